"""Promise: llqr.Exact says what is wrong with a closure, a model or a state before it steps, and leaves parameters alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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
