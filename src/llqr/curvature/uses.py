"""Uses of linear maps in a network, found in the graph that autograd has recorded.

A matrix W acts somewhere as y = W x: in a linear layer, a convolution, an attention's projection, a plain `x @ W`. Its gradient
is a sum of b aᵀ over every place where it acts, with a the input there and b the gradient at the output. Both pass through the
backward pass of a product node (`AddmmBackward0`, `ConvolutionBackward0`, …), whichever Python code has called it; so the graph
of an output tells all uses of all weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from llqr.curvature.linear_maps import LinearMap
from llqr.curvature.statistics import Sides, matching_rows, patches

Edge = tuple[Node | None, int]

MOVES = (
    "Alias Clone Detach Expand NumpyT Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T ToCopy Transpose Unbind "
    "UnsafeSplit UnsafeView Unsqueeze View"
)
VIEWS = frozenset(f"{name}Backward{variant}" for name in MOVES.split() for variant in range(3))
"""Nodes that move the numbers of a weight, and don't change them."""

RESHAPES = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})

SAME_PLACES = frozenset({"ToCopyBackward0", "AliasBackward0", "CloneBackward0", "DetachBackward0"})
"""Those of them that leave every number where it is."""

OPAQUE = frozenset(
    {
        "CompiledFunctionBackward",
        "MkldnnRnnLayerBackward0",
        "CudnnRnnBackward0",
        "MiopenRnnBackward0",
        "CheckpointFunctionBackward",
    }
)
"""Nodes that stand for many, which can be looked into only if the model is run otherwise."""

SPARSE = 0.9
"""Data with at least this share of zeros, as bags of words and one-hot codes, are looked up as in an embedding: the base does
better by weights that few examples meet."""
SPARSE_DATA = "SparseData"
"""What such a use of a weight goes by, as others go by the names of their nodes."""

TRANSPOSING = frozenset({"TBackward0", "NumpyTBackward0"})


@dataclass(frozen=True)
class Use:
    """A node of the graph in which a linear map acts."""

    node: Node
    map: LinearMap
    sides: Callable[[Tensor], Sides]
    """From the gradient at the node's output. It holds the inputs, and not the node, whose hook it may be."""
    leaf: Node
    """Where the gradient of the weight is accumulated."""
    sparse: bool = False
    """The matrix meets data that are zeros for the most part."""

    def without_bias(self) -> Use:
        return replace(self, map=replace(self.map, bias=None))


@dataclass(frozen=True)
class Found:
    """What the graph of some outputs tells."""

    uses: list[Use]
    other_uses: dict[str, str]
    """Parameters that something else than a linear map uses, by the name of that node: their curvature isn't known."""
    hidden: bool
    """Some uses are in a node that can't be looked into."""
    has_parameters: bool
    """Some of the parameters are in the graph."""


def find_uses(outputs: Iterable[Tensor], names: Mapping[int, str], mark: object = None) -> Found:
    """Every use of the parameters of these names (by their ids) in what these outputs were computed from.

    With a mark, nodes that were found with it before are left out: calls of a model may go on from each other.
    """
    uses: list[Use] = []
    others: dict[str, str] = {}
    hidden, has_parameters = False, False
    nodes = list(_nodes(outputs, mark))
    with_bias = _with_added_bias(nodes, names)
    for node in nodes:
        kind = node.name()
        has_parameters = has_parameters or id(getattr(node, "variable", None)) in names
        hidden = hidden or kind in OPAQUE
        if kind in VIEWS:
            continue
        use = with_bias.get(node) or _read(node, names)
        if use is not None and use.node is node:
            uses.append(use)
        known = () if use is None else use.map.members
        for edge in node.next_functions:
            origin = _origin(edge, names)
            if origin is not None and origin.name not in known:
                others[origin.name] = kind
    dense = {use.map.weight for use in uses if not use.sparse}  # a recurrent layer starts at zeros
    for use in uses:
        if use.map.weight not in dense:
            others[use.map.weight] = SPARSE_DATA
    kept = [use for use in uses if use.map.weight not in others]
    for use in uses:
        if use.map.weight in others and use.map.bias is not None:
            others.setdefault(use.map.bias, others[use.map.weight])
    return Found(
        [use.without_bias() if use.map.bias in others else use for use in kept], others, hidden, has_parameters
    )


