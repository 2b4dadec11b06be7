"""Matrices from products: Jacobians, block-diagonal matrices; and how symmetric systems are solved.

Along the depth of a network most matrices are block-diagonal over the examples (a stage acts on each by itself), some even
over tokens or single numbers (an activation function). Knowing it turns B·d products into d, and B³ into B² further on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llqr.checks import check_finite
from llqr.errors import IndefiniteProblemError, LLQRError, SingularProblemError

Operator = Callable[[Tensor], Tensor]
"""A linear map from tensors of one shape to tensors of another."""

_PORTION = 2**24
"""How many numbers one batched application may hold at a time."""


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """All of them in one vector."""
    return torch.cat([each.reshape(-1) for each in tensors])


def flat(named: Mapping[str, Tensor]) -> Tensor:
    """All of them in one vector."""
    return joined(named.values())


def unflat(vector: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The inverse of `flat`."""
    parts = torch.split(vector, [shape.numel() for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def apply_to_each(operator: Operator, vectors: Tensor) -> Tensor:
    """The operator on each of a stack of vectors."""
    weights = torch.linspace(1, 2, len(vectors), dtype=vectors.dtype, device=vectors.device)
    return _apply(operator, lambda first, last: vectors[first:last], torch.tensordot(weights, vectors, 1), weights)


def apply_to_units(operator: Operator, like: Tensor, at_once: int | None = None) -> Tensor:
    """The operator on each unit vector of the shape of `like`, at most so many at once: the rows of its transposed matrix."""

    def units(first: int, last: int) -> Tensor:
        rows = like.new_zeros(last - first, like.numel())
        rows.diagonal(first).fill_(1)
        return rows.reshape(-1, *like.shape)

    weights = torch.linspace(1, 2, like.numel(), dtype=like.dtype, device=like.device)
    return _apply(operator, units, weights.reshape(like.shape), weights, at_once)


def _apply(
    operator: Operator,
    vectors: Callable[[int, int], Tensor],
    combined: Tensor,
    weights: Tensor,
    at_once: int | None = None,
) -> Tensor:
    """All at once by vmap, in portions that bound the memory, or one by one where an operation has no batching rule, or a wrong
    one, as layer_norm's hessian in torch 2.13: a combination of the results has to be the operator on that of the vectors."""
    count, together = len(weights), operator(combined)
    # in one place: small ones between large ones keep freed memory
    results = together.new_empty(count, *together.shape)

    def fill(apply: Operator, portion: int) -> Tensor:
        for first in range(0, count, portion):
            last = min(first + portion, count)
            results[first:last] = apply(vectors(first, last))
        return results

    portion = max(1, min(_PORTION // (combined.numel() + together.numel()), at_once or count))
    if portion > 1:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "performance drop": where there is no rule, vmap loops by itself
                fill(torch.func.vmap(operator), portion)
            difference = (torch.tensordot(weights, results, dims=1) - together).abs()
            size = torch.tensordot(weights, results.abs(), dims=1) + together.abs()
            if bool((difference <= torch.finfo(weights.dtype).eps ** 0.5 * size).all()):
                return results
        except (RuntimeError, LLQRError):  # as engines translate it
            pass
    return fill(lambda part: operator(part[0]), 1)


def puller(output: Tensor, inputs: list[Tensor]) -> Operator | None:
    """v ↦ vᵀ ∂output/∂inputs as one vector; None if the output doesn't depend on any of the inputs, or there are none."""
    if not output.requires_grad or not inputs:
        return None
    needed = torch.autograd.grad(output, inputs, torch.zeros_like(output), retain_graph=True, allow_unused=True)
    if all(gradient is None for gradient in needed):
        return None

    def pull(cotangent: Tensor) -> Tensor:
        return joined(torch.autograd.grad(output, inputs, cotangent, retain_graph=True, materialize_grads=True))

    return pull


def jacobian(output: Tensor, inputs: list[Tensor]) -> Tensor | None:
    """∂output/∂inputs, a row for each number of the output; None if it doesn't depend on any of the inputs."""
    pull = puller(output, inputs)
    return None if pull is None else apply_to_units(pull, output.detach())


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
        wide = torch.diag_embed(self.blocks.reshape(groups, merge, rows, columns).movedim(1, -1))
        return BlockDiagonal(wide.permute(0, 3, 1, 4, 2).reshape(groups, merge * rows, merge * columns))

    def __add__(self, other: BlockDiagonal) -> BlockDiagonal:
        groups = math.gcd(self.blocks.shape[0], other.blocks.shape[0])
        return BlockDiagonal(self.coarsened(groups).blocks + other.coarsened(groups).blocks)


def materialise_transposed(operator: Operator, rows: torch.Size, columns: torch.Size, like: Tensor) -> BlockDiagonal:
    """The matrix of shape (rows, columns) whose transpose `operator` multiplies by.

    Takes as many products as one block has rows, with the finest blocks that the map has along the leading dimensions
    which `rows` and `columns` have in common.
    """
    counts = [1]
    for left, right in zip(rows, columns, strict=False):
        if left != right:
            break
        counts.append(counts[-1] * left)
    for groups in sorted(set(counts), reverse=True):
        if groups == 1 or _separates(operator, rows, columns, groups, like):
            break
    height, width = rows.numel() // groups, columns.numel() // groups
    units = torch.eye(height, dtype=like.dtype, device=like.device)
    cotangents = units[:, None, :].expand(height, groups, height).reshape(height, *rows)
    pulled = apply_to_each(operator, cotangents).reshape(height, groups, width)
    return BlockDiagonal(pulled.transpose(0, 1).contiguous())


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


def add_symmetric(total: Tensor, left: Tensor, right: Tensor, width: int = 128) -> None:
    """total += leftᵀ @ right, known to be symmetric: the blocks below the diagonal are computed and the others copied."""
    for first in range(0, len(total), width):
        last = min(first + width, len(total))
        total[first:last, :last].addmm_(left[:, first:last].T, right[:, :last])
        total[:first, first:last] = total[first:last, :first].T


def cholesky(matrix: Tensor, scale: Tensor, stage: str | None) -> Tensor:
    """The Cholesky factor, or the error that says why there is none.

    `scale` says how large the numbers were that each diagonal entry was computed from: what is smaller than their rounding,
    with some room for what earlier eliminations amplified, is taken for zero.
    """
    matrix = (matrix + matrix.T) / 2
    factor, failed = torch.linalg.cholesky_ex(matrix)
    precision = torch.finfo(matrix.dtype).eps
    noise = max(8 * len(matrix) * precision, precision**0.75)
    if not bool(failed) and bool((factor.diagonal().square() > noise * scale).all()):
        return factor  # type: ignore[no-any-return]
    unit = torch.where(scale > 0, scale, torch.ones_like(scale)).rsqrt()
    lowest = float(torch.linalg.eigvalsh(unit[:, None] * matrix * unit)[0])
    where = "" if stage is None else f" at stage {stage!r}"
    if lowest < -(precision**0.5):
        raise IndefiniteProblemError(
            f"the quadratic model is unbounded below{where} (curvature as low as {lowest:.2g} of its scale): raise the "
            "damping, use GaussNewton or KL, or ask for the stationary point with degenerate='least-norm'",
            stage,
        )
    raise SingularProblemError(
        f"the quadratic model is singular{where}, so its minimum isn't unique: add damping (damping=1e-3, say), or ask for the "
        "smallest solution with degenerate='least-norm'",
        stage,
    )


def least_norm(matrix: Tensor, gradient: Tensor) -> Tensor:
    """-H⁺ g: the smallest solution of Hδ = -g, with eigenvalues within rounding of zero taken for zero."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    kept = values.abs() > len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    coefficients = vectors.T @ gradient
    lost = coefficients[~kept].norm()
    if lost > torch.finfo(values.dtype).eps ** 0.5 * gradient.norm():
        raise SingularProblemError(
            "the gradient has a part along which there is no curvature, so the quadratic model falls without bound: add damping"
        )
    return -torch.mv(vectors[:, kept], coefficients[kept] / values[kept])


class Solved(NamedTuple):
    """δ, the norm of Hδ + g relative to that of g as the recursion has it, and how many products it took."""

    step: Tensor
    residual: float
    products: int


def conjugate_gradients(
    curvature: Operator,
    gradient: Tensor,
    tolerance: float,
    max_steps: int,
    precondition: Operator = lambda residual: residual,
) -> Solved:
    """Hδ = -g from δ = 0, until the residual is `tolerance` times the gradient or for so many steps.

    Where H is singular, the iterates stay in its range: the least-norm step (if nothing preconditions).
    """
    step, residual = torch.zeros_like(gradient), -gradient
    direction = precondition(residual)
    squared, scaled = residual @ residual, residual @ direction
    start, goal = squared, tolerance**2 * squared
    products = 0
    while products < max_steps and not squared <= goal:  # a NaN goes on, to be met below
        product = curvature(direction)
        products += 1
        check_finite(product, "a product with the Hessian")
        bend = direction @ product
        if bend <= 0:
            if bend < -1e-12 * product.norm() * direction.norm():
                raise IndefiniteProblemError(
                    "conjugate gradients met negative curvature: raise the damping, or use GaussNewton or KL"
                )
            break
        length = scaled / bend
        step = step + length * direction
        residual = residual - length * product
        following = precondition(residual)
        before, squared, scaled = scaled, residual @ residual, residual @ following
        direction = following + (scaled / before) * direction
    return Solved(step, float((squared / start).sqrt()) if start > 0 else 0.0, products)
