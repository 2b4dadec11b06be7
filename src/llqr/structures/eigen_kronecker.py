"""EigenKronecker: a basis for each side of a matrix, and a scale for each coordinate in it (E-KFAC's shape, learned)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.structures.base import Damping, Linearization, Tensors, ones
from llqr.structures.kronecker import (
    VECTOR,
    AllButOne,
    SideStructure,
    identity_factor,
    longest,
    multiply,
    multiply_all,
    outer,
    shortest,
    transpose,
)

BASES = ("Q_L", "Q_R", "Q_K")
SCALE = "s"


@dataclass(frozen=True)
class EigenKronecker(SideStructure):
    """U X = Q_L (s ∘ (Q_Lᵀ X Q_R)) Q_Rᵀ, for X the parameter (m, ...) seen as m × n; a vector is diagonal.

    Q_L, Q_R and s are all free: nothing keeps the bases orthogonal. `max_dim` and `modes` are as for `Kronecker`: a side longer
    than `max_dim` has a diagonal in place of a basis, and with `modes="all"` a convolution has a third basis Q_K over k².
    """

    def factors(self, sides: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {**{name: self.factor_size(side) for name, side in zip(BASES, sides, strict=False)}, SCALE: sides}

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        if len(shape) < 2:
            return VECTOR.identity(shape, like, count)
        return {
            name: ones(size, like, count) if name == SCALE else identity_factor(size, like, count)
            for name, size in self.sizes(shape).items()
        }

    def act(self, tensors: Tensors, x: Tensor) -> Tensor:
        bases = _bases(tensors)
        return multiply_all(tensors[SCALE] * multiply_all(x, [transpose(basis) for basis in bases]), bases)

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """(A ⊗ G + λ)⁻¹, exactly: in the eigenbases of A and G it divides by their eigenvalues' products plus λ."""
        bases: dict[str, Tensor] = {}
        curvature = moments["rows"].new_ones(())
        for name, moment in zip(BASES, moments.values(), strict=False):
            values, bases[name] = (moment, torch.ones_like(moment)) if moment.dim() == 2 else torch.linalg.eigh(moment)
            curvature = curvature[..., None] * values.clamp_min(0).reshape(len(values), *[1] * (len(bases) - 1), -1)
        shift = damping * curvature.flatten(1).mean(1) + torch.finfo(curvature.dtype).tiny
        return {**bases, SCALE: (curvature + shift.reshape(-1, *[1] * (curvature.dim() - 1))).reciprocal()}

    def scale_side(self, tensors: Tensors, side: int, scale: Tensor) -> dict[str, Tensor]:
        basis = tensors[BASES[side]]
        return {**tensors, BASES[side]: basis * (scale if basis.dim() == 2 else scale[..., None])}

    def linearize_sides(self, tensors: Tensors, x: Tensor, shape: Sequence[int]) -> Linearization:
        return _Linearization(tensors, x, shape)

    def degree(self, shape: Sequence[int]) -> int:
        return 2 * len(self.sizes(shape)) - 1

    def scaled(self, tensors: Tensors, factor: float) -> dict[str, Tensor]:
        """The bases stay; s (d of a vector) takes it all."""
        return {name: tensor if name in BASES else tensor * factor for name, tensor in tensors.items()}


class _Linearization(Linearization):
    """With X̂ = Q_Lᵀ X Q_R and Y = Q_L (s ∘ X̂) Q_Rᵀ,

        dX̂ = dQ_Lᵀ (X Q_R) + (Q_Lᵀ X) dQ_R
        dY = dQ_L ((s ∘ X̂) Q_Rᵀ) + (Q_L (s ∘ X̂)) dQ_Rᵀ + Q_L (ds ∘ X̂ + s ∘ dX̂) Q_Rᵀ

    and with P̂ = Q_Lᵀ P Q_R the pullback of P is P̂ ∘ X̂ for s, P ((s ∘ X̂) Q_Rᵀ)ᵀ + (X Q_R) (s ∘ P̂)ᵀ for Q_L, and
    (Q_Lᵀ P)ᵀ (s ∘ X̂) + (Q_Lᵀ X)ᵀ (s ∘ P̂) for Q_R: the same in L and R, but for what the first term puts together. That takes
    what Y (for the longer side) and P̂ (for the others) need anyway, so that five products involve the longer side, not seven.
    """

    def __init__(self, tensors: Tensors, x: Tensor, shape: Sequence[int]) -> None:
        self._shape, self._scale, self._bases = shape, tensors[SCALE], _bases(tensors)
        self._stored = {name: tensors[name] for name in BASES if name in tensors}
        self._transposed = [transpose(basis) for basis in self._bases]
        self._long, self._short = longest(x.shape), shortest(x.shape)
        self._inner = AllButOne(x, self._transposed)
        self._hat = multiply(self._inner[self._short], self._transposed[self._short], self._short)
        self._scaled = self._scale * self._hat
        self._outer = AllButOne(self._scaled, self._bases)

    def value(self) -> Tensor:
        return multiply(self._outer[self._long], self._bases[self._long], self._long).reshape(self._shape)

    def derivative(self, change: Tensors) -> Tensor:
        names = list(enumerate(self._stored))
        hat = sum(multiply(self._inner[mode], transpose(change[name]), mode) for mode, name in names)
        moved = multiply_all(change[SCALE] * self._hat + self._scale * hat, self._bases)
        for mode, name in names:
            moved = moved + multiply(self._outer[mode], change[name], mode)
        return moved.reshape(self._shape)

    def pullback(self, cotangent: Tensor) -> dict[str, Tensor]:
        return self._pulled(cotangent, {}, 1.0)

    def pull_onto(self, cotangent: Tensor, total: Tensors, decay: float) -> None:
        scale = self._pulled(cotangent, total, decay)[SCALE]
        total[SCALE].mul_(decay).add_(scale)

    def _pulled(self, cotangent: Tensor, total: Tensors, decay: float) -> dict[str, Tensor]:
        """The gradient: of the bases added to decay · `total` in place, of the scale by itself."""
        cotangent = cotangent.reshape(self._hat.shape)
        pulled = AllButOne(cotangent, self._transposed)
        hat = multiply(pulled[self._short], self._transposed[self._short], self._short)
        scaled = self._scale * hat
        gradient: dict[str, Tensor] = {}
        for mode, (name, basis) in enumerate(self._stored.items()):
            if mode == self._long:
                direct = outer(cotangent, self._outer[mode], mode, basis, total.get(name), decay)
            else:
                direct = outer(pulled[mode], self._scaled, mode, basis, total.get(name), decay)
            gradient[name] = outer(self._inner[mode], scaled, mode, basis, onto=direct)
        return {**gradient, SCALE: hat * self._hat}


def _bases(tensors: Tensors) -> list[Tensor]:
    return [tensor for name, tensor in tensors.items() if name != SCALE]
