"""g, H and J of what a closure returns, at θ_k, and J row by row at the price of a few backward passes.

Where row e of an output depends on example e alone, one backward pass from the sum over all examples gives every example's own
gradients: a weight that acts as y = W x in a product node has ∂(row e)/∂W = Σ b aᵀ over the places where it meets example e,
with a the inputs of the node and b the gradients at its output, in a forward pass or in the derivatives that a residual takes
of it. That is measured: with random weights c the rows have to add up to Jᵀc, group by group. Parameters for which they don't
(used otherwise, or examples that depend on each other) get their columns by products, or these rows, whichever are fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from llqr.checks import check_finite
from llqr.curvature.chunks import Piece
from llqr.curvature.engine import JacobianProducts
from llqr.curvature.graph import graph_nodes, graph_numbers
from llqr.curvature.recorded_chunk import ChunkContext, RecordedChunk
from llqr.curvature.recorder import Parameters
from llqr.curvature.replacements import plain_rules
from llqr.divergences import GaussNewton, OutputTerm
from llqr.errors import LLQRError
from llqr.exact.matrices import BlockDiagonal, apply_to_units, joined, materialise_transposed, unflat

Move = Callable[[Tensor], Tensor]


class Group(NamedTuple):
    """Numbers of the output that belong together: from `start` on, `columns` for each of some examples."""

    start: int
    examples: int
    columns: int


class _Use(NamedTuple):
    """A node in which a parameter acts: a linear map of inputs, or a bias that is added (no inputs)."""

    parameter: int
    outputs_first: bool
    """The parameter is m × k with k inputs and m outputs, not k × m."""
    node: Any
    inputs: Callable[[], Tensor] | None
    """(R, k), at R places in the order of the examples; made when they are asked for."""
    gradients: Move
    """From the gradient at the node's output to (R, m)."""


Sides = dict[tuple[int, bool], tuple[Tensor, Tensor]]
"""By parameter and orientation: inputs (examples, T, k) and gradients (columns, examples, T, m) of all uses."""


class MethodError(LLQRError):
    """A way to the step that can't be taken here, or not in the memory that it may take."""


