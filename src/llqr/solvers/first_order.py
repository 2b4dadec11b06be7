"""SGDM, the paper's inner solver, and Adam: one gradient of J a step, no line search."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llqr.errors import LLQRError
from llqr.preconditioner import Preconditioner, Stacks
from llqr.solvers.problem import Problem, Solver, block_norms, fraction, per_block, positive

Update = Callable[[Stacks], tuple[Stacks, float]]
"""From ∇_U J to a direction and a length along it."""


class FirstOrder(Solver):
    """U ← U + length · direction, by an update that sees the gradients one after another.

    A step takes one curvature product; half a one at the end tells what the last step gave. U is moved in place, and back where
    the step has led beyond what is finite, which ends the history: a second copy would be the largest thing in memory.
    """

    clip: float | None

    @abstractmethod
    def update(self) -> Update:
        """A fresh update, for one solve."""

    def solve(self, problem: Problem, u: Preconditioner, steps: int) -> Preconditioner:
        update, history = self.update(), list[float]()
        direction, length = Stacks(), 0.0
        for step in range(steps + 1):
            point = problem.at(u)
            product = problem.curvature(point.step) if step < steps else None
            value = problem.value_at(point.step) if product is None else problem.value(point.step, product)
            history.append(value)
            if not math.isfinite(value) and step:
                u.move_(direction, -length)
            if product is None or not math.isfinite(value):
                break
            gradient = point.pullback(problem.slope(product))
            del point, product  # they hold U's tensors and the gradient's
            direction, length = update(gradient if self.clip is None else clipped(gradient, self.clip))
            size = problem.norm(direction)
            if not math.isfinite(size):
                history.append(size)
                break
            if step == 0 and size == 0:
                break
            u.move_(direction, length)
        return u.with_history(history)


def clipped(change: Stacks, norm: float) -> Stacks:
    """Each block's tensors scaled to a norm of at most `norm`."""
    return [per_block(norm / block_norms(stack).clamp_min(norm), stack) for stack in change]


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
        buffer: Stacks = []

        def update(gradient: Stacks) -> tuple[Stacks, float]:
            if not buffer:
                buffer.extend(g.clone() for g in gradient)
            else:
                for b, g in zip(buffer, gradient, strict=True):
                    b.mul_(self.momentum).add_(g)
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
        mean, square, count = Stacks(), Stacks(), 0

        def update(gradient: Stacks) -> tuple[Stacks, float]:
            nonlocal count
            count += 1
            if count == 1:
                mean.extend(torch.zeros_like(g) for g in gradient)
                square.extend(torch.zeros_like(g) for g in gradient)
            for m, v, g in zip(mean, square, gradient, strict=True):
                m.lerp_(g, 1 - first)
                v.mul_(second).addcmul_(g, g, value=1 - second)
            unbias = (1 - second**count) ** 0.5
            direction = [m / (v.sqrt() / unbias + self.eps) for m, v in zip(mean, square, strict=True)]
            return direction, -self.lr / (1 - first**count)

        return update
