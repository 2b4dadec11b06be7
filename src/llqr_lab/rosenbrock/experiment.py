"""Which methods run from where, at which rate, and for how long.

The rate is the same fixed one for every method but SGDM, which has the best of a small grid; nobody searches along a line.
Newton at rate r ≪ 1 follows the curve along which g keeps its direction and shrinks by 1 - r an iteration, so that its
loss falls by (1 - r)² in the end: a rate to compare the others with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from llqr.curvature.quadratic import QuadraticModel
from llqr.divergences import Newton
from llqr.relaxation import fit
from llqr.solvers import SGDM, ScaleFree, Solver
from llqr.structures import Scalar
from llqr_lab.rosenbrock.follow import Run, follow
from llqr_lab.rosenbrock.methods import Direction, Momentum, dense, diagonal_newton, riccati, scalars, steepest
from llqr_lab.rosenbrock.problem import INPUTS, gradient, mean, newton, two_layers

CONVERGED = ScaleFree(reach=1e6)
"""A solver that finds the minimum of J here. Its default bound on U, a hundred times a scaled identity, is too tight in the
valley, where the Hessian's eigenvalues are a factor of 2,500 apart."""
PAPER = SGDM(lr=1e-4)
"""The paper's inner solver; it takes 500 steps."""
RATES = (3e-4, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3)
"""SGDM's grid, with momentum 0.9."""
CLIPPED = SGDM(lr=1e-4, clip=5.0)
"""The same, with the gradient of each block held to a norm of 5."""


@dataclass(frozen=True)
class Setting:
    """θ ← θ + rate · direction from `start`, at most `most` times, until the loss is `until`; counted to `target`."""

    start: tuple[float, float]
    rate: float
    most: int
    until: float
    target: float

    def run(self, direction: Direction, rate: float | None = None) -> Run:
        return follow(direction, self.start, self.rate if rate is None else rate, self.most, self.until)


@dataclass(frozen=True)
class Plan:
    """What is run: `classic` with U fitted to convergence, `valley` with the paper's inner solver, and a scan of periods."""

    classic: Setting = Setting((-1.2, 1.0), rate=0.05, most=3000, until=1e-12, target=1e-8)
    scalar_periods: Sequence[int] = (1, 2, 3)
    dense_periods: Sequence[int] = (1, 10)
    valley: Setting = Setting((-1.0, 1.0), rate=1e-3, most=15000, until=1e-2, target=1e-2)
    valley_periods: Sequence[int] = (50, 100, 250)
    valley_dense_periods: Sequence[int] = (50,)
    inner_steps: int = 500
    scan_starts: Sequence[tuple[float, float]] = ((-1.2, 1.0), (0.5, 0.0))
    scan_periods: Sequence[int] = (1, 2, 3, 5, 10, 15, 20)
    scan_most: int = 1000
    fit_after: int = 300

    @property
    def fits(self) -> dict[str, tuple[Solver, int]]:
        """The solvers whose single fits are compared, and how many steps they have."""
        solvers: dict[str, tuple[Solver, int]] = {"SGDM(lr=1e-4)": (PAPER, self.inner_steps)}
        solvers["SGDM(lr=1e-4, clip=5)"] = (CLIPPED, self.inner_steps)
        solvers["ScaleFree()"] = (ScaleFree(), 25)
        solvers["ScaleFree(reach=1e6)"] = (CONVERGED, 25)
        return {f"{name}, {steps} steps": (solver, steps) for name, (solver, steps) in solvers.items()}

    @property
    def parts(self) -> int:
        """How often `run` calls `done`."""
        runs = (self.scalar_periods, self.dense_periods, self.valley_periods, self.valley_dense_periods)
        return 9 + sum(map(len, runs)) + 2 * len(self.scan_starts) * len(self.scan_periods)


FULL = Plan()
QUICK = Plan(
    classic=replace(FULL.classic, most=30),
    scalar_periods=(1, 3),
    dense_periods=(1,),
    valley=replace(FULL.valley, most=20),
    valley_periods=(5, 10),
    valley_dense_periods=(10,),
    inner_steps=20,
    scan_periods=(1, 5),
    scan_most=15,
    fit_after=20,
)


