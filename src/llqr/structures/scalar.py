"""Scalar: one number a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.structures.base import Damping, LinearStructure, Per, Tensors, check_per, gram, ones


@dataclass(frozen=True)
class Scalar(LinearStructure):
    """U x = u·x: a learned length for each parameter, or for each layer with `per="layer"`."""

    per: Per = "parameter"

    def __post_init__(self) -> None:
        check_per(self.per)

    def sizes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {"u": ()}

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
