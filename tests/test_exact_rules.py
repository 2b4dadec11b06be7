"""Promise: llqr.Exact keeps its own rules: damping, momentum, rounding, conjugate gradients, memory, checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import llqr.exact.optimizer
import llqr.exact.systems
from llqr import Exact
from llqr.errors import IndefiniteProblemError, LLQRError, NonFiniteError
from llqr.exact.matrices import Solved, add_symmetric, conjugate_gradients

EPS = torch.finfo(torch.float64).eps


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def linear(width: int = 4, count: int = 20, spread: float = 0.0) -> tuple[nn.Linear, Tensor, Tensor]:
    """A regression: the quadratic model is the loss, so that every ratio is 1. H = 2 XᵀX / n."""
    inputs = torch.randn(count, width) * torch.logspace(0, spread, width)
    return nn.Linear(width, 1, bias=False), inputs, torch.randn(count, 1)


def hessian(inputs: Tensor) -> Tensor:
    return 2 * inputs.T @ inputs / len(inputs)


def test_the_damping_falls_to_a_third_after_good_steps_down_to_its_floor() -> None:
    """Nielsen's rule at a ratio of 1: μ/3. At least ε g·Hg/g·g is used."""
    model, x, y = linear()
    optimizer = Exact(model, damping=10.0)
    optimizer.step(lambda: model(x) - y)
    first = optimizer.stats.damping
    optimizer.step(lambda: model(x) - y)
    assert optimizer.stats.ratio == pytest.approx(1)
    assert optimizer.stats.damping == pytest.approx(first / 3)
    with torch.no_grad():
        model.weight.add_(1.0)
    g = 2 * x.T @ (model(x) - y).detach() / len(x)
    optimizer.param_groups[0]["mu"] = 1e-300
    optimizer.step(lambda: model(x) - y)
    curvature = float((g.T @ hessian(x) @ g) / (g.T @ g))
    assert optimizer.stats.damping == pytest.approx(EPS * curvature / 3, rel=1e-9, abs=0)


def test_momentum_is_dropped_before_the_damping_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refusal (H + μ) δ = -g with the same μ; after another one with 2 μ."""
    monkeypatch.setattr(llqr.exact.optimizer, "CORRECTIONS", 0)
    for refusals, grown in ((1, 1.0), (2, 2.0)):
        model, x, y = linear()
        optimizer = Exact(model, damping=10.0, momentum=0.9)
        optimizer.step(lambda model=model, x=x, y=y: model(x) - y)  # type: ignore[misc]
        start, mu, calls = model.weight.detach().clone(), optimizer.stats.damping, [0]
        g = 2 * x.T @ (model(x) - y).detach() / len(x)

        def closure(model: nn.Linear = model, x: Tensor = x, y: Tensor = y) -> Tensor:
            calls[0] += 1  # noqa: B023
            residual: Tensor = model(x) - y
            return residual + 100 * (2 < calls[0] <= 2 + refusals)  # noqa: B023

        optimizer.step(closure)
        step = (model.weight.detach() - start)[0]
        assert optimizer.stats.refused == refusals
        assert (hessian(x) @ step + grown * mu * step + g[:, 0]).norm() < 1e-12 * g.norm()


@pytest.mark.parametrize("method", ["dual", "primal"])
def test_a_correction_is_pulled_to_where_momentum_pulls(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """tanh(w x) - y: δ - (H + μ)⁻¹ (∇L(θ + δ) + μ(δ - c)) with J at θ, from δ without corrections; c = 0.9 δ_last."""
    x = torch.randn(20, 4)
    y = (2 * x.sum(1, keepdim=True)).tanh()
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Tanh())
    weight, optimizer = model[0].weight, Exact(model, method=method, damping=1.0, momentum=0.9)
    begun = weight.detach().clone()
    optimizer.step(lambda: model(x) - y)
    start, mu = weight.detach()[0].clone(), optimizer.stats.damping
    carried = 0.9 * (start - begun[0])
    J = (1 - (x @ start).tanh() ** 2)[:, None] * x
    identity = torch.eye(4)

    def towards(step: Tensor) -> Tensor:
        slope = J.T @ ((x @ (start + step)).tanh() - y[:, 0]) * 2 / len(x)
        return step - torch.linalg.solve(2 * J.T @ J / len(x) + mu * identity, slope + mu * (step - carried))

    first = towards(torch.zeros(4))
    monkeypatch.setattr(llqr.exact.optimizer, "CORRECTIONS", 1)
    optimizer.step(lambda: model(x) - y)
    assert optimizer.stats.refused == 0
    assert (towards(first) - first).norm() > 1e-3 * first.norm()
    torch.testing.assert_close(weight.detach()[0] - start, towards(first))


def test_what_is_below_rounding_is_not_tried() -> None:
    """Residuals (d, 1): the decrease to come is d²/2 of a loss of ½, and the threshold 4 ε of that."""
    for distance, stalled in ((1e-8, 1), (1e-7, 0)):
        point = nn.Linear(1, 1, bias=False)
        nn.init.constant_(point.weight, distance)
        optimizer = Exact(point)
        optimizer.step(lambda point=point: torch.cat((point.weight[0], torch.ones(1))))  # type: ignore[misc]
        assert (optimizer.stats.stalled, optimizer.stats.refused) == (stalled, 0)
        assert (abs(point.weight.item()) < distance) == (not stalled)


def test_a_promise_below_zero_raises_the_damping() -> None:
    """The minimum of the quadratic model can't lie above its start: the solution is noise, as in float32 at a small μ."""
    model, x, y = linear()
    optimizer = Exact(model, damping=1e-3)
    solve, tried = optimizer._solve, []

    def noisy(system: Any, carried: Tensor, mu: float) -> tuple[Tensor, float]:
        step, promised = solve(system, carried, mu)
        tried.append(mu)
        return step, promised if mu > 5 * tried[0] else -1e-9

    optimizer._solve = noisy  # type: ignore[method-assign]
    optimizer.step(lambda: model(x) - y)
    assert tried == pytest.approx([tried[0], 2 * tried[0], 8 * tried[0]])
    assert (optimizer.stats.refused, optimizer.stats.stalled) == (2, 0)