def _read(node: Any, names: Mapping[int, str]) -> Use | None:
    """The use that a node is of a linear map, if it is one whose inputs are there still."""
    read = READERS.get(node.name())
    try:
        return None if read is None else read(node, names)
    except RuntimeError:  # freed, or written over: its backward pass will say so, if it is ever asked for
        return None


def _with_added_bias(nodes: Sequence[Node], names: Mapping[int, str]) -> dict[Node, Use]:
    """x W + b as two nodes, as a linear layer has them for inputs that aren't contiguous: the use, for both of them."""
    heads = Counter(inner for node in nodes for inner, _ in node.next_functions if inner is not None)
    found: dict[Node, Use] = {}
    for node in nodes:
        if node.name() != "AddBackward0" or cast(Any, node)._saved_alpha != 1:
            continue
        for edge, other in zip(node.next_functions, node.next_functions[::-1], strict=True):
            product = edge[0]
            while product is not None and product.name() in RESHAPES and heads[product] == 1:
                product = product.next_functions[0][0]
            if product is None or product.name() != "MmBackward0" or heads[product] > 1:
                continue
            use = _read(product, names)
            second = _origin(product.next_functions[1], names)
            if use is not None and second is not None and use.map.places is None and use.map.shape[0] == 1:
                _, r, c = use.map.shape
                size = c if use.map.inputs_on_rows else r
                bias = _bias(other, names, size)
                if bias is not None and cast(Any, edge[0])._input_metadata[edge[1]].shape[-1] == size:
                    found[node] = found[product] = replace(use, map=replace(use.map, bias=bias))
    return found


MARK = "llqr"


def _nodes(outputs: Iterable[Tensor], mark: object) -> Iterator[Node]:
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if mark is not None:
            notes: dict[str, object] = cast(Any, node).metadata
            if notes.get(MARK) is mark:
                continue
            notes[MARK] = mark
        yield node
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                waiting.append(inner)


# --- products of matrices ---


def _addmm(node: Any, names: Mapping[int, str]) -> Use | None:
    bias, first, second = node.next_functions
    if node._saved_alpha != 1:
        return None
    shapes = [tuple(node._saved_mat1_sym_sizes), tuple(node._saved_mat2_sym_sizes)]
    return _product(node, names, first, second, shapes, ("mat1", "mat2"), bias if node._saved_beta == 1 else None)


def _mm(node: Any, names: Mapping[int, str]) -> Use | None:
    first, second = node.next_functions
    shapes = [tuple(node._saved_self_sym_sizes), tuple(node._saved_mat2_sym_sizes)]
    return _product(node, names, first, second, shapes, ("self", "mat2"))


def _bmm(node: Any, names: Mapping[int, str]) -> Use | None:
    first, second = node.next_functions[-2:]
    saved = ("self", "mat2") if node.name() == "BmmBackward0" else ("batch1", "batch2")
    batch, t, n = node._input_metadata[0].shape
    operands = [getattr(node, f"_saved_{name}") for name in saved]
    inner = next((o.shape[2 - i] for i, o in enumerate(operands) if o is not None), None)
    if inner is None:
        return None
    return _product(node, names, first, second, [(batch, t, inner), (batch, inner, n)], saved)


def _linear(node: Any, names: Mapping[int, str]) -> Use | None:
    """`aten::linear` as one node, which some back ends have."""
    inputs, weight, bias = node.next_functions
    origin = _origin(weight, names)
    if origin is None or not origin.in_place:
        return None
    map_ = LinearMap(
        origin.name, (1, *origin.shape), bias=_bias(bias, names, origin.shape[0]), reads_data=_is_data(inputs, names)
    )

    x = node._saved_input

    def sides(gradient: Tensor) -> Sides:
        return matching_rows(gradient.flatten(0, -2)[None], x.detach().flatten(0, -2)[None])

    return Use(node, map_, sides, origin.leaf, _is_sparse(map_, x))


