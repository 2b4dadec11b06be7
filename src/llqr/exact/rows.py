"""The Jacobian of recorded outputs, row by row, at the price of a few backward passes.

Where row e of an output depends on example e alone, one backward pass from the sum over all examples gives every example's own
gradients: a weight that acts as y = W x in a product node has ∂(row e)/∂W = Σ b aᵀ over the places where it meets example e,
with a the inputs of the node and b the gradients at its output. That holds for every use of W that autograd has recorded, in a
forward pass or in the derivatives that a residual takes of it. Whether it holds is measured, not assumed: with random weights c
the rows have to add up to Jᵀc, group by group. Parameters for which they don't (used otherwise, or examples that depend on each
other) get their part of these rows of J by products, column by column or row by row, whichever are fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from llqr.errors import LLQRError
from llqr.exact.derivatives import apply_to_each, graph_nodes, graph_numbers

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
    inputs: Tensor | None
    """(R, k), at R places in the order of the examples."""
    gradients: Move
    """From the gradient at the node's output to (R, m)."""


Sides = dict[tuple[int, bool], tuple[Tensor, Tensor]]
"""By parameter and orientation: inputs (examples, T, k) and gradients (columns, examples, T, m) of all uses."""


class RoomError(LLQRError):
    """A Jacobian that takes more memory than it may."""


