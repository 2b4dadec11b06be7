"""The loop that SGDM and Adam share: one gradient of J a step, no line search."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

from llqr.preconditioner import Change, Preconditioner
from llqr.solvers.base import Solver
from llqr.solvers.problem import Point, Problem, Stacks


class Gradient:
    """∇_U J at a point."""

    def __init__(self, point: Point, slope: Stacks) -> None:
        self._point, self._slope = point, slope

    def __call__(self) -> Change:
        return self._point.pullback(self._slope)

    def onto(self, total: Change, decay: float) -> Change:
        """decay · total + ∇_U J, in the place of `total`."""
        self._point.pull_onto(self._slope, total, decay)
        return total


Rule = Callable[[Gradient], tuple[Change, float]]
"""From ∇_U J to a direction and a length along it."""


class FirstOrder(Solver):
    """U ← U + length · direction, by a rule that sees the gradients one after another.

    A step takes one curvature product; half a one at the end tells what the last step gave. U is moved in place, and back where
    the step has led beyond what is finite, which ends the history: a second copy would be the largest thing in memory.
    """

    @abstractmethod
    def rule(self) -> Rule:
        """A fresh rule, for one solve."""

    def solve(self, problem: Problem, u: Preconditioner, steps: int) -> Preconditioner:
        rule, history = self.rule(), list[float]()
        direction, length = Change(), 0.0
        for step in range(steps + 1):
            point = problem.at(u)
            product = problem.curvature(point.step) if step < steps else None
            value = problem.value_at(point.step) if product is None else problem.value(point.step, product)
            history.append(value)
            if not math.isfinite(value) and step:
                u.move_(direction, -length)
            if product is None or not math.isfinite(value):
                break
            direction, length = rule(Gradient(point, problem.slope(product)))
            del point, product  # they hold U's tensors and the gradient's
            size = problem.norm(direction)
            if not math.isfinite(size):
                history.append(size)
                break
            if step == 0 and size == 0:
                break
            u.move_(direction, length)
        return u.with_history(history)
