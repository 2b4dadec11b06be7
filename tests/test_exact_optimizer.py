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

import llqr.exact.optimizer
import llqr.exact.point
import llqr.exact.systems
from llqr import Exact, LayerwiseLoss, QuadraticModel, dense_step
from llqr.divergences import (
    KL,
    L2,
    Divergence,
    Gaussian,
    GaussNewton,
    Intermediate,
    Newton,
    Renyi,
    ReverseKL,
)
from llqr.errors import LLQRError, LLQRWarning, NonFiniteError

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
    """δ = -(H + μ)⁻¹ g, then δ ← δ - (H + μ)⁻¹ (Jᵀ∇ℓ(x(θ + δ)) + dδ + μδ) as long as corrections are shorter and the loss falls
    by a tenth, for H = JᵀWJ + d.

    H comes from differentiating the divergence of the whole network twice, J by torch.func, ∇ℓ at the output.
    """
    divergence, loss_fn = CASES[case]
    model, inputs, targets = network(), torch.randn(12, 3), torch.randint(2, (12,))
    start, before = flat(model), copy.deepcopy(model)
    options: dict[str, Any] = {"method": method, "damping": 3.0, "tolerance": 1e-12}
    optimizer = Exact(model, loss_fn, divergence, **options)
    optimizer.step(lambda: (model(inputs), targets))
    stats = optimizer.stats
    assert (stats.method, stats.steps, stats.refused, stats.stalled) == (method, 1, 0, 0)
    mu = stats.damping / max(1 / 3, 1 - (2 * stats.ratio - 1) ** 3)
    H, g = curvature_and_gradient(before, inputs, targets, loss_fn, divergence)
    assert mu == pytest.approx(3 * float(g @ H @ g / (g @ g)))
    dense = dense_step(before, inputs, targets, loss_fn, divergence, mu)
    step = torch.cat([each.reshape(-1) for each in dense.values()])
    if case not in ("newton", "inside"):

        def output(vector: Tensor) -> Tensor:
            named = {}
            for name, p in before.named_parameters():
                named[name], vector = vector[: p.numel()].reshape(p.shape), vector[p.numel() :]
            result: Tensor = torch.func.functional_call(before, named, inputs)
            return result.reshape(-1)

        J = torch.func.jacrev(output)(start)
        damped, held = H + mu * torch.eye(len(g)), 0.1 if case == "sum" else 0.0

        def loss(step: Tensor) -> Tensor:
            return loss_fn(output(start + step).reshape(12, 2), targets)

        more, length = step, math.inf
        for corrections in range(10):
            x = output(start + step).reshape(12, 2).requires_grad_()
            (slope,) = torch.autograd.grad(loss_fn(x, targets), x)
            more = -torch.linalg.solve(damped, J.T @ slope.reshape(-1) + (held + mu) * step)
            if more.norm() >= min(length, step.norm()) or loss(step + more) >= loss(step):
                break
            pays = loss(step + more) <= 0.9 * loss(step)
            step, length = step + more, float(more.norm())
            if not pays:
                corrections += 1
                break
        assert corrections > 0 or case not in ("sum", "gaussian", "squares")
    assert (flat(model) - start - step).norm() < 1e-8 * step.norm()


