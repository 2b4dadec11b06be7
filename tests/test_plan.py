"""plan: how every parameter would be stepped, and why; costs as LLQR has them; a model that is left as it was."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llqr import LLQR, Plan, plan
from llqr.checks import Inputs
from llqr.errors import LLQRError


class Language(nn.Module):
    """A small transformer with a parameter of every kind."""

    def __init__(self, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(words, width), nn.Parameter(torch.randn(5, width))
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 600), nn.PReLU(), nn.Linear(600, width))
        self.adapter, self.spare = nn.Linear(width, width).requires_grad_(False), nn.Linear(2, 2)
        self.scale, self.gate = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens) + self.position)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head((x + self.adapter(self.mlp(x))) * self.scale * self.gate.sigmoid())


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(144, 5)
    )


PICTURES = torch.randn(4, 3, 8, 8)
TOKENS = torch.randint(11, (3, 5))
LONG = "the side of 60{} by its leading eigenvectors"
IN_LANGUAGE = {
    "position": "by the base: used by an addition",
    "scale": "by the base: used by a product number by number",
    "gate": "by the base: used by Sigmoid",
    "embed.weight": "by the base: used by an embedding",
    "norm.weight": "by the base: used by a layer norm",
    "norm.bias": "by the base: used by a layer norm",
    "attention.in_proj_weight": "along U m, kfac of 24 × 9",
    "attention.in_proj_bias": "along U m, with attention.in_proj_weight",
    "attention.out_proj.weight": "along U m, kfac of 8 × 9",
    "attention.out_proj.bias": "along U m, with attention.out_proj.weight",
    "mlp.0.weight": f"along U m, kfac of 600 × 9; {LONG.format(0)}",
    "mlp.0.bias": "along U m, with mlp.0.weight",
    "mlp.1.weight": "by the base: used by a PReLU",
    "mlp.2.weight": f"along U m, kfac of 8 × 601; {LONG.format(1)}",
    "mlp.2.bias": "along U m, with mlp.2.weight",
    "adapter.weight": "frozen",
    "adapter.bias": "frozen",
    "spare.weight": "by the base: in no linear map so far",
    "spare.bias": "by the base: in no linear map so far",
    "head.weight": "along U m, kfac of 11 × 8",
}


def test_what_each_parameter_of_a_transformer_gets() -> None:
    assert plan(Language(), TOKENS, repeats=1).parameters == IN_LANGUAGE


def test_what_each_parameter_of_a_convnet_gets() -> None:
    found = plan(convolutions(), PICTURES, structure={"0": "ekfac", "*": "diagonal"}, repeats=1)
    assert found.parameters == {
        "0.weight": "along U m, ekfac of 4 × 28",
        "0.bias": "along U m, with 0.weight",
        "1.weight": "by the base: used by a batch norm",
        "1.bias": "by the base: used by a batch norm",
        "5.weight": "along U m, diagonal of 5 × 145",
        "5.bias": "along U m, with 5.weight",
    }


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "dense"])
@pytest.mark.parametrize("low", [False, True])
def test_it_says_what_llqr_does_and_takes(structure: str, low: bool) -> None:
    """The words are those of `assignments()` after a step, the bytes those of the optimizer."""
    model = convolutions().to(torch.bfloat16) if low else convolutions()
    inputs = PICTURES.to(torch.bfloat16) if low else PICTURES
    found = plan(model, inputs, structure=structure, repeats=1)
    optimizer = LLQR(torch.optim.SGD(model.parameters(), lr=0.01), model, structure=structure)
    model(inputs).square().mean().backward()
    optimizer.step()
    assert found.parameters == optimizer.assignments()
    own = found.memory["curvature"] + found.memory["U"]
    assert own == optimizer.stats.memory == optimizer.memory_usage()["preconditioner"]
    copied = [p for name, p in model.named_parameters() if not name.startswith("1.")]
    assert found.memory["copy"] == sum(p.numel() * p.element_size() for p in copied)
    assert found.memory["parameters"] == sum(p.numel() * p.element_size() for p in model.parameters())


def test_it_says_what_llqr_does_in_a_transformer() -> None:
    model = Language()
    optimizer = LLQR(torch.optim.SGD(model.parameters(), lr=0.01), model)
    found = plan(model, TOKENS, repeats=1)  # beside the optimizer's hook, which doesn't hear it
    model(TOKENS).square().mean().backward()
    optimizer.step()
    assert found.parameters == optimizer.assignments()
    assert found.memory["curvature"] + found.memory["U"] == optimizer.stats.memory


def test_times_and_what_follows_from_them() -> None:
    """No part is longer than the whole measurement, which has each of them in every round."""
    begun = time.perf_counter()
    found = plan(convolutions(), PICTURES, repeats=1)
    elapsed = time.perf_counter() - begun
    assert min(found.train_seconds, found.refit) > 0
    assert found.step >= 0
    assert found.train_seconds * (1 + found.refit + found.step) < elapsed
    assert found.overhead == pytest.approx(found.step + found.refit / 40)
    assert found.overhead_at_first == pytest.approx(found.step + found.refit * 41 / 300)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda x: self.inner(x).tanh(), x.requires_grad_(), use_reentrant=True))


@pytest.mark.parametrize("kind", [Recurrent, Checkpointed])
def test_models_whose_graph_hides_something(kind: type[nn.Module]) -> None:
    """They are run once more in a refit, and every weight is seen."""
    model = kind()
    found = plan(model, torch.randn(5, 2, 3), repeats=1)
    assert all(how.startswith("along U m") for name, how in found.parameters.items() if "weight" in name)
    assert found.refit > 0
    assert not any(p.grad is not None for p in model.parameters())


def test_nothing_but_norms_costs_next_to_nothing() -> None:
    found = plan(nn.LayerNorm(3), torch.randn(4, 3), repeats=1)
    assert set(found.parameters.values()) == {"by the base: used by a layer norm"}
    assert found.memory["curvature"] == found.memory["U"] == found.memory["copy"] == 0


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = convolutions(), PICTURES.clone()
    model(inputs).sum().backward()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    modes, flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    random = torch.get_rng_state()
    plan(model.train(), inputs, repeats=1)
    model[1].eval()
    plan(model, inputs, repeats=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name][0]
        assert torch.equal(parameter.grad, grads[name][1])
    assert modes == [m.training for m in model.modules()]
    assert flags == [p.requires_grad for p in model.parameters()]
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(inputs, PICTURES)


class Sum(nn.Module):
    """What it returns is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"left": self.left(a), "right": self.right(b)}


