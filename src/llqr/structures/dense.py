"""Dense: a full matrix a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.structures.base import Damping, LinearStructure, Per, Tensors, check_per, damped_inverse, eye, gram


@dataclass(frozen=True)
class Dense(LinearStructure):
    """vec(U x) = U vec(x), U of n × n for a block of n numbers: exact for a block, and only for small ones.

    `per="layer"`: one matrix for all the parameters that a module owns itself, the paper's U_i.
    """

    per: Per = "parameter"

    def __post_init__(self) -> None:
        check_per(self.per)

    def sizes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {"U": (math.prod(shape), math.prod(shape))}

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        return {"U": eye(math.prod(shape), like, count)}

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return torch.bmm(tensors["U"], _columns(x)).reshape(x.shape)

    def second_moments(self, rows: Tensor, columns: Tensor, kernel: int) -> dict[str, Tensor]:
        return {"whole": gram((rows[..., None] * columns[:, :, None]).flatten(2))}

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """(H + λ)⁻¹."""
        return {"U": damped_inverse(moments["whole"], damping)}

    def pullback(self, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        return {"U": _columns(cotangent) * _columns(x).mT}


def _columns(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, 1)
