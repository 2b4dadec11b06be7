"""What inner solvers work on, and what each of them is: J(U) = g·δ + ½ δ·Hδ with δ = -U g.

With P = g + Hδ, the gradient of the model at δ, dJ = ⟨P, dδ⟩: the gradient with respect to U is the pullback of P through
δ = -U g. A step is a list of stacks, one for each group of blocks; a change of U is one for each tensor of each group.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from llqr.checks import ShownWithOptions, checked_number
from llqr.preconditioner import Preconditioner, Stacks

ROUNDING = 64
"""A block whose gradient is within so many units in the last place of the whole has none but rounding, as the bias before a
BatchNorm or that of attention's keys. A solver that weighs all blocks alike leaves it out, or it would follow it."""


def add(left: Stacks, right: Stacks, factor: float) -> Stacks:
    """left + factor · right."""
    return [torch.add(a, b, alpha=factor) for a, b in zip(left, right, strict=True)]


def weighted(factors: Stacks, stacks: Stacks) -> Stacks:
    """Each block's tensors times its own factor."""
    return [per_block(factor, stack) for factor, stack in zip(factors, stacks, strict=True)]


def per_block(factors: Tensor, stack: Tensor) -> Tensor:
    return factors.reshape(-1, *(1 for _ in stack.shape[1:])) * stack


def block_norms(stack: Tensor) -> Tensor:
    """The norm of each block's own tensor in a stack."""
    norms: Tensor = torch.linalg.vector_norm(stack.reshape(stack.shape[0], -1), dim=1)
    return norms


def _dot(left: Stacks, right: Stacks) -> float:
    parts = [torch.sum(a * b) for a, b in zip(left, right, strict=True)]
    return float(torch.stack(parts).sum()) if parts else 0.0


class Quadratic(Protocol):
    """A quadratic model g·δ + ½ δ·Hδ of a step δ, by parameter name. One that knows v·Hv for less than Hv has
    `curvature_along` as well."""

    @property
    def gradient(self) -> Mapping[str, Tensor]: ...

    def curvature(self, direction: dict[str, Tensor]) -> Mapping[str, Tensor]: ...


def curvature_along(model: Quadratic, direction: dict[str, Tensor]) -> float:
    """v·Hv: half a product for a model that knows it without Hv."""
    if hasattr(model, "curvature_along"):
        return float(model.curvature_along(direction))
    product = model.curvature(direction)
    return _dot(list(direction.values()), [product[name] for name in direction])


class Problem:
    """J for a quadratic model and preconditioners with the blocks of `u`."""

    def __init__(self, model: Quadratic, u: Preconditioner) -> None:
        self.model, self.groups = model, [group.layout() for group in u.groups]
        self.gradient: Stacks = [group.gather(model.gradient).detach() for group in u.groups]
        self.descent = [-part for part in self.gradient]

    def normalised(self) -> tuple[Problem, float]:
        """The problem with g/‖g‖ in place of g, without blocks of rounding, and ‖g‖: its J is ‖g‖² times smaller."""
        (factor,) = self.sizes(self.gradient)
        scaled = copy.copy(self)
        scaled.gradient = [_without_rounding(part / factor) for part in self.gradient]
        scaled.descent = [-part for part in scaled.gradient]
        return scaled, factor

    def curvature(self, step: Stacks) -> Stacks:
        """H · step, one curvature product."""
        product = self.model.curvature(self._named(step))
        return [group.gather(product) for group in self.groups]

    def at(self, u: Preconditioner) -> Point:
        return Point(self, u)

    def value(self, step: Stacks, product: Stacks) -> float:
        """J at δ, given Hδ."""
        along, curved = self.dots((self.gradient, step), (step, product))
        return along + 0.5 * curved

    def value_at(self, step: Stacks) -> float:
        """J at δ, where Hδ itself isn't wanted."""
        return _dot(self.gradient, step) + 0.5 * curvature_along(self.model, self._named(step))

    def slope(self, product: Stacks, scale: float = 1.0) -> Stacks:
        """P = g + Hδ at scale · δ, given Hδ."""
        return add(self.gradient, product, scale)

    def _named(self, step: Stacks) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for group, stack in zip(self.groups, step, strict=True):
            named.update(group.scatter(stack, self.model.gradient))
        return {name: named[name] for name in self.model.gradient}

    def dots(self, *pairs: tuple[Stacks, Stacks]) -> list[float]:
        """The inner products of pairs of steps, or of pairs of changes."""
        return [_dot(left, right) for left, right in pairs]

    def sizes(self, *stacks: Stacks) -> list[float]:
        """Norms of steps, also where squares are beyond float32."""
        parts = [[float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in each] for each in stacks]
        return [math.hypot(*each) for each in parts]

    def norm(self, change: Stacks) -> float:
        """√⟨change, change⟩; not finite where one of the numbers isn't."""
        return math.hypot(*(float(torch.linalg.vector_norm(stack)) for stack in change))


def _without_rounding(part: Tensor) -> Tensor:
    """A stack of g/‖g‖, with zeros for the blocks that are nothing but rounding."""
    rounded = block_norms(part) <= ROUNDING * torch.finfo(part.dtype).eps
    return per_block((~rounded).to(part.dtype), part) if bool(rounded.any()) else part


class Point:
    """δ = U·(-g) at one U, with its derivatives."""

    def __init__(self, problem: Problem, u: Preconditioner) -> None:
        self.u = u
        self._linear = [g.structure.linearize(g.tensors, x) for g, x in zip(u.groups, problem.descent, strict=True)]

    @cached_property
    def step(self) -> Stacks:
        return [linear.value() for linear in self._linear]

    def derivative(self, change: Stacks) -> Stacks:
        """dδ along a change of U."""
        moved = self.u.with_tensors(change).groups
        return [linear.derivative(group.tensors) for linear, group in zip(self._linear, moved, strict=True)]

    def pullback(self, slope: Stacks) -> Stacks:
        """∇_U J, given P."""
        pulled = [linear.pullback(part) for linear, part in zip(self._linear, slope, strict=True)]
        return [part[name] for part, group in zip(pulled, self.u.groups, strict=True) for name in group.tensors]


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