@pytest.mark.parametrize(
    ("case", "method"), [(c, m) for c in ("kl", "sum", "newton") for m in METHODS if (c, m) != ("newton", "dual")]
)
def test_momentum_pulls_to_the_last_step(case: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(H + μ) δ = -g + μ β δ_last."""
    divergence, loss_fn = CASES[case]
    model, inputs, targets = network(), torch.randn(12, 3), torch.randint(2, (12,))
    monkeypatch.setattr(llqr.exact.optimizer, "CORRECTIONS", 0)
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


def poisson(model: nn.Module, inside: Tensor, boundary: Tensor) -> tuple[Tensor, Tensor]:
    """Δu + 1 at points inside, and u on the boundary: residuals with second derivatives of the network."""
    x = inside.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    return second[0] + second[1] + 1, model(boundary)


class Odd(nn.Module):
    """Parameters that aren't linear maps: a scale, a coefficient, a layer norm, a weight used twice and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.scale, self.coefficient = nn.Parameter(torch.rand(6) + 1), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).tanh() * self.scale)
        back = (hidden @ self.first.weight).tanh() * self.coefficient
        return self.last(hidden) + back


class Conv(nn.Module):
    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Conv2d(3, 2, 2, dilation=2, bias=False)
        self.norm = nn.BatchNorm2d(3) if batch_norm else nn.Identity()
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        pictures = x.reshape(-1, 1, 8, 8)
        result: Tensor = self.last(self.b(self.norm(self.a(pictures)).relu()).flatten(1))
        return result


class Sequence(nn.Module):
    """Tokens: every weight meets each example several times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.last = (
            nn.Linear(2, 4),
            nn.MultiheadAttention(4, 2, batch_first=True),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x)
        result: Tensor = self.last(tokens + self.mix(tokens, tokens, tokens)[0]).mean(1)
        return result


def single(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return (model(x),)


RESIDUALS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], tuple[Tensor, ...]]]] = {
    "derivatives": (lambda: network(2, 1), lambda m: poisson(m, POINTS, POINTS[:7] + 1)),
    "odd": (Odd, lambda m: single(m, POINTS)),
    "odd derivatives": (Odd, lambda m: poisson(lambda x: m(x)[:, :1], POINTS, POINTS[:7])),  # type: ignore[arg-type]
    "convolutions": (Conv, lambda m: single(m, PICTURES)),
    "batch statistics": (lambda: Conv(True), lambda m: single(m, PICTURES)),
    "tokens": (Sequence, lambda m: single(m, TOKENS)),
    "torch.func": (lambda: network(2, 1), lambda m: (torch.func.vmap(torch.func.jacrev(m))(POINTS)[:, 0],)),
    "one example": (lambda: network(2, 3), lambda m: single(m, POINTS[0])),
    "coupled": (lambda: network(2, 2), lambda m: (m(POINTS) - m(POINTS).mean(0),)),
    "held back": (lambda: network(2, 1), lambda m: (m(POINTS), 0.1 * torch.cat([p.flatten() for p in m.parameters()]))),
    "on columns": (lambda: network(2, 2), lambda m: ((m[0].weight @ POINTS.T).T.tanh(),)),  # type: ignore[index]
}
POINTS, PICTURES, TOKENS = (
    torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shape in ((20, 2), (6, 64), (5, 3, 2))
)


@pytest.mark.parametrize("name", RESIDUALS)
@pytest.mark.parametrize("method", ["dual", "primal", "cg"])
def test_jacobians_of_all_kinds_of_residuals(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(JᵀJ + μ/2) δ = -Jᵀ r for the loss Σ mean r², with J row by row from one backward pass each."""
    monkeypatch.setattr(llqr.exact.optimizer, "CORRECTIONS", 0)
    make, residuals = RESIDUALS[name]
    model = make()
    scaled = [r.reshape(-1) / r.numel() ** 0.5 for r in residuals(model)]
    r = torch.cat(scaled)
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(each, parameters, retain_graph=True, materialize_grads=True) for each in r]
    J = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])
    start = flat(model)
    options: dict[str, Any] = {"method": method, "damping": 3.0, "tolerance": 1e-12}
    optimizer = Exact(model, **options)
    loss = optimizer.step(lambda: residuals(model))
    assert float(loss) == pytest.approx(float(r.detach() @ r.detach()))
    mu = optimizer.stats.damping / max(1 / 3, 1 - (2 * optimizer.stats.ratio - 1) ** 3)
    step = -torch.linalg.solve(2 * J.T @ J + mu * torch.eye(len(start)), 2 * J.T @ r.detach())
    assert optimizer.stats.refused == 0
    assert (flat(model) - start - step).norm() < 1e-8 * step.norm()


