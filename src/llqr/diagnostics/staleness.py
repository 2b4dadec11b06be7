"""Staleness: how much of what a fresh fit of U would gain the present U still gains, on the present batch and gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from llqr.checks import Inputs, Loss
from llqr.diagnostics.vectors import dot
from llqr.errors import LLQRError
from llqr.loop.gradients import gradients_of, stepped_parameters
from llqr.loop.refit import Source
from llqr.paper import PaperLLQR
from llqr.precision import no_autocast
from llqr.preconditioner import Preconditioner
from llqr.relaxation import fit
from llqr.solvers import Quadratic, Solver
from llqr.structures.assign import StructureSpec


@dataclass(frozen=True)
class Objectives:
    """J of the identity, of the present U and of a freshly fitted one, on the same batch."""

    identity: float
    current: float
    fresh: float

    @property
    def staleness(self) -> float:
        """0 where the present U is as good as a fresh one, 1 where it is no better than the identity, more where it is worse.

        NaN where a fresh fit gains nothing over the identity.
        """
        gain = self.identity - self.fresh
        return (self.current - self.fresh) / gain if gain > 0 else math.nan


@dataclass(frozen=True)
class Staleness:
    """J(U) as it is, and at the best multiple of each U: the first tells of length and direction, the second of direction."""

    as_is: Objectives
    along: Objectives


def compare_fits(
    q: Quadratic,
    current: Preconditioner,
    structure: StructureSpec,
    solver: Solver | None = None,
    steps: int = 25,
) -> Staleness:
    """Hold a U against a fresh fit with this structure, solver and number of steps, and against the identity."""
    fresh = fit(q, structure, solver, steps)
    identity = Preconditioner.identity(q.gradient, "scalar")
    pairs = [_objectives(q, u) for u in (identity, current, fresh)]
    return Staleness(Objectives(*(pair[0] for pair in pairs)), Objectives(*(pair[1] for pair in pairs)))


def staleness(optimizer: PaperLLQR, inputs: Inputs, targets: Any, loss_fn: Loss) -> Staleness:
    """How stale the U of an optimizer is on a batch: by the objective, structure and solver of its own refits.

    A fresh fit is one from the identity, without the moving average. Neither model nor optimizer is changed.
    """
    if not isinstance(optimizer, PaperLLQR):
        raise LLQRError(f"staleness is that of the U of LLQR.paper; this is a {type(optimizer).__name__}")
    if optimizer.preconditioner is None:
        raise LLQRError("there is no U yet: it is the identity until the first refit")
    refuse_ranks(optimizer)
    parameters = stepped_parameters(optimizer.base, optimizer.model)
    source = Source(gradients_of(parameters), None, None, (inputs, targets), loss_fn)
    refit = optimizer._refit
    with optimizer._hook.listening(False), no_autocast(parameters):
        q = refit.objective(parameters, source)
        names = list(q.gradient)
        current = refit.blocks.current(parameters, names, optimizer.preconditioner)
        return compare_fits(q, current, refit.blocks.structures(parameters, names), refit.solver, refit.steps)


def refuse_ranks(optimizer: Optimizer) -> None:
    """Raise where a look at one process would be taken for one at all that train together."""
    if isinstance(optimizer, PaperLLQR) and optimizer._team is not None:
        raise LLQRError(
            "how stale U is can be told where one process trains, and not yet among several: look at a training of one process"
        )


def _objectives(q: Quadratic, u: Preconditioner) -> tuple[float, float]:
    """J(U), and the least J(aU) for a ≥ 0."""
    step = {name: -part for name, part in u.apply(dict(q.gradient)).items()}
    decline, bend = dot(q.gradient, step), dot(step, q.curvature(step))
    best = max(0.0, -decline / bend) if bend > 0 else 1.0
    return decline + 0.5 * bend, best * decline + 0.5 * best**2 * bend
