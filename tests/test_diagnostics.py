"""Diagnostics against dense algebra in float64: the exact step, verdicts, blocks, the diagonal and K-FAC's factors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llqr import cg_step
from llqr.diagnostics import Reference, judge, reference
from llqr.diagnostics.comparison import dot, norm
from llqr.divergences import KL, L2, Newton
from llqr.errors import IndefiniteProblemError, LLQRError, NonFiniteError, SingularProblemError
from llqr_lab.compare import approximations
from llqr_lab.compare.approximations import diagonal, diagonal_step, kfac_step
from llqr_lab.compare.coupling import block_step, coupling
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


@pytest.mark.parametrize(("method", "used"), [("auto", "riccati"), ("riccati", "riccati"), ("cg", "cg")])
def test_the_exact_step_is_the_dense_solution(method: Any, used: str) -> None:
    """δ* = -(H + λ)⁻¹ g, and the residual that is told is ‖(H + λ)δ* + g‖/‖g‖."""
    model, (inputs, targets) = network(), batch()
    found = reference(model, inputs, targets, cross_entropy, KL(), DAMPING, method=method, tolerance=1e-9)
    truth = Truth(model, inputs, targets)
    assert found.method == used
    assert found.converged
    assert relative(truth.dense.flat(found.step), truth.exact) < 1e-7
    residual = (truth.h @ truth.dense.flat(found.step) + truth.g).norm() / truth.g.norm()
    assert found.residual == pytest.approx(float(residual), abs=1e-12)
    assert found.attainable == pytest.approx(float(0.5 * truth.g @ truth.exact), rel=1e-9)


def test_a_solve_that_was_cut_short_says_so() -> None:
    model, (inputs, targets) = network(), batch()
    found = reference(model, inputs, targets, cross_entropy, KL(), DAMPING, method="cg", max_steps=2)
    truth = Truth(model, inputs, targets)
    residual = (truth.h @ truth.dense.flat(found.step) + truth.g).norm() / truth.g.norm()
    assert not found.converged
    assert found.residual == pytest.approx(float(residual), rel=1e-9)
    assert found.residual > 1e-3


def test_a_chain_too_large_for_the_recursion_goes_to_conjugate_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (inputs, targets) = network(), batch()
    monkeypatch.setattr("llqr.diagnostics.comparison.RICCATI_WORK", 10.0)
    assert reference(model, inputs, targets, cross_entropy, KL(), DAMPING).method == "cg"


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
    found = reference(model, inputs, targets, loss, KL(), 0.1, tolerance=1e-9, output=select, method="cg")
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
    verdict = judge(downhill, found, by_layer=False)
    assert verdict.best_length > 0
    assert verdict.fraction_along == pytest.approx(verdict.cosine_h**2, rel=1e-9)
    scaled = judge({name: 7.5 * v for name, v in downhill.items()}, found, by_layer=False)
    assert scaled.fraction_along == pytest.approx(verdict.fraction_along, rel=1e-9)
    assert scaled.best_length == pytest.approx(verdict.best_length / 7.5, rel=1e-9)
    best = judge({name: verdict.best_length * v for name, v in downhill.items()}, found, by_layer=False)
    assert best.fraction == pytest.approx(verdict.fraction_along, rel=1e-9)
    uphill = judge(found.gradient, found, by_layer=False)
    assert uphill.fraction_along == 0
    assert uphill.fraction < 0
    assert uphill.cosine == pytest.approx(-verdict.cosine)


def test_the_exact_step_is_perfect(made: tuple[Reference, Truth]) -> None:
    verdict = judge(made[0].step, made[0])
    for number in ("cosine", "cosine_h", "fraction", "fraction_along", "best_length", "length"):
        assert getattr(verdict, number) == pytest.approx(1, abs=1e-9)
    assert all(part.cosine == pytest.approx(1) for part in verdict.layers.values())


def test_layers_are_judged_alone(made: tuple[Reference, Truth]) -> None:
    """A layer's numbers are those of its part of δ with the others at rest, against its part of δ*."""
    found, truth = made
    step = random_step(truth)
    verdict = judge(truth.dense.named(step), found)
    assert list(verdict.layers) == ["0", "2", "4"]
    for layer, part in verdict.layers.items():
        mask = truth.block([f"{layer}.weight", f"{layer}.bias"])
        alone, exact = torch.where(mask, step, 0.0), torch.where(mask, truth.exact, 0.0)
        size = math.sqrt(float(alone @ truth.h @ alone) * float(exact @ truth.h @ exact))
        assert part.cosine == pytest.approx(float(alone @ exact / alone.norm() / exact.norm()), abs=1e-7)
        assert part.cosine_h == pytest.approx(float(alone @ truth.h @ exact) / size, abs=1e-7)
        assert part.fraction == pytest.approx(float(truth.m(alone) / truth.m(truth.exact)), rel=1e-7)
        change = truth.dense.loss(truth.dense.run(truth.dense.point + alone)) - truth.dense.loss(truth.dense.output)
        assert part.actual == pytest.approx(float(change), rel=1e-9)


