"""Promise: with `trust`, J is that of the base's own step, no direction is lengthened much, and training stays stable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from llqr import LLQR, QuadraticModel
from llqr.errors import LLQRError
from llqr.loop.trust import Trust, Trusted, Verdict, check_saved, norm_of, trusted
from llqr.preconditioner import Preconditioner
from llqr.solvers import SGDM, ScaleFree
from llqr.solvers.totals import totals_of
from llqr.structures import Dense
from standins import DenseModel, random_model


def flat_rates(model: DenseModel, rates: dict[str, float]) -> torch.Tensor:
    return torch.cat([torch.full((g.numel(),), rates[name], dtype=torch.float64) for name, g in model.gradient.items()])


def test_the_objective_is_that_of_the_base_step() -> None:
    """g·ε + ½ ε·(ηH + ρI)ε = m(ηε)/η + ρ/2 ‖ε‖², for one η."""
    model, rate, trust = random_model(), 0.3, 0.1
    other = Trusted(model, dict.fromkeys(model.gradient, rate), trust)
    step = model.unflat(
        torch.randn(model.matrix.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    )
    curved = other.curvature(step)
    value = sum((g * step[n]).sum() + 0.5 * (step[n] * curved[n]).sum() for n, g in model.gradient.items())
    taken = {name: rate * part for name, part in step.items()}
    expected = model.value(taken) / rate + trust / 2 * model.flat(step).square().sum()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def edge(**settings: Any) -> float:
    """The largest curvature at which torch's SGD on ½ λ x² stays bounded, by bisection."""

    def bounded(curvature: float) -> bool:
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        base = torch.optim.SGD([x], **settings)
        for _ in range(3000):
            x.grad = curvature * x.detach()
            base.step()
            if abs(float(x.detach())) > 1e6:
                return False
        return True

    low, high = 0.0, 1000.0
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if bounded(middle) else (low, middle)
    return low


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.2},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.5, "dampening": 0.5},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ],
    ids=str,
)
def test_the_rate_is_one_over_the_curvature_at_the_edge_of_stability(settings: dict[str, Any]) -> None:
    """η·λ = 1 where SGD on ½ λ x² begins to grow, found by running it."""
    model = random_model()
    parameters = {name: g.clone().requires_grad_() for name, g in model.gradient.items()}
    base = torch.optim.SGD(parameters.values(), **settings)
    direction = dict(model.gradient)
    product = model.flat(dict(trusted(model, base, parameters, 0.0).curvature(direction)))
    rate = float(product.norm() / (model.matrix @ model.flat(direction)).norm())
    assert rate == pytest.approx(1 / edge(**settings), rel=0.01)


def test_each_group_has_its_own_rate() -> None:
    """√η H √η + ρI, by group."""
    model = random_model()
    parameters = {name: g.clone().requires_grad_() for name, g in model.gradient.items()}
    first, *rest = parameters
    base = torch.optim.SGD(
        [
            {"params": [parameters[first]], "lr": 0.3, "momentum": 0.5},
            {"params": [parameters[name] for name in rest], "lr": 0.2, "momentum": 0.0},
        ],
        lr=1.0,
    )
    roots = flat_rates(model, {first: 0.1, **dict.fromkeys(rest, 0.1)}).sqrt()
    direction = model.unflat(torch.ones(model.matrix.shape[0], dtype=torch.float64))
    product = model.flat(dict(trusted(model, base, parameters, 0.1).curvature(direction)))
    torch.testing.assert_close(product, roots * (model.matrix @ roots) + 0.1, rtol=1e-12, atol=1e-12)


def test_how_near_the_edge_u_is() -> None:
    """η ε·Hε / (-g·ε) with ε = -U g; for U = I and SGD without momentum lr/2 times the curvature along g."""
    model = random_model()
    parameters = {name: g.clone().requires_grad_() for name, g in model.gradient.items()}
    base = torch.optim.SGD(parameters.values(), lr=0.3)
    u = Preconditioner.identity(dict(model.gradient), "diagonal").scaled(2.0)
    g = model.flat(model.gradient)
    near = trusted(model, base, parameters, 0.7).edge(u)
    assert near == pytest.approx(float(0.15 * 4 * (g @ model.matrix @ g) / (2 * g @ g)), rel=1e-12)


