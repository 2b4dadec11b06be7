"""Linear maps: which numbers of the parameters are a matrix W, its curvature, averaged over refits, and the block of U that
inverts it.

With a the inputs of a map and b the gradients at its outputs, one pair for each example and place where it acts, the second
moment of its gradients b aᵀ is about A ⊗ G, A = E[a aᵀ], G = E[b bᵀ] (`llqr.curvature.statistics`). What a structure keeps of
it, and the U that it gives, is in `llqr.structures`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llqr.checks import check_amount, check_count, check_tensors
from llqr.curvature.precision import at_least_single, raised
from llqr.errors import LLQRError, NonFiniteError, unknown
from llqr.structures.base import Damping, Structure
from llqr.structures.kronecker import SideStructure

MEMORY = 0.8
"""How much each refit counts beside the next one, in a weighted mean over all of them."""
DAMPING = 0.1
"""λ, as a share of the mean curvature of a map, once there were many refits."""
FIRST_DAMPING = 1000.0
"""What is added to it at the first refit, when few examples were seen; it falls with the cube of the number of refits."""

NEVER_SEEN = 1e-6
"""An input of the data that is smaller than this share of the mean, in squares, has no units that are known."""

Moments = dict[str, Tensor]
ROWS, COLUMNS = "rows", "columns"


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
    def inputs(self) -> str:
        """Which moment is that of its inputs."""
        return ROWS if self.inputs_on_rows else COLUMNS

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

    def part(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """What is of this map in the tensor of its weight, or of its bias."""
        return self.matrix(tensors[name]) if name == self.weight else tensors[name]

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What these tensors (gradients, momenta) have at the places of W and its bias, as one stack of matrices."""
        matrix = self.matrix(tensors[self.weight])
        if self.bias is None:
            return matrix
        line = tensors[self.bias].reshape(self.shape[0], -1)
        return torch.cat((matrix, line[:, None]), 1) if self.inputs_on_rows else torch.cat((matrix, line[..., None]), 2)

    def split(self, joined: Tensor) -> list[Tensor]:
        """The inverse of `read`: the matrices of W, and the bias if there is one; of a stack of maps, one after another."""
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
    owner: int = 0
    """The rank that has the tensors, where only one has."""
    stack: Stack | None = field(default=None, init=False)
    """Of blocks like this one, which U was last applied with."""

    def state(self) -> dict[str, Any]:
        """Tensors and builtins alone. U isn't among them: the curvature gives it again."""
        return {
            "map": {**vars(self.map), "shape": list(self.map.shape)},
            "refits": self.refits,
            "moments": dict(self.moments),
            "diagonal": self.diagonal,
        }

    @classmethod
    def from_state(
        cls, key: str, state: Any, parameters: Mapping[str, Tensor], structures: Mapping[str, Structure]
    ) -> Block:
        """The block of a state, without its U, for the parameters that are here; an error where anything doesn't fit."""
        what = f"the state's block for {key!r}"
        if not isinstance(state, Mapping) or not {"map", "refits", "moments", "diagonal"} <= state.keys():
            raise LLQRError(f"{what} has no 'map', 'refits', 'moments' and 'diagonal'")
        check_count(f"'refits' in {what}", state["refits"], 1)
        check_amount(f"'diagonal' in {what}", state["diagonal"])
        check_tensors(f"'moments' in {what}", state["moments"])
        map_ = _map_of(state["map"], key)
        if map_ is None:
            raise LLQRError(f"{what} has a 'map' that isn't one")
        for name in map_.members:
            if name not in parameters:
                raise unknown("parameter in the state", name, parameters)
        weight, structure = parameters[map_.weight], structures[map_.weight]
        if not map_.lies_in(parameters):
            raise LLQRError(f"the state has {key!r} in shape {map_.shape}, and it is {tuple(weight.shape)} here")
        dtype, (g, r, c) = at_least_single(weight.dtype), map_.joined
        rows, columns = (torch.empty(g, 1, side, dtype=dtype, device="meta") for side in (r, c))
        wanted = {n: tuple(m.shape) for n, m in structure.second_moments(rows, columns).items()}
        given = {name: tuple(moment.shape) for name, moment in state["moments"].items()}
        if wanted != given:
            raise LLQRError(f"{key!r} has {given} in the state, and {structure!r} {wanted}: give the same structure")
        # in the order in which the structure has them
        moments = {name: state["moments"][name].to(weight.device, dtype, copy=True) for name in wanted}
        return cls(map_, structure, moments, state["refits"], diagonal=float(state["diagonal"]))

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
        if map_.bias is None and self.map.bias is not None and self.moments.keys() <= {ROWS, COLUMNS}:
            moments.update({name: grown(m, self.moments[name]) for name, m in moments.items()})
        elif map_.bias != self.map.bias:
            return False
        return {name: m.shape for name, m in moments.items()} == {name: m.shape for name, m in self.moments.items()}

    def take(self, moments: Moments) -> None:
        """Average in what a refit has seen: a mean in which each refit counts 0.8 of the next."""
        self.refits += 1
        share = (1 - MEMORY) / (1 - MEMORY**self.refits)
        for name, moment in moments.items():
            before = self.moments.get(name, moment).to(moment)
            self.moments[name] = moment if self.refits == 1 else torch.lerp(before, moment, share)

    def invert(self) -> None:
        """U, from the curvature that is known."""
        damping: Damping = damping_after(self.refits)
        moments, units = dict(self.moments), self.units()
        if units is not None:
            moment = moments[self.map.inputs]
            pairs = units.square() if moment.dim() == 2 else units[..., None] * units[:, None]
            moments[self.map.inputs] = moment * pairs
        if self.diagonal:
            mean = self.structure.mean_curvature(moments)
            damping = damping + self.diagonal / mean.clamp_min(torch.finfo(mean.dtype).tiny)
        try:
            inverse = self.structure.closed_form(moments, damping)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise NonFiniteError(f"the curvature of {self.map.key!r} can't be inverted: {error}") from error
        if units is not None and isinstance(self.structure, SideStructure):
            inverse = self.structure.scale_side(inverse, 0 if self.map.inputs_on_rows else 1, units)
        self.inverse = {name: tensor.contiguous() for name, tensor in inverse.items()}  # as ranks send them

    def dense(self) -> Tensor:
        """U as one matrix over the numbers of W, row by row, each row with its bias at the end; a stack of them for groups.

        It has the square of so many numbers: to look at small layers.
        """
        if not self.inverse:
            raise LLQRError(f"U of {self.map.key!r} is on another rank")
        g, r, c = self.map.joined
        dtype, device = next((t.dtype, t.device) for t in self.inverse.values())
        units = torch.eye(r * c, dtype=dtype, device=device).reshape(-1, 1, r, c).expand(-1, g, -1, -1)
        columns = [self.structure.apply(self.inverse, unit.contiguous()).reshape(g, -1) for unit in units]
        return torch.stack(columns, 2).squeeze(0)

    def units(self) -> Tensor | None:
        """Where the inputs are data: s_j = (mean A_ii / A_jj)^¼, (k, n).

        U is found for inputs s∘a in place of a. That damps A_jj by √λ √A_jj mean √A_ii in place of √λ mean A_ii: an input in
        small units is learned too, as Adam learns it. It is half of the way to inputs of one size, where pixels that hardly
        ever change would count as much as the others.
        """
        if not (self.map.reads_data and isinstance(self.structure, SideStructure)) or self.diagonal:
            return None
        moment = self.moments[self.map.inputs]
        sizes = moment if moment.dim() == 2 else moment.diagonal(dim1=1, dim2=2)
        sizes = sizes / sizes.mean(1, keepdim=True)
        return torch.where(sizes > NEVER_SEEN, sizes, 1).pow(-0.25)

    @property
    def memory(self) -> int:
        """Bytes of the curvature and of U."""
        held = [*self.moments.values(), *self.inverse.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _map_of(state: Any, key: str) -> LinearMap | None:
    """The map of this key in a block's state; None where a field isn't of the type and size that it should be."""
    try:
        parts = {f.name: state[f.name] for f in fields(LinearMap)}
        map_ = LinearMap(**{**parts, "shape": tuple(parts["shape"])})
        counts, places = (*map_.shape, map_.first + 1), map_.places
        sound = (
            all(isinstance(name, str) for name in map_.members)
            and len(map_.shape) == 3
            and all(type(count) is int and count > 0 for count in counts)
            and type(map_.inputs_on_rows) is type(map_.reads_data) is bool
            and (
                map_.first == 0
                if places is None
                else isinstance(places, Tensor)
                and places.dtype == torch.int64
                and tuple(places.shape) == map_.shape
                and int(places.min()) == map_.first
                and len(set(places.reshape(-1).tolist())) == places.numel()
            )
            and map_.key == key
        )
        return map_ if sound else None
    except (TypeError, KeyError):
        return None


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
        applied = self.blocks[0].structure.apply(self._inverse, x)
        return applied.clone() if applied.data_ptr() == x.data_ptr() else applied


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
    how = (map_.shape, map_.bias is None, map_.inputs_on_rows)
    return (block.structure, *how, *layout)


def grown(moment: Tensor, like: Tensor) -> Tensor:
    """With zeros for the input that a bias would have met."""
    lacking = [side for a, b in zip(like.shape[:0:-1], moment.shape[:0:-1], strict=True) for side in (0, a - b)]
    return functional.pad(moment, lacking) if any(lacking) else moment
