"""Definition 1 whole: D = ψ_N(x_N) + Σ_i ψ_i(x_i, θ_i), and losses ℓ(x_N) + Σ_i ℓ_i(x_i, θ_i) (footnote 1, appendix A).

For every form of ψ the Riccati recursion, the dense solve and conjugate gradients are compared with -(H + λI)⁻¹ g, where H
and g come from torch.func.hessian and grad of D and L, which are written out here along the states of the chain. The relaxed
objective (eq. relaxed-lqr-equivalence) is added up stage by stage at δ = -U g, with a U that was fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from llqr import LLQR, LayerwiseLoss, QuadraticModel, cg_step, dense_step, exact_step, fit
from llqr.divergences import (
    KL,
    L2,
    BasePoint,
    Categorical,
    Divergence,
    GaussNewton,
    Intermediate,
    Layerwise,
    Newton,
    OutputTerm,
    Renyi,
)
from llqr.errors import ChainError, LLQRError, NotTwiceDifferentiableError
from llqr.exact import Chain, Riccati, build
from networks import relative

TOLERANCE = 1e-9
CLASSES = 3
State = Any
Parameters = dict[str, Tensor]


class Probed(nn.Module):
    """x + tanh(W x), and a probe head with parameters of its own, whose logits go nowhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.probe = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        following = x + self.inner(x).tanh()
        self.probe(following)
        return following


class Attention(nn.Module):
    """Two tokens that attend to each other; the distributions are what the module `softmax` returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.softmax = nn.Linear(width, 2), nn.Linear(width, 2), nn.Softmax(-1)

    def weights(self, x: Tensor) -> Tensor:
        return self.softmax(self.query(x) @ self.key(x).mT)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weights(x) @ x


class Truth:
    """A chain by hand: its states as functions of all the parameters, g and H by torch.func."""

    def __init__(self, stages: nn.Sequential, inputs: Any, targets: Tensor) -> None:
        self.stages, self.inputs, self.targets = stages.double(), inputs, targets
        self.shapes = {name: p.shape for name, p in stages.named_parameters()}
        self.point = torch.cat([p.detach().reshape(-1) for p in stages.parameters()])
        self.base = self.trace(self.point)

    def flat(self, named: Parameters) -> Tensor:
        return torch.cat([named[name].reshape(-1) for name in self.shapes])

    def trace(self, flat: Tensor) -> tuple[list[State], list[Parameters]]:
        """x_0 … x_N and θ_0 … θ_{N-1}."""
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        named = {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        states, own = [self.inputs], []
        for place, stage in self.stages.named_children():
            own.append({n.removeprefix(f"{place}."): p for n, p in named.items() if n.startswith(f"{place}.")})
            states.append(functional_call(stage, own[-1], (states[-1],)))
        return states, own

    def loss(self, output: Tensor) -> Tensor:
        return cross_entropy(output, self.targets)


@dataclass
class Case:
    """A divergence, what it is by hand: D(x, θ, x_k, θ_k) but for ψ_N = KL, and the loss's terms, likewise."""

    divergence: Divergence
    psi: Callable[[list[State], list[Parameters], list[State], list[Parameters]], Tensor] | None = None
    terms: dict[str | int, Callable[[State, Parameters], Tensor]] | None = None
    output: str = "kl"
    """ψ_N: KL, or parts of the loss and of KL."""


def kl(base: Tensor, now: Tensor) -> Tensor:
    """Σ p_k (log p_k - log p), one for each distribution."""
    p, q = base.log_softmax(-1), now.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def head(x: Tensor, own: Parameters, name: str) -> Tensor:
    return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]


def local_change(x: Tensor, own: Parameters, x_k: Tensor, own_k: Parameters) -> Tensor:
    """½ |W x - W_k x_k|² of one layer: flat, and of x and θ together."""
    return 0.5 * (x @ own["weight"].T - x_k @ own_k["weight"].T).square().sum(-1).mean()


def steep(x: Tensor, own: Parameters, x_k: Tensor, own_k: Parameters) -> Tensor:
    """Neither flat by x nor by θ, and curved in both."""
    return (x.exp() @ own["weight"].T).sin().mean() + (own["bias"] ** 4).sum() + (x - 2 * x_k).square().mean()


def active(x: Tensor, own: Parameters) -> Tensor:
    """A term of a loss on an activation alone."""
    return 0.3 * (1 + x.square()).log().mean()


def weighed(x: Tensor, own: Parameters) -> Tensor:
    """A term of a loss on θ alone."""
    return 0.05 * sum((p.square().sum() for p in own.values()), torch.zeros(()).double()) + own["bias"].exp().sum()


def both(x: Tensor, own: Parameters) -> Tensor:
    return 0.2 * (x @ own["weight"].T).cosh().mean()


