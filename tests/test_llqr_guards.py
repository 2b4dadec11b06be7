"""Promise: what goes wrong with U costs a step or a refit, never the training: it is left out, counted, and said once."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR
from llqr.divergences import KL
from llqr.errors import LLQRWarning
from llqr.paper import PaperLLQR
from llqr.preconditioner import Preconditioner
from llqr.solvers import SGDM, ScaleFree
from loops import (
    STRUCTURES,
    assert_same,
    backward,
    batch,
    blocks_of,
    gradients_of,
    network,
    never,
    parameters_of,
    sgd,
    spoil,
    train,
)


def wrapped(model: nn.Module, **options: Any) -> PaperLLQR:
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    usual = {"divergence": KL(), "structure": "kfac", "steps": 4, "damping": 0.1, "ema": 0.5, "solver": ScaleFree()}
    return LLQR.paper(base, model, **{**usual, "every": 100, **options})


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(entry.message) for entry in caught if issubclass(entry.category, LLQRWarning)]


def negate(optimizer: PaperLLQR, key: str) -> None:
    """The block becomes -1 times itself: one of its tensors changes its sign (the scales of E-KFAC are its last)."""
    assert optimizer.preconditioner is not None
    list(optimizer.preconditioner.blocks[key].values())[-1].neg_()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fit_that_does_not_stay_finite_is_rejected(structure: str) -> None:
    """U stays bit for bit, and is applied as it is."""
    model, other = network(), network()
    good = wrapped(model, structure=structure)
    train(model, good, range(1))
    other.load_state_dict(model.state_dict())
    bad = wrapped(other, structure=structure, every=1, solver=SGDM(lr=1e200))
    bad.load_state_dict(good.state_dict())
    before = blocks_of(good)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(other, bad, range(1, 5))
    assert_same(before, blocks_of(bad))
    assert (bad.stats.refits, bad.stats.rejected) == (1, 4)
    (message,) = messages(caught)
    assert "a refit was rejected, and U stays as it was: " in message
    assert "optimizer.stats.rejected" in message
    assert bad.stats.objective_after is not None
    assert not math.isfinite(bad.stats.objective_after)
    train(model, good, range(1, 5))
    assert_same(parameters_of(model), parameters_of(other))


def test_a_first_fit_that_is_rejected_leaves_the_identity() -> None:
    model, alone = network(), network()
    optimizer = wrapped(model, every=1, solver=SGDM(lr=1e200))
    with pytest.warns(LLQRWarning, match="rejected"):
        train(model, optimizer, range(3))
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), range(3))
    assert optimizer.preconditioner is None
    assert_same(parameters_of(alone), parameters_of(model))
    assert not optimizer.refit(*batch(), functional.cross_entropy)
    assert optimizer.stats.rejected == 4


@pytest.mark.parametrize("solver", [SGDM(), ScaleFree()], ids=repr)
def test_curvature_that_overflows(solver: Any) -> None:
    """J isn't finite even at the identity."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * 1e25  # type: ignore[no-any-return]

    model = Steep()
    optimizer = wrapped(model, divergence=KL(family="gaussian"), solver=solver)
    model(batch(dtype=torch.float32)[0])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.warns(LLQRWarning, match="J isn't finite at the start"):
        optimizer.step()
    assert optimizer.stats.rejected == 1
    assert optimizer.preconditioner is None


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
def test_a_gradient_that_is_not_finite_goes_to_the_base_as_it_is(base: Any, value: float) -> None:
    """That block alone; the others are preconditioned. The base does with it what it does."""
    model = network()
    optimizer = LLQR.paper(base(model.parameters(), lr=0.1), model, structure="kfac", steps=4, damping=0.1, every=100)
    train(model, optimizer, range(2))
    twin = network()
    twin.load_state_dict(model.state_dict())
    alone = base(twin.parameters(), lr=0.1)
    alone.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    assert optimizer.preconditioner is not None
    for net in (model, twin):
        backward(net, batch(2))
        spoil(net, "0.weight", value)
    steered = optimizer.preconditioner.apply(gradients_of(twin))
    for name, parameter in twin.named_parameters():
        if name != "0.weight":
            parameter.grad = steered[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        alone.step()
        for name, p in parameters_of(twin).items():
            torch.testing.assert_close(parameters_of(model)[name], p, rtol=1e-12, atol=1e-14, equal_nan=True)
        assert optimizer.stats.nonfinite == 1
        optimizer.step()  # the same gradients again
    (message,) = messages(caught)
    assert "the gradient of '0.weight' is not finite" in message
    assert optimizer.stats.nonfinite == 2


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_u_g_that_leaves_the_range_of_the_parameters(dtype: torch.dtype, structure: str) -> None:
    """U g is computed in float32, and the base gets it in the dtype of the parameter, where it has to be finite too."""
    model = network(dtype=dtype)
    optimizer = LLQR.paper(torch.optim.SGD(model.parameters(), lr=1e-3), model, structure=structure, every=never)
    identity = Preconditioner.identity(dict(model.named_parameters()), structure)
    optimizer.preconditioner = identity.scaled(torch.finfo(dtype).max)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (2.0, 0.1):
            for name, p in model.named_parameters():
                p.grad = torch.full_like(p, size if name.startswith("0") else 0.1)
            optimizer.step()
    assert len(messages(caught)) == 1
    assert optimizer.stats.nonfinite == 2
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_gradient_that_is_not_finite_where_u_is_refitted() -> None:
    """The refit is rejected, and the gradient goes to the base; both are counted."""
    model, alone = network(), network()
    optimizer = wrapped(model)
    for net in (model, alone):
        backward(net, batch())
        spoil(net, "2.bias", math.nan)
    with pytest.warns(LLQRWarning, match=r"rejected.*'2.bias'"), pytest.warns(LLQRWarning, match="stats.nonfinite"):
        optimizer.step()
    assert optimizer.stats.nonfinite == 1
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for name, p in parameters_of(alone).items():
        torch.testing.assert_close(parameters_of(model)[name], p, rtol=0, atol=0, equal_nan=True)
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (0, 1)
    assert optimizer.stats.seconds > 0


def test_inputs_that_are_not_finite_reject_the_refit() -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model, batch())
    with torch.enable_grad():
        model(torch.full((3, 4), torch.nan).double())
    with pytest.warns(LLQRWarning, match="not finite in the inputs"):
        optimizer.step()
    assert optimizer.stats.rejected == 1
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_u_g_is_the_step_also_where_it_turns_the_gradient(structure: str) -> None:
    """Algorithm 1: Δθ = U g as it is. Nothing is said, and nothing replaced."""
    model = network()
    optimizer = wrapped(model, structure=structure)
    train(model, optimizer, range(1))
    negate(optimizer, "0.weight")
    assert optimizer.preconditioner is not None
    backward(model, batch(1))
    before, g = parameters_of(model), gradients_of(model)
    step = optimizer.preconditioner.apply(g)
    assert float((step["0.weight"] * g["0.weight"]).sum()) < 0
    optimizer.step()
    for name, p in parameters_of(model).items():
        torch.testing.assert_close(p, before[name] - 0.1 * step[name], rtol=1e-12, atol=1e-14)


