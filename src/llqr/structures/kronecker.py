"""Kronecker: a factor for each side of a matrix (K-FAC's shape), and products with such factors.

A stack `x` has shape (k, n_0, n_1, …). The factor of side i is a stack of matrices (k, n_i, n_i), or of vectors (k, n_i)
that stand for diagonal matrices, or thin.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llqr.checks import checked_integer
from llqr.errors import unknown
from llqr.structures.base import (
    LONG_SIDE,
    Damping,
    Linearization,
    Modes,
    Structure,
    Tensors,
    damped_inverse,
    eye,
    gram,
    ones,
    thin_inverse,
)
from llqr.structures.linear import Diagonal


class Thin(NamedTuple):
    """diag(w) - B Bᵀ, of w (k, n) and B (k, n, r)."""

    diagonal: Tensor
    basis: Tensor


def sides(shape: Sequence[int], modes: Modes) -> tuple[int, ...]:
    """The sides that a parameter is seen with: m × n, or C_out × C_in × k² for a convolution with `modes="all"`."""
    if modes == "all" and len(shape) > 2:
        return shape[0], shape[1], math.prod(shape[2:])
    return shape[0], math.prod(shape[1:])


def shortest(stack: Sequence[int]) -> int:
    """The side (mode) of a stack's shape (k, n_0, n_1, …) that costs least to multiply."""
    return min(range(len(stack) - 1), key=lambda mode: stack[mode + 1])


def longest(stack: Sequence[int]) -> int:
    """The side that costs most to multiply; another than the shortest one."""
    return max(range(len(stack) - 1), key=lambda mode: (stack[mode + 1], mode))


def identity_factor(size: tuple[int, ...], like: Tensor, count: int) -> Tensor:
    return eye(size[0], like, count) if len(size) == 2 else ones(size, like, count)


def transpose(factor: Tensor) -> Tensor:
    return factor.mT if factor.dim() == 3 else factor


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


def multiply_all(x: Tensor, factors: Sequence[Tensor | Thin]) -> Tensor:
    for mode, factor in enumerate(factors):
        x = multiply(x, factor, mode)
    return x


class AllButOne:
    """For each side, x multiplied by the factors of all the others (X Dᵀ and C X for a matrix); computed when asked for."""

    def __init__(self, x: Tensor, factors: Sequence[Tensor]) -> None:
        self._x, self._factors = x, factors
        self._products: dict[int, Tensor] = {}

    def __getitem__(self, left_out: int) -> Tensor:
        if left_out not in self._products:
            product = self._x
            for mode, factor in enumerate(self._factors):
                if mode != left_out:
                    product = multiply(product, factor, mode)
            self._products[left_out] = product
        return self._products[left_out]


def outer(
    cotangent: Tensor, x: Tensor, mode: int, factor: Tensor, onto: Tensor | None = None, decay: float = 1.0
) -> Tensor:
    """The gradient of ⟨cotangent, multiply(x, factor, mode)⟩ with respect to the factor, added to decay · `onto` in place."""
    if factor.dim() == 2:
        others = [dim for dim in range(1, x.dim()) if dim != mode + 1]
        gradient = (cotangent * x).sum(others)
        return gradient if onto is None else onto.mul_(decay).add_(gradient)
    left, right = _unfold(cotangent, mode), _unfold(x, mode).mT
    return torch.bmm(left, right) if onto is None else onto.baddbmm_(left, right, beta=decay)


def _unfold(x: Tensor, mode: int) -> Tensor:
    return x.transpose(1, mode + 1).flatten(2)


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


VECTOR = Diagonal()