class Leaning(OutputTerm):
    """A ψ_i(x_i) of one's own that isn't flat."""

    needs_loss, flat = False, False

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        return (output.exp() + (output - base.output) ** 2).mean()


def per_example(x: Tensor) -> Tensor:
    """W(x_k) = x xᵀ + I for each example."""
    return x[:, :, None] * x[:, None, :] + torch.eye(x.shape[1]).to(x)


def mlp() -> Truth:
    torch.manual_seed(0)
    stages = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Probed(5), nn.Linear(5, 4), nn.Softplus(), nn.Linear(4, CLASSES))
    return Truth(stages, torch.randn(6, 4).double(), torch.randint(CLASSES, (6,)))


MLP = {
    "W(x_k), diagonal": Case(
        Intermediate({1: lambda x: 1 + x**2}),
        lambda x, own, x_k, own_k: 0.5 * ((1 + x_k[2] ** 2) * (x[2] - x_k[2]) ** 2).sum(-1).mean(),
    ),
    "W(x_k), a matrix each": Case(
        Intermediate({"2": per_example}, reduction="sum"),
        lambda x, own, x_k, own_k: 0.5 * torch.einsum("bi,bij,bj->", x[3] - x_k[3], per_example(x_k[3]), x[3] - x_k[3]),
    ),
    "W(x_k), a weight": Case(
        Intermediate({"0": lambda x: x.var()}),
        lambda x, own, x_k, own_k: 0.5 * x_k[1].var() * (x[1] - x_k[1]).square().sum(-1).mean(),
    ),
    "KL of an activation": Case(
        Intermediate({"3": KL() + 0.5 * Renyi(2.0, reduction="sum")}),
        lambda x, own, x_k, own_k: (
            kl(x_k[4], x[4]).mean() + 0.5 * 2 * kl(x_k[4], x[4]).sum()
        ),  # H of Rényi: order × KL's
    ),
    "KL of a probe head": Case(
        0.7 * Intermediate({"2.probe": KL()}),
        lambda x, own, x_k, own_k: 0.7 * kl(head(x_k[3], own_k[2], "probe"), head(x[3], own[2], "probe")).mean(),
    ),
    "a slope at an activation": Case(
        Intermediate({"1": Leaning()}), lambda x, own, x_k, own_k: (x[2].exp() + (x[2] - x_k[2]) ** 2).mean()
    ),
    "a slope inside a stage": Case(
        Intermediate({"2.probe": Leaning()}),
        lambda x, own, x_k, own_k: (
            head(x[3], own[2], "probe").exp() + (head(x[3], own[2], "probe") - head(x_k[3], own_k[2], "probe")) ** 2
        ).mean(),
    ),
    "x and θ, flat": Case(
        Layerwise({3: local_change, "0": local_change, "2.inner": local_change}),
        lambda x, own, x_k, own_k: (
            local_change(x[3], own[3], x_k[3], own_k[3])
            + local_change(x[0], own[0], x_k[0], own_k[0])
            + local_change(x[2], {"weight": own[2]["inner.weight"]}, x_k[2], {"weight": own_k[2]["inner.weight"]})
        ),
    ),
    "x and θ, with slopes": Case(
        Layerwise({3: steep, "5": steep, "0": steep}, flat=False),
        lambda x, own, x_k, own_k: sum(
            (steep(x[i], own[i], x_k[i], own_k[i]) for i in (3, 5, 0)), torch.zeros(()).double()
        ),
    ),
    "all of them": Case(
        Layerwise({3: steep}, flat=False)
        + Layerwise({3: local_change, "2.inner": local_change})
        + Intermediate({3: KL(), "2": 0.4, "2.probe": KL()})
        + L2(0.2),
        lambda x, own, x_k, own_k: (
            steep(x[3], own[3], x_k[3], own_k[3])
            + local_change(x[3], own[3], x_k[3], own_k[3])
            + kl(x_k[4], x[4]).mean()
            + local_change(x[2], {"weight": own[2]["inner.weight"]}, x_k[2], {"weight": own_k[2]["inner.weight"]})
            + kl(head(x_k[3], own_k[2], "probe"), head(x[3], own[2], "probe")).mean()
            + 0.2 * (x[3] - x_k[3]).square().sum(-1).mean()
            + 0.1 * sum(((p - q[n]) ** 2).sum() for o, q in zip(own, own_k, strict=True) for n, p in o.items())
        ),
    ),
    "a loss with terms inside, KL": Case(KL(), terms={"2": active, 0: weighed, 5: both}),
    "a loss with terms inside, Newton": Case(
        0.6 * Newton() + 0.1 * KL(), terms={"2": active, 0: weighed, 5: both, "3": weighed}, output="loss"
    ),
}
"""Except for Newton, KL() of the output is added on both sides."""


