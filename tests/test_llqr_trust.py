"""Promise: with `trust`, J is that of the base's own step, no direction is lengthened much, and training stays stable."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from llqr import LLQR, QuadraticModel
from llqr.errors import LLQRError
from llqr.loop.trust import Trusted, trusted
from llqr.solvers import SGDM, ScaleFree
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


def test_each_group_has_its_own_rate() -> None:
    """√η H √η + ρI with η = lr (1 - dampening) / (1 - momentum), by group."""
    model = random_model()
    parameters = {name: g.clone().requires_grad_() for name, g in model.gradient.items()}
    first, *rest = parameters
    base = torch.optim.SGD(
        [
            {"params": [parameters[first]], "lr": 0.2, "momentum": 0.5},
            {"params": [parameters[name] for name in rest], "lr": 0.1, "momentum": 0.9, "dampening": 0.5},
        ],
        lr=1.0,
    )
    roots = flat_rates(model, {first: 0.4, **dict.fromkeys(rest, 0.5)}).sqrt()
    direction = model.unflat(torch.ones(model.matrix.shape[0], dtype=torch.float64))
    product = model.flat(dict(trusted(model, base, parameters, 0.1).curvature(direction)))
    torch.testing.assert_close(product, roots * (model.matrix @ roots) + 0.1, rtol=1e-12, atol=1e-12)


def test_bases_that_normalise_have_the_curvature_along_the_gradient_for_unit() -> None:
    model = random_model()
    parameters = {name: g.clone().requires_grad_() for name, g in model.gradient.items()}
    base = torch.optim.AdamW(parameters.values(), lr=1e-3)
    g = model.flat(model.gradient)
    rate = float(g @ g / (g @ model.matrix @ g))
    product = model.flat(dict(trusted(model, base, parameters, 0.2).curvature(dict(model.gradient))))
    torch.testing.assert_close(product, rate * model.matrix @ g + 0.2 * g, rtol=1e-10, atol=1e-12)


def test_a_dense_u_is_the_damped_inverse_of_the_steps_curvature() -> None:
    """Fitted long enough, U g = (ηH + ρI)⁻¹ g, which is no longer than ‖g‖/ρ."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs, targets = torch.randn(12, 3).double(), torch.randint(3, (12,))
    optimizer = LLQR(torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5), net, "ngd", Dense(), steps=400, ema=0.0)
    cross_entropy(net(inputs), targets).backward()
    q = QuadraticModel.build(net, inputs, targets, cross_entropy, "ngd")
    optimizer.refit(inputs)
    u = optimizer.preconditioner
    assert u is not None
    step = u.apply(q.gradient)
    curved = q.curvature(step)
    for name, g in q.gradient.items():
        torch.testing.assert_close(0.4 * curved[name] + 0.1 * step[name], g, rtol=0, atol=1e-3 * float(g.norm()))


def test_it_is_on_with_the_default_solver_and_off_with_a_given_one() -> None:
    net = nn.Linear(3, 2)
    base = torch.optim.SGD(net.parameters(), lr=0.1)
    assert LLQR(base, net)._refit.trust == 0.1
    assert LLQR(base, net, solver=ScaleFree())._refit.trust == 0
    assert LLQR(base, net, solver=SGDM(), trust=0.5)._refit.trust == 0.5
    assert LLQR(base, net, trust=0)._refit.trust == 0
    assert "trust=0.1" in repr(LLQR(base, net))


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
    torch.testing.assert_close(product, 0.4 * model.matrix @ g + 0.1 * g, rtol=1e-10, atol=1e-12)


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
