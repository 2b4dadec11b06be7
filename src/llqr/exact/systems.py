"""Ways to one damped step: the minimiser of s·Jδ + ½ δ·Hδ + ½ μ‖δ - c‖², s a slope at the output, c what μ pulls to.

With H = JᵀWJ + d and m = μ + d, the same δ comes from whichever system is smallest:

    dual      δ = c' - Jᵀ (W J Jᵀ + m)⁻¹ (s + W J c'), c' = (μ/m) c    a row for each number of the output
    primal    δ = -(H + μ)⁻¹ (Jᵀs - μ c)                               a row for each parameter; also where H isn't JᵀWJ + d
    cg        the same by conjugate gradients, with products alone, to a tolerance
    riccati   the same by Riccati recursion along the stages of an nn.Sequential

A point is prepared once. Another damping costs a factorisation, and another slope at the same damping a solution.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss, check_finite
from llqr.divergences import Divergence
from llqr.errors import ChainError, IndefiniteProblemError, LLQRError
from llqr.exact.chain import Chain
from llqr.exact.lqr import LQR, build
from llqr.exact.matrices import BlockDiagonal, add_symmetric, apply_to_units, conjugate_gradients
from llqr.exact.point import MethodError, Point
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
        if not point.flat_terms:
            raise MethodError("method='dual' is for divergences that are flat, as Gauss–Newton and KL are")
        if point.uniform is None:
            raise MethodError("method='dual' is for a divergence with one L2 weight for all parameters")
        self._uniform = point.uniform
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
        carried = carried * (damping / (damping + self._uniform))
        slope = (slope + self._weigh(self._J @ carried))[:, None]
        factor = self.factorised(damping)
        solved = torch.cholesky_solve(slope, factor) if self._multiple else torch.linalg.lu_solve(*factor, slope)
        return carried - self._J.T @ solved[:, 0]

    def _factorise(self, damping: float) -> Any:
        matrix = _damped(self._system, damping + self._uniform)
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
            self._H.diagonal().add_(point.diagonal)
        else:
            point.product(like)  # looks at the derivatives once, without vmap
            self._H = apply_to_units(point.product, like, point.products_at_once(room))
        check_finite(self._H, "the Hessian of the divergence")

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
            raise MethodError(
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
        return _cholesky(_damped(self._H, damping))


MOST_PRODUCTS = 1000


class Conjugate(System):
    """Conjugate gradients from the last step on, preconditioned by U: for each weight the damped inverses of the second moments
    of its inputs and of its drawn gradients, as in LLQR; for others, and without room for those, one number."""

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
        point, squares = self.point, self._squares  # what is kept doesn't lead back here

        def apply(vector: Tensor) -> Tensor:
            parts = []
            for index, (part, square) in enumerate(zip(point.named(vector).values(), squares, strict=True)):
                if index in sides:
                    first, second = sides[index]
                    parts.append((first @ part.reshape(len(first), -1) @ second).reshape(-1))
                else:
                    parts.append(part.reshape(-1) / (square + damping))
            return torch.cat(parts)

        return apply


class Stages(System):
    """Riccati recursion."""

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


class StagePlan(NamedTuple):
    """A model as stages: the numbers of each one's inputs and parameters, and its LQR."""

    sizes: list[tuple[int, int]]
    build: Callable[[], LQR]


def as_stages(
    model: nn.Module, loss_fn: Loss | None, inputs: Inputs | None, targets: Any, divergence: Divergence
) -> StagePlan | LLQRError:
    """The stages, or why there are none."""
    if loss_fn is None or not isinstance(model, nn.Sequential) or inputs is None:
        return MethodError("method='riccati' is for an nn.Sequential and a closure that returns model(inputs), targets")
    try:
        chain = Chain(model)
        return StagePlan(list(chain.sizes(inputs)), partial(build, chain, inputs, targets, loss_fn, divergence))
    except LLQRError as error:
        return error


def prepared(
    point: Point,
    method: str,
    memory: int,
    examples: int,
    start: Tensor,
    tolerance: float,
    stages: StagePlan | LLQRError,
) -> tuple[System, str]:
    """The system of a method ("auto": the one with the least arithmetic of those that fit into memory), and its name."""
    n, p, largest = point.rows_of_output, len(point.gradient_vector), point.largest
    item = point.gradient_vector.element_size()
    room = memory // item
    a_pass = 100.0 * p * examples + 6e7  # small matrices run at a tenth of the speed of large ones
    squaring = 2.0 * n if point.flat_terms else 2.0 * a_pass / p
    work = {"dual": 2.0 * n * n * p + n**3, "primal": squaring * p * p + p**3 / 3, "cg": 600 * a_pass}
    squares = {"dual": n * (p + largest) + 3 * n * n, "primal": 3 * p * p, "cg": 0}
    rows = {"dual": 0, "primal": 2 * p + largest, "cg": 0}
    make: dict[str, Callable[[int], System]] = {
        "dual": partial(Dual, point),
        "primal": partial(Primal, point),
        "cg": partial(Conjugate, point, start, tolerance),
    }
    if isinstance(stages, StagePlan):
        work["riccati"], rows["riccati"] = sum(10.0 * x * x * (x + q) for x, q in stages.sizes), 0
        squares["riccati"] = sum(x * (x + q) for x, q in stages.sizes) + 4 * max(stages.sizes)[0] ** 2
        make["riccati"] = lambda _: Stages(point, stages.build())
    elif method == "riccati":
        raise stages
    first: LLQRError | None = None
    for name in sorted(work, key=work.__getitem__) if method == "auto" else [method]:
        needed = item * (squares[name] + rows[name])
        try:
            if needed > memory:
                raise MethodError(
                    f"method={name!r} takes {needed:,} bytes for {n:,} numbers of the output and {p:,} parameters, and "
                    f"memory={memory:,}: allow more, take fewer examples at a time, or write method='cg'"
                )
            return make[name](room - squares[name]), name
        except (ChainError, IndefiniteProblemError, MethodError) as error:
            first = first or error.with_traceback(None)  # whose frame holds the point
    assert first is not None
    raise first


def _least(blocks: Tensor) -> float:
    """The least eigenvalue, as a share of the largest number."""
    largest = float(blocks.abs().max())
    return float(torch.linalg.eigvalsh(blocks).min()) / largest if largest else 0.0


def _damped(matrix: Tensor, damping: float) -> Tensor:
    damped = matrix.clone()
    damped.diagonal().add_(damping)
    return damped


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
    first, second = (
        _damped(side, damping**0.5 * share) for side, share in zip(pair, (balance, 1 / balance), strict=True)
    )
    return torch.linalg.inv(first), torch.linalg.inv(second)