def problem(truth: Truth, case: Case) -> tuple[Divergence, Any, Tensor, Tensor]:
    """The library's divergence and loss; g and H by hand."""
    terms = case.terms or {}
    places = {name: i for i, (name, _) in enumerate(truth.stages.named_children())}

    def loss(flat: Tensor) -> Tensor:
        x, own = truth.trace(flat)
        inside = [term(x[i], own[i]) for i, term in ((places.get(str(p), p), t) for p, t in terms.items())]  # type: ignore[index]
        return truth.loss(x[-1]) + sum(inside, torch.zeros(()).double())

    def divergence(flat: Tensor) -> Tensor:
        x, own = truth.trace(flat)
        at_output = kl(truth.base[0][-1], x[-1]).mean()
        total = 0.6 * loss(flat) + 0.1 * at_output if case.output == "loss" else at_output
        return total if case.psi is None else total + case.psi(x, own, *truth.base)

    ours = case.divergence if case.psi is None else case.divergence + KL()
    loss_fn = LayerwiseLoss(cross_entropy, terms) if terms else cross_entropy
    return ours, loss_fn, torch.func.grad(loss)(truth.point), torch.func.hessian(divergence)(truth.point)


def agree(truth: Truth, case: Case) -> None:
    ours, loss_fn, gradient, matrix = problem(truth, case)
    damping = 0.2 + max(0.0, -float(torch.linalg.eigvalsh(matrix)[0]))
    damped = matrix + damping * torch.eye(len(matrix)).double()
    expected = -torch.linalg.solve(damped, gradient)
    arguments = (truth.stages, truth.inputs, truth.targets, loss_fn, ours, damping)
    assert relative(truth.flat(exact_step(*arguments)), expected) < TOLERANCE
    assert relative(truth.flat(dense_step(*arguments)), expected) < TOLERANCE
    assert relative(truth.flat(cg_step(*arguments, tolerance=1e-13)), expected) < TOLERANCE

    q = QuadraticModel.build(*arguments)
    assert relative(truth.flat(q.gradient), gradient) < TOLERANCE
    direction = {name: torch.randn(shape).double() for name, shape in truth.shapes.items()}
    assert relative(truth.flat(q.curvature(direction)), damped @ truth.flat(direction)) < TOLERANCE
    lqr = build(Chain(truth.stages), *arguments[1:])
    assert relative(torch.cat(lqr.gradient()), gradient) < TOLERANCE
    products = lqr.curvature([stage.stack(direction) for stage in lqr.stages])
    assert relative(torch.cat(products), damped @ truth.flat(direction)) < TOLERANCE

    u = fit(q, "kfac", steps=3)
    step = {name: -value for name, value in u.apply(q.gradient).items()}
    flat = truth.flat(step)
    by_stage = lqr.costs(step)
    assert len(by_stage) == len(truth.stages) + 1
    value = gradient @ flat + 0.5 * flat @ damped @ flat
    assert value < 0
    assert abs(sum(by_stage) - value) < TOLERANCE * abs(value)
    assert abs(q.value(step) - value) < TOLERANCE * abs(value)


@pytest.mark.parametrize("name", MLP)
def test_forms_of_psi(name: str) -> None:
    """Riccati = dense = CG = -(H + λI)⁻¹ g, and J(U) stage by stage."""
    agree(mlp(), MLP[name])


def inner_of(own: Parameters) -> Parameters:
    return {"weight": own["inner.weight"]}


def probed(x: Tensor, own: Parameters) -> Tensor:
    return head(x + head(x, own, "inner").tanh(), own, "probe")


Local = Callable[[Tensor, Parameters, Tensor, Parameters], Tensor]
LOCAL: dict[str, dict[int, Local]] = {
    "KL of an activation": {4: lambda x, own, x_k, own_k: kl(x_k, x).mean() + kl(x_k, x).sum()},
    "KL of a probe head": {2: lambda x, own, x_k, own_k: 0.7 * kl(probed(x_k, own_k), probed(x, own)).mean()},
    "a slope at an activation": {2: lambda x, own, x_k, own_k: (x.exp() + (x - x_k) ** 2).mean()},
    "x and θ, flat": {
        0: local_change,
        2: lambda x, own, x_k, own_k: local_change(x, inner_of(own), x_k, inner_of(own_k)),
        3: local_change,
    },
    "x and θ, with slopes": dict.fromkeys((0, 3, 5), steep),
    "a loss with terms inside, Newton": {
        i: lambda x, own, x_k, own_k, term=term: 0.6 * term(x, own)
        for i, term in {0: weighed, 2: active, 3: weighed, 5: both}.items()
    },
}
"""The ψ_i of these cases as functions of one stage's x_i and θ_i."""


