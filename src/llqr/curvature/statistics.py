"""Statistics of linear maps: the inputs a and the output gradients b at some of the places where a map acts, and the sums of
their second moments over one refit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from llqr.curvature.linear_maps import COLUMNS, ROWS, LinearMap, Moments, grown
from llqr.curvature.precision import raised
from llqr.structures.base import Structure, kept

PLACES = 512
"""At how many places a use is looked at, at the most; the average over refits sees others."""


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
    channels, rows = under.shape[1] // groups, over.shape[1] // groups
    settings = tuple(kernel), tuple(stride), tuple(padding), tuple(dilation)
    places = _kernel_places((len(over), *over.shape[2:]), tuple(under.shape[2:]), *settings, over.device)
    (batch, *corner), where, outside = places
    met = under.flatten(2)[batch[:, None], :, where].masked_fill(outside[..., None], 0)  # (T, kernel, channels)
    columns = met.reshape(*met.shape[:2], groups, channels).permute(2, 0, 3, 1).flatten(2)
    left = over.movedim(1, -1)[batch, *corner].reshape(len(batch), groups, rows).transpose(0, 1)
    return left, columns, over[:, 0].numel() / max(len(batch), 1)


Sizes = tuple[int, ...]


@kept
def _kernel_places(
    over: Sizes, under: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, device: torch.device
) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    """Some places of a tensor without its channels, and where in another one the kernel lies there: all its dimensions but the
    batch as one, (T, kernel); and whether that is outside. The same at every refit."""
    chosen = some_places(math.prod(over), device)
    batch, *corner = torch.unravel_index(chosen, over)
    where = torch.zeros_like(chosen)[:, None]
    outside = torch.zeros_like(where, dtype=torch.bool)
    for dim, (start, size) in enumerate(zip(corner, under, strict=True)):
        steps = torch.arange(kernel[dim], device=device) * dilation[dim]
        at = (start * stride[dim] - padding[dim])[:, None] + steps
        where = (where[:, :, None] * size + at.clamp(0, size - 1)[:, None]).flatten(1)
        outside = (outside[:, :, None] | ((at < 0) | (at >= size))[:, None]).flatten(1)
    return (batch, *corner), where, outside


@dataclass
class Sums:
    """The second moments of one map, summed over all its uses since the last refit."""

    map: LinearMap
    structure: Structure
    tensors: Moments = field(default_factory=dict)
    places: float = 0.0
    """Where it acts: how many summands there are."""
    owner: int = 0
    """The rank that has the tensors, where only one has."""

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
        for name, moment in self.structure.second_moments(rows, columns).items():
            moment = moment if repeats == 1 else moment * repeats
            self.tensors[name] = self.tensors[name] + moment if name in self.tensors else moment

    def moments(self) -> Moments:
        """A as a mean over the places and G as a sum, so that A ⊗ G is of the size of H."""
        return {name: m / self.places if name == self.map.inputs else m for name, m in self.tensors.items()}


UNLIKE_USES = "UnlikeUses"
"""What weights that `merged` leaves out are said to be used by, as others by the names of nodes."""


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
        joined = [whole for group in by_key.values() if (whole := _joined(group)) is not None]
        if len(joined) == len(by_key) and _are_apart([sums.map for sums in joined]):
            result |= {sums.map.key: sums for sums in joined}
    return result


def _joined(group: list[Sums]) -> Sums | None:
    if len(group) == 1:
        return group[0]
    if len({sums.map.shape for sums in group}) > 1:
        return None
    by_sides = all(sums.tensors.keys() <= {ROWS, COLUMNS} for sums in group)
    if not by_sides and len({(sums.map.bias, sums.map.inputs_on_rows) for sums in group}) > 1:
        return None  # the numbers of other moments aren't arranged alike
    first = replace(group[0].map, reads_data=all(sums.map.reads_data for sums in group))
    biases = {sums.map.bias for sums in group} - {None}
    if len({sums.map.inputs_on_rows for sums in group}) == 1 and len(biases) <= 1:
        total = Sums(replace(first, bias=next(iter(biases), None)), group[0].structure)
        wanted = next(sums for sums in group if sums.map.bias == total.map.bias).tensors
        parts = [{name: grown(m, wanted[name]) for name, m in sums.tensors.items()} for sums in group]
    else:  # inputs meet gradients on each side: every use counts as much on one as on the other
        total = Sums(replace(first, bias=None), group[0].structure)
        parts = [_balanced(sums) for sums in group]
    total.places = sum(sums.places for sums in group)
    if len({tuple(m.shape for m in part.values()) for part in parts}) > 1:
        return None
    total.tensors = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    return total


def _balanced(sums: Sums) -> Moments:
    """Without the bias; A and G so that both have the same trace."""
    _, r, c = sums.map.shape
    if ROWS not in sums.tensors:
        return sums.tensors
    cut = {ROWS: r, COLUMNS: c}
    moments = {n: m[:, : cut[n]] if m.dim() == 2 else m[:, : cut[n], : cut[n]] for n, m in sums.moments().items()}
    traces = {name: float(m.sum() if m.dim() == 2 else m.diagonal(dim1=1, dim2=2).sum()) for name, m in moments.items()}
    size = (traces[ROWS] * traces[COLUMNS]) ** 0.5
    return {name: m * (size / traces[name]) if traces[name] > 0 else m for name, m in moments.items()}


def _are_apart(maps: list[LinearMap]) -> bool:
    """Whether no number of a weight is in two of its maps."""
    if len(maps) == 1:
        return True
    places = [map_.places.reshape(-1) for map_ in maps if map_.places is not None]
    return len(places) == len(maps) and len(set(torch.cat(places).tolist())) == sum(map(len, places))
