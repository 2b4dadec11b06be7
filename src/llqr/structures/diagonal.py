"""Diagonal: one number a coordinate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from llqr.structures.base import LinearStructure, Tensors, ones


@dataclass(frozen=True)
class Diagonal(LinearStructure):
    """U x = d ∘ x, with d of the parameter's shape."""

    def sizes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {"d": tuple(shape)}

    def spread(self, shape: Sequence[int]) -> int:
        return math.prod(shape)

    def multiplier(self, shape: Sequence[int]) -> str | None:
        return "d"

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        return {"d": ones(shape, like, count)}

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return tensors["d"] * x

    def pullback(self, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        return {"d": x * cotangent}
