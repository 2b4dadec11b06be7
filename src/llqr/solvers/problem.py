"""The relaxed problem that inner solvers work on: J(U) = g·δ + ½ δ·Hδ with δ = -U g.

With P = g + Hδ, the gradient of the model at δ, dJ = ⟨P, dδ⟩: the gradient with respect to U is the pullback of P through
δ = -U g. Steps are kept as one stack for each group of blocks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from llqr.preconditioner import Change, Preconditioner


class Totals:
    """Numbers of the blocks that are here, made into those of all blocks: the same, unless ranks hold some each."""

    def sums(self, values: list[float]) -> list[float]:
        """Each summed up."""
        return values

    def norms(self, values: list[float]) -> list[float]:
        """From norms of the part that is here to those of all."""
        return values

    def least(self, value: float) -> float:
        return value

    def most(self, value: float) -> float:
        return value


ALONE = Totals()


def totals_of(model: object) -> Totals:
    """How a quadratic model takes totals: one that holds a part of the parameters says so by its `totals`."""
    totals: Totals = getattr(model, "totals", ALONE)
    return totals


def inner(left: Change, right: Change) -> float:
    """⟨left, right⟩ over all tensors."""
    parts = [torch.sum(a[name] * b[name]) for a, b in zip(left, right, strict=True) for name in a]
    return float(torch.stack(parts).sum()) if parts else 0.0


def change_norm(change: Change) -> float:
    """√⟨change, change⟩; not finite where one of the numbers isn't."""
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for part in change for tensor in part.values()))


def combine(left: Change, right: Change, factor: float) -> Change:
    """left + factor · right."""
    return [{n: torch.add(a[n], b[n], alpha=factor) for n in a} for a, b in zip(left, right, strict=True)]


def negative(change: Change) -> Change:
    return [{name: -tensor for name, tensor in part.items()} for part in change]


def block_norms(stack: Tensor) -> Tensor:
    """The norm of each block's own tensor in a stack."""
    norms: Tensor = torch.linalg.vector_norm(stack.reshape(stack.shape[0], -1), dim=1)
    return norms


def per_block(factors: Tensor, stack: Tensor) -> Tensor:
    """Each block's tensor times its own factor."""
    return factors.reshape(-1, *(1 for _ in stack.shape[1:])) * stack


def clipped(change: Change, norm: float) -> Change:
    """Each block's tensors scaled to a norm of at most `norm`."""
    return [
        {name: per_block(norm / block_norms(stack).clamp_min(norm), stack) for name, stack in part.items()}
        for part in change
    ]


def accumulate(change: Change, other: Change, factor: float) -> None:
    """change ← change + factor · other, in place."""
    for new, old in zip(change, other, strict=True):
        for name, tensor in new.items():
            tensor.add_(old[name], alpha=factor)


class Quadratic(Protocol):
    """A quadratic model g·δ + ½ δ·Hδ of a step δ, by parameter name."""

    @property
    def gradient(self) -> Mapping[str, Tensor]: ...

    def curvature(self, direction: dict[str, Tensor]) -> Mapping[str, Tensor]: ...


@runtime_checkable
class KnowsCurvatureAlong(Protocol):
    """One that knows v·Hv for less than Hv."""

    def curvature_along(self, direction: dict[str, Tensor]) -> float: ...


Stacks = list[Tensor]

ROUNDING = 64
"""A block whose gradient is within so many units in the last place of the whole has none but rounding, as the bias before a
BatchNorm or that of attention's keys. A solver that weighs all blocks alike leaves it out, or it would follow it."""


