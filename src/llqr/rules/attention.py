"""The rule of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llqr.rules.base import Maybe, Rule


class Attention(Rule):
    """y = P v with P = softmax(S), S = a·q kᵀ + mask; a softmax's Jacobian σ(·) is its own transpose.

    Jᵀu: dv = Pᵀu, dS = σ(u vᵀ), dq = a·dS k, dk = a·dSᵀq.   Jv: σ(a·(v_q kᵀ + q v_kᵀ)) v + P v_v.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, scale: float) -> None:
        self.shapes = [tensor.shape for tensor in (q, k, v)]
        self.q, self.k, self.v = (_stacked(tensor.detach()) for tensor in (q, k, v))
        self.scale, self.mask = scale, mask

    def forward(self) -> Tensor:
        of_q, of_k, _ = self.needed
        read = ((self.q, of_k), (self.k, of_q), (self.v, of_q or of_k))
        self.keep(*(tensor for tensor, wanted in read if wanted))
        scores = torch.bmm(self.q, self.k.mT).mul_(self.scale).reshape(*self.shapes[0][:-1], self.shapes[1][-2])
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -math.inf) if self.mask.dtype == torch.bool else scores + self.mask
        self.weights = _stacked(torch._safe_softmax(scores, -1))
        return self._unstacked(torch.bmm(self.weights, self.v))

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        u = _stacked(u)
        scores = self._softmax(torch.bmm(u, self.v.mT))
        parts = (
            torch.bmm(scores, self.k).mul_(self.scale) if self.needed[0] else None,
            torch.bmm(scores.mT, self.q).mul_(self.scale) if self.needed[1] else None,
            torch.bmm(self.weights.mT, u) if self.needed[2] else None,
        )
        return tuple(
            None if part is None else part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)
        )

    def push(self, v: Sequence[Maybe]) -> Maybe:
        v_q, v_k, v_v = (None if part is None else _stacked(part) for part in v)
        moved = None if v_v is None else torch.bmm(self.weights, v_v)
        scores = None if v_q is None else torch.bmm(v_q, self.k.mT)
        if v_k is not None:
            scores = torch.bmm(self.q, v_k.mT) if scores is None else scores.baddbmm_(self.q, v_k.mT)
        if scores is not None:
            weights = self._softmax(scores).mul_(self.scale)
            moved = torch.bmm(weights, self.v) if moved is None else moved.baddbmm_(weights, self.v)
        return None if moved is None else self._unstacked(moved)

    def _softmax(self, scores: Tensor) -> Tensor:
        return torch._softmax_backward_data(scores, self.weights, -1, scores.dtype)

    def _unstacked(self, y: Tensor) -> Tensor:
        return y.reshape(*self.shapes[0][:-1], self.shapes[2][-1])


def _stacked(x: Tensor) -> Tensor:
    """All but the last two dimensions as one."""
    return x.reshape(-1, *x.shape[-2:])