class Rows:
    """J, with the outputs in one vector and the parameters in one vector. `push` is v ↦ Jv. There is room for so many numbers
    beside the rows that are asked for and the graph."""

    def __init__(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], groups: Sequence[Group], push: Move, room: int
    ) -> None:
        self._outputs, self._leaves = list(outputs), list(leaves)
        self._sizes = [leaf.numel() for leaf in leaves]
        self.count, self.width = sum(value.numel() for value in outputs), sum(self._sizes)
        uses = list(_uses(outputs, leaves))
        self._at_once = max(1, room // (3 * graph_numbers(outputs)))  # a push is a backward pass of a backward pass
        self._roots = self._parts(groups)
        self._groups = [(group, self._sides(group, uses)) for group in groups]
        places = torch.split(torch.arange(self.width, device=leaves[0].device), self._sizes)
        self._starts = [int(place[0]) for place in places]
        self._rest = [torch.cat([places[0][:0], *(places[i] for i in self._wrong(*each))]) for each in self._groups]
        """For each group, the numbers whose columns come by products."""
        kept = sum(group.examples * group.columns * len(rest) for group, rest in zip(groups, self._rest, strict=True))
        if kept > room:
            raise RoomError(
                f"examples depend on each other, or parameters act in other ways than as linear maps, and {kept:,} numbers of "
                f"the Jacobian would be kept where there is room for {room:,}: allow more memory, or write method='cg'"
            )
        self._others = [self._by_products(number, push) for number in range(len(groups))]

    def chunks(self, most: int) -> Iterator[tuple[int, Tensor]]:
        """J, about so many rows at a time (at least those of one example), each with the number of its first row."""
        for (group, sides), rest, others in zip(self._groups, self._rest, self._others, strict=True):
            examples = max(1, most // group.columns)
            for first in range(0, group.examples, examples):
                last = min(first + examples, group.examples)
                rows = others.new_zeros((last - first) * group.columns, self.width)
                for (parameter, outputs_first), (a, b) in sides.items():
                    form = "etk,cetm->ecmk" if outputs_first else "etk,cetm->eckm"
                    made = torch.einsum(form, a[first:last], b[:, first:last]).reshape(len(rows), -1)
                    rows[:, self._starts[parameter] :][:, : self._sizes[parameter]] += made
                start = first * group.columns
                if len(rest):
                    rows[:, rest] = others[start : start + len(rows)]
                yield group.start + start, rows

    def whole(self) -> Tensor:
        """J, count × width."""
        return torch.cat([rows for _, rows in self.chunks(self.count)])

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
        return torch.cat([(torch.zeros_like(leaf) if row is None else row).reshape(-1) for leaf, row in pairs])

    def _parts(self, groups: Sequence[Group]) -> list[GradientEdge | None]:
        """Where each group comes into the first output, if it is put together from them: a backward pass from there meets
        nothing of the others."""
        node: Any = self._outputs[0].grad_fn
        edges = node.next_functions if node.name() == "CatBackward0" else ()
        if len(edges) != len(groups) or any(node is None for node, _ in edges):
            return [None] * len(groups)
        return [GradientEdge(*edge) for edge in edges]

    def _sides(self, group: Group, uses: list[_Use]) -> Sides:
        edges = [GradientEdge(use.node, 0) for use in uses]
        pulled: list[list[Tensor]] = [[] for _ in uses]
        for column in range(group.columns if uses else 0):
            cotangent = torch.zeros(self.count, dtype=self._outputs[0].dtype, device=self._outputs[0].device)
            cotangent[group.start + column :: group.columns][: group.examples] = 1
            for gradients, use, gradient in zip(pulled, uses, self._pull(cotangent, edges), strict=True):
                if gradient is not None:
                    gradients.append(use.gradients(gradient))
        sides: Sides = {}
        for use, gradients in zip(uses, pulled, strict=True):
            if len(gradients) < group.columns or len(gradients[0]) % group.examples:
                continue  # of another group; or the rows won't add up
            b = torch.stack(gradients).reshape(group.columns, group.examples, -1, gradients[0].shape[-1])
            a = b.new_ones(*b.shape[1:3], 1) if use.inputs is None else use.inputs.reshape(*b.shape[1:3], -1)
            key = (use.parameter, use.outputs_first)
            known = sides.get(key)
            sides[key] = (a, b) if known is None else (torch.cat((known[0], a), 1), torch.cat((known[1], b), 2))
        return sides

    def _wrong(self, group: Group, sides: Sides) -> list[int]:
        """The parameters whose rows don't add up."""
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(group.examples, group.columns, generator=generator, dtype=torch.float64)
        weights = weights.to(self._outputs[0])
        found = [torch.zeros_like(leaf) for leaf in self._leaves]
        for (parameter, outputs_first), (a, b) in sides.items():
            made = torch.einsum("ec,cetm->etm", weights, b).flatten(0, 1).T @ a.flatten(0, 1)
            found[parameter] += (made if outputs_first else made.T).reshape(found[parameter].shape)
        rounding = torch.finfo(weights.dtype).eps ** 0.5
        number = next(i for i, (other, _) in enumerate(self._groups) if other is group)
        pairs = zip(torch.split(self._gradient(number, weights.reshape(-1)), self._sizes), found, strict=True)
        return [i for i, (e, f) in enumerate(pairs) if not bool((e - f.reshape(-1)).norm() <= rounding * e.norm())]

    def _by_products(self, number: int, push: Move) -> Tensor:
        """What the rows of a group have in the columns of its rest."""
        group, rest = self._groups[number][0], self._rest[number]
        count = group.examples * group.columns
        units = torch.eye(min(len(rest), count), dtype=self._leaves[0].dtype, device=rest.device)
        if not len(rest):
            return units.new_zeros(count, 0)
        if len(rest) >= count:
            return apply_to_each(lambda c: self._gradient(number, c)[rest], units, self._at_once)
        zeros = units.new_zeros(self.width)
        push(zeros)  # the first product looks at J, which it can't under vmap

        def column(unit: Tensor) -> Tensor:
            return push(zeros.index_copy(0, rest, unit))[group.start : group.start + count]

        return apply_to_each(column, units, self._at_once).T


def second_moments(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], slopes: Sequence[Tensor]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Of both sides of every linear map in a backward pass from these slopes, by its number: of the weight's first dimension
    and of its second. Summed over the places on the side of the gradients, averaged on that of the inputs, so that their
    Kronecker product is of the size of H."""
    uses = list(_uses(outputs, leaves))
    edges = [GradientEdge(use.node, 0) for use in uses]
    pulled = torch.autograd.grad(outputs, edges, slopes, retain_graph=True, allow_unused=True) if uses else ()
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for use, gradient in zip(uses, pulled, strict=True):
        if gradient is None:
            continue
        b = use.gradients(gradient)
        a = b.new_ones(len(b), 1) if use.inputs is None else use.inputs
        pair = (b.T @ b, a.T @ a / len(a)) if use.outputs_first else (a.T @ a / len(a), b.T @ b)
        known = found.get(use.parameter)
        found[use.parameter] = pair if known is None else (known[0] + pair[0], known[1] + pair[1])
    return found


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

    for node in graph_nodes(outputs):
        name, edges = node.name(), node.next_functions
        if name in ("AddmmBackward0", "MmBackward0"):
            if name == "AddmmBackward0":
                if node._saved_alpha != 1 or node._saved_beta != 1:
                    continue
                bias = parameter(edges[0])
                if bias is not None and leaves[bias[0]].dim() == 1:
                    yield _Use(bias[0], True, node, None, as_rows)
            saved = ("_saved_mat1" if name == "AddmmBackward0" else "_saved_self", "_saved_mat2")
            first, second = parameter(edges[-2]), parameter(edges[-1])
            if second is not None and first is None:  # x W
                yield _Use(second[0], second[1], node, getattr(node, saved[0]).detach(), as_rows)
            elif first is not None and second is None:  # W x, examples along the columns
                yield _Use(first[0], not first[1], node, getattr(node, saved[1]).detach().T, lambda g: g.T)
        elif name == "AddBackward0" and node._saved_alpha == 1:
            for edge in edges:
                bias = parameter(edge)
                if (
                    bias is not None
                    and leaves[bias[0]].dim() == 1
                    and leaves[bias[0]].shape[0] == node._input_metadata[0].shape[-1]
                ):
                    yield _Use(bias[0], True, node, None, as_rows)
        elif name == "ConvolutionBackward0" and len(node._saved_stride) == 2 and node._saved_groups == 1:
            weight, bias = parameter(edges[1]), parameter(edges[2])
            if weight is None or weight[1] or node._saved_transposed:
                continue
            kernel = tuple(leaves[weight[0]].shape[2:])
            patches = functional.unfold(
                node._saved_input.detach(), kernel, node._saved_dilation, node._saved_padding, node._saved_stride
            )
            yield _Use(weight[0], True, node, patches.mT.flatten(0, 1), _channels_last)
            if bias is not None:
                yield _Use(bias[0], True, node, None, _channels_last)


def _channels_last(gradient: Tensor) -> Tensor:
    return gradient.flatten(2).mT.flatten(0, 1)