@dataclass
class Outcome:
    """The runs by name, the learning rates that SGDM took, the scan of refit periods, and what single fits reach."""

    classic: dict[str, Run] = field(default_factory=dict)
    valley: dict[str, Run] = field(default_factory=dict)
    scan: list[tuple[str, tuple[float, float], int, Run]] = field(default_factory=list)
    fits: list[tuple[str, str, float]] = field(default_factory=list)

    @property
    def disagreement(self) -> float:
        """The largest distance between Newton's iterates and those of the Riccati step, over the whole path."""
        pairs = zip(self.classic["Newton"].points, self.classic["Riccati"].points, strict=True)
        return max(float((left - right).norm()) for left, right in pairs)


def run(plan: Plan, done: Callable[[], None] = lambda: None) -> Outcome:
    """Run all of it; `done` is called after each part."""
    outcome = Outcome()

    def note(runs: dict[str, Run], name: str, taken: Run) -> None:
        runs[name] = taken
        done()

    setting = plan.classic
    note(outcome.classic, "Newton", setting.run(newton))
    note(outcome.classic, "Riccati", setting.run(riccati))
    for every in plan.scalar_periods:
        note(outcome.classic, f"LLQR scalars, every {every}", setting.run(scalars(every, CONVERGED)))
    for every in plan.dense_periods:
        note(outcome.classic, f"LLQR dense, every {every}", setting.run(dense(every, CONVERGED)))
    note(outcome.classic, *best_momentum(setting))
    note(outcome.classic, "diagonal Hessian", setting.run(diagonal_newton))

    setting = plan.valley
    note(outcome.valley, "Newton", setting.run(newton))
    for every in plan.valley_periods:
        note(outcome.valley, f"LLQR scalars, every {every}", setting.run(scalars(every, PAPER, plan.inner_steps)))
    for every in plan.valley_dense_periods:
        note(outcome.valley, f"LLQR dense, every {every}", setting.run(dense(every, PAPER, plan.inner_steps)))
    note(outcome.valley, "gradient alone", setting.run(steepest))
    note(outcome.valley, *best_momentum(setting))
    note(outcome.valley, "diagonal Hessian", setting.run(diagonal_newton))

    for start in plan.scan_starts:
        setting = replace(plan.classic, start=start, most=plan.scan_most, until=plan.classic.target)
        for structure, relaxed in (("scalars", scalars), ("dense", dense)):
            for every in plan.scan_periods:
                outcome.scan.append((structure, start, every, setting.run(relaxed(every, CONVERGED))))
                done()
    points = outcome.classic["Newton"].points
    places = {"at the start": points[0], f"after {plan.fit_after} Newton steps": points[plan.fit_after]}
    outcome.fits = [
        (name, place, share(point, *fitted)) for name, fitted in plan.fits.items() for place, point in places.items()
    ]
    done()
    return outcome


def best_momentum(setting: Setting) -> tuple[str, Run]:
    """SGDM with the rate of the grid that takes the fewest iterations to the target, or that ends lowest."""
    runs = {rate: setting.run(Momentum(rate), rate=1.0) for rate in RATES}

    def order(rate: float) -> tuple[float, float]:
        reached = runs[rate].reached(setting.target)
        return (float("inf") if reached is None else reached, runs[rate].losses[-1])

    best = min(RATES, key=order)
    return f"SGDM, lr {best:g}", runs[best]


def share(point: Tensor, solver: Solver, steps: int) -> float:
    """J(U) / J* of one fit of two scalars: 1 is Newton's step, 0 no step at all, and below 0 the model foresees a rise."""
    model = QuadraticModel.build(two_layers(point), INPUTS, None, mean, Newton())
    u = fit(model, Scalar(per="layer"), solver, steps)
    return u.history[-1] / (0.5 * float(torch.dot(gradient(point), newton(point))))
