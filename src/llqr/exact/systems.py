"""Ways to one damped step: the minimiser of s·Jδ + ½ δ·Hδ + ½ μ‖δ - c‖², s a slope at the output, c what μ pulls to.

With H = JᵀWJ + d and m = μ + d, the same δ comes from whichever system is smallest:

    dual      δ = c' - Jᵀ (W J Jᵀ + m)⁻¹ (s + W J c'), c' = (μ/m) c    a row for each number of the output
    primal    δ = -(H + μ)⁻¹ (Jᵀs - μ c)                               a row for each parameter; also where H isn't JᵀWJ + d
    cg        the same by conjugate gradients, with products alone, to a tolerance
    riccati   the same along the stages of an nn.Sequential

A point is prepared once. Another damping costs a factorisation, and another slope at the same damping a solution.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss, check_finite
from llqr.divergences import Divergence
from llqr.errors import ChainError, IndefiniteProblemError, LLQRError
from llqr.exact.chain import Chain
from llqr.exact.lqr import LQR, build
from llqr.exact.matrices import BlockDiagonal, add_symmetric, apply_to_units, conjugate_gradients
from llqr.exact.point import Point, RoomError
from llqr.exact.steps import Riccati


class System(ABC):
    """One way to the step, prepared at a point."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self._kept: tuple[float, Any] | None = None
        self.cut_short = 0
        """Solutions that stopped before they were as exact as asked for."""

    def product(self, step: Tensor) -> Tensor:
        """H δ."""
        return self.point.product(step)

    @abstractmethod
    def solve(self, slope: Tensor, carried: Tensor, damping: float) -> Tensor:
        """The step; a DegenerateProblemError where H + μ isn't positive definite."""

    def factorised(self, damping: float) -> Any:
        """What `_factorise` makes of a damping, kept for the next slope."""
        if self._kept is None or self._kept[0] != damping:
            self._kept = (damping, self._factorise(damping))
        return self._kept[1]

    @abstractmethod
    def _factorise(self, damping: float) -> Any: ...


class Dual(System):
    def __init__(self, point: Point, room: int) -> None:
        super().__init__(point)
        self._J = point.rows(room).whole()
        check_finite(self._J, "the Jacobian")
        self._W = point.weights()
        if any(_least(w.blocks) < -(torch.finfo(self._J.dtype).eps ** 0.7) for w in self._W):
            raise IndefiniteProblemError(
                "method='dual' needs a loss that is convex in the output: write method='primal'"
            )
        numbers = torch.cat([w.blocks.reshape(-1) for w in self._W])
        self._multiple = len(numbers) == len(self._J) and bool((numbers == numbers[0]).all())
        """W is a multiple of the identity."""
        gram = self._J.new_zeros(len(self._J), len(self._J))
        add_symmetric(gram, self._J.T, self._J.T)
        self._system = self._weigh(gram)
        check_finite(self._system, "W J Jᵀ")

    def product(self, step: Tensor) -> Tensor:
        return self._J.T @ self._weigh(self._J @ step) + self.point.diagonal * step

    def solve(self, slope: Tensor, carried: Tensor, damping: float) -> Tensor:
        assert self.point.uniform is not None
        carried = carried * (damping / (damping + self.point.uniform))
        slope = (slope + self._weigh(self._J @ carried))[:, None]
        factor = self.factorised(damping)
        solved = torch.cholesky_solve(slope, factor) if self._multiple else torch.linalg.lu_solve(*factor, slope)
        return carried - self._J.T @ solved[:, 0]

    def _factorise(self, damping: float) -> Any:
        assert self.point.uniform is not None
        matrix = self._system.clone()
        matrix.diagonal().add_(damping + self.point.uniform)
        return _cholesky(matrix) if self._multiple else torch.linalg.lu_factor(matrix)

    def _weigh(self, matrix: Tensor) -> Tensor:
        parts = torch.split(matrix, [w.shape[0] for w in self._W])
        return torch.cat([w.apply(part) for w, part in zip(self._W, parts, strict=True)])


