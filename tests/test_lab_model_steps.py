"""Every network of the lab takes steps with every structure of U."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from llqr import LLQR
from llqr.curvature.quadratic import QuadraticModel
from loops import STRUCTURES, parameters_of
from small_lab import OPTIONS, PAD, batch, mean_loss, small


def check_step(name: str, structure: str, divergence: str) -> None:
    model, (inputs, targets) = small(name), batch(name)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = LLQR.paper(base, model, divergence, structure, every=1, steps=2)
    before = parameters_of(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model(*inputs), targets)
        loss.backward()
        return loss

    if divergence == "newton":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    assert (optimizer.stats.refits, optimizer.stats.rejected, optimizer.stats.nonfinite) == (1, 0, 0)
    check_moved(model, before)


def check_moved(model: nn.Module, before: dict[str, Tensor]) -> None:
    """All that has a gradient worth the name is elsewhere, and everything finite."""
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(before)
    learning = {key for key, gradient in gradients.items() if gradient.abs().max() > 1e-6}
    assert len(learning) > 0.6 * len(gradients)
    for key, parameter in model.named_parameters():
        assert parameter.isfinite().all(), key
        assert key not in learning or not torch.equal(parameter, before[key]), key


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_with_a_refit(name: str, structure: str) -> None:
    check_step(name, structure, "ngd")


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_with_newtons_curvature_through_a_closure(name: str) -> None:
    check_step(name, "ekfac", "newton")


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_curvature_of_the_masked_attentions(chunk_size: int | None) -> None:
    """Against Jᵀ(diag(p) - p pᵀ)J with J by torch's forward mode, averaged over the words that aren't padding."""
    model, (inputs, targets) = small("translation-transformer").double(), batch("translation-transformer", 4)
    real = (targets != PAD).double()
    q = QuadraticModel.build(
        model, inputs, targets, mean_loss, "ngd", chunk_size=chunk_size, weights=real, training=False
    )
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    curved = sum((v[name] * product).sum() for name, product in q.curvature(v).items())

    parameters = {name: p.detach() for name, p in model.eval().named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        logits, moved = jvp(lambda values: functional_call(model, values, inputs), (parameters,), (v,))
    p = logits.softmax(-1)
    by_word = (p * moved.square()).sum(-1) - (p * moved).sum(-1).square()
    torch.testing.assert_close(curved, (real * by_word).sum() / real.sum())
