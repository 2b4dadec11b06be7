"""fit on real models: U is what a plain double loop in float64 gives, and ScaleFree beats the paper's solver for less.

The oracle knows nothing of the library: H is dense, from differentiating the divergence twice, U is applied by its formula in
the appendix "Block Structures", ∇_U J comes from autograd, and the loop is SGD with momentum written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr.curvature.quadratic import QuadraticModel
from llqr.divergences import KL, Divergence, Newton
from llqr.refit import fit
from llqr.solvers import SGDM, ScaleFree, Solver
from test_curvature import Truth, kl, truth_of
from zoo import pick

Factors = list[Tensor]
STRUCTURES = ["scalar", "diagonal", "kfac", "ekfac", "dense"]
DIVERGENCES: dict[str, tuple[Divergence, Callable[[Tensor, Tensor, Any], Tensor]]] = {
    "newton": (Newton(), lambda x, k, loss: loss(x)),
    "kl mean": (KL(), lambda x, k, loss: kl(k, x).mean()),
    "kl sum": (KL(reduction="sum"), lambda x, k, loss: kl(k, x).sum()),
}


def identity(structure: str, g: Tensor) -> Factors:
    m, n = len(g) if g.dim() else 1, max(1, g.numel() // max(1, len(g) if g.dim() else 1))
    if structure == "scalar":
        return [torch.ones(()).double()]
    if structure == "dense":
        return [torch.eye(g.numel()).double()]
    if structure == "diagonal" or g.dim() < 2:
        return [torch.ones_like(g)]
    sides = [torch.eye(m).double(), torch.eye(n).double()]
    return sides if structure == "kfac" else [*sides, torch.ones(m, n).double()]


def applied(structure: str, factors: Factors, g: Tensor) -> Tensor:
    if structure == "dense":
        return (factors[0] @ g.reshape(-1)).reshape(g.shape)
    if len(factors) == 1:
        return factors[0] * g
    x = g.reshape(len(g), -1)
    if structure == "kfac":
        return (factors[0] @ x @ factors[1].T).reshape(g.shape)
    left, right, s = factors
    return (left @ (s * (left.T @ x @ right)) @ right.T).reshape(g.shape)


def double_loop(
    structure: str, truth: Truth, matrix: Tensor, steps: int, lr: float, momentum: float, clip: float | None
) -> dict[str, Factors]:
    """J(U) = g·δ + ½ δ·Hδ with δ = -Ug; U ← U - lr·b, b ← momentum·b + ∇J, each tensor's ∇J clipped."""
    g = truth.named(truth.gradient())
    u = {name: identity(structure, value) for name, value in g.items()}
    buffers = {name: [torch.zeros_like(f) for f in factors] for name, factors in u.items()}
    for _ in range(steps):
        for factors in u.values():
            for factor in factors:
                factor.requires_grad_()
        delta = -truth.flat({name: applied(structure, u[name], value) for name, value in g.items()})
        objective = truth.flat(g) @ delta + 0.5 * delta @ matrix @ delta
        objective.backward()
        for name, factors in u.items():
            for i, factor in enumerate(factors):
                slope = factor.grad
                assert slope is not None
                if clip is not None and slope.norm() > clip:
                    slope = slope * (clip / slope.norm())
                buffers[name][i] = momentum * buffers[name][i] + slope
                factors[i] = (factor - lr * buffers[name][i]).detach()
    return u


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("damping", [0.0, 0.2])
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_sgdm_fit_is_the_double_loop(structure: str, kind: str, damping: float, clip: float | None) -> None:
    truth, arguments = truth_of("residual")
    divergence, psi = DIVERGENCES[kind]
    matrix = truth.hessian(psi, truth.output) + damping * torch.eye(len(truth.point)).double()
    expected = double_loop(structure, truth, matrix, 25, 0.005, 0.9, clip)
    q = QuadraticModel.build(*arguments, divergence, damping, output=pick)
    u = fit(q, structure, SGDM(lr=0.005, momentum=0.9, clip=clip), steps=25)
    for name, factors in expected.items():
        found = dict(u.blocks[name])
        ordered = [found[key] for key in ("C", "D", "Q_L", "Q_R", "s", "d", "u", "U") if key in found]
        for mine, theirs in zip(ordered, factors, strict=True):
            torch.testing.assert_close(mine.reshape(theirs.shape), theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["attention", "tied", "convolution", "residual"])
@pytest.mark.parametrize("structure", STRUCTURES[:4])
def test_scale_free_reaches_lower_for_less(name: str, structure: str) -> None:
    """10 steps of ScaleFree against 25 of the paper's SGDM: a lower J, with fewer products."""
    _, arguments = truth_of(name)

    class Counting:
        def __init__(self) -> None:
            self.q = QuadraticModel.build(*arguments, KL(), output=pick)
            self.gradient, self.products = self.q.gradient, 0

        def curvature(self, direction: Any) -> dict[str, Tensor]:
            self.products += 1
            return self.q.curvature(direction)

    paper, free = Counting(), Counting()
    slow = fit(paper, structure, SGDM(0.005, 0.9), steps=25)
    fast = fit(free, structure, ScaleFree(), steps=10)
    assert not slow.history[-1] <= fast.history[-1]  # where it doesn't stay finite, it says so
    assert free.products <= 12 < paper.products