def _product(
    node: Any,
    names: Mapping[int, str],
    first: Edge,
    second: Edge,
    shapes: Sequence[tuple[int, ...]],
    saved: tuple[str, str],
    bias: Edge | None = None,
) -> Use | None:
    """y = x W or y = W x; one of the two is a weight."""
    origins = [_origin(first, names), _origin(second, names)]
    which = 0 if origins[1] is None else 1
    origin, shape = origins[which], shapes[which]
    if origin is None or origins[1 - which] is not None:
        return None
    map_ = origin.matrix(shape, which == 1)
    if map_ is None:
        return None
    map_ = replace(map_, reads_data=_is_data((first, second)[1 - which], names))
    if bias is not None and which == 1:
        outputs = map_.shape[2] if map_.inputs_on_rows else map_.shape[1]
        name = _bias(bias, names, outputs) if map_.places is None and map_.shape[0] == 1 else None
        map_ = replace(map_, bias=name)
    saved_inputs, groups, inputs_on_rows = (
        getattr(node, f"_saved_{saved[1 - which]}"),
        map_.shape[0],
        map_.inputs_on_rows,
    )

    def sides(gradient: Tensor) -> Sides:
        x, y = (t if which == 1 else t.mT for t in (saved_inputs.detach(), gradient))
        # (batch, T, n), the groups' matrices in turn along the batch
        batch = (x.shape[0] if x.dim() == 3 else 1) // groups
        x, y = (t.reshape(batch, groups, *t.shape[-2:]).transpose(0, 1).flatten(1, 2) for t in (x, y))
        return matching_rows(x, y) if inputs_on_rows else matching_rows(y, x)

    return Use(node, map_, sides, origin.leaf, _is_sparse(map_, saved_inputs))


def _is_sparse(map_: LinearMap, inputs: Tensor | None) -> bool:
    """Whether the inputs, where they are data, are zeros for the most part."""
    if not map_.reads_data or inputs is None or not inputs.numel():
        return False
    return int(inputs.count_nonzero()) <= (1 - SPARSE) * inputs.numel()


@dataclass(frozen=True)
class _Origin:
    """The parameter that an operand comes from, and the nodes on the way."""

    name: str
    shape: torch.Size
    chain: tuple[tuple[Any, int], ...]
    leaf: Node

    @property
    def moves(self) -> list[str]:
        return [node.name() for node, _ in self.chain if node.name() not in SAME_PLACES]

    @property
    def in_place(self) -> bool:
        return not self.moves

    def matrix(self, operand: tuple[int, ...], is_second: bool) -> LinearMap | None:
        """The map of a product whose first (y = W x) or second (y = x W) operand this is."""
        if len(self.shape) == 2 and len(operand) == 2 and (self.in_place or self._is_transposed):
            return LinearMap(self.name, (1, *self.shape), inputs_on_rows=is_second == self.in_place)
        r, c = operand[-2:]
        batch = operand[0] if len(operand) == 3 else 1
        g = batch
        if any(
            map(_expands, self.chain)
        ):  # the same matrices in turn along the batch: all of the parameter, or one of it
            g = self.shape.numel() // (r * c)
            g = g if 0 < g < batch and batch % g == 0 else 1
        places = self._places(operand, 0, g)
        if places is None or (g < batch and not _same(places, self._places(operand, batch - g, g))):
            return None
        in_order = torch.arange(self.shape.numel())
        if torch.equal(places.flatten(), in_order):
            return LinearMap(self.name, (g, r, c), is_second)
        if torch.equal(places.mT.flatten(), in_order):
            return LinearMap(self.name, (g, c, r), not is_second)
        return LinearMap(self.name, (g, r, c), is_second, places=places, first=int(places.min()))

    @property
    def _is_transposed(self) -> bool:
        """Of a matrix: by one node."""
        moved = [node for node, _ in self.chain if node.name() not in SAME_PLACES]
        return len(moved) == 1 and _transposes(moved[0])

    def _places(self, operand: tuple[int, ...], start: int, g: int) -> Tensor | None:
        """Where in the parameter g matrices of the operand come from: their numbers, sent back along the chain."""
        shape = (g, *operand[-2:])
        count = math.prod(shape)
        numbers = torch.zeros(operand, dtype=torch.float64)
        numbers.view(-1, *operand[-2:])[start : start + g] = torch.arange(1, count + 1).reshape(shape)
        value: Any = numbers
        try:
            for node, output in self.chain:
                if node.name() == "ToCopyBackward0":
                    continue
                arguments = [None] * len(node._input_metadata)
                arguments[output] = value
                value = node(*arguments)
        except RuntimeError:
            return None
        found = value.reshape(-1).long()
        positions = found.nonzero()[:, 0]
        numbers = found[positions] - 1
        if len(numbers) != count or int(numbers.max()) >= count:  # some were added up
            return None
        places = torch.full((count,), -1)
        places[numbers] = positions
        return None if bool((places < 0).any()) else places.reshape(shape)


