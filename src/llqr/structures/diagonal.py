"""Diagonal: one number a coordinate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.structures.base import Damping, LinearStructure, Tensors, ones


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

    def second_moments(self, rows: Tensor, columns: Tensor, kernel: int) -> dict[str, Tensor]:
        return {"squares": rows.square().mT @ columns.square()}

    def mean_curvature(self, moments: Tensors) -> Tensor:
        return moments["squares"].flatten(1).mean(1)

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """1/(h + λ), h the diagonal of H."""
        squares = moments["squares"]
        shift = damping * squares.flatten(1).mean(1) + torch.finfo(squares.dtype).tiny
        return {"d": (squares + shift.reshape(-1, 1, 1)).reciprocal()}

    def pullback(self, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        return {"d": x * cotangent}