@pytest.mark.parametrize("what", ["output", "targets"])
def test_the_closure_may_differ_by_rounding(what: str) -> None:
    """√ε of the output, or of the loss: summing in another order is no other batch."""
    model, x, y = linear()

    def step(change: float) -> None:
        calls = [0]

        def closure() -> tuple[Tensor, Tensor]:
            calls[0] += 1
            factor = 1 + change * (calls[0] > 1)
            return (model(x) * factor, y) if what == "output" else (model(x), y * factor)

        Exact(model, nn.MSELoss()).step(closure)

    step(1e-10)
    with pytest.raises(LLQRError, match="one output and then another" if what == "output" else "a loss of"):
        step(1e-6)


def test_a_batch_that_changes_later_is_noticed_in_the_first_step() -> None:
    """Two calls with one batch, all later ones with another of the same size."""
    model, x, y = linear()
    before, calls = model.weight.detach().clone(), [0]

    def closure() -> Tensor:
        calls[0] += 1
        rows = slice(10) if calls[0] < 3 else slice(10, 20)
        residual: Tensor = model(x[rows]) - y[rows]
        return residual

    with pytest.raises(LLQRError, match="Draw batches"):
        Exact(model).step(closure)
    assert torch.equal(model.weight.detach(), before)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Solved, Callable[[Tensor], Tensor]]]:
    """What conjugate gradients begin with and end with, and their product."""
    found: list[tuple[Tensor, Solved, Callable[[Tensor], Tensor]]] = []

    def solve(product: Any, gradient: Tensor, *options: Any) -> Solved:
        found.append((gradient, conjugate_gradients(product, gradient, *options), product))
        return found[-1][1]

    monkeypatch.setattr(llqr.exact.systems, "conjugate_gradients", solve)
    monkeypatch.setattr(llqr.exact.optimizer, "CORRECTIONS", 0)
    return found


def test_conjugate_gradients_begin_at_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first residual is g + (H + μ) δ_last."""
    solved = noted(monkeypatch)
    model, x, y = linear()
    optimizer = Exact(model, method="cg", damping=10.0, tolerance=1e-12)
    start = model.weight.detach().clone()
    optimizer.step(lambda: model(x) - y)
    last, mu = (model.weight.detach() - start)[0], optimizer.stats.damping
    g = (2 * x.T @ (model(x) - y).detach() / len(x))[:, 0]
    optimizer.step(lambda: model(x) - y)
    expected = g + hessian(x) @ last + mu * last
    assert (solved[1][0] - expected).norm() < 1e-10 * g.norm()


def test_conjugate_gradients_are_preconditioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One linear map of inputs with scales from 1 to 1000: H is the second moment of the inputs, up to a factor."""
    solved = noted(monkeypatch)
    model, x, y = linear(12, 200, 3.0)
    Exact(model, method="cg", damping=1e-9, tolerance=1e-8).step(lambda: model(x) - y)
    gradient, found, product = solved[0]
    assert 2 * found.products < conjugate_gradients(product, gradient, 1e-8, 1000).products


