"""Statistics: the curvature of every linear map, averaged over refits, and the block of U that inverts it.

With a the inputs of a map and b the gradients at its outputs, one pair for each example and place where it acts, the second
moment of its gradients b aᵀ is about A ⊗ G, A = E[a aᵀ], G = E[b bᵀ]. What a structure keeps of it, and the U that it gives, is
in `llqr.structures`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llqr.curvature.precision import at_least_single, raised
from llqr.errors import LLQRError, NonFiniteError
from llqr.structures.base import Damping, Structure

MEMORY = 0.8
"""How much each refit counts beside the next one, in a weighted mean over all of them."""
DAMPING = 0.1
"""λ, as a share of the mean curvature of a map, once there were many refits."""
FIRST_DAMPING = 1000.0
"""What is added to it at the first refit, when few examples were seen; it falls with the cube of the number of refits."""

PLACES = 1024
"""At how many places a use is looked at, at the most; the average over refits sees others."""

NEVER_SEEN = 1e-6
"""An input of the data that is smaller than this share of the mean, in squares, has no units that are known."""

Moments = dict[str, Tensor]
ROWS, COLUMNS, KERNEL = "rows", "columns", "kernel"


def damping_after(refits: int) -> float:
    """λ after so many refits: 1,000 at the first, 1.1 at the tenth, 0.14 at the thirtieth."""
    return DAMPING + FIRST_DAMPING / refits**3


@dataclass(frozen=True)
class LinearMap:
    """Which numbers of the parameters are the matrix W of a linear map: a stack of g matrices, r × c."""

    weight: str
    shape: tuple[int, int, int]
    inputs_on_rows: bool = False
    """The map is x ↦ xᵀ W in place of x ↦ W x: the columns are its outputs."""
    kernel: int = 1
    """Of a convolution: its columns are so many places for each of its channels."""
    bias: str | None = None
    """Joined to W as one more column (row), which meets a constant input of 1."""
    places: Tensor | None = field(default=None, compare=False)
    """Where the numbers of W are in its parameter, if they aren't all of it in order."""
    first: int = 0
    """The least of these places."""
    reads_data: bool = False
    """Its inputs are the data, and not what other layers made of them: they may be in any units."""

    @property
    def key(self) -> str:
        """Its name: that of the weight, and where in it if it is a part."""
        return self.weight if self.places is None else f"{self.weight}[{self.first}]"

    @property
    def members(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def joined(self) -> tuple[int, int, int]:
        """The shape of W with its bias."""
        g, r, c = self.shape
        more = self.bias is not None
        return (g, r + (more and self.inputs_on_rows), c + (more and not self.inputs_on_rows))

    def lies_in(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether they have the shapes that this map is of."""
        count, (g, r, c) = parameters[self.weight].numel(), self.shape
        outputs = g * (c if self.inputs_on_rows else r)
        fits = int(self.places.max()) < count if self.places is not None else count == g * r * c
        return fits and (self.bias is None or parameters[self.bias].numel() == outputs)

    def matrix(self, weight: Tensor) -> Tensor:
        """What a tensor of the weight's shape has at the places of W."""
        return weight.reshape(self.shape) if self.places is None else weight.reshape(-1)[self.places.to(weight.device)]

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What these tensors (gradients, momenta) have at the places of W and its bias, as one stack of matrices."""
        matrix = self.matrix(tensors[self.weight])
        if self.bias is None:
            return matrix
        line = tensors[self.bias].reshape(self.shape[0], -1)
        return torch.cat((matrix, line[:, None]), 1) if self.inputs_on_rows else torch.cat((matrix, line[..., None]), 2)

    def split(self, joined: Tensor) -> list[Tensor]:
        """The inverse of `read`: the matrix of W, and the vector of the bias if there is one."""
        _, r, c = self.shape
        if self.bias is None:
            return [joined]
        return [joined[:, :r, :c], (joined[:, -1] if self.inputs_on_rows else joined[..., -1]).reshape(-1)]

    def put(self, matrix: Tensor, weight: Tensor) -> None:
        """Write a matrix to the places of W in a contiguous tensor of the weight's shape."""
        if self.places is None:
            weight.copy_(matrix.reshape(weight.shape))
        else:
            weight.view(-1)[self.places.to(weight.device)] = matrix.to(weight.dtype)


Sides = tuple[Tensor, Tensor, float]
"""What meets the rows of W, (g, T, r), and what meets its columns, (g, T, c), at T of the places where it acts; and how many
times as many of these there are. One of the two is inputs, the other gradients."""


def matching_rows(left: Tensor, right: Tensor) -> Sides:
    """The same rows of both, some of them where there are many."""
    count = left.shape[1]
    if count <= PLACES:
        return left, right, 1.0
    chosen = some_places(count, left.device)
    return left[:, chosen], right[:, chosen], count / len(chosen)


def some_places(count: int, device: torch.device) -> Tensor:
    """Places spread over all of them: steps of about the golden section, which falls in with no period of the data."""
    stride = max(1, round(0.6180339887 * count))
    while math.gcd(stride, count) > 1:
        stride += 1
    return torch.arange(min(count, PLACES), device=device) * stride % count


def patches(
    under: Tensor,
    over: Tensor,
    kernel: Sequence[int],
    groups: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Sides:
    """At some places of `over` (N, rows, …): its numbers there, and those of `under` (N, channels, …) that the kernel meets."""
    sizes, laid = over.shape[2:], under.shape[2:]
    count = len(over) * math.prod(sizes)
    channels, rows = under.shape[1] // groups, over.shape[1] // groups
    chosen = some_places(count, over.device)
    batch = chosen // math.prod(sizes)
    rest, where, inside = chosen % math.prod(sizes), torch.zeros_like(chosen)[:, None], None
    for dim in range(len(sizes)):
        after = math.prod(sizes[dim + 1 :])
        start = (rest // after) * stride[dim] - padding[dim]
        rest = rest % after
        at = start[:, None] + torch.arange(kernel[dim], device=over.device) * dilation[dim]
        within = (at >= 0) & (at < laid[dim])
        where = (where[:, :, None] * laid[dim] + at.clamp(0, laid[dim] - 1)[:, None]).flatten(1)
        inside = within if inside is None else (inside[:, :, None] & within[:, None]).flatten(1)
    assert inside is not None
    met = under.flatten(2)[batch[:, None], :, where].masked_fill(~inside[..., None], 0)  # (T, kernel, channels)
    columns = met.reshape(*met.shape[:2], groups, channels).permute(2, 0, 3, 1).flatten(2)
    left = over.flatten(2)[batch, :, chosen % math.prod(sizes)].reshape(len(chosen), groups, rows).transpose(0, 1)
    return left, columns, count / max(len(chosen), 1)


@dataclass
class Sums:
    """The second moments of one map, summed over all its uses since the last refit."""

    map: LinearMap
    structure: Structure
    tensors: Moments = field(default_factory=dict)
    places: float = 0.0
    """Where it acts: how many summands there are."""

    def add(self, sides: Sides) -> None:
        """Count one use."""
        rows, columns, repeats = sides
        rows, columns = raised(rows), raised(columns)
        if self.map.bias is not None:  # it meets an input of 1
            if self.map.inputs_on_rows:
                rows = functional.pad(rows, (0, 1), value=1.0)
            else:
                columns = functional.pad(columns, (0, 1), value=1.0)
        self.places += repeats * rows.shape[1]
        for name, moment in self.structure.second_moments(rows, columns, self.map.kernel).items():
            moment = moment if repeats == 1 else moment * repeats
            self.tensors[name] = self.tensors[name] + moment if name in self.tensors else moment

    def moments(self) -> Moments:
        """A as a mean over the places and G as a sum, so that A ⊗ G is of the size of H."""
        inputs = ROWS if self.map.inputs_on_rows else COLUMNS
        moments = {name: m / self.places if name == inputs else m for name, m in self.tensors.items()}
        if KERNEL in moments:  # it shares its size with the channels
            moments[KERNEL] = moments[KERNEL] / moments[KERNEL].diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        return moments


def merged(found: Iterable[Sums]) -> dict[str, Sums]:
    """The sums of each map, by its key: over its uses with and without a bias, as it is and transposed.

    Weights that are used in arrangements that don't go together are left out.
    """
    by_weight: dict[str, list[Sums]] = {}
    for sums in found:
        by_weight.setdefault(sums.map.weight, []).append(sums)
    result: dict[str, Sums] = {}
    for all_of_it in by_weight.values():
        by_key: dict[str, list[Sums]] = {}
        for sums in all_of_it:
            by_key.setdefault(sums.map.key, []).append(sums)
        joined = [_joined(group) for group in by_key.values()]
        if all(sums is not None for sums in joined) and _are_apart([sums.map for sums in joined if sums is not None]):
            result |= {sums.map.key: sums for sums in joined if sums is not None}
    return result


def _joined(group: list[Sums]) -> Sums | None:
    if len(group) == 1:
        return group[0]
    if len({(sums.map.shape, sums.map.kernel) for sums in group}) > 1:
        return None
    by_sides = all(sums.tensors.keys() <= {ROWS, COLUMNS, KERNEL} for sums in group)
    if not by_sides and len({(sums.map.bias, sums.map.inputs_on_rows) for sums in group}) > 1:
        return None  # the numbers of other moments aren't arranged alike
    first = replace(group[0].map, reads_data=all(sums.map.reads_data for sums in group))
    biases = {sums.map.bias for sums in group} - {None}
    if len({sums.map.inputs_on_rows for sums in group}) == 1 and len(biases) <= 1:
        total = Sums(replace(first, bias=next(iter(biases), None)), group[0].structure)
        wanted = next(sums for sums in group if sums.map.bias == total.map.bias).tensors
        parts = [{name: _grown(m, wanted[name]) for name, m in sums.tensors.items()} for sums in group]
    else:  # inputs meet gradients on each side: every use counts as much on one as on the other
        total = Sums(replace(first, bias=None), group[0].structure)
        parts = [_balanced(sums) for sums in group]
    total.places = sum(sums.places for sums in group)
    if len({tuple(m.shape for m in part.values()) for part in parts}) > 1:
        return None
    total.tensors = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    return total


def _grown(moment: Tensor, like: Tensor) -> Tensor:
    """With zeros for the input that a bias would have met."""
    lacking = [side for a, b in zip(like.shape[:0:-1], moment.shape[:0:-1], strict=True) for side in (0, a - b)]
    return functional.pad(moment, lacking) if any(lacking) else moment


def _balanced(sums: Sums) -> Moments:
    """Without the bias; A and G so that both have the same trace."""
    _, r, c = sums.map.shape
    if ROWS not in sums.tensors:
        return sums.tensors
    cut = {ROWS: r, COLUMNS: c if KERNEL not in sums.tensors else c // sums.map.kernel}
    moments = {name: m[:, : cut[name], : cut[name]] if name in cut else m for name, m in sums.moments().items()}
    traces = {name: float(m.sum() if m.dim() == 2 else m.diagonal(dim1=1, dim2=2).sum()) for name, m in moments.items()}
    size = (traces[ROWS] * traces[COLUMNS]) ** 0.5
    return {name: m * (size / traces[name]) if name in cut and traces[name] > 0 else m for name, m in moments.items()}


def _are_apart(maps: list[LinearMap]) -> bool:
    """Whether no number of a weight is in two of its maps."""
    if len(maps) == 1:
        return True
    places = [map_.places.reshape(-1) for map_ in maps if map_.places is not None]
    return len(places) == len(maps) and len(set(torch.cat(places).tolist())) == sum(map(len, places))


@dataclass(eq=False)
class Block:
    """One linear map: its curvature, averaged over refits, and its block of U. `optimizer.blocks` has them by name."""

    map: LinearMap
    """Which parameters it is of."""
    structure: Structure
    moments: Moments = field(default_factory=dict)
    """Second moments of its inputs and of the gradients at its outputs: for K-FAC, "columns" and "rows"."""
    refits: int = 0
    inverse: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors of U, as its structure has them; empty on a rank that doesn't hold them."""
    diagonal: float = 0.0
    """What the divergence itself puts on H's diagonal, as L2 does."""
    stack: Stack | None = field(default=None, init=False)
    """Of blocks like this one, which U was last applied with."""

    def fits(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether they are as they were when it was made: their shapes, their dtype, their device."""
        weight, like = parameters[self.map.weight], next(iter(self.inverse.values()), None)
        if like is not None and (like.dtype != at_least_single(weight.dtype) or like.device != weight.device):
            return False
        return self.map.lies_in(parameters)

    def takes(self, map_: LinearMap, moments: Moments) -> bool:
        """Whether the second moments of this map can be averaged in; made so where it is without its bias this time."""
        if replace(map_, bias=self.map.bias, reads_data=self.map.reads_data) != self.map:
            return False
        if map_.bias is None and self.map.bias is not None and self.moments.keys() <= {ROWS, COLUMNS, KERNEL}:
            moments.update({name: _grown(m, self.moments[name]) for name, m in moments.items()})
        elif map_.bias != self.map.bias:
            return False
        return {name: m.shape for name, m in moments.items()} == {name: m.shape for name, m in self.moments.items()}

    def take(self, moments: Moments) -> None:
        """Average in what a refit has seen: a mean in which each refit counts 0.8 of the next."""
        self.refits += 1
        share = (1 - MEMORY) / (1 - MEMORY**self.refits)
        for name, moment in moments.items():
            self.moments[name] = (
                moment if self.refits == 1 else torch.lerp(self.moments[name].to(moment), moment, share)
            )

    def invert(self) -> None:
        """U, from the curvature that is known."""
        damping: Damping = damping_after(self.refits)
        moments, units = dict(self.moments), self.units()
        if units is not None:
            moment = moments[self._inputs]
            pairs = units.square() if moment.dim() == 2 else units[..., None] * units[:, None]
            moments[self._inputs] = moment * pairs
        if self.diagonal:
            mean = self.structure.mean_curvature(moments)
            damping = damping + self.diagonal / mean.clamp_min(torch.finfo(mean.dtype).tiny)
        try:
            inverse = self.structure.closed_form(moments, damping)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise NonFiniteError(f"the curvature of {self.map.key!r} can't be inverted: {error}") from error
        side = 0 if self.map.inputs_on_rows else 1
        self.inverse = inverse if units is None else self.structure.scale_side(inverse, side, units)

    def dense(self) -> Tensor:
        """U as one matrix over the numbers of W, row by row, each row with its bias at the end; a stack of them for groups.

        It has the square of so many numbers: to look at small layers.
        """
        if not self.inverse:
            raise LLQRError(f"U of {self.map.key!r} is on another rank")
        g, r, c = self.map.joined
        dtype, device = next((t.dtype, t.device) for t in self.inverse.values())
        units = torch.eye(r * c, dtype=dtype, device=device).reshape(-1, 1, r, c).expand(-1, g, -1, -1)
        columns = [_applied(self, self.inverse, unit.contiguous()).reshape(g, -1) for unit in units]
        return torch.stack(columns, 2).squeeze(0)

    @property
    def _inputs(self) -> str:
        """The moment of the inputs."""
        return ROWS if self.map.inputs_on_rows else COLUMNS

    def units(self) -> Tensor | None:
        """Where the inputs are data: s_j = (mean A_ii / A_jj)^¼, (k, n).

        U is found for inputs s∘a in place of a. That damps A_jj by √λ √A_jj mean √A_ii in place of √λ mean A_ii: an input in
        small units is learned too, as Adam learns it. It is half of the way to inputs of one size, where pixels that hardly
        ever change would count as much as the others.
        """
        if not (self.map.reads_data and self.structure.by_sides) or self.diagonal:
            return None
        moment = self.moments[self._inputs]
        sizes = moment if moment.dim() == 2 else moment.diagonal(dim1=1, dim2=2)
        sizes = sizes / sizes.mean(1, keepdim=True)
        return torch.where(sizes > NEVER_SEEN, sizes, 1).pow(-0.25)

    @property
    def memory(self) -> int:
        """Bytes of the curvature and of U."""
        held = [*self.moments.values(), *self.inverse.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


class Stack:
    """Blocks that are alike, as one: U m of all of them is one product."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = list(blocks)
        first = blocks[0]
        self._map, self._inverse = first.map, first.inverse
        if len(blocks) > 1:
            self._inverse = {name: torch.cat([block.inverse[name] for block in blocks]) for name in first.inverse}
            for number, block in enumerate(blocks):  # which hold it from now on: once is enough
                own = slice(number * self._map.shape[0], (number + 1) * self._map.shape[0])
                block.inverse = {name: tensor[own] for name, tensor in self._inverse.items()}
        for block in blocks:
            block.stack = self

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What these tensors (gradients, momenta) have at the places of the maps."""
        matrices = [raised(block.map.read(tensors)) for block in self.blocks]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    def apply(self, x: Tensor) -> Tensor:
        """U x, in memory of its own, also by a structure that returns what it was given."""
        applied = _applied(self.blocks[0], self._inverse, x)
        return applied.clone() if applied.data_ptr() == x.data_ptr() else applied


def _applied(like: Block, inverse: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """U x, for the U of blocks that are like this one."""
    folded = x.reshape(*x.shape[:2], -1, like.map.kernel) if KERNEL in like.moments else x
    return like.structure.apply(inverse, folded).reshape(x.shape)


def stacked(blocks: Iterable[Block]) -> list[Stack]:
    """Those that are alike together; the stacks of before, where they are the same."""
    groups: dict[tuple[Any, ...], list[Block]] = {}
    for block in blocks:
        groups.setdefault(_kind(block), []).append(block)
    return [
        stack if (stack := group[0].stack) is not None and stack.blocks == group else Stack(group)
        for group in groups.values()
    ]


def _kind(block: Block) -> tuple[Any, ...]:
    """What blocks have to share to be in one stack."""
    map_ = block.map
    layout = [(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in block.inverse.items()]
    how = (map_.shape, map_.bias is None, map_.inputs_on_rows, map_.kernel, KERNEL in block.moments)
    return (block.structure, *how, *layout)
