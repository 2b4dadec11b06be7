"""Kronecker and EigenKronecker: a factor for each side of a matrix (the shapes of K-FAC and E-KFAC).

A stack `x` has shape (k, n_0, n_1, …). The factor of side i is a stack of matrices (k, n_i, n_i), or of vectors (k, n_i)
that stand for diagonal matrices, or thin. A side is also called a mode, 0 for rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from llqr.checks import checked_integer
from llqr.errors import unknown
from llqr.structures.base import (
    LONG_SIDE,
    Damping,
    Diagonal,
    Modes,
    Structure,
    Tensors,
    damped_inverse,
    eye,
    gram,
    ones,
    thin_inverse,
)

VECTOR = Diagonal()


class Thin(NamedTuple):
    """diag(w) - B Bᵀ, of w (k, n) and B (k, n, r)."""

    diagonal: Tensor
    basis: Tensor


def multiply(x: Tensor, factor: Tensor | Thin, mode: int) -> Tensor:
    """x with its side `mode` multiplied by the factor: F X for mode 0 of a matrix, X Fᵀ for mode 1."""
    if isinstance(factor, Thin):
        return _multiply_thin(x, factor, mode)
    if factor.dim() == 2:
        return x * _along(factor, x, mode)
    if mode == 0:
        return torch.bmm(factor, x.flatten(2)).reshape(x.shape)
    if mode == x.dim() - 2:
        return torch.bmm(x.flatten(1, -2), factor.mT).reshape(x.shape)
    return torch.einsum("kij,kajc->kaic", factor, x)


def _multiply_thin(x: Tensor, thin: Thin, mode: int) -> Tensor:
    basis, along = thin.basis, x * _along(thin.diagonal, x, mode)
    if mode == x.dim() - 2:
        shared = torch.bmm(x.flatten(1, -2), basis)
        return along.flatten(1, -2).baddbmm_(shared, basis.mT, alpha=-1).reshape(x.shape)
    turned, along = x.transpose(1, mode + 1), along.transpose(1, mode + 1)
    shared = torch.bmm(basis.mT, turned.flatten(2))
    return torch.baddbmm(along.flatten(2), basis, shared, alpha=-1).reshape(turned.shape).transpose(1, mode + 1)


def _along(vector: Tensor, x: Tensor, mode: int) -> Tensor:
    return vector.reshape(x.shape[0], *(x.shape[dim] if dim == mode + 1 else 1 for dim in range(1, x.dim())))


def multiply_all(x: Tensor, factors: Sequence[Tensor | Thin]) -> Tensor:
    """x with every side multiplied by its factor."""
    for mode, factor in enumerate(factors):
        x = multiply(x, factor, mode)
    return x


def transpose(factor: Tensor) -> Tensor:
    return factor.mT if factor.dim() == 3 else factor


@dataclass(frozen=True)
class SideStructure(Structure):
    """A structure with a factor for each side of a parameter (m, ...), seen as m × n; a vector is diagonal."""

    max_dim: int = 8192
    modes: Modes = "matrix"
    by_sides = True
    factors: ClassVar[tuple[str, ...]]
    """The names of the factors, side by side."""

    def __post_init__(self) -> None:
        checked_integer("max_dim", self.max_dim, "a positive integer, the longest side that gets a full factor")
        if self.modes not in ("matrix", "all"):
            raise unknown("modes", self.modes, ("matrix", "all"))

    @abstractmethod
    def act(self, tensors: Tensors, x: Tensor) -> Tensor:
        """U x, of x with these sides."""

    def sides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """m × n, or C_out × C_in × k² for a convolution with `modes="all"`."""
        if self.modes == "all" and len(shape) > 2:
            return shape[0], shape[1], math.prod(shape[2:])
        return shape[0], math.prod(shape[1:])

    def sizes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        if len(shape) < 2:
            return VECTOR.sizes(shape)
        sides = zip(self.factors, self.sides(shape), strict=False)
        return {name: (side, side) if side <= self.max_dim else (side,) for name, side in sides}

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        return {
            name: eye(size[0], like, count) if name in self.factors and len(size) == 2 else ones(size, like, count)
            for name, size in self.sizes(shape).items()
        }

    def multiplier(self, shape: Sequence[int]) -> str | None:
        return VECTOR.multiplier(shape) if len(shape) < 2 else None

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return VECTOR.apply(tensors, x) if x.dim() < 3 else self.act(tensors, self._folded(x)).reshape(x.shape)

    def second_moments(self, rows: Tensor, columns: Tensor, kernel: int) -> dict[str, Tensor]:
        """Along each side: matrices, or diagonals where the side is longer than max_dim."""
        stacks = {"rows": rows, "columns": columns}
        if not self.joins_bias(kernel):
            places = columns.reshape(*columns.shape[:2], -1, kernel)
            stacks = {"rows": rows, "columns": places.mT.flatten(1, 2), "kernel": places.flatten(1, 2)}
        return {name: gram(x) if x.shape[2] <= self.max_dim else x.square().sum(1) for name, x in stacks.items()}

    def joins_bias(self, kernel: int) -> bool:
        return self.modes == "matrix" or kernel == 1

    def _folded(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], *self.sides(x.shape[1:]))


@dataclass(frozen=True)
class Kronecker(SideStructure):
    """U X = C X Dᵀ, vec(U X) = (D ⊗ C) vec(X), for X the parameter (m, ...) seen as m × n; a vector is diagonal.

    `max_dim`: a side longer than that has a diagonal factor (a vector), so that an embedding of 50,000 words doesn't ask for
    a 50,000 × 50,000 matrix. `modes="all"`: a convolution (C_out, C_in, k, k) gets three factors, C over C_out, D over C_in and
    E over k², in place of two.
    """

    factors = ("C", "D", "E")

    def act(self, tensors: Tensors, x: Tensor) -> Tensor:
        named = [(name, _diagonal_of(name)) for name in self.factors if name in tensors]
        factors = [Thin(tensors[w], tensors[name]) if w in tensors else tensors[name] for name, w in named]
        return multiply_all(x, factors)

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """C = (G + √λ ḡ)⁻¹ and D = (A + √λ ā)⁻¹, with ḡ and ā the means of their diagonals: the damping is split, so that each
        factor is inverted by itself. Of a long side a thin B is kept, and w beside it, which stand for diag(w) - B Bᵀ.
        """
        inverse: dict[str, Tensor] = {}
        for name, moment in zip(self.factors, moments.values(), strict=False):
            if moment.dim() == 3 and moment.shape[2] > LONG_SIDE:
                inverse[name], inverse[_diagonal_of(name)] = thin_inverse(moment, damping**0.5)
            else:
                inverse[name] = damped_inverse(moment, damping**0.5)
        return inverse

    def scale_side(self, tensors: Tensors, side: int, scale: Tensor) -> dict[str, Tensor]:
        name = self.factors[side]
        factor, w = tensors[name], _diagonal_of(name)
        if w in tensors:
            return {**tensors, w: tensors[w] * scale.square(), name: factor * scale[..., None]}
        pairs = scale.square() if factor.dim() == 2 else scale[..., None] * scale[:, None]
        return {**tensors, name: factor * pairs}

    def degree(self, shape: Sequence[int]) -> int:
        return len(self.sizes(shape))

    def scaled(self, tensors: Tensors, factor: float) -> dict[str, Tensor]:
        """Each factor takes an equal share."""
        return {name: tensor * factor ** (1 / len(tensors)) for name, tensor in tensors.items()}


def _diagonal_of(name: str) -> str:
    """What the diagonal of a thin factor is called."""
    return f"diagonal of {name}"


SCALE = "s"


@dataclass(frozen=True)
class EigenKronecker(SideStructure):
    """U X = Q_L (s ∘ (Q_Lᵀ X Q_R)) Q_Rᵀ, for X the parameter (m, ...) seen as m × n; a vector is diagonal.

    Q_L, Q_R and s are all free: nothing keeps the bases orthogonal. `max_dim` and `modes` are as for `Kronecker`: a side longer
    than `max_dim` has a diagonal in place of a basis, and with `modes="all"` a convolution has a third basis Q_K over k².
    """

    factors = ("Q_L", "Q_R", "Q_K")

    def sizes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        sizes = super().sizes(shape)
        return sizes if len(shape) < 2 else {**sizes, SCALE: self.sides(shape)}

    def act(self, tensors: Tensors, x: Tensor) -> Tensor:
        bases = list(_bases(tensors).values())
        return multiply_all(tensors[SCALE] * multiply_all(x, [transpose(basis) for basis in bases]), bases)

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """(A ⊗ G + λ)⁻¹, exactly: in the eigenbases of A and G it divides by their eigenvalues' products plus λ."""
        bases: dict[str, Tensor] = {}
        curvature = moments["rows"].new_ones(())
        for name, moment in zip(self.factors, moments.values(), strict=False):
            values, bases[name] = (moment, torch.ones_like(moment)) if moment.dim() == 2 else torch.linalg.eigh(moment)
            curvature = curvature[..., None] * values.clamp_min(0).reshape(len(values), *[1] * (len(bases) - 1), -1)
        shift = damping * curvature.flatten(1).mean(1) + torch.finfo(curvature.dtype).tiny
        return {**bases, SCALE: (curvature + shift.reshape(-1, *[1] * (curvature.dim() - 1))).reciprocal()}

    def scale_side(self, tensors: Tensors, side: int, scale: Tensor) -> dict[str, Tensor]:
        basis = tensors[self.factors[side]]
        return {**tensors, self.factors[side]: basis * (scale if basis.dim() == 2 else scale[..., None])}

    def degree(self, shape: Sequence[int]) -> int:
        return 2 * len(self.sizes(shape)) - 1

    def scaled(self, tensors: Tensors, factor: float) -> dict[str, Tensor]:
        """The bases stay; s (d of a vector) takes it all."""
        return {name: tensor if name in self.factors else tensor * factor for name, tensor in tensors.items()}


def _bases(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != SCALE}