def test_a_correction_that_meets_negative_curvature_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conjugate gradients from another slope go other ways. The step that was found before stands."""
    x, y = torch.randn(20, 4), torch.randn(20, 1)
    solved: list[Solved] = []

    def solve(*given: Any) -> Solved:
        if solved:
            raise IndefiniteProblemError("met in a correction")
        solved.append(conjugate_gradients(*given))
        return solved[0]

    monkeypatch.setattr(llqr.exact.systems, "conjugate_gradients", solve)
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Tanh())
    start = model[0].weight.detach().clone()
    optimizer = Exact(model, method="cg")
    optimizer.step(lambda: model(x) - y)
    assert (optimizer.stats.refused, optimizer.stats.stalled) == (0, 0)
    torch.testing.assert_close(model[0].weight.detach() - start, solved[0].step[None])


def test_memory_for_moments_and_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for second moments conjugate gradients do without; where there is none for patches a Jacobian says
    so before it makes them."""
    solved = noted(monkeypatch)
    model, x, y = linear(12, 200, 3.0)
    Exact(model, method="cg", damping=1e-9, tolerance=1e-8, memory=1000).step(lambda: model(x) - y)
    assert solved[0][1].products > 12
    pictures = nn.Sequential(nn.Conv2d(1, 2, 5, padding=2), nn.Flatten(), nn.Linear(128, 1))
    data = torch.randn(50, 1, 8, 8)
    sides = 2 * (50 * 64 * (25 + 2) + 50 * 64 * (1 + 2) + 50 * (128 + 1) + 50 * (1 + 1))
    size = sum(p.numel() for p in pictures.parameters())
    memory = 8 * (3 * size**2 + sides - 1)
    unfolded: list[int] = []
    unfold = nn.functional.unfold
    monkeypatch.setattr(nn.functional, "unfold", lambda *given: (unfolded.append(1), unfold(*given))[1])
    with pytest.raises(LLQRError, match=f"takes {sides:,} numbers, .* room for {sides - 1:,}"):
        Exact(pictures, method="primal", memory=memory).step(lambda: pictures(data))
    assert not unfolded
    optimizer = Exact(pictures, memory=memory // 4)
    optimizer.step(lambda: pictures(data))
    assert optimizer.stats.method == "cg"


@pytest.mark.parametrize("method", ["dual", "primal", "cg"])
def test_large_residuals_in_single_precision(method: Any) -> None:
    """Targets of 1e18: g·g is beyond float32, the loss isn't. The step is that of float64. At 1e20 the loss isn't finite."""
    model, x, y = linear()
    x = 100 * x
    single = nn.Linear(4, 1, bias=False).float()
    single.weight.data.copy_(model.weight.data)
    Exact(model, method=method, tolerance=1e-6).step(lambda: model(x) - 1e18 * y)
    optimizer = Exact(single, method=method, tolerance=1e-6)
    optimizer.step(lambda: single(x.float()) - 1e18 * y.float())
    assert optimizer.stats.stalled == 0
    assert (single.weight.double() - model.weight).norm() < 1e-4 * model.weight.norm()
    with pytest.raises(NonFiniteError, match="the loss is inf"):
        optimizer.step(lambda: single(x.float()) - 1e20 * y.float())


@pytest.mark.parametrize("at", [3, 4])
def test_a_loss_of_minus_infinity_is_refused(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the trial, or at its correction: the trial is tried again with more damping, or stands as it is."""
    x, y, calls = torch.randn(20, 4), torch.randn(20, 1), [0]

    def stepped(at: int) -> tuple[Tensor, Exact]:
        torch.manual_seed(0)
        model, calls[0] = nn.Sequential(nn.Linear(4, 1), nn.Tanh()), 0

        def closure() -> tuple[Tensor, Tensor]:
            calls[0] += 1
            return model(x), y

        def loss(output: Tensor, targets: Tensor) -> Tensor:
            return (output - targets).square().mean() - (torch.inf if calls[0] == at else 0)

        optimizer = Exact(model, loss, "gauss-newton")
        optimizer.step(closure)
        return model[0].weight.detach().clone(), optimizer

    weight, optimizer = stepped(at)
    assert (optimizer.stats.refused, optimizer.stats.stalled) == (int(at == 3), 0)
    if at == 4:
        monkeypatch.setattr(llqr.exact.optimizer, "CORRECTIONS", 0)
        assert torch.equal(weight, stepped(0)[0])


def test_right_on_a_saddle_point_nothing_moves() -> None:
    """f = y² - x² at 0: g = 0. stats.stalled says so; beside it the step leaves."""
    point = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(point.weight)

    def closure() -> Tensor:
        x, y = point.weight[0]
        return y**2 - x**2

    optimizer = Exact(point, divergence="newton")
    optimizer.step(closure)
    assert optimizer.stats.stalled == 1
    assert not point.weight.any()
    with torch.no_grad():
        point.weight[0, 0] = 1e-6
    optimizer.step(closure)
    assert optimizer.stats.stalled == 1
    assert float(point.weight[0, 0].detach()) > 1e-6


@pytest.mark.parametrize("size", [1, 127, 300])
def test_symmetric_products(size: int) -> None:
    left, middle = torch.randn(50, size), torch.rand(50)
    total = torch.eye(size)
    add_symmetric(total, left, middle[:, None] * left)
    torch.testing.assert_close(total, torch.eye(size) + left.T @ torch.diag(middle) @ left)