@pytest.mark.parametrize("name", LOCAL)
def test_the_relaxed_objective_stage_by_stage(name: str) -> None:
    """Eq. relaxed-lqr-equivalence with δθ = -U g: ½ δx·Qδx + δθ·Mδx + ½ δθ·Rδθ + q·δx + r·δθ of each stage, by torch.func
    of that stage alone: A, B of f_i; Q, M, R of p_{i+1}·f_i + ψ_i; p_i its slope by x_i. Their sum is g·δ + ½ δ·Hδ."""
    truth, case = mlp(), MLP[name]
    ours, loss_fn, gradient, matrix = problem(truth, case)
    arguments = (truth.inputs, truth.targets, loss_fn, ours)
    q = QuadraticModel.build(truth.stages, *arguments)
    step = {name: -value for name, value in fit(q, "kfac", steps=3).apply(q.gradient).items()}
    states, own = truth.base
    terms = {int(place): term for place, term in (case.terms or {}).items()}
    newton = case.output == "loss"

    def at_output(x: Tensor) -> Tensor:
        here = kl(states[-1], x).mean()
        return 0.6 * truth.loss(x) + 0.1 * here if newton else here

    def stacked(named: Parameters, prefix: str = "") -> Tensor:
        """With a number that nothing depends on, for stages without parameters."""
        return torch.cat([*(named[prefix + n].reshape(-1) for n in own[i]), torch.zeros(1).double()])

    blocks, adjoint = [], torch.func.grad(at_output)(states[-1])
    for i in reversed(range(len(own))):

        def named(theta: Tensor, i: int = i) -> Parameters:
            parts = theta[:-1].split([p.numel() for p in own[i].values()]) if own[i] else ()
            return {n: part.reshape(p.shape) for (n, p), part in zip(own[i].items(), parts, strict=True)}

        def run(x: Tensor, theta: Tensor, i: int = i, named: Any = named) -> Tensor:
            return torch.as_tensor(functional_call(truth.stages[i], named(theta), (x,)))

        def hamiltonian(
            x: Tensor, theta: Tensor, i: int = i, p: Tensor = adjoint, f: Any = run, n: Any = named
        ) -> Tensor:
            value = (p * f(x, theta)).sum()
            return value + LOCAL[name][i](x, n(theta), states[i], own[i]) if i in LOCAL[name] else value

        def loss_term(x: Tensor, theta: Tensor, i: int = i, n: Any = named) -> Tensor:
            return terms[i](x, n(theta)) if i in terms else 0 * (x.sum() + theta.sum())

        point = states[i], stacked(own[i])
        jacobians = torch.func.jacrev(run, (0, 1))(*point)
        hessians = torch.func.hessian(hamiltonian, (0, 1))(*point)
        blocks.append((point[0].numel(), jacobians, hessians, torch.func.grad(loss_term, (0, 1))(*point)))
        adjoint = torch.func.grad(hamiltonian)(*point)

    found, dx = [], torch.zeros(states[0].numel()).double()
    for i, (width, (a, b), ((cost, _), (cross, own_cost)), (slope, own_slope)) in enumerate(reversed(blocks)):
        dt = stacked(step, f"{i}.")
        curved = 0.5 * dx @ cost.reshape(width, width) @ dx + dt @ cross.reshape(-1, width) @ dx
        found.append(curved + 0.5 * dt @ own_cost @ dt + slope.reshape(-1) @ dx + own_slope @ dt)
        dx = a.reshape(-1, width) @ dx + b.reshape(-1, len(dt)) @ dt
    last = torch.func.hessian(at_output)(states[-1]).reshape(len(dx), len(dx))
    found.append(torch.func.grad(truth.loss)(states[-1]).reshape(-1) @ dx + 0.5 * dx @ last @ dx)

    flat = truth.flat(step)
    value = gradient @ flat + 0.5 * flat @ matrix @ flat
    size = max(abs(float(each)) for each in found)
    assert sum(abs(float(each)) > 1e-6 * size for each in found) > 1  # more than the output's
    assert abs(sum(found) - value) < TOLERANCE * size
    assert abs(q.value(step) - value) < TOLERANCE * size
    for here, expected in zip(build(Chain(truth.stages), *arguments).costs(step), found, strict=True):
        assert abs(here - expected) < TOLERANCE * size