def test_the_parts_of_layers_add_up(made: tuple[Reference, Truth]) -> None:
    """g_i·δ_i + ½ δ_i·((H + λ)δ)_i over m(δ*), from the dense H; they add up to the step's own fraction."""
    found, truth = made
    step = random_step(truth)
    parts = found.parts(truth.dense.named(step))
    verdict = judge(truth.dense.named(step), found)
    assert sum(part.fraction for part in parts.values()) == pytest.approx(verdict.fraction, rel=1e-9)
    mask = truth.block(["2.weight", "2.bias"])
    value = (truth.g @ torch.where(mask, step, 0.0)) + 0.5 * torch.where(mask, step, 0.0) @ truth.h @ step
    assert parts["2"].fraction == pytest.approx(float(value / truth.m(truth.exact)), rel=1e-8)
    assert parts["2"].cosine == pytest.approx(verdict.layers["2"].cosine, rel=1e-9)
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
    verdict = judge(step, found, by_layer=False)
    assert verdict.actual == pytest.approx(verdict.predicted, rel=1e-4)


# --- blocks ---


@pytest.mark.parametrize("per", ["layer", "parameter"])
def test_block_steps_solve_the_blocks(made: tuple[Reference, Truth], per: Any) -> None:
    """δ_b = -(H_bb + λ)⁻¹ g_b with the dense blocks."""
    found, truth = made
    step = block_step(found, per, tolerance=1e-10)
    names = list(truth.dense.shapes)
    groups = [names[i : i + 2] for i in range(0, len(names), 2)] if per == "layer" else [[name] for name in names]
    expected = torch.zeros_like(truth.g)
    for group in groups:
        mask = truth.block(group)
        expected[mask] = -torch.linalg.solve(truth.h[mask][:, mask], truth.g[mask])
    assert relative(truth.dense.flat(step.step), expected) < 1e-7
    assert step.residual < 1e-9


def test_coupling_tells_what_the_cut_loses(made: tuple[Reference, Truth]) -> None:
    found, truth = made
    cut = coupling(found, tolerance=1e-10)
    layer = truth.dense.flat(block_step(found, "layer", tolerance=1e-10).step)
    along = (truth.g @ layer) ** 2 / (layer @ truth.h @ layer) / (-2 * truth.m(truth.exact))
    assert cut.lost["layer"] == pytest.approx(1 - float(along), abs=1e-8)
    assert 0 < cut.lost["layer"] < 1
    total = float(truth.exact @ truth.h @ truth.exact)
    mask_0, mask_4 = truth.block(["0.weight", "0.bias"]), truth.block(["4.weight", "4.bias"])
    expected = float(truth.exact[mask_0] @ truth.h[mask_0][:, mask_4] @ truth.exact[mask_4]) / total
    assert cut.energy["0"]["4"] == pytest.approx(expected, rel=1e-6)
    assert sum(sum(row.values()) for row in cut.energy.values()) == pytest.approx(1, rel=1e-9)


def test_one_layer_loses_nothing() -> None:
    """H of a single layer is its own block."""
    model, (inputs, targets) = nn.Sequential(nn.Linear(3, 3)).double(), batch()
    found = reference(model, inputs, targets, cross_entropy, KL(), DAMPING, tolerance=1e-10)
    assert coupling(found, tolerance=1e-10).lost["layer"] == pytest.approx(0, abs=1e-9)
    assert coupling(found, tolerance=1e-10).lost["parameter"] > 1e-6


# --- the diagonal and K-FAC ---


def test_the_diagonal_by_products(made: tuple[Reference, Truth]) -> None:
    found, truth = made
    assert relative(truth.dense.flat(diagonal(found)), truth.h.diagonal()) < 1e-10
    step = truth.dense.flat(diagonal_step(found))
    assert relative(step, -truth.g / truth.h.diagonal()) < 1e-10


