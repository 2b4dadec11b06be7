"""Promise: what people do around a training loop (masks, autocast, compiling, new heads, single logits) works or is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR
from llqr.divergences import KL
from llqr.divergences.families import summed
from llqr.errors import LLQRError, LLQRWarning
from loops import backward, batch, blocks_of, network, sgd, train


def test_masks_with_infinities() -> None:
    """torch's own causal mask holds -inf, and is no reason to refuse a batch."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.layer(x, mask)).flatten(0, 1)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Masked()
    optimizer = LLQR.paper(sgd(model, lr=0.01), model, structure="kfac", every=1, steps=2)
    x, mask = torch.randn(4, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(model(x, mask), torch.randint(3, (20,))).backward()
        optimizer.step()
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (2, 0)


@pytest.mark.parametrize("structure", ["diagonal", "kfac", "ekfac"])
def test_steps_under_autocast(structure: str) -> None:
    """U is learned and applied in float32: the same as outside."""
    results = []
    for enabled in (False, True):
        model = network(dtype=torch.float32)
        optimizer = LLQR.paper(sgd(model), model, structure=structure, steps=3)
        backward(model, batch(dtype=torch.float32))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for outside, inside in zip(*results, strict=True):
        assert torch.equal(outside, inside)


@pytest.mark.parametrize("given", ["raw", "compiled"])
def test_compiled_models_are_compiled_once(given: str) -> None:
    compiled = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    torch._dynamo.reset()
    model = network()
    fast = torch.compile(model, backend=backend)
    optimizer = LLQR.paper(sgd(model), model if given == "raw" else fast, structure="diagonal", every=2, steps=2)
    train(fast, optimizer, range(8))  # type: ignore[arg-type]
    assert compiled == 1
    assert optimizer.stats.refits == 4


def test_a_new_head_begins_at_the_identity() -> None:
    model = network()
    optimizer = LLQR.paper(sgd(model), model, structure="kfac", every=3, steps=2)
    train(model, optimizer, range(4))
    body = blocks_of(optimizer)["0.weight C"]
    model[2] = nn.Linear(5, 6).double()
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(model.parameters()), "lr": 0.1})
    x = batch()[0]
    functional.cross_entropy(model(x), torch.randint(6, (6,))).backward()
    head = model[2].weight
    gradient, before = head.grad.clone(), head.detach().clone()
    optimizer.step()  # no refit
    torch.testing.assert_close(head.detach(), before - 0.1 * gradient)
    assert torch.equal(blocks_of(optimizer)["0.weight C"], body)
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), torch.randint(6, (6,))).backward()
        optimizer.step()
    assert blocks_of(optimizer)["2.weight C"].shape == (6, 6)


def test_one_number_an_example_is_no_vector_of_logits() -> None:
    x = torch.randn(16, 4)
    y = torch.randint(2, (16,)).float()
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    functional.binary_cross_entropy_with_logits(model(x), y).backward()
    with pytest.raises(LLQRError, match=r"bernoulli.*gaussian"):
        LLQR.paper(sgd(model), model).refit(x)
    right = LLQR.paper(sgd(model), model, KL(family="bernoulli"))
    assert right.refit(x)


def test_outputs_that_are_dictionaries_have_their_logits_found() -> None:
    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.inner(x), "hidden": x}

    model, (x, y) = Talking(), batch()
    optimizer = LLQR.paper(sgd(model), model, structure="kfac", steps=2)
    functional.cross_entropy(model(x)["logits"], y).backward()
    optimizer.step()
    assert optimizer.stats.refits == 1


def test_targets_without_a_loss_are_told() -> None:
    model, (x, y) = network(), batch()
    backward(model, (x, y))
    with pytest.raises(LLQRError, match="give loss_fn too"):
        LLQR.paper(sgd(model), model).refit(x, y)


SUMS = {
    "classes": (KL(reduction="sum"), lambda out, y: functional.cross_entropy(out, y, reduction="sum")),
    "padding": (
        KL(),
        lambda out, y: functional.cross_entropy(out, torch.where(y == y[0], -100, y), reduction="sum"),
    ),
    "coins": (
        KL("bernoulli"),
        lambda out, y: functional.binary_cross_entropy_with_logits(
            out, functional.one_hot(y, out.shape[1]).to(out), reduction="sum"
        ),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_loss_that_is_a_sum_is_told_once(name: str) -> None:
    """Its gradient at the output is p - y, and that of a mean is p - y over the number of variables."""
    divergence, loss = SUMS[name]
    model, (x, y) = network(), batch()
    count = {"classes": len(y), "padding": int((y != y[0]).sum()), "coins": model(x).numel()}[name]
    optimizer = LLQR.paper(sgd(model), model, divergence, "kfac", every=1, steps=2)
    loss(model(x), y).backward()
    with pytest.warns(
        LLQRWarning, match=rf"adds up its {count} variables.*reduction=\"mean\".*rate by {count} \(said once"
    ):
        optimizer.step()
    for scale in (1.0, 1 / count, 2.0**16 / count):  # told already; a mean; one that a GradScaler has multiplied
        other = optimizer if scale == 1 else LLQR.paper(sgd(model), model, divergence, "kfac", every=1, steps=2)
        (scale * loss(model(x), y)).backward()
        other.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_known_to_be_a_sum(dtype: torch.dtype) -> None:
    """p - y for hard targets, whatever p is; not for soft ones, class weights, squares, or a mean of saturated logits."""
    torch.manual_seed(0)
    for size in (0.1, 1.0, 10.0):
        output = (size * torch.randn(8, 5)).to(dtype).requires_grad_()
        targets = torch.randint(5, (8,))
        soft, weights = torch.rand(8, 5).softmax(-1).to(dtype), (1 + torch.rand(5)).to(dtype)
        known = {
            8: [functional.cross_entropy(output, targets, reduction="sum")],
            0: [
                functional.cross_entropy(output, targets),
                2.0**10 * functional.cross_entropy(output, targets),
                functional.cross_entropy(output, soft, reduction="sum"),
                functional.cross_entropy(output, targets, weights, reduction="sum"),
                functional.mse_loss(output, soft),
                1e6 * functional.mse_loss(output, soft),
            ],
        }
        for count, losses in known.items():
            for loss in losses:
                (slope,) = torch.autograd.grad(loss, output)
                assert summed(KL(), slope, output.detach()) == count
        right = functional.one_hot(output.argmax(-1), 5).to(dtype) * 20 + output
        (slope,) = torch.autograd.grad(functional.cross_entropy(right, right.argmax(-1)), output)
        assert summed(KL(), slope, right.detach()) == 0


def test_the_sum_of_a_loss_is_no_matter_without_a_divergence() -> None:
    """LLQR's steps are as long as the base's: a sum at the rate over N gives those of a mean."""
    found = []
    for reduction, lr in (("mean", 0.06), ("sum", 0.01)):
        model = network()
        optimizer = LLQR(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), model, every=2)
        for k in range(5):
            x, y = batch(k)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
        assert optimizer.stats.refits > 1
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [LLQR, LLQR.paper])
def test_gradients_that_are_not_finite_are_counted_before_the_first_refit(make: Any) -> None:
    model, (x, y) = network(), batch()
    optimizer = make(sgd(model), model, every=lambda step: step == 3)
    functional.cross_entropy(model(x), y).backward()
    model[0].bias.grad.fill_(torch.nan)
    with pytest.warns(LLQRWarning, match=r"'0\.bias'.*stats\.nonfinite"):
        optimizer.step()
    assert (optimizer.stats.nonfinite, optimizer.stats.rejected) == (1, 0)