@pytest.mark.parametrize("name", ["attention", "convolution", "residual"])
def test_scale_free_on_newton_stays_finite_and_descends(name: str) -> None:
    _, arguments = truth_of(name)
    q = QuadraticModel.build(*arguments, Newton(), output=pick)
    for structure in STRUCTURES[:4]:
        u = fit(q, structure, ScaleFree(), steps=10)
        assert u.is_finite()
        step = {key: -value for key, value in u.apply(q.gradient).items()}
        assert float(q.value(step)) == pytest.approx(u.history[-1], rel=1e-6, abs=1e-12)
        assert u.history[-1] <= u.history[0]


@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
@pytest.mark.parametrize("name", ["attention", "tied", "convolution", "residual"])
def test_scale_free_learns_more_than_a_scale(name: str, structure: str) -> None:
    """The best multiple of the identity has J = -(g·g)² / 2g·Hg; factors have to get below that, not stop at it."""
    _, arguments = truth_of(name)
    q = QuadraticModel.build(*arguments, KL(), output=pick)
    curved = q.curvature(q.gradient)
    squared = sum(float(g.square().sum()) for g in q.gradient.values())
    bend = sum(float((g * curved[key]).sum()) for key, g in q.gradient.items())
    assert fit(q, structure, ScaleFree(), steps=10).history[-1] < -1.2 * squared**2 / (2 * bend)


@pytest.mark.parametrize("structure", STRUCTURES[:4])
def test_negative_curvature_does_not_bring_the_identity_back(structure: str) -> None:
    """Where H is negative along g, J has no bottom: the step is bounded by the curvature, whatever the scale of the loss."""

    class Downhill:
        def __init__(self, scale: float) -> None:
            torch.manual_seed(0)
            self.gradient = {"w": scale * torch.randn(4, 3).double(), "b": scale * torch.randn(4).double()}
            self.scale = scale

        def curvature(self, direction: Any) -> dict[str, Tensor]:
            return {name: -self.scale * v for name, v in direction.items()}

    sizes = []
    for scale in (1.0, 2.0**13):
        q = Downhill(scale)
        step = fit(q, structure, ScaleFree(), steps=10).apply(q.gradient)
        sizes.append(torch.cat([part.reshape(-1) for part in step.values()]).norm())
    torch.testing.assert_close(sizes[0], sizes[1])


@pytest.mark.parametrize(("factor", "tolerance"), [(2.0**-13, 1e-9), (2.0**13, 1e-9), (1e-4, 1e-2), (1e4, 1e-2)])
@pytest.mark.parametrize("structure", STRUCTURES[:4])
def test_the_scale_of_the_loss_changes_nothing(structure: str, factor: float, tolerance: float) -> None:
    """With g and H both c times as large, H⁻¹g is what it was: the fitted step too, and J is c times what it was.

    Powers of two scale without rounding, so they show it sharply; others let conjugate directions drift apart by rounding.
    """
    _, (model, inputs, targets, loss_fn) = truth_of("residual")

    def scaled(output: Tensor, labels: Tensor) -> Tensor:
        return factor * loss_fn(output, labels)

    one, two = (
        QuadraticModel.build(model, inputs, targets, loss, "gauss-newton", output=pick) for loss in (loss_fn, scaled)
    )
    u, v = fit(one, structure, steps=10), fit(two, structure, steps=10)
    assert v.history[-1] == pytest.approx(factor * u.history[-1], rel=tolerance)
    for name, step in u.apply(one.gradient).items():
        torch.testing.assert_close(
            v.apply(two.gradient)[name], step, rtol=tolerance, atol=tolerance * float(step.norm())
        )


@pytest.mark.parametrize("solver", [ScaleFree(), SGDM(0.005)], ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_gradient_of_rounding_does_not_steer_the_fit(structure: str, solver: Solver) -> None:
    """A bias before BatchNorm moves nothing: J(U) doesn't depend on its block, which stays a multiple of the identity, and the
    other blocks are those of a fit that doesn't know of it. In float32 its gradient is about 1e-8 of the whole, not 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(32, 4), torch.randint(3, (32,))
    fits = {}
    for known in (["0.bias"], []):
        only = ["0.weight", *known, "1.weight", "1.bias", "3.weight", "3.bias"]
        q = QuadraticModel.build(model, x, y, functional.cross_entropy, KL(), 0.01, only=only)
        fits[bool(known)] = fit(q, structure, solver, steps=5)
        if known:
            whole = torch.cat([g.reshape(-1) for g in q.gradient.values()]).norm()
            assert 0 < q.gradient["0.bias"].norm() < 1e-6 * whole
    step = fits[True].apply({"0.bias": torch.ones(6)})["0.bias"]
    torch.testing.assert_close(step, step[0].expand(6))
    for key, block in fits[False].blocks.items():
        for name, tensor in block.items():
            torch.testing.assert_close(fits[True].blocks[key][name], tensor, rtol=1e-3, atol=1e-4)