def test_blocks_beside_one_that_is_not_finite() -> None:
    """Blocks of one shape are applied in one product: what is wrong with one doesn't reach the others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3)).double()
    optimizer = wrapped(model)
    train(model, optimizer, range(1))
    backward(model, batch(1))
    before, g = parameters_of(model), gradients_of(model)
    assert optimizer.preconditioner is not None
    steered = optimizer.preconditioner.apply(g)
    spoil(model, "1.weight")
    with pytest.warns(LLQRWarning):
        optimizer.step()
    for name in ("0.weight", "2.weight", "3.weight", "2.bias"):
        torch.testing.assert_close(
            parameters_of(model)[name], before[name] - 0.1 * steered[name], rtol=1e-12, atol=1e-14
        )
    assert optimizer.stats.nonfinite == 1


def test_the_training_goes_on() -> None:
    """After a refit that was rejected, the next refit is taken, and the loss falls."""
    model = network()
    optimizer = wrapped(model, every=10)
    first = float(backward(model, batch()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LLQRWarning)
        for number in range(31):
            backward(model, batch())
            if number == 10:
                spoil(model, "0.bias", 0.0)
                model(torch.full((2, 4), torch.inf).double())
            optimizer.step()
    assert optimizer.stats.refits == 3
    assert optimizer.stats.rejected == 1
    assert float(backward(model, batch())) < 0.7 * first


def test_no_warning_where_nothing_is_wrong() -> None:
    """Zero gradients are finite."""
    model = network()
    optimizer = LLQR.paper(sgd(model), model, structure="kfac", steps=4, damping=0.1, every=2)
    train(model, optimizer, range(1))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = optimizer.state_dict()["llqr"]["stats"]
    optimizer.step()
    assert optimizer.state_dict()["llqr"]["stats"] == before