def test_few_backward_passes_give_the_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and biases of a residual with derivatives need no product each: none is left to them."""
    left: list[int] = []
    made = llqr.exact.point.Rows._by_products

    def noted(self: Any, number: int, push: Any) -> Tensor:
        left.append(len(self._rest[number]))
        return made(self, number, push)

    monkeypatch.setattr(llqr.exact.point.Rows, "_by_products", noted)
    for name in ("derivatives", "convolutions", "held back"):
        model = RESIDUALS[name][0]()
        Exact(model).step(lambda name=name, model=model: RESIDUALS[name][1](model))  # type: ignore[misc]
    size = sum(p.numel() for p in network(2, 1).parameters())
    assert left == [0, 0, 0, 0, size]  # two groups, one, and two of which one is the parameters themselves


def test_the_minimum_is_that_of_least_squares() -> None:
    """scipy's Levenberg–Marquardt (MINPACK) from the same start ends at the same loss."""
    optimize = pytest.importorskip("scipy.optimize")
    x = torch.linspace(-3, 3, 40)[:, None]
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    with torch.no_grad():
        y = model(x) + 0.01 * torch.randn(40, 1)
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    other = copy.deepcopy(model)

    def residuals(vector: Any) -> Any:
        nn.utils.vector_to_parameters(torch.tensor(vector), other.parameters())
        return (other(x) - y).detach().numpy().ravel()

    expected = optimize.least_squares(residuals, flat(model).numpy(), method="lm", xtol=1e-14, ftol=1e-14, gtol=1e-14)
    optimizer = Exact(model)
    for _ in range(80):
        loss = optimizer.step(lambda: model(x) - y)
    assert float(loss) == pytest.approx(2 * expected.cost / 40, rel=1e-8)
    assert optimizer.stats.stalled > 0  # and says that it is there


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poisson_is_solved(dtype: torch.dtype) -> None:
    """-Δu = 1 with u = 0 on the unit circle: u = (1 - |x|²)/4."""
    model = network(2, 1, 10).to(dtype)
    angle, radius = 2 * math.pi * torch.rand(120), torch.rand(120).sqrt()
    inside = torch.stack((radius * angle.cos(), radius * angle.sin()), 1).to(dtype)
    edge = torch.stack((angle.cos(), angle.sin()), 1)[:60].to(dtype)
    optimizer = Exact(model)
    losses = [float(optimizer.step(lambda: poisson(model, inside, edge))) for _ in range(30)]
    assert losses == sorted(losses, reverse=True)
    truth = (1 - inside.square().sum(1)) / 4
    error = (model(inside)[:, 0] - truth).detach().norm() / truth.norm()
    assert float(error) < (1e-3 if dtype == torch.float32 else 1e-4)


def test_newton_leaves_a_saddle() -> None:
    """f = x⁴/4 - x²/2 + y²: H isn't positive definite at the start, and the minimum is at x = ±1, y = 0."""
    point = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        point.weight.copy_(torch.tensor([[1e-3, 2.0]]))

    def closure() -> Tensor:
        x, y = point.weight[0]
        return x**4 / 4 - x**2 / 2 + y**2

    optimizer = Exact(point, divergence="newton")
    for _ in range(30):
        optimizer.step(closure)
    assert point.weight[0].abs().tolist() == pytest.approx([1.0, 0.0], abs=1e-7)


def classifier() -> tuple[nn.Sequential, Tensor, Tensor]:
    return network(4, 3, 6), torch.randn(30, 4), torch.randint(3, (30,))


def test_a_state_goes_on_bit_for_bit() -> None:
    model, inputs, targets = classifier()

    def make() -> Exact:
        return Exact(model, functional.cross_entropy, "ngd", momentum=0.3)

    first = make()
    for _ in range(3):
        first.step(lambda: (model(inputs), targets))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, saved)
    for _ in range(3):
        first.step(lambda: (model(inputs), targets))
    expected = flat(model)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    model.load_state_dict(loaded["model"])
    second = make()
    second.load_state_dict(loaded["optimizer"])
    for _ in range(3):
        second.step(lambda: (model(inputs), targets))
    assert torch.equal(flat(model), expected)
    assert second.stats.steps == 6
    with pytest.raises(LLQRError, match="other parameters"):
        Exact(network(4, 3, 5)).load_state_dict(loaded["optimizer"])
    loaded["optimizer"]["param_groups"][0]["mu"] = math.nan
    with pytest.raises(LLQRError, match="'mu' in the state"):
        second.load_state_dict(loaded["optimizer"])


@pytest.mark.parametrize("at", [3, 4])
def test_ctrl_c_leaves_the_parameters_from_before(at: int) -> None:
    """The closure runs for the loss, the engine, the trial and its correction: an interruption in the last two."""
    model, inputs, targets = classifier()
    optimizer = Exact(model, functional.cross_entropy)
    optimizer.step(lambda: (model(inputs), targets))
    before, calls = flat(model), []

    def closure() -> tuple[Tensor, Tensor]:
        calls.append(None)
        if len(calls) == at:
            raise KeyboardInterrupt
        return model(inputs), targets

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert torch.equal(flat(model), before)
    assert optimizer.stats.steps == 1
    optimizer.step(lambda: (model(inputs), targets))
    assert optimizer.stats.steps == 2


def test_a_step_that_raises_the_loss_is_taken_back() -> None:
    """A loss that is nothing like its quadratic model: every step of it is refused."""
    point = nn.Linear(1, 1, bias=False)
    start = point.weight.item()

    def closure() -> Tensor:
        moved = point.weight != start
        return point.weight + 3.0 + 10.0 * moved

    optimizer = Exact(point)
    optimizer.step(closure)
    assert point.weight.item() == start
    assert optimizer.stats.stalled == 1
    assert optimizer.stats.refused > 5


