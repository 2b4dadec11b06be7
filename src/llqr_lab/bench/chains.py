"""The problem that the exact steps are timed on: a classifier of equally wide tanh layers on random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llqr import dense_step, exact_step
from llqr.divergences import KL

Step = Callable[[], dict[str, Tensor]]

DAMPING = 1e-2
METHODS = {"riccati": exact_step, "dense": dense_step}
"""The same step twice: by the recursion along the layers, and by forming H and factorising it."""


@dataclass(frozen=True)
class Size:
    """`depth` layers with parameters, each `width` wide, and a batch."""

    depth: int
    width: int
    batch: int

    @property
    def parameters(self) -> int:
        return self.depth * (self.width + 1) * self.width

    @property
    def states(self) -> int:
        """The side of the Riccati recursion's matrices K_i."""
        return self.batch * self.width


def prepare(method: str, size: Size, seed: int) -> Step:
    """A job that computes the natural gradient's step.

    Weights are orthogonal, so that signals and gradients live through 64 layers. A first step on a tiny network, made here,
    keeps what torch loads at its first derivatives out of what is measured.
    """
    step = METHODS[method]
    step(*_problem(Size(2, 4, 2), seed), cross_entropy, KL(), DAMPING)
    model, inputs, targets = _problem(size, seed)
    return lambda: step(model, inputs, targets, cross_entropy, KL(), DAMPING)


def _problem(size: Size, seed: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(size.depth):
        linear = nn.Linear(size.width, size.width, dtype=torch.float64)
        nn.init.orthogonal_(linear.weight, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    inputs = torch.randn(size.batch, size.width, dtype=torch.float64, generator=generator)
    targets = torch.randint(size.width, (size.batch,), generator=generator)
    return nn.Sequential(*layers[:-1]), inputs, targets