@pytest.mark.parametrize(
    "batch", [(torch.randn(4, 3), torch.randn(4, 3)), {"a": torch.randn(4, 3), "b": torch.randn(4, 3)}], ids=type
)
def test_batches_are_what_the_model_is_called_with_and_outputs_can_be_chosen(batch: Inputs) -> None:
    assert "no linear map" not in str(plan(Sum(), batch, repeats=1))
    found = plan(Sum(), batch, output=lambda returned: returned["left"], repeats=1)
    assert found.parameters["left.weight"] == "along U m, kfac of 2 × 4"
    assert found.parameters["right.weight"] == "by the base: in no linear map so far"


def test_parts_of_a_weight_and_long_sides() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(8))
            self.wide = nn.Parameter(torch.randn(2, 9000))

        def forward(self, x: Tensor) -> Tensor:
            first = functional.linear(x, self.weight[:4], self.bias[:4])
            return torch.cat((first + functional.linear(x, self.weight[4:]), x[:, :2] @ self.wide), 1)

    found = plan(Parts(), torch.randn(5, 3), repeats=1).parameters
    assert found["weight"] == "along U m, kfac of 2 of 3 × 4"
    assert found["bias"] == "by the base: used by a matrix product, not as one matrix or bias"
    assert found["wide"] == "along U m, kfac of 2 × 9000; the side of 9,000 by its diagonal"


def test_it_prints_as_a_table() -> None:
    found = plan(convolutions(), PICTURES, repeats=1)
    for name, how in found.parameters.items():
        assert f"  {name.ljust(8)}  {how}" in repr(found)
    assert f"LLQR adds {found.overhead:.1%}" in str(found)
    assert "more" not in str(found)
    many = Plan({str(n): "frozen" for n in range(45)}, 1.0, 1.0, 1.0, 1.0, 1.0, {"U": 5, "copy": 3 * 2**31})
    assert str(many).count("frozen") == 40
    assert str(many).endswith("and 5 more")
    assert "U 5 B, copy 6 GiB." in str(many)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "linear"}, "nn.Module"),
        ({"batch": "words"}, "a tensor, or a tuple or dict"),
        ({"batch": torch.zeros(0, 3)}, "empty"),
        ({"batch": torch.zeros(4, 7)}, "the model fails on this batch: RuntimeError: mat1"),
        ({"model": nn.Linear(3, 2).requires_grad_(False)}, "nothing to step"),
        ({"output": lambda output: output.detach()}, "nothing that the model returns depends"),
        ({"output": "logits"}, "output is a function"),
        ({"structure": "kfca"}, "kfac"),
        ({"structure": {"nothing": "kfac"}}, "nothing"),
        ({"repeats": 1.5}, "repeats is a positive integer"),
        ({"repeats": 0}, "repeats is a positive integer"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"model": nn.Linear(3, 2), "batch": torch.randn(4, 3), **change}
    with pytest.raises(LLQRError, match=message):
        plan(given.pop("model"), given.pop("batch"), **given)  # type: ignore[arg-type]