def test_dropout_is_one_function_within_a_step_and_another_in_the_next() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    inputs, targets = torch.randn(30, 4), torch.randint(3, (30,))
    optimizer = Exact(model, functional.cross_entropy)
    masks: list[Tensor] = []
    dropped: list[Tensor] = []
    model[2].register_forward_hook(lambda _, __, output: dropped.append(output.detach() == 0))
    counts = [0]

    def closure() -> tuple[Tensor, Tensor]:
        output = model(inputs)
        masks.append(dropped[-1])
        return output, targets

    for _ in range(2):
        optimizer.step(closure)
        counts.append(len(masks))
    assert all(torch.equal(mask, masks[0]) for mask in masks[: counts[1]])
    assert all(torch.equal(mask, masks[counts[1]]) for mask in masks[counts[1] :])
    assert not torch.equal(masks[0], masks[-1])


def test_batch_statistics_are_counted_once_a_step() -> None:
    model = Conv(True)
    targets = torch.randint(2, (6,))
    optimizer = Exact(model, functional.cross_entropy)
    for _ in range(3):
        optimizer.step(lambda: (model(PICTURES), targets))
    assert int(model.norm.num_batches_tracked) == 3  # type: ignore[union-attr, arg-type]


def test_another_batch_within_a_step_is_an_error() -> None:
    model, inputs, targets = classifier()
    batches = iter(torch.split(torch.randperm(30), 5))

    def closure() -> tuple[Tensor, Tensor]:
        rows = next(batches)
        return model(inputs[rows]), targets[rows]

    before = flat(model)
    with pytest.raises(LLQRError, match=r"Draw batches .* before step"):
        Exact(model, functional.cross_entropy).step(closure)
    assert torch.equal(flat(model), before)


def test_rank_deficient_jacobians_are_damped() -> None:
    """Two equal columns, a parameter without effect, more parameters than residuals."""

    class Redundant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = (nn.Parameter(torch.randn(3)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.a + self.b)

    for method in ("dual", "primal", "cg", "auto"):
        model = Redundant()
        x, y = torch.randn(2, 3), torch.randn(2)
        unused = model.unused.detach().clone()
        optimizer = Exact(model, method=method)  # type: ignore[arg-type]
        for _ in range(12):
            loss = optimizer.step(lambda model=model, x=x, y=y: model(x) - y)  # type: ignore[misc]
        assert float(loss) < 1e-12
        assert torch.equal(model.unused.detach(), unused)


def test_memory_bounds_the_method() -> None:
    """Few bytes: conjugate gradients; a method that was asked for says what it takes. Chunks give the same H."""
    model, inputs, targets = classifier()
    optimizer = Exact(model, functional.cross_entropy, memory=10_000)
    optimizer.step(lambda: (model(inputs), targets))
    assert optimizer.stats.method == "cg"
    for method in ("dual", "primal", "riccati"):
        with pytest.raises(LLQRError, match=r"takes [\d,]+ bytes .* memory=10,000"):
            Exact(model, functional.cross_entropy, method=method, memory=10_000).step(lambda: (model(inputs), targets))  # type: ignore[arg-type]
    size = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    sides = 2 * (
        30 * 3 * (6 + 6 + 3) * 2 + 30 * (4 + 6 + 6 + 3)
    )  # gradients of weights and biases, 3 columns; inputs and ones
    ends, least = [], 8 * (3 * size**2 + sides + 3 * (2 * size + largest))  # and the three rows of an example
    for memory in (least, least + 8 * 7 * (2 * size + largest), 2**31):
        copied = copy.deepcopy(model)
        optimizer = Exact(copied, functional.cross_entropy, method="primal", memory=memory)
        optimizer.step(lambda copied=copied: (copied(inputs), targets))  # type: ignore[misc]
        ends.append(flat(copied))
    assert (ends[0] - ends[2]).norm() < 1e-12 * ends[2].norm()
    assert (ends[1] - ends[2]).norm() < 1e-12 * ends[2].norm()
    with pytest.raises(LLQRError, match=r"3 rows of the Jacobian .* room for"):
        Exact(model, functional.cross_entropy, method="primal", memory=least - 8).step(lambda: (model(inputs), targets))


def test_what_cannot_be_stepped_says_so() -> None:
    model, inputs, targets = classifier()

    def pair() -> tuple[Tensor, Tensor]:
        return model(inputs), targets

    def doubled() -> tuple[Tensor, Tensor]:
        return 2 * model(inputs), inputs[:, :3]

    def wrong(match: str, *arguments: Any, closure: Closure = pair, **options: Any) -> None:
        before = flat(model)
        with pytest.raises(LLQRError, match=match):
            Exact(*arguments, **options).step(closure)
        assert torch.equal(flat(model), before)

    wrong("not an nn.Module", list(model.parameters()))
    wrong("unknown method 'daul': did you mean 'dual'", model, method="daul")
    wrong("unknown divergence", model, divergence="gaus-newton")
    wrong("momentum is a number from 0 to 1", model, momentum=1.0)
    wrong("damping is a number larger than 0", model, damping=0)
    wrong("tolerance is a number between 0 and 1", model, tolerance=0)
    wrong("memory is a number of bytes", model, memory=1e9)
    wrong("loss_fn is a function", model, "mse")
    wrong("takes no LayerwiseLoss", model, LayerwiseLoss(functional.cross_entropy, {"0": lambda x, own: x.sum()}))
    wrong("needs a closure", model, closure=None)  # type: ignore[arg-type]
    wrong(r"returns \(output, targets\)", model, functional.mse_loss, closure=lambda: model(inputs))
    wrong("one number, a loss", model, closure=lambda: model(inputs).mean())
    wrong("isn't a|not a", model, closure=lambda: "residuals")
    wrong("floating-point", model, closure=lambda: targets)
    wrong("0 numbers", model, closure=lambda: model(inputs[:0]))
    wrong("depend on the parameters", model, closure=lambda: inputs)
    wrong("for divergences that are flat", model, functional.cross_entropy, "newton", "dual")
    wrong("nn.Sequential", model, functional.mse_loss, method="riccati", closure=doubled)
    wrong("convex in the output", model, lambda x, _: -x.square().mean(), method="dual")
    with pytest.raises(LLQRError, match="too coarse"):
        Exact(nn.Linear(2, 2).half())
    with pytest.raises(LLQRError, match="one group"):
        Exact(model).add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(NonFiniteError, match="what the closure returned"):
        Exact(model).step(lambda: model(inputs) / 0)
    optimizer = Exact(model)
    model[0].bias.requires_grad_(False)  # type: ignore[operator, union-attr]
    with pytest.raises(LLQRError, match="requires a gradient no longer"):
        optimizer.step(lambda: model(inputs))
    broken = network(4, 3)
    nn.init.constant_(broken[0].weight, math.nan)  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match="parameter"):
        Exact(broken)


