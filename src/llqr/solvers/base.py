"""What every inner solver does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from llqr.checks import ShownWithOptions, checked_number
from llqr.preconditioner import Preconditioner
from llqr.solvers.problem import Problem

NOTHING_TO_GAIN = 1e-6
"""A line search that lowers J by less than this, relative to J, is the last."""


class Solver(ShownWithOptions, ABC):
    """Minimises J(U). A solver is a set of options and holds no state."""

    @abstractmethod
    def solve(self, problem: Problem, u: Preconditioner, steps: int) -> Preconditioner:
        """U after at most so many steps from u, whose tensors may be overwritten; `history` is J at the start and after each.

        Where U would no longer be finite, the last one that is comes back.
        """


def positive(name: str, value: object) -> float:
    return checked_number(name, value, lambda number: 0 < number < math.inf, "a positive number")


def fraction(name: str, value: object) -> float:
    return checked_number(name, value, lambda number: 0 <= number < 1, "at least 0 and below 1")
