"""Diagnostics against dense algebra in float64: the exact step and verdicts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llqr import cg_step
from llqr.diagnostics import Reference, comparison, judge, reference
from llqr.divergences import KL, Newton
from llqr.errors import IndefiniteProblemError, LLQRError, NonFiniteError
from networks import Dense, relative
from zoo import cases, pick

DAMPING = 1e-2


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 3)).double()


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3).double(), torch.randint(3, (size,))


class Truth:
    """g and the Fisher matrix of a categorical output, as dense matrices: H = Jᵀ W J, W the mean over examples."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor, damping: float = DAMPING) -> None:
        self.dense = Dense(model, inputs, lambda out: cross_entropy(out, targets))
        jacobian = torch.func.jacrev(self.dense.run)(self.dense.point)
        p = self.dense.output.softmax(-1)
        w = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(inputs)
        self.bare = torch.einsum("bci,bcd,bdj->ij", jacobian, w, jacobian)
        self.h = self.bare + damping * torch.eye(len(self.bare)).double()
        self.g = self.dense.gradient
        self.exact = -torch.linalg.solve(self.h, self.g)
        self.jacobian, self.w = jacobian, w

    def m(self, step: Tensor) -> Tensor:
        return self.g @ step + 0.5 * step @ self.h @ step

    def block(self, names: list[str]) -> Tensor:
        """Which coordinates belong to these parameters."""
        marks = {n: torch.full(s, float(n in names)) for n, s in self.dense.shapes.items()}
        return self.dense.flat(marks).bool()


@pytest.fixture
def made() -> tuple[Reference, Truth]:
    model, (inputs, targets) = network(), batch()
    return reference(model, inputs, targets, cross_entropy, KL(), DAMPING, tolerance=1e-10), Truth(
        model, inputs, targets
    )


def random_step(truth: Truth, seed: int = 3) -> Tensor:
    return 0.1 * torch.randn(truth.g.shape, generator=torch.Generator().manual_seed(seed)).double()


# --- the exact step ---


@pytest.mark.parametrize(("most_work", "method"), [(3e9, "riccati"), (10.0, "cg")])
def test_the_exact_step_is_the_dense_solution(monkeypatch: pytest.MonkeyPatch, most_work: float, method: str) -> None:
    """δ* = -(H + λ)⁻¹ g, and the residual that is told is ‖(H + λ)δ* + g‖/‖g‖; by products, where the chain is too large."""
    monkeypatch.setattr(comparison, "RICCATI_WORK", most_work)
    model, (inputs, targets) = network(), batch()
    found = reference(model, inputs, targets, cross_entropy, KL(), DAMPING, tolerance=1e-9)
    truth = Truth(model, inputs, targets)
    assert found.method == method
    assert found.converged
    assert relative(truth.dense.flat(found.step), truth.exact) < 1e-7
    residual = (truth.h @ truth.dense.flat(found.step) + truth.g).norm() / truth.g.norm()
    assert found.residual == pytest.approx(float(residual), abs=1e-12)
    assert found.attainable == pytest.approx(float(0.5 * truth.g @ truth.exact), rel=1e-9)


def test_a_solve_that_was_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "RICCATI_WORK", 10.0)
    model, (inputs, targets) = network(), batch()
    found = reference(model, inputs, targets, cross_entropy, KL(), DAMPING, max_steps=2)
    truth = Truth(model, inputs, targets)
    residual = (truth.h @ truth.dense.flat(found.step) + truth.g).norm() / truth.g.norm()
    assert not found.converged
    assert found.residual == pytest.approx(float(residual), rel=1e-9)
    assert found.residual > 1e-3


def test_without_damping_the_singular_chain_gets_the_least_norm_step() -> None:
    """The softmax leaves H singular, so the recursion refuses; conjugate gradients stay in the range of H: -H⁺ g."""
    model, (inputs, targets) = nn.Sequential(nn.Linear(3, 3)).double(), batch()
    found = reference(model, inputs, targets, cross_entropy, KL(), tolerance=1e-10)
    truth = Truth(model, inputs, targets)
    assert found.method == "cg"
    assert relative(truth.dense.flat(found.step), -torch.linalg.pinv(truth.bare, hermitian=True) @ truth.g) < 1e-6