class Rows:
    """J, with the outputs in one vector and the parameters in one vector. `push` is v ↦ Jv. There is room for so many numbers
    beside the rows that are asked for and the graph; `held` are those that are kept."""

    def __init__(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], groups: Sequence[Group], push: Move, room: int
    ) -> None:
        self._outputs, self._leaves, self._room, self.held = list(outputs), list(leaves), room, 0
        self._sizes = [leaf.numel() for leaf in leaves]
        self.count, self.width = sum(value.numel() for value in outputs), sum(self._sizes)
        uses = list(_uses(outputs, leaves))
        self._roots = self._parts(groups)
        self.groups = groups
        self._groups = [(group, self._sides(group, uses)) for group in groups]
        places = torch.split(torch.arange(self.width, device=leaves[0].device), self._sizes)
        self._starts = [int(place[0]) for place in places]
        wrong = [self._wrong(number) for number in range(len(groups))]
        self._rest = [torch.cat([places[0][:0], *(places[i] for i in each)]) for each in wrong]
        """For each group, the numbers whose columns come by products."""
        self._hold(sum(g.examples * g.columns * len(rest) for g, rest in zip(groups, self._rest, strict=True)))
        left = self._room - self.held
        self._at_once = max(1, left // (3 * graph_numbers(outputs)))  # a push is a backward pass of a backward pass
        self._others = [self._by_products(number, push) for number in range(len(groups))]

    def chunks(self, most: int) -> Iterator[tuple[int, Tensor]]:
        """J, about so many rows at a time (at least those of one example), each with the number of its first row."""
        for number, (group, _) in enumerate(self._groups):
            examples = max(1, most // group.columns)
            for first in range(0, group.examples, examples):
                count = min(examples, group.examples - first)
                rows = self._leaves[0].new_zeros(count * group.columns, self.width)
                self._fill(rows, number, first)
                yield group.start + first * group.columns, rows

    def whole(self) -> Tensor:
        """J, count × width."""
        rows = self._leaves[0].new_zeros(self.count, self.width)
        for number, (group, _) in enumerate(self._groups):
            self._fill(rows[group.start :][: group.examples * group.columns], number, 0)
        return rows

    def _fill(self, rows: Tensor, number: int, first: int) -> None:
        """The rows of a group from one example on."""
        (group, sides), rest = self._groups[number], self._rest[number]
        last = first + len(rows) // group.columns
        for (parameter, outputs_first), (a, b) in sides.items():
            form = "etk,cetm->ecmk" if outputs_first else "etk,cetm->eckm"
            made = torch.einsum(form, a[first:last], b[:, first:last]).reshape(len(rows), -1)
            rows[:, self._starts[parameter] :][:, : self._sizes[parameter]] += made
        if len(rest):
            rows[:, rest] = self._others[number][first * group.columns :][: len(rows)]

    def _hold(self, numbers: int) -> None:
        self.held += numbers
        if self.held > self._room:
            raise MethodError(
                f"beside its rows the Jacobian takes {self.held:,} numbers, for inputs and gradients of its linear maps "
                "(patches of convolutions) and for the columns of other parameters, and there is room for "
                f"{max(self._room, 0):,}: allow more memory, or write method='cg'"
            )

    def _pull(self, cotangent: Tensor, wanted: Sequence[Any]) -> tuple[Tensor | None, ...]:
        parts = torch.split(cotangent, [value.numel() for value in self._outputs])
        shaped = [part.reshape(value.shape) for part, value in zip(parts, self._outputs, strict=True)]
        return torch.autograd.grad(self._outputs, wanted, shaped, retain_graph=True, allow_unused=True)

    def _gradient(self, number: int, cotangent: Tensor) -> Tensor:
        """Jᵀc, of the rows of one group."""
        group, root = self._groups[number][0], self._roots[number]
        if root is None:
            ends = (group.start, self.count - group.start - len(cotangent))
            pulled = self._pull(functional.pad(cotangent, ends), self._leaves)
        else:
            shaped = cotangent.reshape(-1, 1)
            pulled = torch.autograd.grad([root], self._leaves, [shaped], retain_graph=True, allow_unused=True)
        pairs = zip(self._leaves, pulled, strict=True)
        return joined(torch.zeros_like(leaf) if row is None else row for leaf, row in pairs)

    def _parts(self, groups: Sequence[Group]) -> list[GradientEdge | None]:
        """Where each group comes into the first output, if it is put together from them, each in one column: a backward pass
        from there meets nothing of the others."""
        node: Any = self._outputs[0].grad_fn
        edges = node.next_functions if node.name() == "CatBackward0" else ()
        shapes = [None if node is None else tuple(node._input_metadata[which].shape) for node, which in edges]
        if shapes != [(group.examples * group.columns, 1) for group in groups]:
            return [None] * len(groups)
        return [GradientEdge(*edge) for edge in edges]

    def _sides(self, group: Group, uses: list[_Use]) -> Sides:
        edges = [GradientEdge(use.node, 0) for use in uses]
        pulled: list[list[Tensor]] = [[] for _ in uses]
        for column in range(group.columns if uses else 0):
            cotangent = self._outputs[0].detach().new_zeros(self.count)
            cotangent[group.start + column :: group.columns][: group.examples] = 1
            for gradients, use, gradient in zip(pulled, uses, self._pull(cotangent, edges), strict=True):
                if gradient is None:
                    continue
                gradients.append(use.gradients(gradient))
                if column == 0:  # twice, for the copies that are made on the way
                    inputs = self._sizes[use.parameter] // gradients[0].shape[1] * len(gradients[0])
                    self._hold(2 * (group.columns * gradient.numel() + inputs))
        sides: Sides = {}
        for use, gradients in zip(uses, pulled, strict=True):
            if len(gradients) < group.columns or len(gradients[0]) % group.examples:
                continue  # of another group; or the rows won't add up
            b = torch.stack(gradients).reshape(group.columns, group.examples, -1, gradients[0].shape[-1])
            gradients.clear()
            a = b.new_ones(*b.shape[1:3], 1) if use.inputs is None else use.inputs().reshape(*b.shape[1:3], -1)
            key = (use.parameter, use.outputs_first)
            known = sides.get(key)
            sides[key] = (a, b) if known is None else (torch.cat((known[0], a), 1), torch.cat((known[1], b), 2))
        return sides

    def _wrong(self, number: int) -> list[int]:
        """The parameters whose rows of a group don't add up."""
        group, sides = self._groups[number]
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(group.examples, group.columns, generator=generator, dtype=torch.float64)
        weights = drawn.to(self._outputs[0])
        found = [torch.zeros_like(leaf) for leaf in self._leaves]
        for (parameter, outputs_first), (a, b) in sides.items():
            made = torch.einsum("ec,cetm->etm", weights, b).flatten(0, 1).T @ a.flatten(0, 1)
            found[parameter] += (made if outputs_first else made.T).reshape(found[parameter].shape)
        rounding = torch.finfo(weights.dtype).eps ** 0.5
        pairs = zip(torch.split(self._gradient(number, weights.reshape(-1)), self._sizes), found, strict=True)
        return [i for i, (e, f) in enumerate(pairs) if not bool((e - f.reshape(-1)).norm() <= rounding * e.norm())]

    def _by_products(self, number: int, push: Move) -> Tensor:
        """What the rows of a group have in the columns of its rest."""
        group, rest = self._groups[number][0], self._rest[number]
        count, zeros = group.examples * group.columns, self._leaves[0].detach().new_zeros(self.width)
        if not len(rest):
            return zeros.new_zeros(count, 0)
        if len(rest) >= count:
            like = zeros.new_empty(count)
            return apply_to_units(lambda c: self._gradient(number, c)[rest], like, self._at_once)
        push(zeros)  # the first product looks at J, which it can't under vmap

        def column(unit: Tensor) -> Tensor:
            return push(zeros.index_copy(0, rest, unit))[group.start : group.start + count]

        return apply_to_units(column, zeros[: len(rest)], self._at_once).T


def _uses(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Iterator[_Use]:
    """The products, convolutions and sums behind the outputs in which a parameter acts as it is, or transposed."""
    numbers = {id(leaf): i for i, leaf in enumerate(leaves)}

    def parameter(edge: tuple[Any, int]) -> tuple[int, bool] | None:
        """Which one, and whether it comes transposed."""
        node, transposed = edge[0], False
        while node is not None and node.name() in ("TBackward0", "AliasBackward0"):
            transposed ^= node.name() == "TBackward0"
            node = node.next_functions[0][0]
        number = numbers.get(id(getattr(node, "variable", None)))
        return None if number is None else (number, transposed)

    def as_rows(gradient: Tensor) -> Tensor:
        return gradient.reshape(-1, gradient.shape[-1])

    def held(node: Any, saved: str) -> Callable[[], Tensor]:
        return lambda: getattr(node, saved).detach()

    for node in graph_nodes(outputs):
        name, edges = node.name(), node.next_functions
        if name in ("AddmmBackward0", "MmBackward0"):
            if name == "AddmmBackward0":
                if node._saved_alpha != 1 or node._saved_beta != 1:
                    continue
                bias = parameter(edges[0])
                if bias is not None and leaves[bias[0]].dim() == 1:
                    yield _Use(bias[0], True, node, None, as_rows)
            saved = "_saved_mat1" if name == "AddmmBackward0" else "_saved_self"
            first, second = parameter(edges[-2]), parameter(edges[-1])
            if second is not None and first is None:  # x W
                yield _Use(second[0], second[1], node, held(node, saved), as_rows)
            elif first is not None and second is None:  # W x, examples along the columns
                right = held(node, "_saved_mat2")
                yield _Use(first[0], not first[1], node, lambda right=right: right().T, lambda g: g.T)  # type: ignore[misc]
        elif name == "AddBackward0" and node._saved_alpha == 1:
            for edge in edges:
                bias, width = parameter(edge), node._input_metadata[0].shape[-1:]
                if bias is not None and leaves[bias[0]].shape == width:
                    yield _Use(bias[0], True, node, None, as_rows)
        elif name == "ConvolutionBackward0" and len(node._saved_stride) == 2 and node._saved_groups == 1:
            weight, bias = parameter(edges[1]), parameter(edges[2])
            if weight is None or weight[1] or node._saved_transposed:
                continue

            def patches(node: Any = node, kernel: tuple[int, ...] = tuple(leaves[weight[0]].shape[2:])) -> Tensor:
                how = (node._saved_dilation, node._saved_padding, node._saved_stride)
                return functional.unfold(node._saved_input.detach(), kernel, *how).mT.flatten(0, 1)

            yield _Use(weight[0], True, node, patches, _channels_last)
            if bias is not None:
                yield _Use(bias[0], True, node, None, _channels_last)


def _channels_last(gradient: Tensor) -> Tensor:
    return gradient.flatten(2).mT.flatten(0, 1)


def squares(output: Tensor, targets: object) -> Tensor:
    """The loss of residuals."""
    return output.square().sum()


Groups = Sequence[tuple[int, int]]
"""(examples, columns) of the numbers of the output, in order."""


class _Plain(JacobianProducts):
    """A forward pass recorded by plain operations, whose nodes tell where parameters act."""

    def _rules(self) -> type[plain_rules]:
        return plain_rules

    def rows(self, groups: Sequence[Group], push: Callable[[Tensor], Tensor], room: int) -> Rows:
        return Rows(self._outputs, self._leaves, groups, push, room)

    def second_moments(self, slopes: list[Tensor], room: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Of both sides of every linear map in a backward pass from these slopes, by its number: of the weight's first
        dimension and of its second. Summed over the places on the side of the gradients, averaged on that of the inputs, so
        that their Kronecker product is of the size of H. Weights whose moments there is no room for are left out."""
        uses = list(_uses(self._outputs, self._leaves))
        edges = [GradientEdge(use.node, 0) for use in uses]
        pulled = torch.autograd.grad(self._outputs, edges, slopes, retain_graph=True, allow_unused=True) if uses else ()
        found: dict[int, tuple[Tensor, Tensor]] = {}
        left_out = set()
        for use, gradient in zip(uses, pulled, strict=True):
            if gradient is None:
                continue
            b = use.gradients(gradient)
            width = self._leaves[use.parameter].numel() // b.shape[1]
            needed = 4 * (width**2 + b.shape[1] ** 2)  # the moments, their inverses, and what those take
            if needed + len(b) * width > room or use.parameter in left_out:
                left_out.add(use.parameter)
                continue
            a = b.new_ones(len(b), 1) if use.inputs is None else use.inputs()
            pair = (b.T @ b, a.T @ a / len(a)) if use.outputs_first else (a.T @ a / len(a), b.T @ b)
            known = found.get(use.parameter)
            room -= 0 if known else needed
            found[use.parameter] = (known[0] + pair[0], known[1] + pair[1]) if known else pair
        return {parameter: pair for parameter, pair in found.items() if parameter not in left_out}


class Point(RecordedChunk):
    """g and H of a closure at θ_k, in flat vectors."""

    def __init__(
        self, context: ChunkContext, piece: Piece, diagonal: dict[str, float], groups: Groups, by_products: bool
    ) -> None:
        # rules make products quicker, and hide where parameters act
        super().__init__(context, piece, JacobianProducts if by_products else _Plain)
        self._shapes = {name: p.shape for name, p in context.parameters.items()}
        self._groups = groups
        self.gradient_vector = self.flat(self.gradient())
        check_finite(self.gradient_vector, "the gradient")
        like = self.gradient_vector
        self.diagonal = torch.cat([torch.full_like(like[: s.numel()], diagonal[n]) for n, s in self._shapes.items()])
        """What L2 terms put on H's diagonal."""
        self.uniform = float(self.diagonal[0]) if bool((self.diagonal == self.diagonal[0]).all()) else None
        if not like.any() and not self.run.depends():
            raise LLQRError(
                "what the closure returned doesn't depend on the parameters of the model that Exact was given: is it computed "
                "with another model, or with a copy?"
            )
        self.values = self.run.values
        self.rows_of_output = sum(value.numel() for value in self.values)
        self.largest = max(shape.numel() for shape in self._shapes.values())
        assert self.loss_slope is not None
        self.slope = joined([self.loss_slope, *(torch.zeros_like(value) for value in self.values[1:])])

    def flat(self, named: Parameters) -> Tensor:
        return joined(named[name] for name in self._shapes)

    def named(self, vector: Tensor) -> Parameters:
        return unflat(vector, self._shapes)

    def product(self, vector: Tensor) -> Tensor:
        """H v."""
        return self.flat(self.curvature(self.named(vector))) + self.diagonal * vector

    def push_vector(self, vector: Tensor) -> Tensor:
        """J v."""
        return joined(self.push(list(self.named(vector).values())))

    def pull_slope(self, slope: Tensor) -> Tensor:
        """Jᵀs, of a slope at the output."""
        if slope is self.slope:
            return self.gradient_vector
        return joined(self.run.pull(self._shaped(slope)))

    def _shaped(self, vector: Tensor) -> list[Tensor]:
        parts = torch.split(vector, [value.numel() for value in self.values])
        return [part.reshape(value.shape) for part, value in zip(parts, self.values, strict=True)]

    def rows(self, room: int) -> Rows:
        groups, start = [], 0
        for examples, columns in [*self._groups, *(_shape(value, self._piece.count) for value in self.values[1:])]:
            groups.append(Group(start, examples, columns))
            start += examples * columns
        return self._plain().rows(groups, self.push_vector, room)

    def products_at_once(self, room: int) -> int:
        """How many products with H there is room for."""
        return max(1, room // (6 * self.run.numbers()))

    def weights(self) -> list[BlockDiagonal]:
        """W, one block-diagonal matrix for each value."""
        if self._context.loss_fn is squares and [type(term) for _, term in self._context.terms] == [GaussNewton]:
            return [BlockDiagonal(torch.full_like(self.values[0], 2.0 * self._context.terms[0][0])[..., None])]
        found = []
        for index, value in enumerate(self.values):

            def weigh(tangent: Tensor, index: int = index) -> Tensor:
                total = torch.zeros_like(tangent)
                for factor, term in self._terms:
                    if self._context.index(term) == index:
                        total = total + factor * term.hessian_product(tangent, self.bases[index])
                return total

            found.append(materialise_transposed(weigh, value.shape, value.shape, value))
        return found

    def moments(self, room: int) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor]:
        """Second moments of both sides of each linear map, and the gradient, of a random slope whose second moment is W."""
        generator = torch.Generator(self.gradient_vector.device).manual_seed(0)
        total = [torch.zeros_like(value) for value in self.values]
        for factor, term in self._terms:
            if isinstance(term, OutputTerm):
                total[0] = total[0] + factor**0.5 * term.draw(self.bases[0], generator)
        plain = self._plain()
        return plain.second_moments(total, room), joined(plain.pull(total))

    def _plain(self) -> _Plain:
        if isinstance(self.run, _Plain):
            return self.run
        return _Plain(self._context.recorder, self._context.parameters, self._piece.inputs)


def _shape(value: Tensor, examples: int) -> tuple[int, int]:
    whole = value.numel() % examples == 0
    return (examples, value.numel() // examples) if whole else (1, value.numel())
