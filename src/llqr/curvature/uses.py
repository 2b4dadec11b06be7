"""Uses of linear maps in a network, found in the graph that autograd has recorded.

A matrix W acts somewhere as y = W x: in a linear layer, a convolution, an attention's projection, a plain `x @ W`. Its gradient
is a sum of b aᵀ over every place where it acts, with a the input there and b the gradient at the output. Both pass through the
backward pass of a product node (`AddmmBackward0`, `ConvolutionBackward0`, …), whichever Python code has called it; so the graph
of an output tells all uses of all weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from llqr.curvature.graph import graph_nodes
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

OPAQUES = "CheckpointFunction CompiledFunction CudnnRnn MiopenRnn MkldnnRnnLayer"
OPAQUE = frozenset(f"{name}Backward{variant}" for name in OPAQUES.split() for variant in ("", "0"))
"""Nodes that stand for many, which can be looked into only if the model is run otherwise."""

SPARSE = 0.9
"""Data with at least this share of zeros, as bags of words and one-hot codes, are looked up as in an embedding: the base does
better by weights that few examples meet."""
SPARSE_DATA = "SparseData"
"""What such a use of a weight goes by, as others go by the names of their nodes."""

TURNS = frozenset({"TBackward0", "NumpyTBackward0", "TransposeBackward0", "PermuteBackward0"})
"""Those that may turn a matrix around."""


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
    nodes = list(graph_nodes(outputs, mark))
    with_bias = _with_added_bias(nodes, names)
    for node in nodes:
        if node.name() in VIEWS:
            continue
        use = with_bias.get(node) or _read(node, names)
        if use is not None and use.node is node:
            uses.append(use)
        known = () if use is None else use.map.members
        for edge in node.next_functions:
            origin = _origin(edge, names)
            if origin is not None and origin.name not in known:
                others[origin.name] = node.name()
    dense = {use.map.weight for use in uses if not use.sparse}  # a recurrent layer starts at zeros
    others |= {use.map.weight: SPARSE_DATA for use in uses if use.map.weight not in dense}
    for use in uses:
        if use.map.weight in others and use.map.bias is not None:
            others.setdefault(use.map.bias, others[use.map.weight])
    kept = [
        replace(use, map=replace(use.map, bias=None)) if use.map.bias in others else use
        for use in uses
        if use.map.weight not in others
    ]
    hidden = any(node.name() in OPAQUE for node in nodes)
    return Found(kept, others, hidden, any(id(getattr(node, "variable", None)) in names for node in nodes))


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
            use, size = _read(product, names), cast(Any, edge[0])._input_metadata[edge[1]].shape[-1]
            if use is None or _origin(product.next_functions[1], names) is None:  # W x: its outputs aren't the last
                continue
            map_ = _with_bias(use.map, other, names)
            if map_.bias is not None and size == map_.joined[2 if map_.inputs_on_rows else 1]:
                found[node] = found[product] = replace(use, map=map_)
    return found


# --- products of matrices ---

OPERANDS = {
    "AddmmBackward0": ("mat1", "mat2"),
    "MmBackward0": ("self", "mat2"),
    "BmmBackward0": ("self", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
}
"""By what names a node of a product has saved its two matrices."""


def _product(node: Any, names: Mapping[int, str]) -> Use | None:
    """y = x W or y = W x; one of the two is a weight, and the other was saved for its gradient."""
    *more, first, second = node.next_functions
    origins = [_origin(first, names), _origin(second, names)]
    which = 0 if origins[1] is None else 1
    origin = origins[which]
    if origin is None or origins[1 - which] is not None or getattr(node, "_saved_alpha", 1) != 1:
        return None
    inputs = getattr(node, f"_saved_{OPERANDS[node.name()][1 - which]}")
    *batch, t, n = node._input_metadata[0].shape
    shape = (*batch, t, inputs.shape[-2]) if which == 0 else (*batch, inputs.shape[-1], n)
    map_ = origin.matrix(shape, which == 1)
    if map_ is None:
        return None
    map_ = replace(map_, reads_data=_is_data((first, second)[1 - which], names))
    if more and node._saved_beta == 1 and which == 1:
        map_ = _with_bias(map_, more[0], names)
    groups, inputs_on_rows = map_.shape[0], map_.inputs_on_rows

    def sides(gradient: Tensor) -> Sides:
        x, y = (t if which == 1 else t.mT for t in (inputs.detach(), gradient))
        # (batch, T, n), the groups' matrices in turn along the batch
        batch = (x.shape[0] if x.dim() == 3 else 1) // groups
        x, y = (t.reshape(batch, groups, *t.shape[-2:]).transpose(0, 1).flatten(1, 2) for t in (x, y))
        return matching_rows(x, y) if inputs_on_rows else matching_rows(y, x)

    return Use(node, map_, sides, origin.leaf, _is_sparse(map_, inputs))


def _linear(node: Any, names: Mapping[int, str]) -> Use | None:
    """`aten::linear` as one node, which some back ends have."""
    inputs, weight, bias = node.next_functions
    origin = _origin(weight, names)
    if origin is None or origin.moved:
        return None
    map_ = LinearMap(origin.name, (1, *origin.shape), reads_data=_is_data(inputs, names))
    map_, x = _with_bias(map_, bias, names), node._saved_input

    def sides(gradient: Tensor) -> Sides:
        return matching_rows(gradient.flatten(0, -2)[None], x.detach().flatten(0, -2)[None])

    return Use(node, map_, sides, origin.leaf, _is_sparse(map_, x))


def _with_bias(map_: LinearMap, edge: Edge, names: Mapping[int, str]) -> LinearMap:
    """With the parameter that is added as a bias, as it is, to all of the map's outputs; without one where there is none."""
    origin, (groups, r, c) = _origin(edge, names), map_.shape
    outputs = groups * (c if map_.inputs_on_rows else r)
    if origin is None or map_.places is not None or origin.moved or origin.shape != (outputs,):
        return map_
    return replace(map_, bias=origin.name)


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
    def moved(self) -> list[Any]:
        """The nodes that put numbers elsewhere."""
        return [node for node, _ in self.chain if node.name() not in SAME_PLACES]

    def matrix(self, operand: tuple[int, ...], is_second: bool) -> LinearMap | None:
        """The map of a product whose first (y = W x) or second (y = x W) operand this is."""
        moved = self.moved
        if len(self.shape) == len(operand) == 2 and (not moved or (len(moved) == 1 and _transposes(moved[0]))):
            return LinearMap(self.name, (1, *self.shape), inputs_on_rows=is_second == (not moved))
        r, c = operand[-2:]
        g = batch = operand[0] if len(operand) == 3 else 1
        if any(
            map(_expands, self.chain)
        ):  # the same matrices in turn along the batch: all of the parameter, or one of it
            g = self.shape.numel() // (r * c)
            g = g if 0 < g < batch and batch % g == 0 else 1
        places = self._places(operand, g)
        if places is None:
            return None
        in_order = torch.arange(self.shape.numel())
        if torch.equal(places.flatten(), in_order):
            return LinearMap(self.name, (g, r, c), is_second)
        if torch.equal(places.mT.flatten(), in_order):
            return LinearMap(self.name, (g, c, r), not is_second)
        return LinearMap(self.name, (g, r, c), is_second, places=places, first=int(places.min()))

    def _places(self, operand: tuple[int, ...], g: int) -> Tensor | None:
        """Where in the parameter the g matrices come from that are in turn along the operand's batch: numbers for each of
        their places, sent back along the chain, which adds up what it had repeated."""
        shape = (g, *operand[-2:])
        count = math.prod(shape)
        times = math.prod(operand) // count
        numbers = torch.arange(1, count + 1, dtype=torch.float64)
        value: Any = numbers.repeat(times).reshape(operand)
        try:
            for node, output in self.chain:
                if node.name() == "ToCopyBackward0":
                    continue
                arguments = [None] * len(node._input_metadata)
                arguments[output] = value
                value = node(*arguments)
        except RuntimeError:
            return None
        sums = value.reshape(-1) / times
        positions = sums.nonzero()[:, 0]
        found, order = sums[positions].sort()
        return positions[order].reshape(shape) if torch.equal(found, numbers) else None