@pytest.mark.parametrize("name", ["attention", "tied", "convolution", "batch statistics", "residual"])
def test_the_exact_step_of_any_model_is_that_of_cg_step(name: str) -> None:
    model, inputs, targets, loss = cases()[name]
    select = pick if name == "residual" else None
    found = reference(model, inputs, targets, loss, KL(), 0.1, tolerance=1e-9, output=select)
    assert found.converged
    if select is None:
        other = cg_step(model, inputs, targets, loss, KL(), 0.1, tolerance=1e-9)
        assert all(relative(found.step[n], v) < 1e-5 for n, v in other.items() if v.norm() > 1e-8)
    assert judge(found.step, found).cosine_h == pytest.approx(1, abs=1e-9)


# --- verdicts ---


def test_every_number_of_a_verdict(made: tuple[Reference, Truth]) -> None:
    """Cosines, m(δ)/m(δ*), its best along δ, and g·δ + ½ δ·Hδ without damping, from the dense H."""
    found, truth = made
    step = random_step(truth)
    verdict = judge(truth.dense.named(step), found)
    h, exact = truth.h, truth.exact
    assert verdict.cosine == pytest.approx(float(step @ exact / step.norm() / exact.norm()), abs=1e-8)
    size = math.sqrt(float(step @ h @ step) * float(exact @ h @ exact))
    assert verdict.cosine_h == pytest.approx(float(step @ h @ exact) / size, abs=1e-8)
    assert verdict.fraction == pytest.approx(float(truth.m(step) / truth.m(exact)), rel=1e-8)
    assert verdict.length == pytest.approx(float(step.norm() / exact.norm()), rel=1e-8)
    assert verdict.predicted == pytest.approx(float(truth.g @ step + 0.5 * step @ truth.bare @ step), rel=1e-8)
    lengths = torch.linspace(-20, 20, 400_001).double()
    best = (lengths * (truth.g @ step) + 0.5 * lengths**2 * (step @ h @ step)).min()
    along = float(best / truth.m(exact))
    assert abs(verdict.best_length) < 20
    if verdict.best_length > 0:
        assert verdict.fraction_along == pytest.approx(along, rel=1e-6)
    else:
        assert verdict.fraction_along == 0
    loss = truth.dense.loss
    change = loss(truth.dense.run(truth.dense.point + step)) - loss(truth.dense.run(truth.dense.point))
    assert verdict.actual == pytest.approx(float(change), rel=1e-10)


def test_along_a_line_the_fraction_is_the_squared_cosine(made: tuple[Reference, Truth]) -> None:
    """g = -(H + λ)δ*, so the most that a direction attains is cos² in the metric of H + λ; lengths don't matter."""
    found, _ = made
    downhill = {name: -g for name, g in found.gradient.items()}
    verdict = judge(downhill, found)
    assert verdict.best_length > 0
    assert verdict.fraction_along == pytest.approx(verdict.cosine_h**2, rel=1e-9)
    scaled = judge({name: 7.5 * v for name, v in downhill.items()}, found)
    assert scaled.fraction_along == pytest.approx(verdict.fraction_along, rel=1e-9)
    assert scaled.best_length == pytest.approx(verdict.best_length / 7.5, rel=1e-9)
    best = judge({name: verdict.best_length * v for name, v in downhill.items()}, found)
    assert best.fraction == pytest.approx(verdict.fraction_along, rel=1e-9)
    uphill = judge(found.gradient, found)
    assert uphill.fraction_along == 0
    assert uphill.fraction < 0
    assert uphill.cosine == pytest.approx(-verdict.cosine)


def test_the_exact_step_is_perfect(made: tuple[Reference, Truth]) -> None:
    verdict = judge(made[0].step, made[0])
    for number in ("cosine", "cosine_h", "fraction", "fraction_along", "best_length", "length"):
        assert getattr(verdict, number) == pytest.approx(1, abs=1e-9)
    assert all(part.cosine == pytest.approx(1) for part in verdict.layers.values())


