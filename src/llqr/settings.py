"""The options that both optimizers share: what a base may be, which steps begin with a refit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from llqr.errors import LLQRError

Every = int | Callable[[int], bool]


class Schedule:
    """Counts steps from 0; step k begins with a refit where k mod `every` = 0, or where `every(k)` is true.

    A callable is asked once a step, when its answer is first needed: by the forward pass or by the step itself. What it raises
    is raised by the step, where all ranks learn of it.
    """

    def __init__(self, every: Every) -> None:
        if isinstance(every, bool) or not (callable(every) or (isinstance(every, int) and every >= 1)):
            raise LLQRError(
                f"every is a positive number of steps between refits, or a function of the step's number that tells whether "
                f"to refit; not {every!r}"
            )
        self.every = every
        self.go_to(0)

    def go_to(self, step: int) -> None:
        self.step = step
        self._answer: bool | None = None

    def may_be_due(self) -> bool:
        """For the forward pass: whether the coming step refits, or will have to say why that can't be told."""
        try:
            return self.due()
        except Exception:
            return True

    def due(self) -> bool:
        if isinstance(self.every, int):
            return self.step % self.every == 0
        if self._answer is None:
            self._answer = bool(self.every(self.step))
        return self._answer


LONGEST = 40
"""Steps between refits at the most, with the default schedule."""


def often_at_first(step: int) -> bool:
    """Whether the default schedule refits before a step: the first eleven, and then after a tenth of the steps so far."""
    regular = 11 * LONGEST  # from before here on the gaps are all the longest
    if step > regular:
        step = regular - (regular - step) % LONGEST
    at = 0
    while at < step:
        at += min(1 + at // 10, LONGEST)
    return at == step


def check_base(base: Optimizer, model: nn.Module, name: str = "LLQR") -> None:
    """`name` is what the user wrote."""
    if not isinstance(base, Optimizer):
        raise LLQRError(
            f"{name} wraps an optimizer, as in {name}(torch.optim.SGD(model.parameters(), lr=0.1), model); got "
            f"{type(base).__name__}"
        )
    if isinstance(getattr(base, "optimizer", None), Optimizer):
        raise LLQRError(
            f"the base is a {type(base).__name__}, a framework's wrapper around an optimizer: give {name} the optimizer "
            f"inside, and what it returns to the framework, as in accelerator.prepare({name}(optimizer, model))"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise LLQRError(
            "LBFGS evaluates its closure several times a step, and U can't come between: wrap another optimizer"
        )
    if not isinstance(model, nn.Module):
        raise LLQRError(f"the second argument is the model, an nn.Module; got {type(model).__name__}")