@dataclass(frozen=True)
class SideStructure(Structure):
    """A structure with a factor for each side of a parameter (m, ...), seen as m × n; a vector is diagonal.

    `max_dim`: a side longer than that has a diagonal factor (a vector), so that an embedding of 50,000 words doesn't ask for
    a 50,000 × 50,000 matrix. `modes="all"`: a convolution (C_out, C_in, k, k) has three sides, C_out, C_in and k², in place of
    two.
    """

    max_dim: int = 8192
    modes: Modes = "matrix"
    by_sides = True

    def __post_init__(self) -> None:
        checked_integer("max_dim", self.max_dim, "a positive integer, the longest side that gets a full factor")
        if self.modes not in ("matrix", "all"):
            raise unknown("modes", self.modes, ("matrix", "all"))

    @abstractmethod
    def factors(self, sides: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The name and shape of each tensor, for a parameter with these sides."""

    @abstractmethod
    def act(self, tensors: Tensors, x: Tensor) -> Tensor:
        """U x, of x with these sides."""

    @abstractmethod
    def linearize_sides(self, tensors: Tensors, x: Tensor, shape: Sequence[int]) -> Linearization:
        """U x with its derivatives, of x with these sides; what comes out has the given shape."""

    def sizes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return VECTOR.sizes(shape) if len(shape) < 2 else self.factors(sides(shape, self.modes))

    def factor_size(self, side: int) -> tuple[int, ...]:
        """A matrix, or a diagonal where the side is longer than max_dim."""
        return (side, side) if side <= self.max_dim else (side,)

    def multiplier(self, shape: Sequence[int]) -> str | None:
        return VECTOR.multiplier(shape) if len(shape) < 2 else None

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return VECTOR.apply(tensors, x) if x.dim() < 3 else self.act(tensors, self._folded(x)).reshape(x.shape)

    def linearize(self, tensors: Tensors, x: Tensor) -> Linearization:
        if x.dim() < 3:
            return VECTOR.linearize(tensors, x)
        return self.linearize_sides(tensors, self._folded(x), x.shape)

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
        return x.reshape(x.shape[0], *sides(x.shape[1:], self.modes))


FACTORS = ("C", "D", "E")
DIAGONALS = {name: f"diagonal of {name}" for name in FACTORS}
"""Of thin factors."""


@dataclass(frozen=True)
class Kronecker(SideStructure):
    """U X = C X Dᵀ, vec(U X) = (D ⊗ C) vec(X), for X the parameter (m, ...) seen as m × n; a vector is diagonal.

    `max_dim`: a side longer than that has a diagonal factor (a vector), so that an embedding of 50,000 words doesn't ask for
    a 50,000 × 50,000 matrix. `modes="all"`: a convolution (C_out, C_in, k, k) gets three factors, C over C_out, D over C_in and
    E over k², in place of two.
    """

    def factors(self, sides: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {name: self.factor_size(side) for name, side in zip(FACTORS, sides, strict=False)}

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        if len(shape) < 2:
            return VECTOR.identity(shape, like, count)
        return {name: identity_factor(size, like, count) for name, size in self.sizes(shape).items()}

    def act(self, tensors: Tensors, x: Tensor) -> Tensor:
        factors = [
            Thin(tensors[DIAGONALS[name]], tensors[name]) if DIAGONALS[name] in tensors else tensors[name]
            for name in FACTORS
            if name in tensors
        ]
        return multiply_all(x, factors)

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """C = (G + √λ ḡ)⁻¹ and D = (A + √λ ā)⁻¹, with ḡ and ā the means of their diagonals: the damping is split, so that each
        factor is inverted by itself. Of a long side a thin B is kept, and w beside it, which stand for diag(w) - B Bᵀ.
        """
        inverse: dict[str, Tensor] = {}
        for name, moment in zip(FACTORS, moments.values(), strict=False):
            if moment.dim() == 3 and moment.shape[2] > LONG_SIDE:
                inverse[name], inverse[DIAGONALS[name]] = thin_inverse(moment, damping**0.5)
            else:
                inverse[name] = damped_inverse(moment, damping**0.5)
        return inverse

    def scale_side(self, tensors: Tensors, side: int, scale: Tensor) -> dict[str, Tensor]:
        name, scaled = FACTORS[side], dict(tensors)
        if DIAGONALS[name] in scaled:
            scaled[DIAGONALS[name]] = scaled[DIAGONALS[name]] * scale.square()
            scaled[name] = scaled[name] * scale[..., None]
        elif scaled[name].dim() == 2:
            scaled[name] = scaled[name] * scale.square()
        else:
            scaled[name] = scale[..., None] * scaled[name] * scale[:, None]
        return scaled

    def linearize_sides(self, tensors: Tensors, x: Tensor, shape: Sequence[int]) -> Linearization:
        return _Linearization(tensors, x, shape)

    def degree(self, shape: Sequence[int]) -> int:
        return len(self.sizes(shape))

    def scaled(self, tensors: Tensors, factor: float) -> dict[str, Tensor]:
        """Each factor takes an equal share."""
        return {name: tensor * factor ** (1 / len(tensors)) for name, tensor in tensors.items()}


class _Linearization(Linearization):
    """d(C X Dᵀ) = dC (X Dᵀ) + (C X) dDᵀ; the pullback of P is P (X Dᵀ)ᵀ for C and Pᵀ (C X) for D.

    Both X Dᵀ and C X are there for the pullback, so the value is one product more: with the factor of the shorter side.
    """

    def __init__(self, tensors: Tensors, x: Tensor, shape: Sequence[int]) -> None:
        self._tensors, self._factors, self._shape, self._sides = tensors, list(tensors.values()), shape, x.shape
        self._rest = AllButOne(x, self._factors)

    def value(self) -> Tensor:
        last = shortest(self._sides)
        return multiply(self._rest[last], self._factors[last], last).reshape(self._shape)

    def derivative(self, change: Tensors) -> Tensor:
        parts = [multiply(self._rest[mode], change[name], mode) for mode, name in enumerate(self._tensors)]
        return sum(parts[1:], start=parts[0]).reshape(self._shape)

    def pullback(self, cotangent: Tensor) -> dict[str, Tensor]:
        return self._pulled(cotangent, {}, 1.0)

    def pull_onto(self, cotangent: Tensor, total: Tensors, decay: float) -> None:
        self._pulled(cotangent, total, decay)

    def _pulled(self, cotangent: Tensor, total: Tensors, decay: float) -> dict[str, Tensor]:
        cotangent = cotangent.reshape(self._sides)
        return {
            name: outer(cotangent, self._rest[mode], mode, factor, total.get(name), decay)
            for mode, (name, factor) in enumerate(self._tensors.items())
        }