def judge(trust: Trust, *edges: float | None) -> list[float]:
    """ρ after each of these verdicts."""
    base = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    rhos = []
    for edge in edges:
        trust.accept(trust.judged(edge), base)
        rhos.append(trust.rho)
    return rhos


def test_trust_is_earned_and_lost() -> None:
    trust = Trust(1.0, earned=True, bounds=True)
    assert judge(trust, 0.8, 0.2, 0.2, 0.2, 0.7, 1.5, 0.1) == pytest.approx([1, 1 / 3, 1 / 9, 0.1, 0.1, 0.3, 0.1])
    assert judge(trust, None) == pytest.approx([0.1])  # a batch that tells nothing
    assert trust.judged(2.5) == Verdict(1.0, pytest.approx(0.3), outdated=True)  # where it failed it doesn't return to
    assert judge(trust, 2.5, 0.0, 0.0, 0.0) == pytest.approx([1, 1 / 3, 0.3, 0.3])
    assert judge(trust, 2.5, 2.5, 0.0, 0.0) == pytest.approx([1, 1, 1 / 3, 1 / 3])  # but it can always be earned again
    fixed = Trust(0.2, earned=False, bounds=True)
    assert judge(fixed, 0.0, 5.0) == [0.2, 0.2]


@pytest.mark.parametrize("edge", [0.1, 0.7, 1.5, None])
def test_trust_is_lost_where_many_steps_had_to_be_bounded(edge: float | None) -> None:
    trust = Trust(0.1, earned=True, bounds=True)
    assert trust.judged(edge, 0.26) == Verdict(pytest.approx(0.3), 0.1)
    assert trust.judged(edge, 0.25).rho == (pytest.approx(0.3) if edge == 1.5 else 0.1)
    assert trust.judged(2.5, 0.26).outdated
    assert Trust(0.5, earned=True, bounds=True).judged(edge, 1.0).rho == 1.0
    assert Trust(0.1, earned=False, bounds=True).judged(edge, 1.0).rho == 0.1


def test_bounded_steps_are_counted_from_fit_to_fit() -> None:
    trust = Trust(0.1, earned=True, bounds=True)
    alone = totals_of(random_model())
    assert trust.restless(alone) == 0.0
    for length, plain in [(0.0, 0.0), (1.0, 1.0), (1.4, 1.0), (2.0, 1.0), (4.0, 1.0), (2.0, 2.0)]:
        bounded(trust, length, plain)
    assert (trust.steps, trust.bounded) == (5, 2)  # not the step without a yardstick, nor the one that is as long as g
    assert trust.restless(alone) == 0.4
    other = Trust(1.0, earned=True, bounds=True)
    other.load(check_saved(trust.as_dict()))
    assert other == trust
    judge(trust, 0.7)
    assert trust.restless(alone) == 0.0


@pytest.mark.parametrize(
    "state",
    [{"steps": 2.5}, {"steps": -1}, {"steps": True}, {"steps": 10**400}, {"steps": 1, "bounded": 2}, {"bounded": 1}],
    ids=str,
)
def test_counts_that_cannot_be_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(LLQRError, match="trust has"):
        check_saved({"rho": 0.1, "least": 0.1, **state})