def test_the_parts_of_layers_add_up(made: tuple[Reference, Truth]) -> None:
    """g_i·δ_i + ½ δ_i·((H + λ)δ)_i over m(δ*), from the dense H; they add up to the step's own fraction."""
    found, truth = made
    step = random_step(truth)
    verdict = judge(truth.dense.named(step), found)
    parts = verdict.layers
    assert list(parts) == ["0", "2", "4"]
    assert sum(part.fraction for part in parts.values()) == pytest.approx(verdict.fraction, rel=1e-9)
    mask = truth.block(["2.weight", "2.bias"])
    value = (truth.g @ torch.where(mask, step, 0.0)) + 0.5 * torch.where(mask, step, 0.0) @ truth.h @ step
    assert parts["2"].fraction == pytest.approx(float(value / truth.m(truth.exact)), rel=1e-8)
    alone, exact = step[mask], truth.exact[mask]
    assert parts["2"].cosine == pytest.approx(float(alone @ exact / alone.norm() / exact.norm()), abs=1e-7)
    assert parts["2"].length == pytest.approx(float(step[mask].norm() / truth.exact[mask].norm()), rel=1e-7)


def test_a_layer_at_rest_has_no_direction(made: tuple[Reference, Truth]) -> None:
    found, _ = made
    step = {name: v if name.startswith("0.") else torch.zeros_like(v) for name, v in found.step.items()}
    verdict = judge(step, found)
    assert math.isnan(verdict.layers["4"].cosine)
    assert verdict.layers["4"].fraction == 0
    assert verdict.layers["0"].cosine == pytest.approx(1)


def test_small_steps_do_what_is_predicted(made: tuple[Reference, Truth]) -> None:
    """The loss falls as g·δ + ½ δ·Hδ says, up to the third order in δ for Newton's H."""
    model, (inputs, targets) = network(), batch()
    found = reference(model, inputs, targets, cross_entropy, Newton(), 5.0)
    step = {name: 0.05 * v for name, v in found.step.items()}
    verdict = judge(step, found)
    assert verdict.actual == pytest.approx(verdict.predicted, rel=1e-4)


# --- what is refused ---


def test_steps_that_are_none(made: tuple[Reference, Truth]) -> None:
    found, _ = made
    step = dict(found.step)
    with pytest.raises(LLQRError, match=r"unknown parameter in the direction '0\.wieght': did you mean '0\.weight'"):
        judge({**step, "0.wieght": step["0.weight"]}, found)
    with pytest.raises(LLQRError, match=r"the direction lacks '4\.bias': give a tensor for each"):
        judge({name: v for name, v in step.items() if name != "4.bias"}, found)
    with pytest.raises(LLQRError, match=r"'4\.bias' has shape \(1, 3\), and the parameter \(3,\)"):
        judge({**step, "4.bias": step["4.bias"][None]}, found)
    with pytest.raises(LLQRError, match=r"of '4\.bias' has type float"):
        judge({**step, "4.bias": 1.0}, found)  # type: ignore[dict-item]
    with pytest.raises(LLQRError, match="a mapping from parameter names"):
        judge(list(step.values()), found)  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match=r"the step of '4\.bias'"):
        judge({**step, "4.bias": step["4.bias"] / 0}, found)
    with pytest.raises(LLQRError, match="the step is zero"):
        judge({name: torch.zeros_like(v) for name, v in step.items()}, found)


def test_batches_and_settings_that_give_no_reference() -> None:
    model, (inputs, targets) = network(), batch()
    with pytest.raises(NonFiniteError, match="the inputs"):
        reference(model, inputs / 0, targets, cross_entropy)
    with pytest.raises(LLQRError, match="tolerance is a number between 0 and 1"):
        reference(model, inputs, targets, cross_entropy, tolerance=0)
    with pytest.raises(LLQRError, match="the gradient is zero"):
        reference(model, inputs, targets, lambda out, y: (out * 0).sum())
    with pytest.raises(IndefiniteProblemError):
        reference(model, inputs, targets, cross_entropy, Newton())