def test_adjoints_and_value_gradients() -> None:
    """Theorem 1's p_i = A_iᵀ p_{i+1} + ∇ψ_i is ∂D/∂x_i of what follows; with H = I/η, λ_i is ∂L/∂x_i (appendix A)."""
    truth = mlp()
    terms = {"2": active, 0: weighed, 5: both}
    divergence = KL() + Layerwise({3: steep, "5": steep}, flat=False) + Intermediate({1: Leaning()})
    lqr = build(Chain(truth.stages), truth.inputs, truth.targets, LayerwiseLoss(cross_entropy, terms), divergence)
    flat = build(Chain(truth.stages), truth.inputs, truth.targets, LayerwiseLoss(cross_entropy, terms), L2(1 / 0.3))
    values = Riccati(flat).solve().value_gradient
    states, own = truth.base

    def following(place: int, x: Tensor) -> list[Tensor]:
        states = [x]
        for stage, parameters in list(zip(truth.stages, own, strict=True))[place:]:
            states.append(functional_call(stage, parameters, (states[-1],)))
        return states

    for place in range(1, len(truth.stages) + 1):

        def rest(x: Tensor, place: int = place) -> Tensor:
            later = dict(enumerate(following(place, x), place))
            total = kl(states[-1], later[6]).mean()
            total = total + sum(steep(later[i], own[i], states[i], own[i]) for i in (3, 5) if i in later)
            return total + (later[2].exp() + (later[2] - states[2]) ** 2).mean() if 2 in later else total

        def loss(x: Tensor, place: int = place) -> Tensor:
            later = dict(enumerate(following(place, x), place))
            total = truth.loss(later[6])
            return total + sum(f(later[i], own[i]) for i, f in ((2, active), (5, both)) if i in later)

        adjoint = lqr.adjoints[place - 1]
        assert adjoint is not None or place == 6
        if adjoint is not None:
            assert relative(adjoint, torch.func.grad(rest)(states[place])) < TOLERANCE
        assert relative(values[place - 1], torch.func.grad(loss)(states[place]).reshape(-1)) < TOLERANCE


def test_gradient_descent_with_terms_inside_the_loss() -> None:
    """Appendix A with its remarks (i) and (ii): for H = I/η the recursion returns -η ∇L of the whole loss."""
    truth = mlp()
    case = Case(L2(1 / 0.3), lambda *_: torch.zeros(()).double(), {"2": active, 0: weighed, 5: both})
    _, loss_fn, gradient, _ = problem(truth, case)
    step = exact_step(truth.stages, truth.inputs, truth.targets, loss_fn, L2(1 / 0.3))
    torch.testing.assert_close(truth.flat(step), -0.3 * gradient, rtol=1e-11, atol=1e-14)


def test_gauss_newton_of_a_loss_with_terms_inside() -> None:
    """H = Σ J_zᵀ ∇²ℓ_i(z) J_z with z = (x_i, θ_i), and ∇²ℓ(x_N) at the output: the network is linearised, the loss isn't."""
    truth = mlp()
    terms: dict[str | int, Any] = {"2": active, 0: weighed, 5: both}
    _, loss_fn, gradient, _ = problem(truth, Case(GaussNewton(), terms=terms))

    def z(flat: Tensor) -> list[Tensor]:
        x, own = truth.trace(flat)
        parts = [torch.cat([x[i].reshape(-1), *(p.reshape(-1) for p in own[i].values())]) for i in (2, 0, 5)]
        return [x[-1].reshape(-1), *parts]

    def of(i: int, term: Any) -> Callable[[Tensor], Tensor]:
        x_k, own_k = truth.base[0][i], truth.base[1][i]
        sizes = [x_k.numel(), *(p.numel() for p in own_k.values())]

        def value(packed: Tensor) -> Tensor:
            x, *parameters = packed.split(sizes)
            own = {n: p.reshape(own_k[n].shape) for n, p in zip(own_k, parameters, strict=True)}
            return term(x.reshape(x_k.shape), own)  # type: ignore[no-any-return]

        return value

    functions = [lambda out: truth.loss(out.reshape(6, CLASSES)), of(2, active), of(0, weighed), of(5, both)]
    matrix = torch.zeros(len(truth.point), len(truth.point)).double()
    for index, function in enumerate(functions):
        jacobian = torch.func.jacrev(lambda flat, index=index: z(flat)[index])(truth.point)
        matrix += jacobian.T @ torch.func.hessian(function)(z(truth.point)[index]) @ jacobian
    damping = 0.2 + max(0.0, -float(torch.linalg.eigvalsh(matrix)[0]))
    expected = -torch.linalg.solve(matrix + damping * torch.eye(len(matrix)).double(), gradient)
    arguments = (truth.stages, truth.inputs, truth.targets, loss_fn, GaussNewton(), damping)
    for step in (exact_step(*arguments), dense_step(*arguments), cg_step(*arguments, tolerance=1e-13)):
        assert relative(truth.flat(step), expected) < TOLERANCE
    q = QuadraticModel.build(*arguments)
    assert relative(truth.flat(q.curvature(exact_step(*arguments))), -gradient) < TOLERANCE


