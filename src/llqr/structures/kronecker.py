"""Kronecker: a factor for each side of a matrix (K-FAC's shape, learned)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from llqr.structures.base import LONG_SIDE, Damping, Linearization, Tensors, damped_inverse, thin_inverse
from llqr.structures.mode_products import (
    VECTOR,
    AllButOne,
    SideStructure,
    Thin,
    identity_factor,
    multiply,
    multiply_all,
    outer,
    shortest,
)

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
