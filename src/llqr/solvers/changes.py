"""Changes of U as vectors: one dictionary of stacked tensors for each group of blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llqr.preconditioner import Change


def inner(left: Change, right: Change) -> float:
    """⟨left, right⟩ over all tensors."""
    parts = [torch.sum(a[name] * b[name]) for a, b in zip(left, right, strict=True) for name in a]
    return float(torch.stack(parts).sum()) if parts else 0.0


def norm(change: Change) -> float:
    """√⟨change, change⟩; not finite where one of the numbers isn't."""
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for part in change for tensor in part.values()))


def combine(left: Change, right: Change, factor: float) -> Change:
    """left + factor · right."""
    return [{n: torch.add(a[n], b[n], alpha=factor) for n in a} for a, b in zip(left, right, strict=True)]


def negative(change: Change) -> Change:
    return [{name: -tensor for name, tensor in part.items()} for part in change]


def block_norms(stack: Tensor) -> Tensor:
    """The norm of each block's own tensor in a stack."""
    norms: Tensor = torch.linalg.vector_norm(stack.reshape(stack.shape[0], -1), dim=1)
    return norms


def per_block(factors: Tensor, stack: Tensor) -> Tensor:
    """Each block's tensor times its own factor."""
    return factors.reshape(-1, *(1 for _ in stack.shape[1:])) * stack


def clipped(change: Change, norm: float) -> Change:
    """Each block's tensors scaled to a norm of at most `norm`."""
    return [
        {name: per_block(norm / block_norms(stack).clamp_min(norm), stack) for name, stack in part.items()}
        for part in change
    ]


def accumulate(change: Change, other: Change, factor: float) -> None:
    """change ← change + factor · other, in place."""
    for new, old in zip(change, other, strict=True):
        for name, tensor in new.items():
            tensor.add_(old[name], alpha=factor)