def test_attention_distributions() -> None:
    """W(p_k) = diag(1/p_k) on the distributions is ∇² KL(p_k ‖ p): Fisher's metric on the simplex."""
    torch.manual_seed(1)
    last = nn.Sequential(nn.Flatten(), nn.Linear(8, CLASSES))
    truth = Truth(
        nn.Sequential(nn.Linear(3, 4), Attention(4), last), torch.randn(4, 2, 3).double(), torch.randint(3, (4,))
    )

    def attention(x: Tensor, own: Parameters) -> Tensor:
        return (head(x, own, "query") @ head(x, own, "key").mT).softmax(-1)

    def psi(x: list[State], own: list[Parameters], x_k: list[State], own_k: list[Parameters]) -> Tensor:
        p_k, p = attention(x_k[1], own_k[1]), attention(x[1], own[1])
        return (p_k * (p_k.log() - p.log())).sum((1, 2)).mean()

    agree(truth, Case(Intermediate({"1.softmax": lambda p: 1 / p}), psi))


class Down(nn.Module):
    """The way down of a U-Net: a coarser picture, and all the finer ones beside it."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inside, outside, 2, stride=2)

    def forward(self, pictures: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        finer = (pictures,) if isinstance(pictures, Tensor) else pictures
        return self.convolution(finer[0]).tanh(), *finer


class Up(nn.Module):
    """The way up: the coarsest picture, made finer, beside the one that was as fine on the way down."""

    def __init__(self, inside: int, skipped: int, outside: int) -> None:
        super().__init__()
        self.finer = nn.ConvTranspose2d(inside, outside, 2, stride=2)
        self.join = nn.Conv2d(outside + skipped, outside, 1)

    def forward(self, pictures: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        coarse, skipped, *others = pictures
        joined = self.join(torch.cat((self.finer(coarse), skipped), 1)).tanh()
        return (joined, *others) if others else joined


def unet() -> Truth:
    torch.manual_seed(2)
    stages = nn.Sequential(Down(1, 2), Down(2, 2), Up(2, 2, 2), Up(2, 1, 2), nn.Conv2d(2, CLASSES, 1))
    return Truth(stages, torch.randn(2, 1, 4, 4).double(), torch.randint(CLASSES, (2, 4, 4)))


class Joined(nn.Module):
    """A layer of a DenseNet that passes on what every earlier one has made, as a dict with a mask that has no derivatives."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, wider)

    def forward(self, made: Any) -> dict[str, Any]:
        if isinstance(made, Tensor):
            made = {"all": [made], "mask": torch.ones(made.shape[1]).bool(), "note": None}
        wide = torch.cat(made["all"], 1)
        return {**made, "all": [*made["all"], self.layer(wide * made["mask"].all()).tanh()]}


class Read(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, CLASSES)

    def forward(self, made: dict[str, Any]) -> Tensor:
        return self.layer(torch.cat(made["all"], 1))


def densenet() -> Truth:
    torch.manual_seed(3)
    stages = nn.Sequential(Joined(3, 2), Joined(5, 3), Joined(8, 2), Read(10))
    return Truth(stages, torch.randn(5, 3).double(), torch.randint(CLASSES, (5,)))


def skipping(x: Any, own: Parameters, x_k: Any, own_k: Parameters) -> Tensor:
    """A ψ that compares a state with an earlier one: the paper's note on augmented states."""
    return 0.5 * (x[0] - x[-1].mean() - x_k[0] + x_k[-1].mean()).square().mean() + x[0].exp().mean()


def over_classes(x: Tensor, x_k: Tensor) -> Tensor:
    return kl(x_k.movedim(1, -1), x.movedim(1, -1)).mean()


@pytest.mark.parametrize("flat", [True, False])
def test_a_unet_is_a_chain(flat: bool) -> None:
    """States are tuples of pictures of several sizes; KL of 16 pixels each, or Newton."""
    truth = unet()

    def divergence(flat_parameters: Tensor) -> Tensor:
        x, own = truth.trace(flat_parameters)
        x_k, own_k = truth.base
        if not flat:
            return truth.loss(x[-1]) + skipping(x[2], own[2], x_k[2], own_k[2])
        return over_classes(x[-1], x_k[-1])

    ours = KL(Categorical(dim=1)) if flat else Newton() + Layerwise({2: skipping}, flat=False)
    matrix = torch.func.hessian(divergence)(truth.point)
    damping = 0.1 + max(0.0, -float(torch.linalg.eigvalsh(matrix)[0]))
    gradient = torch.func.grad(lambda point: truth.loss(truth.trace(point)[0][-1]))(truth.point)
    expected = -torch.linalg.solve(matrix + damping * torch.eye(len(matrix)).double(), gradient)
    arguments = (truth.stages, truth.inputs, truth.targets, cross_entropy, ours, damping)
    for step in (exact_step(*arguments), dense_step(*arguments), cg_step(*arguments, tolerance=1e-13)):
        assert relative(truth.flat(step), expected) < TOLERANCE
    lqr, q = build(Chain(truth.stages), *arguments[1:]), QuadraticModel.build(*arguments)
    step = {name: -0.1 * value for name, value in q.gradient.items()}
    assert abs(sum(lqr.costs(step)) - q.value(step)) < TOLERANCE * abs(q.value(step))
    examples = lqr.stages[1].state_jacobian
    assert examples is not None
    assert examples.blocks.shape[0] == 2, "examples stay apart, though states are tuples"


