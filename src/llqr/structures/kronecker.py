"""Kronecker and EigenKronecker: a factor for each side of a matrix (the shapes of K-FAC and E-KFAC).

A stack `x` has shape (k, m, n); side 0 are the rows. The factor of a side of n numbers is a stack of matrices (k, n, n), of
vectors (k, n) that stand for diagonal matrices, or thin.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from llqr.checks import checked_integer
from llqr.structures.base import (
    LONG_SIDE,
    Damping,
    Diagonal,
    Linearization,
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


def multiply(x: Tensor, factor: Tensor | Thin, side: int) -> Tensor:
    """F X for side 0, X Fᵀ for side 1."""
    if isinstance(factor, Thin):
        scaled, basis = multiply(x, factor.diagonal, side), factor.basis
        pair = (basis, torch.bmm(basis.mT, x)) if side == 0 else (torch.bmm(x, basis), basis.mT)
        return scaled.baddbmm_(*pair, alpha=-1)
    if factor.dim() == 2:
        return x * (factor[..., None] if side == 0 else factor[:, None])
    return torch.bmm(factor, x) if side == 0 else torch.bmm(x, factor.mT)


def pull(cotangent: Tensor, x: Tensor, factor: Tensor, side: int, onto: Tensor | None = None) -> Tensor:
    """The gradient of ⟨P, multiply(x, F, side)⟩ by F: P Xᵀ for side 0, Pᵀ X for side 1; of a vector F its diagonal.

    It is added to `onto` in place, if that is given.
    """
    if factor.dim() == 2:
        gradient = (cotangent * x).sum(2 - side)
        return gradient if onto is None else onto.add_(gradient)
    left, right = (cotangent, x.mT) if side == 0 else (cotangent.mT, x)
    return torch.bmm(left, right) if onto is None else onto.baddbmm_(left, right)


def transpose(factor: Tensor) -> Tensor:
    return factor.mT if factor.dim() == 3 else factor


def by_length(x: Tensor) -> tuple[int, int]:
    """The shorter side of a stack of matrices, and the longer: products with its factor cost more."""
    return (0, 1) if x.shape[1] <= x.shape[2] else (1, 0)


@dataclass(frozen=True)
class SideStructure(Structure):
    """A structure with a factor for each side of a parameter (m, ...), seen as m × n; a vector is diagonal."""

    max_dim: int = 8192
    factors: ClassVar[tuple[str, ...]]
    """The names of the factors, side by side."""

    def __post_init__(self) -> None:
        checked_integer("max_dim", self.max_dim, "a positive integer, the longest side that gets a full factor")

    @abstractmethod
    def act(self, tensors: Tensors, x: Tensor) -> Tensor:
        """U x, of matrices x."""

    @abstractmethod
    def linearize_sides(self, tensors: Tensors, x: Tensor) -> Linearization:
        """U x with its derivatives, of matrices x: by hand, since they share products."""

    @abstractmethod
    def scale_side(self, tensors: Tensors, side: int, scale: Tensor) -> dict[str, Tensor]:
        """The tensors of S U S, with S diagonal along one side: `scale` is (k, n)."""

    def sizes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        if len(shape) < 2:
            return VECTOR.sizes(shape)
        sides = zip(self.factors, _as_matrix(shape), strict=True)
        return {name: (side, side) if side <= self.max_dim else (side,) for name, side in sides}

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        return {
            name: eye(size[0], like, count) if name in self.factors and len(size) == 2 else ones(size, like, count)
            for name, size in self.sizes(shape).items()
        }

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return VECTOR.apply(tensors, x) if x.dim() < 3 else self.act(tensors, x.flatten(2)).reshape(x.shape)

    def linearize(self, tensors: Tensors, x: Tensor) -> Linearization:
        if x.dim() < 3:
            return VECTOR.linearize(tensors, x)
        value, derivative, pullback = self.linearize_sides(tensors, x.flatten(2))
        return Linearization(
            lambda: value().reshape(x.shape),
            lambda change: derivative(change).reshape(x.shape),
            lambda cotangent: pullback(cotangent.flatten(2)),
        )

    def second_moments(self, rows: Tensor, columns: Tensor) -> dict[str, Tensor]:
        """Along each side: matrices, or diagonals where the side is longer than max_dim."""
        sides = {"rows": rows, "columns": columns}
        return {name: gram(x) if x.shape[2] <= self.max_dim else x.square().sum(1) for name, x in sides.items()}


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True)
class Kronecker(SideStructure):
    """U X = C X Dᵀ, vec(U X) = (D ⊗ C) vec(X), for X the parameter (m, ...) seen as m × n; a vector is diagonal.

    `max_dim`: a side longer than that has a diagonal factor (a vector), so that an embedding of 50,000 words doesn't ask for
    a 50,000 × 50,000 matrix.
    """

    factors = ("C", "D")

    def act(self, tensors: Tensors, x: Tensor) -> Tensor:
        for side, name in enumerate(self.factors):
            w = tensors.get(_diagonal_of(name))
            x = multiply(x, tensors[name] if w is None else Thin(w, tensors[name]), side)
        return x

    def linearize_sides(self, tensors: Tensors, x: Tensor) -> Linearization:
        """d(C X Dᵀ) = dC (X Dᵀ) + (C X) dDᵀ; the pullback of P is P (X Dᵀ)ᵀ for C and Pᵀ (C X) for D.

        Both share C X and X Dᵀ; the value is one product more, with the factor of the shorter side.
        """
        left, right = (tensors[name] for name in self.factors)
        products = cache(lambda: multiply(x, right, 1)), cache(lambda: multiply(x, left, 0))
        short, _ = by_length(x)

        def derivative(change: Tensors) -> Tensor:
            along_left, along_right = (multiply(products[i](), change[name], i) for i, name in enumerate(self.factors))
            return along_left + along_right

        def pullback(cotangent: Tensor) -> dict[str, Tensor]:
            return {n: pull(cotangent, products[i](), tensors[n], i) for i, n in enumerate(self.factors)}

        return Linearization(lambda: multiply(products[short](), (left, right)[short], short), derivative, pullback)

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

    Q_L, Q_R and s are all free: nothing keeps the bases orthogonal. A side longer than `max_dim` has a diagonal in place of a
    basis.
    """

    factors = ("Q_L", "Q_R")

    def sizes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        sizes = super().sizes(shape)
        return sizes if len(shape) < 2 else {**sizes, SCALE: _as_matrix(shape)}

    def act(self, tensors: Tensors, x: Tensor) -> Tensor:
        left, right = (tensors[name] for name in self.factors)
        hat = multiply(multiply(x, transpose(left), 0), transpose(right), 1)
        return multiply(multiply(tensors[SCALE] * hat, left, 0), right, 1)

    def linearize_sides(self, tensors: Tensors, x: Tensor) -> Linearization:
        """With X̂ = Q_Lᵀ X Q_R, Z = s ∘ X̂ and Y = Q_L Z Q_Rᵀ,

            dX̂ = dQ_Lᵀ (X Q_R) + (Q_Lᵀ X) dQ_R and dZ = ds ∘ X̂ + s ∘ dX̂
            dY = (dQ_L Z + Q_L dZ) Q_Rᵀ + (Q_L Z) dQ_Rᵀ

        and with P̂ = Q_Lᵀ P Q_R the pullback of P is P̂ ∘ X̂ for s, (P Q_R) Zᵀ + (X Q_R) (s ∘ P̂)ᵀ for Q_L, and
        Pᵀ (Q_L Z) + (Q_Lᵀ X)ᵀ (s ∘ P̂) for Q_R. Here L is the shorter side, whichever that is: of the eleven products of Y and
        the pullback five are with the longer one.
        """
        s, (short, long) = tensors[SCALE], by_length(x)
        name, long_name = self.factors[short], self.factors[long]
        basis, long_basis = tensors[name], tensors[long_name]
        without_short = multiply(x, transpose(long_basis), long)
        without_long = cache(lambda: multiply(x, transpose(basis), short))
        hat = multiply(without_short, transpose(basis), short)
        inside = s * hat
        half = multiply(inside, basis, short)

        def derivative(change: Tensors) -> Tensor:
            d_basis, d_long = change[name], change[long_name]
            d_hat = multiply(without_short, transpose(d_basis), short)
            d_hat += multiply(without_long(), transpose(d_long), long)
            d_inside = change[SCALE] * hat + s * d_hat
            d_half = multiply(inside, d_basis, short) + multiply(d_inside, basis, short)
            return multiply(d_half, long_basis, long) + multiply(half, d_long, long)

        def pullback(cotangent: Tensor) -> dict[str, Tensor]:
            pulled = multiply(cotangent, transpose(long_basis), long)
            hat_pulled = multiply(pulled, transpose(basis), short)
            weighed = s * hat_pulled
            by_basis, by_long = pull(pulled, inside, basis, short), pull(cotangent, half, long_basis, long)
            return {
                name: pull(without_short, weighed, basis, short, onto=by_basis),
                long_name: pull(without_long(), weighed, long_basis, long, onto=by_long),
                SCALE: hat_pulled * hat,
            }

        return Linearization(lambda: multiply(half, long_basis, long), derivative, pullback)

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """(A ⊗ G + λ)⁻¹, exactly: in the eigenbases of A and G it divides by their eigenvalues' products plus λ."""
        bases, along = dict[str, Tensor](), list[Tensor]()
        for name, moment in zip(self.factors, moments.values(), strict=True):
            values, bases[name] = (moment, torch.ones_like(moment)) if moment.dim() == 2 else torch.linalg.eigh(moment)
            along.append(values.clamp_min(0))
        curvature = along[0][..., None] * along[1][:, None]
        shift = damping * curvature.flatten(1).mean(1) + torch.finfo(curvature.dtype).tiny
        return {**bases, SCALE: (curvature + shift[:, None, None]).reciprocal()}

    def scale_side(self, tensors: Tensors, side: int, scale: Tensor) -> dict[str, Tensor]:
        basis = tensors[self.factors[side]]
        return {**tensors, self.factors[side]: basis * (scale if basis.dim() == 2 else scale[..., None])}

    def degree(self, shape: Sequence[int]) -> int:
        return 2 * len(self.sizes(shape)) - 1

    def scaled(self, tensors: Tensors, factor: float) -> dict[str, Tensor]:
        """The bases stay; s (d of a vector) takes it all."""
        return {name: tensor if name in self.factors else tensor * factor for name, tensor in tensors.items()}