class Problem:
    """J for a quadratic model and preconditioners with the blocks of `u`.

    Where the model holds a part of the parameters and others hold the rest, stacks and changes are of that part, and every
    number that comes from one of the methods here is of the whole.
    """

    def __init__(self, model: Quadratic, u: Preconditioner) -> None:
        self.model, self.groups, self._totals = model, [group.layout() for group in u.groups], totals_of(model)
        self.gradient: Stacks = [group.gather(model.gradient).detach() for group in u.groups]
        self.descent: Stacks = [-part for part in self.gradient]

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

    def value(self, step: Stacks, product: Stacks, scale: float = 1.0) -> float:
        """J at scale · δ, given δ and Hδ."""
        along, curved = self.dots((self.gradient, step), (step, product))
        return scale * along + 0.5 * scale**2 * curved

    def value_at(self, step: Stacks) -> float:
        """J at δ, where Hδ itself isn't wanted."""
        along, curved = self._totals.sums([_dot(self.gradient, step), curvature_along(self.model, self._named(step))])
        return along + 0.5 * curved

    def slope(self, product: Stacks, scale: float = 1.0) -> Stacks:
        """P = g + Hδ at scale · δ, given Hδ."""
        return add(self.gradient, product, scale)

    def _named(self, step: Stacks) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for group, stack in zip(self.groups, step, strict=True):
            named.update(group.scatter(stack, self.model.gradient))
        return {name: named[name] for name in self.model.gradient}

    def dots(self, *pairs: tuple[Stacks, Stacks]) -> list[float]:
        """The inner products of pairs of stacks."""
        return self._totals.sums([_dot(left, right) for left, right in pairs])

    def dot(self, left: Stacks, right: Stacks) -> float:
        return self.dots((left, right))[0]

    def sizes(self, *stacks: Stacks) -> list[float]:
        """Norms of stacks, also where squares are beyond float32."""
        return self._totals.norms([_size(parts) for parts in stacks])

    def inners(self, *pairs: tuple[Change, Change]) -> list[float]:
        """The inner products of pairs of changes."""
        return self._totals.sums([inner(left, right) for left, right in pairs])

    def inner(self, left: Change, right: Change) -> float:
        return self.inners((left, right))[0]

    def norm(self, change: Change) -> float:
        """√⟨change, change⟩; not finite where one of the numbers isn't."""
        return self._totals.norms([change_norm(change)])[0]

    def least(self, value: float) -> float:
        """The least of what the holders of blocks have found."""
        return self._totals.least(value)

    def degree(self, u: Preconditioner) -> int:
        return int(self._totals.most(u.degree))

    def is_finite(self, u: Preconditioner) -> bool:
        return self._totals.sums([float(not u.is_finite())])[0] == 0


class Point:
    """δ = U·(-g) at one U, with its derivatives."""

    def __init__(self, problem: Problem, u: Preconditioner) -> None:
        self.u = u
        self._linear = [group.linearize(x) for group, x in zip(u.groups, problem.descent, strict=True)]

    @cached_property
    def step(self) -> Stacks:
        return [linear.value() for linear in self._linear]

    def derivative(self, change: Change) -> Stacks:
        """dδ along a change of U."""
        return [linear.derivative(part) for linear, part in zip(self._linear, change, strict=True)]

    def pullback(self, slope: Stacks) -> Change:
        """∇_U J, given P."""
        return [linear.pullback(part) for linear, part in zip(self._linear, slope, strict=True)]

    def pull_onto(self, slope: Stacks, total: Change, decay: float) -> None:
        """total ← decay · total + ∇_U J, in place."""
        for linear, part, sum_ in zip(self._linear, slope, total, strict=True):
            linear.pull_onto(part, sum_, decay)


def curvature_along(model: Quadratic, direction: dict[str, Tensor]) -> float:
    """v·Hv, the part of it that is here: half a product for a model that knows it without Hv."""
    if isinstance(model, KnowsCurvatureAlong):
        return model.curvature_along(direction)
    product = model.curvature(direction)
    return _dot(list(direction.values()), [product[name] for name in direction])


def _without_rounding(part: Tensor) -> Tensor:
    """A stack of g/‖g‖, with zeros for the blocks that are nothing but rounding."""
    rounded = block_norms(part) <= ROUNDING * torch.finfo(part.dtype).eps
    return per_block((~rounded).to(part.dtype), part) if bool(rounded.any()) else part


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    parts = [torch.sum(a * b) for a, b in zip(left, right, strict=True)]
    return float(torch.stack(parts).sum()) if parts else 0.0


def _size(stacks: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in stacks))


def add(left: Sequence[Tensor], right: Sequence[Tensor], factor: float) -> Stacks:
    return [torch.add(a, b, alpha=factor) for a, b in zip(left, right, strict=True)]