def test_a_densenet_is_a_chain() -> None:
    """States are dicts with a list that grows; a loss has a term on all that was made; masks and None pass."""

    def spread(x: Any, own: Parameters) -> Tensor:
        return 0.1 * torch.cat(x["all"], 1).var(0).log().mean() + own["layer.weight"].square().sum()

    def local(x: Any, own: Parameters, x_k: Any, own_k: Parameters) -> Tensor:
        made, made_k = (head(torch.cat(y["all"], 1), o, "layer") for y, o in ((x, own), (x_k, own_k)))
        return 0.5 * (made - made_k).square().mean()

    agree(densenet(), Case(KL(), terms={2: spread, "3": spread}))
    agree(densenet(), Case(0.6 * Newton() + 0.1 * KL(), terms={2: spread}, output="loss"))
    agree(
        densenet(),
        Case(Layerwise({"2": local}), lambda x, own, x_k, own_k: local(x[2], own[2], x_k[2], own_k[2])),
    )


def test_weights_on_what_has_no_examples() -> None:
    """A weight fits an activation of any shape: ψ = ½ w |s - s_k|² / 5, of three numbers for five examples."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Sequential(nn.Linear(2, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale(torch.ones(2).to(x))

    torch.manual_seed(0)
    stages = nn.Sequential(nn.Linear(4, 3), Scaled(), nn.Linear(3, CLASSES))
    truth = Truth(stages, torch.randn(5, 4).double(), torch.randint(CLASSES, (5,)))

    def scales(own: Parameters) -> Tensor:
        return head(torch.ones(2).double(), own, "scale.0").tanh()

    agree(
        truth,
        Case(
            Intermediate({"1.scale": 0.7}),
            lambda x, own, x_k, own_k: 0.35 * (scales(own[1]) - scales(own_k[1])).square().sum() / 5,
        ),
    )


def test_chunks_and_divergences_at_places() -> None:
    """KL of a probe head in chunks is that of the batch; what may mix the examples can't be cut, and says so."""
    truth = mlp()
    arguments = (truth.stages, truth.inputs, truth.targets, cross_entropy)
    direction = {name: torch.randn(shape).double() for name, shape in truth.shapes.items()}
    divergence = KL() + Intermediate({"2.probe": KL(), "1": 0.3})
    whole, cut = (QuadraticModel.build(*arguments, divergence, chunk_size=size) for size in (None, 4))
    assert relative(truth.flat(cut.curvature(direction)), truth.flat(whole.curvature(direction))) < TOLERANCE
    for wrong in (Layerwise({3: local_change}), Intermediate({"1": lambda x: x.var()}), Intermediate({"1": Leaning()})):
        with pytest.raises(LLQRError, match="can't be cut: give the batch whole"):
            QuadraticModel.build(*arguments, KL() + wrong, chunk_size=4)
    loss = LayerwiseLoss(cross_entropy, {3: both})
    with pytest.raises(LLQRError, match="can't be cut"):
        QuadraticModel.build(truth.stages, truth.inputs, truth.targets, loss, KL(), chunk_size=4)


