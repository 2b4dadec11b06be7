"""Following a direction from a start at a fixed rate, without line search, and what is noted on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr_lab.rosenbrock.methods import Direction
from llqr_lab.rosenbrock.problem import hessian, newton, value

FAR = 1e9
"""A loss above this, or one that isn't finite, counts as divergence."""


@dataclass
class Run:
    """The points of a run from its start on, their losses, and the cosine of each step with Newton's at the same point."""

    points: list[Tensor]
    losses: list[float]
    cosines: list[float]
    diverged: bool = False

    @property
    def iterations(self) -> int:
        return len(self.cosines)

    def reached(self, target: float) -> int | None:
        """The first iteration after which the loss is at most `target`."""
        return next((i for i, loss in enumerate(self.losses) if loss <= target), None)

    @property
    def mean_cosine(self) -> float:
        return sum(self.cosines) / len(self.cosines)

    @property
    def indefinite(self) -> float:
        """The share of the steps that were taken where the Hessian is indefinite."""
        steps = self.points[: self.iterations]
        return sum(float(torch.linalg.eigvalsh(hessian(point))[0]) < 0 for point in steps) / len(steps)


def cosine(left: Tensor, right: Tensor) -> float:
    """left · right / (‖left‖ ‖right‖)."""
    return float(left @ right / (left.norm() * right.norm()))


def follow(direction: Direction, start: tuple[float, float], rate: float, most: int, until: float) -> Run:
    """θ ← θ + rate · direction(θ), at most `most` times, until the loss is at most `until` or the run diverges."""
    point = torch.tensor(start, dtype=torch.float64)
    run = Run([point], [value(point)], [])
    while run.iterations < most and run.losses[-1] > until:
        step = direction(point)
        point = point + rate * step
        run.cosines.append(cosine(step, newton(run.points[-1])))
        loss = value(point) if bool(point.isfinite().all()) and float(point.abs().max()) < FAR else math.inf
        if not loss <= FAR:
            run.diverged = True
            break
        run.points.append(point)
        run.losses.append(loss)
    return run
