"""Ways to one damped step: the minimiser of s·Jδ + ½ δ·Hδ + ½ μ‖δ - c‖², s a slope at the output, c what μ pulls to.

With H = JᵀWJ + d and m = μ + d, the same δ comes from whichever system is smallest:

    dual      δ = c' - Jᵀ (W J Jᵀ + m)⁻¹ (s + W J c'), c' = (μ/m) c    a row for each number of the output
    primal    δ = c - (H + μ)⁻¹ (Jᵀs + H c)                            a row for each parameter; also where H isn't JᵀWJ + d
    cg        the same by conjugate gradients, with products alone, to a tolerance
    riccati   the same along the stages of an nn.Sequential

A point is prepared once. Another damping costs a factorisation, and another slope at the same damping a solution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llqr.checks import Inputs, check_finite
from llqr.curvature.chunks import Piece
from llqr.curvature.engine import JacobianProducts
from llqr.curvature.recorded_chunk import ChunkContext, RecordedChunk
from llqr.curvature.recorder import Parameters, Recorder
from llqr.curvature.replacements import plain_rules
from llqr.divergences import L2, GaussNewton, OutputTerm
from llqr.errors import IndefiniteProblemError, LLQRError
from llqr.exact.blockdiagonal import BlockDiagonal, materialise_transposed
from llqr.exact.blocks import LQR
from llqr.exact.conjugate import conjugate_gradients
from llqr.exact.derivatives import apply_to_each
from llqr.exact.riccati import Riccati
from llqr.exact.rows import Group, Rows, second_moments


def squares(output: Tensor, targets: object) -> Tensor:
    """The loss of residuals."""
    return output.square().sum()


Groups = Sequence[tuple[int, int]]
"""(examples, columns) of the numbers of the output, in order."""


class _Plain(JacobianProducts):
    """A forward pass recorded by plain operations, whose nodes tell where parameters act."""

    def __init__(self, recorder: Recorder, parameters: Parameters, inputs: Inputs, forward_mode: bool) -> None:
        super().__init__(recorder, parameters, inputs, forward_mode, plain_rules())

    def rows(self, groups: Sequence[Group], push: Callable[[Tensor], Tensor], room: int) -> Rows:
        return Rows(self._outputs, self._leaves, groups, push, room)

    def second_moments(self, slopes: list[Tensor]) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor]:
        gradient = torch.cat([each.reshape(-1) for each in self.pull(slopes)])
        return second_moments(self._outputs, self._leaves, slopes), gradient


class Point(RecordedChunk):
    """g and H of a closure at θ_k, in flat vectors."""

    def __init__(
        self, context: ChunkContext, piece: Piece, diagonal: dict[str, float], groups: Groups, by_products: bool
    ) -> None:
        super().__init__(context, piece, keep=True)
        self._by_products = by_products  # rules make products quicker, and hide where parameters act
        self._shapes = {name: p.shape for name, p in context.parameters.items()}
        self._groups, recorded = groups, self._record()
        self.gradient_vector = self.flat(self.gradient())
        check_finite(self.gradient_vector, "the gradient")
        like = self.gradient_vector
        self.diagonal = torch.cat([torch.full_like(like[: s.numel()], diagonal[n]) for n, s in self._shapes.items()])
        """What L2 terms put on H's diagonal."""
        self.uniform = float(self.diagonal[0]) if bool((self.diagonal == self.diagonal[0]).all()) else None
        self._expanded, self._linear = recorded.bases, recorded.linear
        run = recorded.linear or recorded.second
        assert run is not None
        if not like.any() and not run.depends():
            raise LLQRError(
                "what the closure returned doesn't depend on the parameters of the model that Exact was given: is it computed "
                "with another model, or with a copy?"
            )
        self.values = run.values
        self.rows_of_output = sum(value.numel() for value in self.values)
        self.flat_terms = recorded.second is None
        """H = JᵀWJ, but for the diagonal."""
        self.slope = torch.cat([each.reshape(-1) for each in self._slopes(recorded.slope)])

    def flat(self, named: Parameters) -> Tensor:
        return torch.cat([named[name].reshape(-1) for name in self._shapes])

    def named(self, vector: Tensor) -> Parameters:
        parts = torch.split(vector, [shape.numel() for shape in self._shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def product(self, vector: Tensor) -> Tensor:
        """H v."""
        return self.flat(self.curvature(self.named(vector))) + self.diagonal * vector

    def push(self, vector: Tensor) -> Tensor:
        """J v."""
        assert self._linear is not None
        named = self.named(vector)
        return torch.cat(
            [each.reshape(-1) for each in self._push(self._linear, [named[name] for name in self._shapes])]
        )

    def pull_slope(self, slope: Tensor) -> Tensor:
        """Jᵀs, of a slope at the output."""
        if slope is self.slope:
            return self.gradient_vector
        assert self._linear is not None
        return torch.cat([each.reshape(-1) for each in self._linear.pull(self._shaped(slope))])

    def weigh(self, vector: Tensor) -> Tensor:
        """W v."""
        return torch.cat([each.reshape(-1) for each in self._curve(self._record(), self._shaped(vector))])

    def _shaped(self, vector: Tensor) -> list[Tensor]:
        parts = torch.split(vector, [value.numel() for value in self.values])
        return [part.reshape(value.shape) for part, value in zip(parts, self.values, strict=True)]

    def rows(self, room: int) -> Rows:
        groups, start = [], 0
        for examples, columns in [*self._groups, *(_shape(value, self._piece.count) for value in self.values[1:])]:
            groups.append(Group(start, examples, columns))
            start += examples * columns
        return self._plain().rows(groups, self.push, room)

    def products_at_once(self, room: int) -> int:
        """How many products with H there is room for."""
        recorded = self._record()
        return max(1, room // (6 * sum(run.numbers() for run in (recorded.linear, recorded.second) if run is not None)))

    def weights(self) -> list[BlockDiagonal]:
        """W, one block-diagonal matrix for each value."""
        if self._context.loss_fn is squares and [type(term) for _, term in self._context.terms] == [GaussNewton]:
            return [BlockDiagonal(torch.full_like(self.values[0], 2.0 * self._context.terms[0][0])[..., None])]
        found = []
        for index, value in enumerate(self.values):

            def weigh(tangent: Tensor, index: int = index) -> Tensor:
                total = torch.zeros_like(tangent)
                for factor, term in self._counted():
                    if not isinstance(term, L2) and self._context.index(term) == index:
                        total = total + factor * term.hessian_product(tangent, self._expanded[index])
                return total

            found.append(materialise_transposed(weigh, value.shape, value.shape, value))
        return found

    def moments(self) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor]:
        """Second moments of both sides of each linear map, and the gradient, of a random slope whose second moment is W."""
        generator = torch.Generator(self.gradient_vector.device).manual_seed(0)
        total = [torch.zeros_like(value) for value in self.values]
        for factor, term in self._counted():
            if isinstance(term, OutputTerm):
                total[0] = total[0] + factor**0.5 * term.draw(self._expanded[0], generator)
        return self._plain().second_moments(total)

    def _linearized(self, recorder: Recorder, parameters: Parameters, inputs: Inputs) -> JacobianProducts:
        return (JacobianProducts if self._by_products else _Plain)(recorder, parameters, inputs, self._forward)

    def _plain(self) -> _Plain:
        if isinstance(self._linear, _Plain):
            return self._linear
        return _Plain(self._context.recorder, self._context.parameters, self._piece.inputs, False)

    def _slopes(self, slope: Tensor | None) -> list[Tensor]:
        assert slope is not None
        return [slope, *(torch.zeros_like(value) for value in self.values[1:])]


def _shape(value: Tensor, examples: int) -> tuple[int, int]:
    whole = value.numel() % examples == 0
    return (examples, value.numel() // examples) if whole else (1, value.numel())


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

    def push(self, step: Tensor) -> Tensor:
        """J δ."""
        return self.point.push(step)

    @abstractmethod
    def solve(self, slope: Tensor, carried: Tensor, damping: float) -> Tensor:
        """The step; a DegenerateProblemError where H + μ isn't positive definite."""

    def factorised(self, damping: float) -> Any:
        """What `_factorise` makes of a damping, kept for the next slope."""
        if self._kept is None or self._kept[0] != damping:
            self._kept = (damping, self._factorise(damping))
        return self._kept[1]

    def _factorise(self, damping: float) -> Any:
        raise NotImplementedError


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
        scales = torch.stack([w.blocks[0, 0, 0] for w in self._W])
        same = bool((scales == scales[0]).all()) and all(w.blocks.shape[1:] == (1, 1) for w in self._W)
        self._multiple = same and all(bool((w.blocks == scales[0]).all()) for w in self._W)
        self._system = self._weigh(self._J @ self._J.T)

    def product(self, step: Tensor) -> Tensor:
        return self._J.T @ self._weigh(self.push(step)) + self.point.diagonal * step

    def push(self, step: Tensor) -> Tensor:
        return self._J @ step

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
    def __init__(self, point: Point, chunk: int, room: int) -> None:
        super().__init__(point)
        self._J: Tensor | None = None
        """Where there is room for all of it."""
        like = point.gradient_vector
        if point.flat_terms:
            self._H = self._squared(point, chunk, room)
        else:
            point.product(like)  # looks at the derivatives once, without vmap
            units = torch.eye(len(like), dtype=like.dtype, device=like.device)
            self._H = apply_to_each(point.product, units, point.products_at_once(room))
            self._H.diagonal().sub_(point.diagonal)
        check_finite(self._H, "the Hessian of the divergence")
        self._H.diagonal().add_(point.diagonal)

    def _squared(self, point: Point, chunk: int, room: int) -> Tensor:
        """JᵀWJ, some rows of J at a time."""
        rows, weights = point.rows(room), point.weights()
        starts = [0]
        for w in weights:
            starts.append(starts[-1] + w.shape[0])
        aligned = all(
            w.blocks.shape[1] == 1 or w.blocks.shape[1] <= value.numel() // len(value)
            for w, value in zip(weights, point.values, strict=True)
        )
        total = torch.zeros(
            rows.width, rows.width, dtype=point.gradient_vector.dtype, device=point.gradient_vector.device
        )
        parts: list[Tensor] = []
        for start, part in rows.chunks(chunk if aligned else rows.count):
            index = next(i for i in range(len(weights)) if starts[i] <= start < starts[i + 1])
            size = weights[index].blocks.shape[1]
            first = (start - starts[index]) // size
            blocks = BlockDiagonal(weights[index].blocks[first : first + len(part) // size])
            total += part.T @ blocks.apply(part)
            parts.append(part)
            if 2 * rows.count > chunk:
                parts.clear()
        self._J = torch.cat(parts) if parts else None
        return total

    def product(self, step: Tensor) -> Tensor:
        return self._H @ step

    def push(self, step: Tensor) -> Tensor:
        return super().push(step) if self._J is None else self._J @ step

    def solve(self, slope: Tensor, carried: Tensor, damping: float) -> Tensor:
        known = slope is self.point.slope
        gradient = self.point.pull_slope(slope) if known or self._J is None else self._J.T @ slope
        gradient = gradient + self._H @ carried
        return carried - torch.cholesky_solve(gradient[:, None], self.factorised(damping))[:, 0]

    def _factorise(self, damping: float) -> Any:
        matrix = self._H.clone()
        matrix.diagonal().add_(damping)
        return _cholesky(matrix)


MOST_PRODUCTS = 1000


class Conjugate(System):
    """Conjugate gradients from the last step on, preconditioned by U: for each weight the damped inverses of the second moments
    of its inputs and of its drawn gradients, as in LLQR; for other parameters one number, from the mean of the squares."""

    def __init__(self, point: Point, start: Tensor, tolerance: float) -> None:
        super().__init__(point)
        self._last, self._tolerance = start, tolerance
        self._moments, gradient = point.moments()
        self._squares = [float(each.square().mean()) for each in point.named(gradient).values()]

    def solve(self, slope: Tensor, carried: Tensor, damping: float) -> Tensor:
        gradient = self.point.pull_slope(slope) - damping * carried
        own = slope is self.point.slope
        start = self._last if own else torch.zeros_like(self._last)
        begun = gradient + self.product(start) + damping * start
        tolerance = self._tolerance * float(gradient.norm() / begun.norm()) if begun.any() else 1.0
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
        riccati, pushed = self.factorised(damping), self.point.named(self.product(carried))
        self._lqr.terminal_gradient = slope[: len(self._lqr.terminal_gradient)]  # there are none at the other places
        for stage in self._lqr.stages:
            stage.param_gradient = stage.stack(pushed)
        pairs = zip(self._lqr.stages, riccati.solve().controls, strict=True)
        return carried + self.point.flat({n: part for stage, c in pairs for n, part in stage.unstack(c).items()})

    def _factorise(self, damping: float) -> Riccati:
        for stage, diagonal in zip(self._lqr.stages, self._diagonals, strict=True):
            stage.diagonal = diagonal + damping
        return Riccati(self._lqr)


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
