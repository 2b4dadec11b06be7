"""Adam as an inner solver."""

from __future__ import annotations

from dataclasses import dataclass

from llqr.errors import LLQRError
from llqr.preconditioner import Change
from llqr.solvers.base import fraction, positive
from llqr.solvers.changes import clipped
from llqr.solvers.first_order import FirstOrder, Gradient, Rule


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

    def rule(self) -> Rule:
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
