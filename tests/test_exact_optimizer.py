"""Promise: llqr.Exact steps to the minimum of g·δ + ½ δ·Hδ + ½ μ‖δ - c‖², the same by every method, lowers the loss, and fails
clearly."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import Exact, QuadraticModel, dense_step
from llqr.divergences import KL, L2, Divergence, GaussNewton, Gaussian, Intermediate, Newton, Renyi, ReverseKL
from llqr.errors import LLQRError, NonFiniteError

METHODS = ("dual", "primal", "cg", "riccati")
Closure = Callable[[], Any]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def network(inputs: int = 3, outputs: int = 2, width: int = 5) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def moved(model: nn.Module, closure: Closure, **options: Any) -> tuple[Tensor, Exact]:
    """The first step of a copy of the optimizer, which leaves the model as it was."""
    before = copy.deepcopy(model.state_dict())
    optimizer = Exact(model, **options)
    start = flat(model)
    optimizer.step(closure)
    step = flat(model) - start
    model.load_state_dict(before)
    return step, optimizer


CASES: dict[str, tuple[Divergence, Callable[[Tensor, Any], Tensor]]] = {
    "newton": (Newton(), functional.cross_entropy),
    "gauss-newton": (GaussNewton(), functional.cross_entropy),
    "kl": (KL(), functional.cross_entropy),
    "reverse-kl": (ReverseKL(), functional.cross_entropy),
    "renyi": (Renyi(0.5), functional.cross_entropy),
    "sum": (2.0 * KL() + L2(0.1), functional.cross_entropy),
    "inside": (KL() + 0.1 * Intermediate({"1": 1.0}), functional.cross_entropy),
    "gaussian": (KL(family=Gaussian(0.5)), lambda x, y: functional.mse_loss(x, functional.one_hot(y, 2).to(x))),
    "squares": (GaussNewton(), lambda x, y: functional.mse_loss(x, functional.one_hot(y, 2).to(x))),
}


@pytest.mark.parametrize(("case", "method"), [(c, m) for c in CASES for m in METHODS if (c, m) != ("newton", "dual")])
def test_every_method_gives_the_dense_step(case: str, method: str) -> None:
    """δ = -(H + μ)⁻¹ g with H formed by differentiating the divergence twice (dense_step), at the μ that was taken."""
    divergence, loss_fn = CASES[case]
    model, inputs, targets = network(), torch.randn(12, 3), torch.randint(2, (12,))
    step, optimizer = moved(
        model,
        lambda: (model(inputs), targets),
        loss_fn=loss_fn,
        divergence=divergence,
        method=method,
        damping=0.5,
        tolerance=1e-12,
    )
    assert optimizer.stats.method == method
    assert optimizer.stats.steps == 1
    assert optimizer.stats.stalled == 0
    mu = optimizer.stats.damping / (1 / 3 if optimizer.stats.ratio > 0.25 else 2)
    dense = dense_step(model, inputs, targets, loss_fn, divergence, mu)
    expected = torch.cat([each.reshape(-1) for each in dense.values()])
    assert (step - expected).norm() < 1e-8 * expected.norm()


@pytest.mark.parametrize(
    ("case", "method"), [(c, m) for c in ("kl", "sum", "newton") for m in METHODS if (c, m) != ("newton", "dual")]
)
def test_momentum_pulls_to_the_last_step(case: str, method: str) -> None:
    """(H + μ) δ = -g + μ β δ_last."""
    divergence, loss_fn = CASES[case]
    model, inputs, targets = network(), torch.randn(12, 3), torch.randint(2, (12,))
    options: dict[str, Any] = {"method": method, "momentum": 0.7, "damping": 3.0, "tolerance": 1e-12}
    optimizer = Exact(model, loss_fn, divergence, **options)
    points, mu, middle = [flat(model)], 0.0, model
    for _ in range(2):
        middle, mu = copy.deepcopy(model), optimizer.stats.damping
        optimizer.step(lambda: (model(inputs), targets))
        points.append(flat(model))
    assert optimizer.stats.refused == 0
    last, step = points[1] - points[0], points[2] - points[1]
    H, g = curvature_and_gradient(middle, inputs, targets, loss_fn, divergence)
    assert (H @ step + mu * step + g - 0.7 * mu * last).norm() < 1e-8 * g.norm()


def curvature_and_gradient(model: nn.Module, *problem: Any) -> tuple[Tensor, Tensor]:
    q = QuadraticModel.build(model, *problem)
    rows = []
    for name, gradient in q.gradient.items():
        for place in range(gradient.numel()):
            unit = {n: torch.zeros_like(v) for n, v in q.gradient.items()}
            unit[name].view(-1)[place] = 1
            rows.append(torch.cat([each.reshape(-1) for each in q.curvature(unit).values()]))
    return torch.stack(rows), torch.cat([g.reshape(-1) for g in q.gradient.values()])
