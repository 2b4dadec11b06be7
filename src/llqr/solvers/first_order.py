"""The loop that SGDM and Adam share: one gradient of J a step, no line search."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

from llqr.preconditioner import Change, Preconditioner
from llqr.solvers.base import Solver
from llqr.solvers.changes import inner
from llqr.solvers.problem import Problem

Rule = Callable[[Change], tuple[Change, float]]
"""From ∇_U J to a direction and a length along it."""


class FirstOrder(Solver):
    """U ← U + length · direction, by a rule that sees the gradients one after another.

    A step takes one curvature product; one more at the end tells what the last step gave.
    """

    @abstractmethod
    def rule(self) -> Rule:
        """A fresh rule, for one solve."""

    def solve(self, problem: Problem, u: Preconditioner, steps: int) -> Preconditioner:
        rule, history, last = self.rule(), list[float](), u
        for step in range(steps + 1):
            point = problem.at(u)
            product = problem.curvature(point.step)
            value = problem.value(point.step, product)
            if not (math.isfinite(value) and u.is_finite()):
                return last.with_history(history)
            history.append(value)
            last = u
            if step == steps:
                break
            gradient = point.pullback(problem.slope(product))
            if step == 0 and inner(gradient, gradient) == 0:
                break
            direction, length = rule(gradient)
            del gradient  # as large as U; not to be there beside the next one
            u = u.moved(direction, length)
        return last.with_history(history)