class Primal(System):
    def __init__(self, point: Point, room: int) -> None:
        super().__init__(point)
        self._J: Tensor | None = None
        """Where there is room for all of it."""
        like = point.gradient_vector
        if point.flat_terms:
            self._H = self._squared(point, room)
        else:
            point.product(like)  # looks at the derivatives once, without vmap
            self._H = apply_to_units(point.product, like, point.products_at_once(room))
            self._H.diagonal().sub_(point.diagonal)
        check_finite(self._H, "the Hessian of the divergence")
        self._H.diagonal().add_(point.diagonal)

    def _squared(self, point: Point, room: int) -> Tensor:
        """JᵀWJ, some rows of J at a time, or all where there is room for them twice."""
        rows, weights = point.rows(room), point.weights()
        each = 2 * rows.width + point.largest
        chunk, sizes = (room - rows.held) // each, [w.shape[0] for w in weights]
        starts = [0, *itertools.accumulate(sizes)]
        aligned = all(
            w.blocks.shape[1] == 1 or w.blocks.shape[1] <= value.numel() // len(value)
            for w, value in zip(weights, point.values, strict=True)
        )
        least = max(group.columns for group in rows.groups) if aligned else rows.count
        if chunk < least:
            raise RoomError(
                f"{least:,} rows of the Jacobian are needed at once, {least * each:,} numbers, and there is room for "
                f"{max(0, room - rows.held):,}: allow more memory, or write method='cg'"
            )
        self._J = rows.whole() if rows.count <= chunk else None
        total = point.gradient_vector.new_zeros(rows.width, rows.width)
        whole = None if self._J is None else zip(starts, torch.split(self._J, sizes), strict=False)
        for start, part in whole or rows.chunks(chunk):
            index = next(i for i in range(len(weights)) if starts[i] <= start < starts[i + 1])
            size = weights[index].blocks.shape[1]
            first = (start - starts[index]) // size
            blocks = BlockDiagonal(weights[index].blocks[first : first + len(part) // size])
            add_symmetric(total, part, blocks.apply(part))
        return total

    def product(self, step: Tensor) -> Tensor:
        return self._H @ step

    def solve(self, slope: Tensor, carried: Tensor, damping: float) -> Tensor:
        known = slope is self.point.slope
        gradient = self.point.pull_slope(slope) if known or self._J is None else self._J.T @ slope
        return -torch.cholesky_solve((gradient - damping * carried)[:, None], self.factorised(damping))[:, 0]

    def _factorise(self, damping: float) -> Any:
        matrix = self._H.clone()
        matrix.diagonal().add_(damping)
        return _cholesky(matrix)


MOST_PRODUCTS = 1000


class Conjugate(System):
    """Conjugate gradients from the last step on, preconditioned by U: for each weight the damped inverses of the second moments
    of its inputs and of its drawn gradients, as in LLQR; for other parameters, and without room for those, one number, from
    the mean of the squares."""

    def __init__(self, point: Point, start: Tensor, tolerance: float, room: int) -> None:
        super().__init__(point)
        self._last, self._tolerance = start, tolerance
        self._moments, gradient = point.moments(room)
        self._squares = [float(each.square().mean()) for each in point.named(gradient).values()]

    def solve(self, slope: Tensor, carried: Tensor, damping: float) -> Tensor:
        own = slope is self.point.slope
        start = self._last if own else torch.zeros_like(self._last)
        begun = self.point.pull_slope(slope) - damping * carried + self.product(start) + damping * start
        tolerance = self._tolerance * float(self.point.gradient_vector.norm() / begun.norm()) if begun.any() else 1.0
        most = min(10 * len(begun), MOST_PRODUCTS)
        solved = conjugate_gradients(
            lambda v: self.product(v) + damping * v, begun, tolerance, most, self.factorised(damping)
        )
        self.cut_short += solved.products == most and solved.residual > tolerance
        if own:
            self._last = start + solved.step
        return start + solved.step

    def _factorise(self, damping: float) -> Callable[[Tensor], Tensor]:
        sides = {index: _inverses(pair, damping) for index, pair in self._moments.items()}

        def apply(vector: Tensor) -> Tensor:
            parts = []
            for index, (part, square) in enumerate(zip(self.point.named(vector).values(), self._squares, strict=True)):
                if index in sides:
                    first, second = sides[index]
                    parts.append((first @ part.reshape(len(first), -1) @ second).reshape(-1))
                else:
                    parts.append(part.reshape(-1) / (square + damping))
            return torch.cat(parts)

        return apply


class Stages(System):
    """The Riccati recursion."""

    def __init__(self, point: Point, lqr: LQR) -> None:
        super().__init__(point)
        self._lqr = lqr
        self._diagonals = [stage.diagonal for stage in lqr.stages]

    def solve(self, slope: Tensor, carried: Tensor, damping: float) -> Tensor:
        riccati, pulled = self.factorised(damping), self.point.named(-damping * carried)
        self._lqr.terminal_gradient = slope[: len(self._lqr.terminal_gradient)]  # there are none at the other places
        for stage in self._lqr.stages:
            stage.param_gradient = stage.stack(pulled)
        return self.point.flat(self._lqr.named(riccati.solve().controls))

    def _factorise(self, damping: float) -> Riccati:
        for stage, diagonal in zip(self._lqr.stages, self._diagonals, strict=True):
            stage.diagonal = diagonal + damping
        return Riccati(self._lqr)


class Way(NamedTuple):
    """What a method would cost, why it can't be taken, and how it is."""

    work: float
    bytes: int
    reason: str
    make: Callable[[], System]


def ways(point: Point, memory: int, examples: int, start: Tensor, tolerance: float) -> dict[str, Way]:
    """The methods for any model."""
    n, p, largest = point.rows_of_output, len(point.gradient_vector), point.largest
    item = point.gradient_vector.element_size()
    a_pass = 100.0 * p * examples + 6e7  # small matrices run at a tenth of the speed of large ones
    flat = "" if point.flat_terms else "it is for divergences that are flat, as Gauss–Newton and KL are"
    uniform = "" if point.uniform is not None else "the divergence has other L2 weights for some parameters"
    dual, primal = n * (p + largest) + 3 * n * n, 3 * p * p
    squaring = 2.0 * n if point.flat_terms else 2.0 * a_pass / p
    room = memory // item
    return {
        "dual": Way(2.0 * n * n * p + n**3, item * dual, flat or uniform, lambda: Dual(point, room - dual)),
        "primal": Way(
            squaring * p * p + p**3 / 3, item * (primal + 2 * p + largest), "", lambda: Primal(point, room - primal)
        ),
        "cg": Way(600 * a_pass, 0, "", lambda: Conjugate(point, start, tolerance, room)),
    }


def along_stages(
    point: Point, model: nn.Module, loss_fn: Loss | None, inputs: Inputs | None, targets: Any, divergence: Divergence
) -> Way:
    """The Riccati recursion, where the model has stages."""
    if loss_fn is None or not isinstance(model, nn.Sequential) or inputs is None:
        return Way(math.inf, 0, "it is for an nn.Sequential and a closure that returns model(inputs), targets", _no)
    try:
        chain = Chain(model)
        sizes = chain.sizes(inputs)
    except LLQRError as error:
        return Way(math.inf, 0, str(error), _no)
    work = sum(10.0 * n * n * (n + p) for n, p in sizes)
    held = point.gradient_vector.element_size() * (sum(n * (n + p) for n, p in sizes) + 4 * max(sizes)[0] ** 2)
    return Way(work, held, "", lambda: Stages(point, build(chain, inputs, targets, loss_fn, divergence)))


def choose(ways: dict[str, Way], method: str, point: Point, memory: int) -> tuple[System, str]:
    """The system that takes the least arithmetic of those that fit into memory, and its name."""
    errors: dict[str, LLQRError] = {}
    names = sorted(ways, key=lambda name: ways[name].work) if method == "auto" else [method]
    for name in names:
        way = ways[name]
        if way.reason:
            errors[name] = LLQRError(f"method={name!r} can't be taken here: {way.reason}")
        elif way.bytes > memory:
            errors[name] = LLQRError(
                f"method={name!r} takes {way.bytes:,} bytes for {point.rows_of_output:,} numbers of the output and "
                f"{len(point.gradient_vector):,} parameters, and memory={memory:,}: allow more, take fewer examples at a "
                "time, or write method='cg'"
            )
        else:
            try:
                return way.make(), name
            except (ChainError, IndefiniteProblemError, RoomError) as error:
                errors[name] = error
    raise errors[names[0]]


def _no() -> System:
    raise AssertionError


def _least(blocks: Tensor) -> float:
    """The least eigenvalue, as a share of the largest number."""
    largest = float(blocks.abs().max())
    return float(torch.linalg.eigvalsh(blocks).min()) / largest if largest else 0.0


def _cholesky(matrix: Tensor) -> Tensor:
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        raise IndefiniteProblemError("H + μ isn't positive definite")
    return factor


def _inverses(pair: tuple[Tensor, Tensor], damping: float) -> tuple[Tensor, Tensor]:
    """(G + √μ π)⁻¹ and (A + √μ / π)⁻¹, with π² the ratio of their mean eigenvalues."""
    means = [max(float(side.diagonal().mean()), torch.finfo(side.dtype).tiny) for side in pair]
    balance = (means[0] / means[1]) ** 0.5
    damped = []
    for side, share in zip(pair, (balance, 1 / balance), strict=True):
        unit = torch.eye(len(side), dtype=side.dtype, device=side.device)
        damped.append(torch.linalg.inv(side + damping**0.5 * share * unit))
    return damped[0], damped[1]
