"""The loop that SGDM and Adam share: one gradient of J a step, no line search."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

from llqr.preconditioner import Change, Preconditioner
from llqr.solvers.base import Solver
from llqr.solvers.problem import Problem

Rule = Callable[[Change], tuple[Change, float]]
"""From ∇_U J to a direction and a length along it."""


class FirstOrder(Solver):
    """U ← U + length · direction, by a rule that sees the gradients one after another.

    A step takes one curvature product; half a one at the end tells what the last step gave. U is moved in place, and back where
    the step has led beyond what is finite: a second copy would be the largest thing in memory.
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
            if not math.isfinite(value):
                if history:
                    u.move_(direction, -length)
                break
            history.append(value)
            if product is None:
                break
            gradient = point.pullback(problem.slope(product))
            del point, product  # they hold U's tensors and the gradient's
            if step == 0 and problem.norm(gradient) == 0:
                break
            direction, length = rule(gradient)
            del gradient  # as large as U; not to be there beside the next one
            if not math.isfinite(problem.norm(direction)):
                break
            u.move_(direction, length)
        return u.with_history(history)
