"""SGDM: gradient descent with momentum, the paper's inner solver."""

from __future__ import annotations

from dataclasses import dataclass

from llqr.preconditioner import Change
from llqr.solvers.base import fraction, positive
from llqr.solvers.changes import accumulate, clipped
from llqr.solvers.first_order import FirstOrder, Gradient, Rule


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

    def rule(self) -> Rule:
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
