"""Scalar, Diagonal and Dense: the structures that are linear in their tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.structures.base import Damping, LinearStructure, Per, Tensors, check_per, damped_inverse, eye, gram, ones


@dataclass(frozen=True)
class Scalar(LinearStructure):
    """U x = u·x: a learned length for each parameter, or for each layer with `per="layer"`."""

    per: Per = "parameter"

    def __post_init__(self) -> None:
        check_per(self.per)

    def multiplier(self, shape: Sequence[int]) -> str | None:
        return "u" if self.per == "parameter" else None

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        return {"u": ones((), like, count)}

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return tensors["u"].reshape(-1, *(1 for _ in x.shape[1:])) * x

    def second_moments(self, rows: Tensor, columns: Tensor, kernel: int) -> dict[str, Tensor]:
        return {"rows": gram(rows), "columns": gram(columns)}

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """tr H / (tr H² + λ tr H), of H = A ⊗ G."""
        traces = [moment.diagonal(dim1=1, dim2=2).sum(1) for moment in moments.values()]
        squares = [moment.square().sum((1, 2)) for moment in moments.values()]
        numbers = [moment.shape[1] for moment in moments.values()]
        trace = traces[0] * traces[1]
        shift = damping * trace / (numbers[0] * numbers[1]) + torch.finfo(trace.dtype).tiny
        return {"u": trace / (squares[0] * squares[1] + shift * trace + torch.finfo(trace.dtype).tiny)}

    def pullback(self, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        return {"u": (x * cotangent).flatten(1).sum(1) if x.dim() > 1 else x * cotangent}


@dataclass(frozen=True)
class Diagonal(LinearStructure):
    """U x = d ∘ x, with d of the parameter's shape."""

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


@dataclass(frozen=True)
class Dense(LinearStructure):
    """vec(U x) = U vec(x), U of n × n for a block of n numbers: exact for a block, and only for small ones.

    `per="layer"`: one matrix for all the parameters that a module owns itself, the paper's U_i.
    """

    per: Per = "parameter"

    def __post_init__(self) -> None:
        check_per(self.per)

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        return {"U": eye(math.prod(shape), like, count)}

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return torch.bmm(tensors["U"], _columns(x)).reshape(x.shape)

    def second_moments(self, rows: Tensor, columns: Tensor, kernel: int) -> dict[str, Tensor]:
        return {"whole": gram((rows[..., None] * columns[:, :, None]).flatten(2))}

    def mean_curvature(self, moments: Tensors) -> Tensor:
        return moments["whole"].diagonal(dim1=1, dim2=2).mean(1)

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """(H + λ)⁻¹."""
        return {"U": damped_inverse(moments["whole"], damping)}

    def pullback(self, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        return {"U": _columns(cotangent) * _columns(x).mT}


def _columns(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, 1)