def test_the_estimated_diagonal_is_unbiased_and_scatters_as_told(made: tuple[Reference, Truth]) -> None:
    """E Σ_c (Jᵀ s_c)² = diag(H); the relative error of a coordinate is about √(2/draws)."""
    found, truth = made
    bare = truth.dense.flat(diagonal(found, draws=3000, exact=False)) - DAMPING
    ratio = bare / truth.bare.diagonal()
    assert bool((bare >= 0).all())
    assert abs(float(ratio.mean()) - 1) < 0.03
    assert float((ratio - 1).square().mean().sqrt()) < 2 * math.sqrt(2 / 3000)


def test_the_output_root_is_a_root_of_w(made: tuple[Reference, Truth]) -> None:
    """R Rᵀ = W for every example: diag(p) - p pᵀ, over the batch size."""
    found, truth = made
    root, dim = approximations._root(found, truth.dense.output)
    assert dim == 1
    assert relative(root @ root.mT, truth.w) < 1e-10


def test_kfac_factors_of_the_true_fisher(made: tuple[Reference, Truth]) -> None:
    """For W₂ of a chain: A = mean a aᵀ, G = Σ_b J_outᵀ W_b J_out, and δ = -(A ⊗ G + λ)⁻¹ g; exact over classes, not sampled."""
    found, truth = made
    model, inputs = found.model, found.inputs
    assert isinstance(model, nn.Sequential)
    with torch.no_grad():
        a = model[:2](inputs)
        a = torch.cat([a, torch.ones(len(a), 1).double()], 1)
        z = model[:3](inputs)
    out_jacobian = torch.stack([torch.func.jacrev(model[3:])(row).detach() for row in z])
    g_factor = torch.einsum("bci,bcd,bdj->ij", out_jacobian, truth.w, out_jacobian)
    a_factor = a.T @ a / len(a)
    gradient = torch.cat([found.gradient["2.weight"], found.gradient["2.bias"][:, None]], 1)
    matrix = torch.kron(g_factor, a_factor) + DAMPING * torch.eye(20).double()
    expected = -torch.linalg.solve(matrix, gradient.reshape(-1)).reshape(4, 5)
    step = kfac_step(found)
    assert relative(torch.cat([step["2.weight"], step["2.bias"][:, None]], 1), expected) < 1e-9


def test_kfac_is_exact_for_one_example_of_a_linear_model() -> None:
    """H = A ⊗ G with a single example and layer, so the K-FAC step is the exact step."""
    model = nn.Sequential(nn.Linear(3, 3)).double()
    inputs, targets = batch(1)
    found = reference(model, inputs, targets, cross_entropy, KL(), DAMPING, tolerance=1e-11)
    assert judge(kfac_step(found), found).cosine_h == pytest.approx(1, abs=1e-9)
    assert judge(kfac_step(found), found).fraction == pytest.approx(1, abs=1e-9)


def test_kfac_of_a_convolution_is_that_of_a_linear_layer_on_its_patches() -> None:
    """A kernel as large as the picture sees one patch an example: then Conv2d is a Linear on the pixels."""
    linear = nn.Sequential(nn.Flatten(), nn.Linear(8, 3)).double()
    conv = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()).double()
    with torch.no_grad():
        conv[0].weight.copy_(linear[1].weight.reshape(3, 2, 2, 2))  # type: ignore[operator]
        conv[0].bias.copy_(linear[1].bias)  # type: ignore[operator]
    inputs, targets = torch.randn(5, 2, 2, 2).double(), torch.randint(3, (5,))
    one, other = (kfac_step(reference(m, inputs, targets, cross_entropy, KL(), 0.1)) for m in (linear, conv))
    assert relative(other["0.weight"].reshape(3, 8), one["1.weight"]) < 1e-9
    assert relative(other["0.bias"], one["1.bias"]) < 1e-9