def test_a_restless_u_is_trusted_less_at_the_next_refit() -> None:
    """Gradients that double from step to step: at the refit ρ goes up, though by the curvature it would go down."""
    rhos = []
    for growth in (1.0, 2.0):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = LLQR(torch.optim.SGD(model.parameters(), lr=1e-3), model, structure="scalar", every=4, steps=2)
        x = torch.randn(16, 4)
        for k in range(9):
            optimizer.zero_grad()
            (growth**k * cross_entropy(model(x), torch.arange(16) % 3)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert optimizer.stats.refits == 3
        rhos.append(optimizer.stats.trust)
    assert rhos == pytest.approx([1 / 9, 1.0])


def bounded(trust: Trust, length: float, plain: float, base: torch.optim.Optimizer | None = None) -> float:
    """The length that U g has after the bound, for U g and g of these lengths."""
    given = torch.tensor([0.0, length])
    steered = trust.bound({"w": given}, length, lambda: plain, base)
    assert given[1] == length  # not in place
    part = steered["w"]
    assert part is not None
    return float(part.norm())


def test_a_step_is_bounded_by_the_one_that_u_was_fitted_in() -> None:
    trust = Trust(0.1, earned=True, bounds=True)
    assert bounded(trust, 0.0, 0.0) == 0.0  # no yardstick
    assert bounded(trust, 4.0, 1.0) == 4.0
    assert trust.length == 4.0
    assert bounded(trust, 5.9, 1.0) == pytest.approx(5.9)
    assert bounded(trust, 10.0, 1.0) == pytest.approx(6.0)  # 1.5 times as long
    assert bounded(trust, 10.0, 8.0) == pytest.approx(8.0)  # never shorter than the base's own for that
    assert bounded(trust, 11.0, 14.0) == pytest.approx(11.0)  # a U that shortens stays
    assert trust.steps == 5
    assert bounded(trust, 100.0, 100.0) == pytest.approx(3 * 1.06 * 4.0)  # but never more than about 3 times
    trust.steps = 99
    assert bounded(trust, 100.0, 100.0) == pytest.approx(3 * 2 * 4.0)  # which rises slowly
    assert bounded(trust, 5.0, 1.0) == pytest.approx(5.0)


def test_a_rate_that_rises_by_hand_shortens_what_was_fitted_for_a_smaller_one() -> None:
    base = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    trust = Trust(0.1, earned=True, bounds=True)
    trust.accept(trust.judged(None), base)
    assert bounded(trust, 4.0, 1.0, base) == 4.0
    base.param_groups[0]["lr"] = 0.05
    assert bounded(trust, 5.9, 1.0, base) == pytest.approx(5.9)
    base.param_groups[0]["lr"] = 0.2
    assert bounded(trust, 4.0, 1.0, base) == pytest.approx(3.0)  # 1.5 times half the length


def test_norms_of_half_precision_are_taken_in_single() -> None:
    assert norm_of([torch.full((4,), 60000.0, dtype=torch.float16), None]) == pytest.approx(120000, rel=1e-3)
    assert norm_of([torch.full((4,), 1e100, dtype=torch.float64)]) == pytest.approx(2e100)


def test_bases_that_normalise_have_the_curvature_along_the_gradient_for_unit() -> None:
    model = random_model()
    parameters = {name: g.clone().requires_grad_() for name, g in model.gradient.items()}
    base = torch.optim.AdamW(parameters.values(), lr=1e-3)
    g = model.flat(model.gradient)
    rate = float(g @ g / (g @ model.matrix @ g))
    product = model.flat(dict(trusted(model, base, parameters, 0.2).curvature(dict(model.gradient))))
    torch.testing.assert_close(product, rate * model.matrix @ g + 0.2 * g, rtol=1e-10, atol=1e-12)


def test_a_dense_u_is_the_damped_inverse_of_the_steps_curvature() -> None:
    """Fitted long enough, U g = (ηH + ρI)⁻¹ g, which is no longer than ‖g‖/ρ. (η = 0.3/(2 · 1.5) = 0.1.)"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs, targets = torch.randn(12, 3).double(), torch.randint(3, (12,))
    optimizer = LLQR(
        torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5), net, "ngd", Dense(), steps=400, ema=0.0, trust=0.2
    )
    cross_entropy(net(inputs), targets).backward()
    q = QuadraticModel.build(net, inputs, targets, cross_entropy, "ngd")
    optimizer.refit(inputs)
    u = optimizer.preconditioner
    assert u is not None
    step = u.apply(q.gradient)
    curved = q.curvature(step)
    for name, g in q.gradient.items():
        torch.testing.assert_close(0.1 * curved[name] + 0.2 * step[name], g, rtol=0, atol=1e-3 * float(g.norm()))


def test_it_is_earned_with_the_default_solver_and_off_with_a_given_one() -> None:
    net = nn.Linear(3, 2)
    base = torch.optim.SGD(net.parameters(), lr=0.1)
    assert LLQR(base, net)._refit.trust == Trust(1.0, earned=True, bounds=True)
    assert LLQR(base, net, solver=ScaleFree())._refit.trust is None
    assert LLQR(base, net, solver=SGDM(), trust=0.5)._refit.trust == Trust(0.5, earned=False, bounds=True)
    assert LLQR(base, net, trust=0)._refit.trust is None
    adam = torch.optim.AdamW(net.parameters())
    assert LLQR(adam, net)._refit.trust == Trust(1.0, earned=True, bounds=False, least=1 / 3)
    assert LLQR(adam, net, structure="kfac")._refit.trust == Trust(0.1, earned=False, bounds=False)
    assert "trust=1, earned" in repr(LLQR(base, net))


@pytest.mark.parametrize("warm_start", [False, True])
def test_a_u_far_beyond_the_edge_leaves_nothing_behind(warm_start: bool) -> None:
    """Found at a refit: the new U is the fit alone, without the moving average, and ρ is 1 again."""
    torch.manual_seed(0)
    net = nn.Linear(3, 3).double()
    inputs, targets = torch.randn(12, 3).double(), torch.randint(3, (12,))
    optimizer = LLQR(torch.optim.SGD(net.parameters(), lr=0.5), net, "ngd", "diagonal", ema=0.9, warm_start=warm_start)
    cross_entropy(net(inputs), targets).backward()
    assert optimizer.refit(inputs)
    optimizer.preconditioner = optimizer.preconditioner.scaled(1e4)  # type: ignore[union-attr]
    optimizer._refit.trust.steps = 1  # type: ignore[union-attr]  # a step was taken with it
    assert optimizer.refit(inputs)
    assert optimizer.stats.trust == 1.0
    u = optimizer.preconditioner
    assert u is not None
    assert max(float(part.abs().max()) for block in u.blocks.values() for part in block.values()) < 10


def test_a_step_that_u_would_lengthen_beyond_measure_is_kept_short() -> None:
    net = nn.Linear(3, 1).double()
    optimizer = LLQR(torch.optim.SGD(net.parameters(), lr=0.1), net, "ngd", "diagonal", every=100)
    optimizer.preconditioner = Preconditioner.identity(dict(net.named_parameters()), "diagonal").scaled(5.0)
    taken = []
    for size in (1.0, 1.0, 2.0, 10.0, 100.0):
        before = net.weight.detach().clone()
        net.weight.grad, net.bias.grad = torch.full_like(net.weight, size), torch.zeros_like(net.bias)
        optimizer._schedule.go_to(1)
        optimizer.step()
        taken.append(float((before - net.weight.detach())[0, 0] / 0.1))
    assert taken == pytest.approx([5.0, 5.0, 7.5, 10.0, 3 * 1.05 * 5.0])  # U g, U g, 1.5 times the first, ‖g‖, 3 times
    assert optimizer.stats.bounded == 3


def test_what_says_nothing_changes_nothing() -> None:
    """Refits by hand without a step between, and a refit on a batch without a gradient: ρ stays."""
    torch.manual_seed(0)
    net = nn.Linear(3, 3).double()
    inputs, targets = torch.randn(12, 3).double(), torch.randint(3, (12,))
    optimizer = LLQR(torch.optim.SGD(net.parameters(), lr=1e-3), net, "ngd", "diagonal", every=1000)
    for _ in range(4):
        cross_entropy(net(inputs), targets).backward()
        assert optimizer.refit(inputs)
        assert optimizer.stats.trust == 1.0
    optimizer.step()
    before = optimizer.preconditioner
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.refit(inputs)
    assert optimizer._refit.trust.rho == 1.0  # type: ignore[union-attr]
    assert optimizer.preconditioner is not None
    assert before is not None


@pytest.mark.parametrize("trust", [{"rho": -1.0}, {"rho": float("nan")}, {"length": "long"}, {"other": 1.0}])
def test_a_state_with_a_spoilt_trust_changes_nothing(trust: dict[str, object]) -> None:
    net = nn.Linear(3, 2)
    optimizer = LLQR(torch.optim.SGD(net.parameters(), lr=0.1), net)
    state = optimizer.state_dict()
    state["llqr"]["trust"] = trust
    state["param_groups"][0]["lr"] = 0.7
    with pytest.raises(LLQRError, match="the state's trust"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1


class Plain(torch.optim.Optimizer):
    """An optimizer without a learning rate in its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= 0.01 * parameter.grad


@pytest.mark.parametrize("kind", ["no rate", "a rate of 0"])
def test_bases_that_tell_of_no_rate_are_refitted_and_resumed(kind: str) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    inputs, targets = torch.randn(12, 3), torch.randint(3, (12,))

    def wrapped() -> LLQR:
        base = Plain(net.parameters()) if kind == "no rate" else torch.optim.SGD(net.parameters(), lr=0.0)
        return LLQR(base, net, "ngd", "diagonal", every=2)

    optimizer = wrapped()
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    assert optimizer.stats.refits == 2
    other = wrapped()
    other.load_state_dict(optimizer.state_dict())
    assert other._refit.trust == optimizer._refit.trust


def test_what_was_earned_is_saved() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    optimizer = LLQR(torch.optim.SGD(net.parameters(), lr=1e-3), net, "ngd", "diagonal", every=2)
    inputs, targets = torch.randn(12, 3), torch.randint(3, (12,))
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    trust = optimizer._refit.trust
    assert trust is not None
    assert trust.rho < 1
    other = LLQR(torch.optim.SGD(net.parameters(), lr=1e-3), net, "ngd", "diagonal", every=2)
    other.load_state_dict(optimizer.state_dict())
    assert other._refit.trust == trust


@pytest.mark.parametrize("schedule", ["warm-up", "one cycle"])
def test_schedules_that_begin_small(schedule: str) -> None:
    """A U that is fitted during a warm-up is fitted for the rate that follows."""
    model = random_model()
    parameters = {name: g.clone().requires_grad_() for name, g in model.gradient.items()}
    base = torch.optim.SGD(parameters.values(), lr=0.2, momentum=0.5)
    if schedule == "warm-up":
        torch.optim.lr_scheduler.LambdaLR(base, lambda step: min(1.0, step / 10))
    else:
        torch.optim.lr_scheduler.OneCycleLR(base, max_lr=0.2, total_steps=20, cycle_momentum=False)
    assert base.param_groups[0]["lr"] < 0.05
    product = model.flat(dict(trusted(model, base, parameters, 0.1).curvature(dict(model.gradient))))
    g = model.flat(model.gradient)
    torch.testing.assert_close(product, 0.2 / 3 * model.matrix @ g + 0.1 * g, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trust", [-1.0, True, "much", float("nan")])
def test_bad_trust_is_told(trust: object) -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(LLQRError, match="trust is a positive number"):
        LLQR(torch.optim.SGD(net.parameters(), lr=0.1), net, trust=trust)  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", ["diagonal", "kfac", "ekfac"])
def test_training_from_a_plateau_stays_stable(structure: str) -> None:
    """Where curvature is tiny at first and grows: without trust the loss blows up here, with it it falls."""
    from llqr_lab.data.digits import digits
    from llqr_lab.race.methods import sgdm
    from llqr_lab.race.run import train
    from llqr_lab.race.tasks import TASKS

    settings = {"structure": structure, "every": 25, "steps": 10, "ema": 0.9}
    kept = train(TASKS["digits"], digits(), 0, sgdm(0.1), settings, steps=150)
    assert kept.losses[-1] < 0.1
    assert max(kept.losses) < 3.0
