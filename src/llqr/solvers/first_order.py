"""SGDM, the paper's inner solver, and Adam: one gradient of J a step, no line search."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from llqr.errors import LLQRError
from llqr.preconditioner import Change, Preconditioner
from llqr.solvers.base import Solver, fraction, positive
from llqr.solvers.problem import Point, Problem, Stacks, accumulate, clipped


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


Update = Callable[[Gradient], tuple[Change, float]]
"""From ∇_U J to a direction and a length along it."""


class FirstOrder(Solver):
    """U ← U + length · direction, by an update that sees the gradients one after another.

    A step takes one curvature product; half a one at the end tells what the last step gave. U is moved in place, and back where
    the step has led beyond what is finite, which ends the history: a second copy would be the largest thing in memory.
    """

    @abstractmethod
    def update(self) -> Update:
        """A fresh update, for one solve."""

    def solve(self, problem: Problem, u: Preconditioner, steps: int) -> Preconditioner:
        update, history = self.update(), list[float]()
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
            direction, length = update(Gradient(point, problem.slope(product)))
            del point, product  # they hold U's tensors and the gradient's
            size = problem.norm(direction)
            if not math.isfinite(size):
                history.append(size)
                break
            if step == 0 and size == 0:
                break
            u.move_(direction, length)
        return u.with_history(history)


@dataclass(frozen=True)
class SGDM(FirstOrder):
    """b ← momentum · b + ∇_U J, U ← U - lr · b, from b = 0.

    `clip`: the gradient of each block's tensor (C of one layer, say) is scaled to a norm of at most that first.
    """

    lr: float = 0.005
    momentum: float = 0.9
    clip: float | None = None

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        fraction("momentum", self.momentum)
        if self.clip is not None:
            positive("clip", self.clip)

    def update(self) -> Update:
        buffer: Change | None = None

        def update(gradient: Gradient) -> tuple[Change, float]:
            nonlocal buffer
            if self.clip is not None:
                new = clipped(gradient(), self.clip)
                if buffer is not None:
                    accumulate(new, buffer, self.momentum)
                buffer = new
            else:
                buffer = gradient() if buffer is None else gradient.onto(buffer, self.momentum)
            return buffer, -self.lr

        return update


@dataclass(frozen=True)
class Adam(FirstOrder):
    """U ← U - lr · m̂ / (√v̂ + eps), with bias-corrected running means m̂ of ∇_U J and v̂ of its square, as in torch.

    `clip` is that of `SGDM`.
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = None

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        positive("eps", self.eps)
        if self.clip is not None:
            positive("clip", self.clip)
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise LLQRError(f"betas are two numbers such as (0.9, 0.999), not {self.betas!r}")
        for beta in self.betas:
            fraction("a beta", beta)

    def update(self) -> Update:
        first, second = self.betas
        mean: Change = []
        square: Change = []
        count = 0

        def update(slope: Gradient) -> tuple[Change, float]:
            nonlocal count
            gradient, count = slope(), count + 1
            if self.clip is not None:
                gradient = clipped(gradient, self.clip)
            if count == 1:
                mean.extend({name: tensor * (1 - first) for name, tensor in part.items()} for part in gradient)
                square.extend({name: tensor**2 * (1 - second) for name, tensor in part.items()} for part in gradient)
            else:
                for m, v, part in zip(mean, square, gradient, strict=True):
                    for name, tensor in part.items():
                        m[name].lerp_(tensor, 1 - first)
                        v[name].mul_(second).addcmul_(tensor, tensor, value=1 - second)
            unbias = (1 - second**count) ** 0.5
            direction = [
                {name: m[name] / (v[name].sqrt() / unbias + self.eps) for name in m}
                for m, v in zip(mean, square, strict=True)
            ]
            return direction, -self.lr / (1 - first**count)

        return update