def concave(output: Tensor, targets: Any) -> Tensor:
    return (1 + output.square()).log().mean()


def test_losses_that_are_not_convex_take_another_method() -> None:
    model, inputs, _ = classifier()
    with torch.no_grad():
        model[-1].weight.mul_(10)  # type: ignore[operator]
    optimizer = Exact(model, concave)
    losses = [float(optimizer.step(lambda: (model(inputs), None))) for _ in range(8)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]


def test_batches_and_momentum_train() -> None:
    model, _, _ = classifier()
    inputs = torch.randn(400, 4)
    targets = (inputs @ torch.randn(4, 3)).argmax(1)
    optimizer = Exact(model, functional.cross_entropy, "ngd", momentum=0.5, damping=1.0)
    for rows in torch.split(torch.randperm(400), 40):
        optimizer.step(lambda rows=rows: (model(inputs[rows]), targets[rows]))  # type: ignore[misc]
    assert float((model(inputs).argmax(1) == targets).double().mean()) > 0.85


def test_conjugate_gradients_are_as_exact_as_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """‖(H + μ) δ + g‖ ≤ tolerance ‖g‖, with H = 2 JᵀJ; solutions that end before are told once, and counted."""
    monkeypatch.setattr(llqr.exact.optimizer, "CORRECTIONS", 0)
    model, x, y = network(2, 1), POINTS, POINTS[:, :1].sin()
    before, start = copy.deepcopy(model), flat(model)
    optimizer = Exact(model, method="cg", tolerance=0.05)
    optimizer.step(lambda: model(x) - y)
    mu = optimizer.stats.damping / max(1 / 3, 1 - (2 * optimizer.stats.ratio - 1) ** 3)
    H, g = curvature_and_gradient(before, x, y, functional.mse_loss, GaussNewton())
    step = flat(model) - start
    residual = (H @ step + mu * step + g).norm() / g.norm()
    assert optimizer.stats.refused == 0
    assert 1e-6 < residual <= 0.05
    assert optimizer.stats.cut_short == 0
    monkeypatch.setattr(llqr.exact.systems, "MOST_PRODUCTS", 2)
    optimizer = Exact(model, method="cg", tolerance=1e-12)
    with pytest.warns(LLQRWarning, match="limit of products"):
        optimizer.step(lambda: model(x) - y)
    counted = optimizer.stats.cut_short
    assert counted >= 1
    optimizer.step(lambda: model(x) - y)
    assert optimizer.stats.cut_short > counted