def test_kfac_of_a_strided_padded_convolution() -> None:
    """A and G over all places of the kernel, written out: A = mean over places, G = sum over places and examples."""
    model = nn.Sequential(nn.Conv2d(2, 2, 2, 2, 1, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    inputs, targets = torch.randn(3, 2, 3, 3).double(), torch.randint(3, (3,))
    found = reference(model, inputs, targets, cross_entropy, KL(), 0.1)
    truth = Truth(model, inputs, targets, 0.1)
    padded = nn.functional.pad(inputs, (1, 1, 1, 1))
    rows = [padded[b, :, i : i + 2, j : j + 2].reshape(-1) for b in range(3) for i in (0, 2) for j in (0, 2)]
    a_factor = torch.stack(rows).T @ torch.stack(rows) / len(rows)
    z = model[0](inputs).detach()
    jacobian = torch.stack([torch.func.jacrev(lambda x: model[1:](x[None])[0])(each).detach() for each in z])
    back = jacobian.reshape(3, 3, 2, 4)  # example, class, channel, place
    g_factor = torch.einsum("bcip,bcd,bdjp->ij", back, truth.w, back)
    matrix = torch.kron(g_factor, a_factor) + 0.1 * torch.eye(16).double()
    expected = -torch.linalg.solve(matrix, found.gradient["0.weight"].reshape(-1)).reshape(2, 2, 2, 2)
    assert relative(kfac_step(found)["0.weight"], expected) < 1e-9


@pytest.mark.parametrize("name", ["tied", "convolution", "batch statistics", "in place"])
def test_the_references_are_there_for_models_of_all_kinds(name: str) -> None:
    """Every parameter gets a step, downhill, better than nothing; H's diagonal is that of its products."""
    model, inputs, targets, loss = cases()[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = reference(model, inputs, targets, loss, KL(), 0.1)
    exact = diagonal(found)
    estimate = diagonal(found, draws=300, exact=False)
    pairs = [(estimate[n], exact[n]) for n in exact]
    assert relative(torch.cat([e.reshape(-1) for e, _ in pairs]), torch.cat([t.reshape(-1) for _, t in pairs])) < 0.25
    for step in (kfac_step(found), diagonal_step(found), block_step(found).step):
        assert list(step) == list(found.gradient)
        assert dot(step, found.gradient) < 0
        assert judge(step, found, by_layer=False).fraction_along > 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_l2_terms_are_part_of_h_and_damping_is_not(made: tuple[Reference, Truth]) -> None:
    model, (inputs, targets) = network(), batch()
    with_l2 = reference(model, inputs, targets, cross_entropy, KL() + L2(0.3))
    damped = reference(model, inputs, targets, cross_entropy, KL(), 0.3)
    assert relative(with_l2.step["0.weight"], damped.step["0.weight"]) < 1e-4
    for step in (kfac_step, diagonal_step):
        assert relative(step(with_l2)["0.weight"], step(damped)["0.weight"]) < 1e-9
    square = 0.5 * 0.3 * norm(damped.step) ** 2
    l2, plain = (judge(damped.step, each, by_layer=False).predicted for each in (with_l2, damped))
    assert l2 - plain == pytest.approx(square, rel=1e-9)


# --- what is refused ---


def test_steps_that_are_none(made: tuple[Reference, Truth]) -> None:
    found, _ = made
    step = dict(found.step)
    with pytest.raises(LLQRError, match=r"unknown parameter in the step '0\.wieght': did you mean '0\.weight'"):
        judge({**step, "0.wieght": step["0.weight"]}, found)
    with pytest.raises(LLQRError, match=r"lacks '4\.bias': give a tensor for every parameter"):
        judge({name: v for name, v in step.items() if name != "4.bias"}, found)
    with pytest.raises(LLQRError, match=r"'4\.bias' has shape \(1, 3\), and the parameter \(3,\)"):
        judge({**step, "4.bias": step["4.bias"][None]}, found)
    with pytest.raises(LLQRError, match="tensor of real numbers; this one is a float"):
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
    with pytest.raises(LLQRError, match="unknown method 'ricati': did you mean 'riccati'"):
        reference(model, inputs, targets, cross_entropy, method="ricati")  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match="tolerance is a number between 0 and 1"):
        reference(model, inputs, targets, cross_entropy, tolerance=0)
    with pytest.raises(LLQRError, match="the gradient is zero"):
        reference(model, inputs, targets, lambda out, y: (out * 0).sum())
    with pytest.raises(IndefiniteProblemError):
        reference(model, inputs, targets, cross_entropy, Newton(), method="cg")
    with pytest.raises(SingularProblemError):
        reference(model, inputs, targets, cross_entropy, KL(), method="riccati")


def test_factors_of_what_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (inputs, targets) = network(), batch()
    newton = reference(model, inputs, targets, cross_entropy, Newton(), 5.0)
    with pytest.raises(LLQRError, match="isn't a curvature of the output alone"):
        kfac_step(newton)
    assert len(diagonal_step(newton)) == 6  # by products there is one
    monkeypatch.setattr(approximations, "EXACT_DIAGONAL", 1)
    with pytest.raises(LLQRError, match="isn't a curvature of the output alone"):
        diagonal_step(newton)
    linear = nn.Sequential(nn.Linear(3, 3)).double()
    with pytest.raises(SingularProblemError, match="give a damping"):
        kfac_step(reference(linear, inputs[:2], targets[:2], cross_entropy, KL()))
