"""Block-diagonal matrices, and how to find out that a linear map is one.

Along the depth of a network most matrices are block-diagonal over the examples (a stage acts on each by itself), some even
over tokens or single numbers (an activation function). Knowing it turns B·d products into d, and B³ into B² further on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.exact.derivatives import Operator, apply_to_each


@dataclass(frozen=True)
class BlockDiagonal:
    """diag(blocks[0], …, blocks[G-1]), with blocks of shape (G, rows, columns)."""

    blocks: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        groups, rows, columns = self.blocks.shape
        return groups * rows, groups * columns

    def dense(self) -> Tensor:
        return self.coarsened(1).blocks[0]

    def apply(self, matrix: Tensor) -> Tensor:
        """self @ matrix, for a matrix or a vector."""
        groups, rows, columns = self.blocks.shape
        tail = matrix.shape[1:]
        if rows == columns == 1:
            return self.blocks.reshape(groups, *[1] * len(tail)) * matrix
        return torch.bmm(self.blocks, matrix.reshape(groups, columns, -1)).reshape(groups * rows, *tail)

    def apply_transposed(self, matrix: Tensor) -> Tensor:
        """selfᵀ @ matrix, for a matrix or a vector."""
        return BlockDiagonal(self.blocks.mT).apply(matrix)

    def congruence(self, other: BlockDiagonal) -> BlockDiagonal:
        """otherᵀ @ self @ other."""
        groups = math.gcd(self.blocks.shape[0], other.blocks.shape[0])
        middle, outer = self.coarsened(groups).blocks, other.coarsened(groups).blocks
        return BlockDiagonal(outer.mT @ middle @ outer)

    def coarsened(self, groups: int) -> BlockDiagonal:
        """The same matrix with fewer, larger blocks."""
        count, rows, columns = self.blocks.shape
        if count == groups:
            return self
        merge = count // groups
        wide = self.blocks.new_zeros(groups, merge, rows, merge, columns)
        index = torch.arange(merge, device=self.blocks.device)
        # Advanced indices apart from each other move to the front: (merge, groups, rows, columns).
        wide[:, index, :, index, :] = self.blocks.reshape(groups, merge, rows, columns).transpose(0, 1)
        return BlockDiagonal(wide.reshape(groups, merge * rows, merge * columns))

    def __add__(self, other: BlockDiagonal) -> BlockDiagonal:
        groups = math.gcd(self.blocks.shape[0], other.blocks.shape[0])
        return BlockDiagonal(self.coarsened(groups).blocks + other.coarsened(groups).blocks)


def materialise_transposed(operator: Operator, rows: torch.Size, columns: torch.Size, like: Tensor) -> BlockDiagonal:
    """The matrix of shape (rows, columns) whose transpose `operator` multiplies by.

    Takes as many products as one block has rows, with the finest blocks that the map has along the leading dimensions
    which `rows` and `columns` have in common.
    """
    for groups in _candidates(rows, columns):
        if groups == 1 or _separates(operator, rows, columns, groups, like):
            break
    height = rows.numel() // groups
    width = columns.numel() // groups
    units = torch.eye(height, dtype=like.dtype, device=like.device)
    cotangents = units[:, None, :].expand(height, groups, height).reshape(height, *rows)
    pulled = apply_to_each(operator, cotangents).reshape(height, groups, width)
    return BlockDiagonal(pulled.transpose(0, 1).contiguous())


def _candidates(rows: torch.Size, columns: torch.Size) -> list[int]:
    """Group counts to try, finest first: products of leading dimensions that both sides share."""
    counts = [1]
    for left, right in zip(rows, columns, strict=False):
        if left != right:
            break
        counts.append(counts[-1] * left)
    return sorted(set(counts), reverse=True)


def _separates(operator: Operator, rows: torch.Size, columns: torch.Size, groups: int, like: Tensor) -> bool:
    """Whether no group reaches another.

    Two groups differ in some bit of their index, so switching the groups on by the bits of their indices, and by the
    complements, shows every pair: what is off must stay exactly zero.
    """
    index = torch.arange(groups, device=like.device)
    bits = torch.stack([(index >> bit) & 1 for bit in range(max(1, (groups - 1).bit_length()))]).bool()
    masks = torch.cat((bits, ~bits))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(groups, rows.numel() // groups, generator=generator, dtype=torch.float64)
    probes = masks[:, :, None] * noise.to(like)
    pulled = apply_to_each(operator, probes.reshape(len(masks), *rows)).reshape(len(masks), groups, -1)
    return not bool(pulled[~masks].any())
