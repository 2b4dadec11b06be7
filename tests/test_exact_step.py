"""exact_step is the dense step -(H + λI)⁻¹ g, for every divergence, on networks that hypothesis draws (float64).

H comes from torch.func.hessian of the divergence D(θ_k, θ), written out here once more from its definition in the paper
(appendix "Generic Steepest Descent as LQR") and from design: log-sums over probabilities, not the library's closed forms.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from llqr import QuadraticModel, cg_step, dense_step, exact_step
from llqr.divergences import KL, L2, Gaussian, GaussNewton, Intermediate, Newton, Renyi, ReverseKL
from llqr.errors import IndefiniteProblemError
from networks import CLASSES, Dense, networks, relative

TOLERANCE = 1e-8


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets)


def log_p(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def coin(x: Tensor) -> Tensor:
    return torch.stack((x.sigmoid(), (-x).sigmoid()), -1).log()


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def renyi(p: Tensor, q: Tensor, a: float) -> Tensor:
    return (p.exp() ** a * q.exp() ** (1 - a)).sum(-1).log() / (a - 1)


# name: (the library's divergence, ψ_N of x, x_k and the loss)
OUTPUT: dict[str, tuple[object, Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]]] = {
    "kl": (KL(), lambda x, k, loss: kl(log_p(k), log_p(x)).mean()),
    "kl sum": (KL(reduction="sum"), lambda x, k, loss: kl(log_p(k), log_p(x)).sum()),
    "kl bernoulli": (KL("bernoulli"), lambda x, k, loss: kl(coin(k), coin(x)).mean()),
    "kl gaussian": (KL(Gaussian(0.7)), lambda x, k, loss: ((x - k) ** 2 / (2 * 0.7)).mean()),
    "reverse": (ReverseKL(), lambda x, k, loss: kl(log_p(x), log_p(k)).mean()),
    "reverse sum": (ReverseKL(reduction="sum"), lambda x, k, loss: kl(log_p(x), log_p(k)).sum()),
    "renyi 0.5": (Renyi(0.5), lambda x, k, loss: renyi(log_p(k), log_p(x), 0.5).mean()),
    "renyi 2": (Renyi(2.0, reduction="sum"), lambda x, k, loss: renyi(log_p(k), log_p(x), 2.0).sum()),
    "renyi 3 bernoulli": (Renyi(3.0, "bernoulli"), lambda x, k, loss: renyi(coin(k), coin(x), 3.0).mean()),
    "renyi gaussian": (Renyi(0.3, "gaussian"), lambda x, k, loss: 0.3 * ((x - k) ** 2 / 2).mean()),
    "gauss-newton": (
        GaussNewton(),
        lambda x, k, loss: 0.5 * (x - k).reshape(-1) @ output_hessian(loss, k) @ (x - k).reshape(-1),
    ),
    "sum of two": (
        0.5 * KL() + ReverseKL(reduction="sum") * 2,
        lambda x, k, loss: 0.5 * kl(log_p(k), log_p(x)).mean() + 2 * kl(log_p(x), log_p(k)).sum(),
    ),
}


def output_hessian(loss: Callable[[Tensor], Tensor], k: Tensor) -> Tensor:
    return torch.func.hessian(loss)(k).reshape(k.numel(), k.numel())


def problem(drawn: tuple[nn.Sequential, Tensor]) -> tuple[Dense, Tensor]:
    model, inputs = drawn
    targets = torch.randint(CLASSES, (len(inputs),))
    return Dense(model, inputs, lambda output: cross_entropy(output, targets)), targets


@pytest.mark.parametrize("name", OUTPUT)
@settings(max_examples=12)
@given(drawn=networks(), damping=st.floats(0.01, 3.0))
def test_output_divergences(name: str, drawn: tuple[nn.Sequential, Tensor], damping: float) -> None:
    truth, targets = problem(drawn)
    divergence, psi = OUTPUT[name]
    matrix = truth.hessian(lambda flat: psi(truth.run(flat), truth.output, truth.loss))
    expected = truth.step(matrix, damping)
    step = exact_step(truth.model, truth.inputs, targets, cross_entropy, divergence, damping)
    assert relative(truth.flat(step), expected) < TOLERANCE


@settings(max_examples=60)
@given(drawn=networks(), margin=st.floats(0.05, 2.0))
def test_damped_newton(drawn: tuple[nn.Sequential, Tensor], margin: float) -> None:
    """H = ∇²L + λI, with λ above the lowest eigenvalue of ∇²L: the Bregman gap of the damped loss."""
    truth, targets = problem(drawn)
    matrix = truth.hessian(lambda flat: truth.loss(truth.run(flat)))
    damping = margin + max(0.0, -float(torch.linalg.eigvalsh(matrix)[0]))
    expected = truth.step(matrix, damping)
    arguments = (truth.model, truth.inputs, targets, cross_entropy)
    assert relative(truth.flat(exact_step(*arguments, Newton(), damping)), expected) < TOLERANCE
    assert relative(truth.flat(exact_step(*arguments, Newton(damping=damping))), expected) < TOLERANCE


@settings(max_examples=40)
@given(drawn=networks())
def test_pivots_have_the_inertia_of_the_hessian(drawn: tuple[nn.Sequential, Tensor]) -> None:
    """An IndefiniteProblemError is raised just where ∇²L has a negative eigenvalue; the least-norm step is -H⁻¹g there."""
    truth, targets = problem(drawn)
    matrix = truth.hessian(lambda flat: truth.loss(truth.run(flat))) + 0.05 * torch.eye(len(truth.point)).double()
    values = torch.linalg.eigvalsh(matrix)
    arguments = (truth.model, truth.inputs, targets, cross_entropy, Newton(), 0.05)
    if values[0] < -1e-5:
        with pytest.raises(IndefiniteProblemError):
            exact_step(*arguments)
    expected = truth.step(matrix)
    if values.abs().min() > 1e-3:
        step = exact_step(*arguments, degenerate="least-norm")
        assert relative(truth.flat(step), expected) < TOLERANCE


@settings(max_examples=40)
@given(drawn=networks(), damping=st.floats(0.01, 1.0), data=st.data())
def test_intermediate_metrics(drawn: tuple[nn.Sequential, Tensor], damping: float, data: st.DataObject) -> None:
    """Σ_i ½ (x_i - x_i^k)ᵀ W_i (x_i - x_i^k) with a weight, a diagonal and a full metric, beside KL."""
    truth, targets = problem(drawn)
    model, inputs = drawn
    kind = data.draw(st.sampled_from(["weight", "diagonal", "matrix"]))
    place = data.draw(st.integers(0, len(model) - 1))
    reduction = data.draw(st.sampled_from(["mean", "sum"]))

    def at(flat: Tensor) -> Tensor:
        parameters = {n: p for n, p in truth.named(flat).items() if int(n.split(".")[0]) <= place}
        return functional_call(model[: place + 1], parameters, (inputs,))

    base = at(truth.point)
    size = base[0].numel()
    root = torch.randn(size, size, dtype=torch.float64)
    metric = {"weight": 0.8, "diagonal": torch.rand(base[0].shape).double(), "matrix": root @ root.T}[kind]
    full = {"weight": 0.8 * torch.eye(size).double(), "diagonal": torch.diag(torch.as_tensor(metric).reshape(-1))}.get(
        kind, metric
    )

    def divergence(flat: Tensor) -> Tensor:
        change = (at(flat) - base).reshape(len(inputs), -1)
        inside = 0.5 * ((change @ full) * change).sum() / (len(inputs) if reduction == "mean" else 1)
        return inside + kl(log_p(truth.output), log_p(truth.run(flat))).mean()

    expected = truth.step(truth.hessian(divergence), damping)
    for key in (place, str(place)):
        ours = KL() + Intermediate({key: metric}, reduction=reduction)
        step = exact_step(model, inputs, targets, cross_entropy, ours, damping)
        assert relative(truth.flat(step), expected) < TOLERANCE


@settings(max_examples=30)
@given(drawn=networks(), weight=st.floats(0.01, 2.0))
def test_stage_term_on_parameters(drawn: tuple[nn.Sequential, Tensor], weight: float) -> None:
    """ψ_i(θ_i) = w_i/2 ‖θ_i - θ_i^k‖², with one weight, and with one that differs by stage and parameter."""
    truth, targets = problem(drawn)
    last = str(len(truth.model) - 1)
    weights = dict.fromkeys(truth.shapes, 0.3) | {f"{last}.weight": 0.7, f"{last}.bias": weight}
    diagonal = truth.flat(
        {name: torch.full(shape, weights[name], dtype=torch.float64) for name, shape in truth.shapes.items()}
    )

    def divergence(flat: Tensor) -> Tensor:
        own = 0.5 * (diagonal * (flat - truth.point) ** 2).sum()
        return kl(log_p(truth.output), log_p(truth.run(flat))).mean() + own

    expected = truth.step(truth.hessian(divergence))
    ours = KL() + L2({name: value for name, value in weights.items() if value}) + L2(0.0)
    step = exact_step(truth.model, truth.inputs, targets, cross_entropy, ours)
    assert relative(truth.flat(step), expected) < TOLERANCE
    halves = KL() + 0.5 * L2(weights) + L2({name: value / 2 for name, value in weights.items()})
    step = exact_step(truth.model, truth.inputs, targets, cross_entropy, halves)
    assert relative(truth.flat(step), expected) < TOLERANCE
    damped = exact_step(truth.model, truth.inputs, targets, cross_entropy, KL(), damping=weights)
    assert relative(truth.flat(damped), expected) < TOLERANCE


@settings(max_examples=25)
@given(drawn=networks(), damping=st.floats(0.05, 1.0))
def test_references_agree(drawn: tuple[nn.Sequential, Tensor], damping: float) -> None:
    """Riccati, the dense solve and conjugate gradients are three ways to one step."""
    truth, targets = problem(drawn)
    divergence = KL(reduction="sum") + 0.5 * GaussNewton() + Intermediate({0: 0.2}) + L2(0.01)
    arguments = (truth.model, truth.inputs, targets, cross_entropy, divergence, damping)
    step = truth.flat(exact_step(*arguments))
    assert relative(truth.flat(dense_step(*arguments)), step) < TOLERANCE
    assert relative(truth.flat(cg_step(*arguments, tolerance=1e-12)), step) < TOLERANCE


def test_gauss_newton_of_a_residual() -> None:
    """W = J_rᵀ J_r for a loss ½‖r(x)‖² whose residual isn't linear in the output."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs, targets = torch.randn(5, 3).double(), torch.randn(5, 2).double()

    def residual(x: Tensor) -> Tensor:
        return (x.sin() - targets) / len(targets) ** 0.5

    truth = Dense(model, inputs, lambda x: 0.5 * residual(x).square().sum())
    jacobian = torch.func.jacrev(lambda flat: residual(truth.run(flat)).reshape(-1))(truth.point)
    expected = truth.step(jacobian.T @ jacobian, 0.1)
    step = exact_step(model, inputs, None, lambda x, _: truth.loss(x), GaussNewton(residual), 0.1)
    assert relative(truth.flat(step), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("loss", "same"),
    [
        (nn.CrossEntropyLoss(), KL()),
        (nn.BCEWithLogitsLoss(), KL("bernoulli")),
        (nn.MSELoss(), KL(Gaussian(0.5))),
    ],
)
def test_mean_kl_is_gauss_newton_of_its_likelihood(loss: nn.Module, same: KL) -> None:
    """The Fisher matrix of the mean is the Gauss–Newton matrix of the mean negative log-likelihood (exponential families)."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs, targets = torch.randn(6, 3).double(), torch.rand(6, 2).double().softmax(-1)
    one, other = (exact_step(model, inputs, targets, loss, d, 0.1) for d in (GaussNewton(), same))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-14)


def test_sequence_outputs_average_over_tokens() -> None:
    """For outputs (batch, tokens, classes) the mean is over batch and tokens, as cross_entropy over all tokens is."""
    model = nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    inputs, targets = torch.randint(7, (2, 5)), torch.randint(4, (2, 5))

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), labels.flatten())

    truth = Dense(model, inputs, lambda output: loss_fn(output, targets))
    matrix = truth.hessian(lambda flat: kl(log_p(truth.output), log_p(truth.run(flat))).sum() / 10)
    expected = truth.step(matrix, 0.1)
    step = exact_step(model, inputs, targets, loss_fn, KL(), 0.1)
    assert relative(truth.flat(step), expected) < TOLERANCE


def test_stages_that_mix_the_batch() -> None:
    """BatchNorm with batch statistics couples the examples; A is then one block, and its buffers stay as they were."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    before = model[1].running_mean.clone()
    inputs, targets = torch.randn(6, 3).double(), torch.randint(CLASSES, (6,))
    step = exact_step(model, inputs, targets, cross_entropy, Newton(), 4.0)
    assert torch.equal(model[1].running_mean, before)
    assert model[1].num_batches_tracked == 0

    class ByHand(nn.Module):
        def __init__(self, norm: nn.BatchNorm1d) -> None:
            super().__init__()
            self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) / (x.var(0, unbiased=False) + self.eps).sqrt() * self.weight + self.bias

    same = nn.Sequential(model[0], ByHand(model[1]), model[2], model[3])
    truth = Dense(same, inputs, lambda output: cross_entropy(output, targets))
    matrix = truth.hessian(lambda flat: truth.loss(truth.run(flat)))
    assert relative(truth.flat(step), truth.step(matrix, 4.0)) < TOLERANCE


def test_float32_follows_float64() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, CLASSES))
    inputs, targets = torch.randn(4, 5), torch.randint(CLASSES, (4,))
    small = exact_step(model, inputs, targets, cross_entropy, KL(), 0.1)
    assert all(value.dtype == torch.float32 for value in small.values())
    large = exact_step(model.double(), inputs.double(), targets, cross_entropy, KL(), 0.1)
    for name in large:
        assert relative(small[name].double(), large[name]) < 1e-4


def test_weight_norm() -> None:
    """Newton's step is that of the quadratic model, whose products are right where torch's second derivative isn't."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
    arguments = (model, torch.randn(5, 3).double(), torch.randn(5, 2).double(), nn.functional.mse_loss, Newton(), 5.0)
    q = QuadraticModel.build(*arguments)
    for step in (exact_step(*arguments), dense_step(*arguments), cg_step(*arguments)):
        for name, product in q.curvature(step).items():
            torch.testing.assert_close(product, -q.gradient[name], rtol=1e-8, atol=1e-9)