def _expands(link: tuple[Any, int]) -> bool:
    """Whether a node repeats its numbers; a product expands its operands also where there is nothing to repeat."""
    node, _ = link
    if node.name() != "ExpandBackward0":
        return False
    return bool(math.prod(node._saved_self_sym_sizes) != math.prod(node._input_metadata[0].shape))


def _transposes(node: Any) -> bool:
    """Whether a node turns a matrix around."""
    return node.name() in TURNS and bool(node(torch.empty(2, 1)).shape == (1, 2))


def _source(edge: Edge) -> tuple[Any, tuple[tuple[Any, int], ...]]:
    """The node that this edge leads to by nothing but views and copies, and those on the way."""
    node, output = edge
    chain: list[tuple[Any, int]] = []
    while node is not None and node.name() in VIEWS:
        chain.append((node, output))
        node, output = node.next_functions[0]
    return node, tuple(chain)


def _origin(edge: Edge, names: Mapping[int, str]) -> _Origin | None:
    """The parameter that this edge leads to."""
    leaf, chain = _source(edge)
    variable = getattr(leaf, "variable", None)
    name = names.get(id(variable))
    return None if name is None or variable is None else _Origin(name, variable.shape, chain, leaf)


def _is_data(edge: Edge, names: Mapping[int, str]) -> bool:
    """Whether an operand is what the model was given, moved at the most; it may ask for its gradient."""
    node, _ = _source(edge)
    return node is None or (hasattr(node, "variable") and id(node.variable) not in names)


# --- convolutions ---


def _convolution(node: Any, names: Mapping[int, str]) -> Use | None:
    inputs, weight, bias = node.next_functions
    origin = _origin(weight, names)
    if origin is None or origin.moved:
        return None
    rows, columns, *kernel = origin.shape
    groups, places = node._saved_groups, math.prod(kernel)
    transposed = node._saved_transposed
    map_ = LinearMap(
        origin.name,
        (groups, rows // groups, columns * places),
        inputs_on_rows=transposed,
        reads_data=_is_data(inputs, names),
    )
    map_ = map_ if transposed else _with_bias(map_, bias, names)
    x, settings = node._saved_input, (node._saved_stride, node._saved_padding, node._saved_dilation)

    def sides(gradient: Tensor) -> Sides:
        # a transposed convolution is the adjoint: its output is what the kernel is laid over
        under, over = (gradient, x.detach()) if transposed else (x.detach(), gradient)
        return patches(under, over, kernel, groups, *settings)

    return Use(node, map_, sides, origin.leaf)


READERS: dict[str, Callable[[Any, Mapping[int, str]], Use | None]] = {
    **dict.fromkeys(OPERANDS, _product),
    "LinearBackward0": _linear,
    "ConvolutionBackward0": _convolution,
}
"""How a node is read as the use of a linear map, by its name; None where it isn't one. A new one needs three more looks: what
uses a weight and isn't read is told by `IN_WORDS` (llqr.reporting); a bias that is added by a node of its own is found by
`_with_added_bias`, for `mm` alone; and what a reader raises as a RuntimeError counts as "can't be read" (`_read`)."""
