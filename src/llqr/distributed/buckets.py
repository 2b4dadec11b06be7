"""Tensors in few flat buckets, so that a message is long enough to be worth its start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LIMIT = 2**26
"""Bytes of a bucket, unless one tensor alone is larger."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype and device, and a copy of their numbers in one piece."""

    tensors: list[Tensor]
    flat: Tensor

    def parts(self) -> list[Tensor]:
        """What the bucket now has for each tensor."""
        pieces = torch.split(self.flat, [tensor.numel() for tensor in self.tensors])
        return [piece.view(tensor.shape) for tensor, piece in zip(self.tensors, pieces, strict=True)]


def buckets(tensors: Sequence[Tensor]) -> Iterator[Bucket]:
    """The tensors in buckets, in an order that depends on their dtypes and sizes alone."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        held: list[Tensor] = []
        size = 0
        for tensor in kind:
            length = tensor.numel() * tensor.element_size()
            if held and size + length > LIMIT:
                yield _bucket(held)
                held, size = [], 0
            held.append(tensor)
            size += length
        yield _bucket(held)


def _bucket(tensors: list[Tensor]) -> Bucket:
    return Bucket(tensors, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))
