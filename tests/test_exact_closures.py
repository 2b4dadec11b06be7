"""Promise: llqr.Exact says what is wrong with a closure, a model or a state before it steps, and leaves parameters alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llqr import Exact
from llqr.errors import LLQRError

X = torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (5 * X[:, :1]).sin()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def refused(match: str, optimizer: Exact, closure: Callable[[], Any] | None = None) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = copy.deepcopy(parameters)
    with pytest.raises(LLQRError, match=match):
        optimizer.step(closure)
    assert all(map(torch.equal, parameters, before))


@pytest.mark.parametrize("options", [{}, {"method": "cg"}, {"divergence": "newton"}, {"loss_fn": nn.MSELoss()}])
def test_another_model_in_the_closure(options: dict[str, Any]) -> None:
    model, other = network(), network()

    def closure() -> Any:
        return (model(X), Y) if "loss_fn" in options else model(X) - Y

    refused("another model", Exact(other, **options), closure)


def test_a_minimum_is_no_other_model() -> None:
    """A gradient of zero, though the output depends on the parameters."""
    model = network()
    values = model(X).detach()
    optimizer = Exact(model)
    assert float(optimizer.step(lambda: model(X) - values)) == 0
    assert optimizer.stats.stalled == 1


def test_other_parameters_than_those_that_were_given() -> None:
    def change(made: Callable[[nn.Sequential], object]) -> None:
        model = network()
        optimizer = Exact(model)
        optimizer.step(lambda: model(X) - Y)
        made(model)
        refused("make another", optimizer, lambda: model(X) - Y)

    change(lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn(6, 2).double())))
    change(lambda model: model.append(nn.Linear(1, 1).double()))
    change(lambda model: model[0].requires_grad_(False))


def test_the_same_loss_of_other_outputs() -> None:
    """Rows in another order in each call: the loss is the same, and J would be that of other rows than r."""
    model, generator = network(), torch.Generator().manual_seed(0)

    def shuffled() -> Tensor:
        order = torch.randperm(20, generator=generator)
        difference: Tensor = model(X[order]) - Y[order]
        return difference

    refused("one output and then another", Exact(model), shuffled)


@pytest.mark.parametrize("at", [2, 3, 4])
def test_another_number_of_rows_in_a_later_call(at: int) -> None:
    model, calls = network(), [0]

    def closure() -> Tensor:
        calls[0] += 1
        rows = 20 if calls[0] < at else 15
        difference: Tensor = model(X[:rows]) - Y[:rows]
        return difference

    refused("Draw batches", Exact(model), closure)


def test_spectral_norm_is_to_be_evaluated() -> None:
    """Its forward pass in training moves the singular vectors that it divides by; batch statistics change nothing."""
    model = network()
    nn.utils.parametrizations.spectral_norm(model[0])
    norm = model[0].parametrizations.weight[0]  # type: ignore[union-attr, index]
    norm._v.copy_(torch.tensor([0.6, 0.8]))  # not converged
    refused(r"0.parametrizations.weight.0._[uv].*model.eval\(\)", Exact(model), lambda: model(X) - Y)
    model.eval()
    optimizer = Exact(model)
    optimizer.step(lambda: model(X) - Y)
    assert optimizer.stats.stalled == 0