def _expands(link: tuple[Any, int]) -> bool:
    """Whether a node repeats its numbers; a product expands its operands also where there is nothing to repeat."""
    node, _ = link
    if node.name() != "ExpandBackward0":
        return False
    return bool(math.prod(node._saved_self_sym_sizes) != math.prod(node._input_metadata[0].shape))


def _transposes(node: Any) -> bool:
    """Whether a node turns a matrix around."""
    if node.name() == "TransposeBackward0":
        return bool((node._saved_dim0 - node._saved_dim1) % 2)
    if node.name() == "PermuteBackward0":
        return bool(node._saved_dims[0] % 2)
    return node.name() in TRANSPOSING


def _same(first: Tensor, second: Tensor | None) -> bool:
    return second is not None and torch.equal(first, second)


def _origin(edge: Edge, names: Mapping[int, str]) -> _Origin | None:
    """The parameter that this edge leads to by nothing but views and copies."""
    node, output = edge
    chain: list[tuple[Any, int]] = []
    while node is not None:
        variable = getattr(node, "variable", None)
        if variable is not None:
            name = names.get(id(variable))
            return None if name is None else _Origin(name, variable.shape, tuple(chain), node)
        if node.name() not in VIEWS:
            return None
        chain.append((node, output))
        node, output = node.next_functions[0]
    return None


def _is_data(edge: Edge, names: Mapping[int, str]) -> bool:
    """Whether an operand is what the model was given, moved at the most; it may ask for its gradient."""
    node = edge[0]
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is None or (id(getattr(node, "variable", node)) not in names and hasattr(node, "variable"))


def _bias(edge: Edge, names: Mapping[int, str], size: int) -> str | None:
    """The parameter that is added as a bias, as it is."""
    origin = _origin(edge, names)
    return origin.name if origin is not None and origin.in_place and origin.shape == (size,) else None


# --- convolutions ---


def _convolution(node: Any, names: Mapping[int, str]) -> Use | None:
    inputs, weight, bias = node.next_functions
    origin = _origin(weight, names)
    if origin is None or not origin.in_place:
        return None
    rows, columns, *kernel = origin.shape
    groups, places = node._saved_groups, math.prod(kernel)
    transposed = node._saved_transposed
    map_ = LinearMap(
        origin.name,
        (groups, rows // groups, columns * places),
        inputs_on_rows=transposed,
        kernel=places,
        bias=None if transposed else _bias(bias, names, rows),
        reads_data=_is_data(inputs, names),
    )

    x, settings = node._saved_input, (node._saved_stride, node._saved_padding, node._saved_dilation)

    def sides(gradient: Tensor) -> Sides:
        # a transposed convolution is the adjoint: its output is what the kernel is laid over
        under, over = (gradient, x.detach()) if transposed else (x.detach(), gradient)
        return patches(under, over, kernel, groups, *settings)

    return Use(node, map_, sides, origin.leaf)


READERS: dict[str, Callable[[Any, Mapping[int, str]], Use | None]] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "BmmBackward0": _bmm,
    "BaddbmmBackward0": _bmm,
    "LinearBackward0": _linear,
    "ConvolutionBackward0": _convolution,
}