def test_first_derivatives_are_enough_for_what_is_flat() -> None:
    """A flat ψ of something inside a stage asks for no second derivative of the stage; one with a slope does."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 3 * ctx.saved_tensors[0] ** 2 * gradient  # type: ignore[no-any-return]

    class Cubed(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.first, self.function, self.probe = nn.Linear(3, 3), function, nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.probe(self.function(self.first(x)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), Cubed(lambda x: x**3), nn.Linear(3, CLASSES)).double()
    once = nn.Sequential(plain[0], Cubed(Once.apply), plain[2]).double()
    once.load_state_dict(plain.state_dict())
    rest = (torch.randn(5, 4).double(), torch.randint(CLASSES, (5,)), cross_entropy)
    flat = KL() + Intermediate({"1.probe": KL()})
    for name, value in exact_step(plain, *rest, flat, 0.1).items():
        torch.testing.assert_close(exact_step(once, *rest, flat, 0.1)[name], value, rtol=1e-10, atol=1e-12)
    with pytest.raises(NotTwiceDifferentiableError, match=r"stage '1' \(Cubed\) can't be differentiated twice"):
        exact_step(once, *rest, KL() + Intermediate({"1.probe": Leaning()}), 5.0)


@pytest.mark.parametrize("way", [exact_step, dense_step, cg_step, QuadraticModel.build])
def test_errors(way: Any) -> None:
    truth = mlp()

    def run(divergence: Divergence, loss: Any = cross_entropy) -> None:
        way(truth.stages, truth.inputs, truth.targets, loss, divergence, 0.1)

    with pytest.raises(LLQRError, match=r"unknown (stage|module) in Layerwise '9'"):
        run(KL() + Layerwise({"9": local_change}))
    with pytest.raises(LLQRError, match=r"unknown (stage|module) in Layerwise 'nowhere'"):
        run(KL(), LayerwiseLoss(cross_entropy, {"nowhere": both}))
    with pytest.raises(LLQRError, match=r"psi at 3 isn't zero.*flat=False.*linear in x and the parameters"):
        run(KL() + Layerwise({3: steep}))
    with pytest.raises(LLQRError, match="psi at 3 has to return one number"):
        run(KL() + Layerwise({3: lambda x, own, x_k, own_k: x}, flat=False))
    with pytest.raises(LLQRError, match="the loss term at 3 has to return one number"):
        run(KL(), LayerwiseLoss(cross_entropy, {3: lambda x, own: x}))
    with pytest.raises(LLQRError, match=r"has shape \(5, 5\).*6 × 5 × 5 numbers"):
        run(KL() + Intermediate({"1": lambda x: x.T @ x}))
    with pytest.raises(LLQRError, match="negative entries"):
        run(KL() + Intermediate({"1": lambda x: x}))
    with pytest.raises(LLQRError, match="negative entries"):
        run(KL() + Intermediate({"1": lambda x: -1.0}))
    with pytest.raises(LLQRError, match="returned a list, not a number"):
        run(KL() + Intermediate({"1": lambda x: [x]}))  # type: ignore[dict-item, return-value]
    with pytest.raises(LLQRError, match="negative eigenvalue"):
        run(KL() + Intermediate({"1": lambda x: -per_example(x)}))
    with pytest.raises(LLQRError, match="not finite"):
        run(KL() + Intermediate({"1": lambda x: x.log()}))

    class Own(OutputTerm):
        def psi(self, output: Tensor, base: BasePoint) -> Tensor:
            return base.loss(output)

    with pytest.raises(LLQRError, match="loss of the output alone"):
        run(Own(), LayerwiseLoss(cross_entropy, {3: both}))


def test_what_makes_no_sense() -> None:
    truth = mlp()
    for wrong in (
        lambda: Intermediate({"1": GaussNewton()}),
        lambda: Intermediate({"1": L2()}),
        lambda: Intermediate({"1": "kl"}),  # type: ignore[dict-item]
        lambda: Layerwise({}),
        lambda: Layerwise({"1": 2.0}),  # type: ignore[dict-item]
        lambda: LayerwiseLoss(cross_entropy, {"1": 0.1}),  # type: ignore[dict-item]
        lambda: LayerwiseLoss(3, {"1": both}),  # type: ignore[arg-type]
        lambda: LayerwiseLoss(cross_entropy, {"1": both})(truth.inputs, truth.targets),
    ):
        with pytest.raises(LLQRError):
            wrong()
    with pytest.raises(LLQRError, match=r"use LLQR\.paper"):
        LLQR(torch.optim.SGD(truth.stages.parameters(), lr=0.1), truth.stages, KL() + Layerwise({"3": local_change}))
    skipped = densenet()
    with pytest.raises(LLQRError, match="several tensors"):
        exact_step(skipped.stages, skipped.inputs, skipped.targets, cross_entropy, KL() + Intermediate({"1": 1.0}), 0.1)

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> tuple[None, Tensor]:
            return None, torch.arange(3)

    with pytest.raises(ChainError, match="no derivatives"):
        exact_step([truth.stages[0], Nothing(), Read(3)], truth.inputs, truth.targets, cross_entropy, KL())


def test_their_words() -> None:
    """The ranks of a group compare divergences by their words: no place in memory is in them."""
    shown = repr(KL() + Intermediate({"1": per_example, 2: KL("gaussian")}) + Layerwise({3: steep}, flat=False))
    assert shown == (
        "KL() + Intermediate({'1': per_example, 2: KL(family=Gaussian(variance=1.0))}) + Layerwise({3: steep}, flat=False)"
    )


@pytest.mark.parametrize(
    "inside", [Intermediate({"1": 2.0}), Layerwise({"1": lambda x, p, y, q: (x - y).square().sum()})]
)
def test_a_term_inside_the_network_isnt_taken_of_what_a_module_returns(inside: Divergence) -> None:
    with pytest.raises(LLQRError, match="can't be taken of what '0' returns: give a metric"):
        Intermediate({"0": inside})
