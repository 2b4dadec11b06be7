"""Which rank fits, and holds, which block of U; and the quadratic model of all ranks' batches, for the blocks of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llqr.curvature.quadratic import QuadraticModel
from llqr.distributed.ranks import Ranks
from llqr.errors import unknown
from llqr.preconditioner import Preconditioned, Preconditioner
from llqr.structures.stacks import Group
from llqr.wrapper import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class BlockOwners:
    """The blocks of U, and the rank that owns each; the same on all ranks."""

    ranks: Ranks
    shard: bool
    """Each rank holds its own blocks; otherwise all hold all, and own blocks are what a rank fits."""
    layout: Sequence[Group]
    """All of U, on the meta device: names, structures and shapes without numbers."""
    owners: Mapping[str, int]
    """Of each block, by its name."""

    @classmethod
    def of(cls, ranks: Ranks, shard: bool, groups: Sequence[Group], before: BlockOwners | None = None) -> BlockOwners:
        """Blocks that had an owner keep it; the others are dealt out by their bytes."""
        layout = [_without_numbers(group) for group in groups]
        sizes = {key: block_bytes(group) for group in layout for key in group.keys}
        kept = {key: before.owners[key] for key in sizes if before is not None and key in before.owners}
        return cls(ranks, shard, layout, deal(sizes, ranks.size, kept))

    def keys(self, rank: int) -> list[str]:
        """The blocks of a rank."""
        return [key for group in self.layout for key in group.keys if self.owners[key] == rank]

    def names(self) -> dict[int, list[str]]:
        """The parameters that the blocks of each rank cover; ranks without a block are left out."""
        covered: dict[int, list[str]] = {}
        for group in self.layout:
            for key, members in zip(group.keys, group.members, strict=True):
                covered.setdefault(self.owners[key], []).extend(members)
        return covered

    def own(self) -> list[str]:
        """The parameters of this rank's blocks."""
        return self.names().get(self.ranks.rank, [])

    def kept(self, part: Preconditioner) -> Preconditioner:
        """What this rank holds, out of its own blocks."""
        return part if self.shard else self._joined(part)

    def held(self) -> list[str]:
        """The parameters of the blocks that this rank holds."""
        return self.own() if self.shard else [name for names in self.names().values() for name in names]

    def part(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this rank is to hold, out of the state of all of U."""
        blocks = state["blocks"]
        for key in blocks:
            if key not in self.owners:
                raise unknown("block", key, self.owners)
        if not self.shard:
            return state
        return {**state, "blocks": {key: blocks[key] for key in self.keys(self.ranks.rank)}}

    def whole(self, held: Preconditioner) -> Preconditioner:
        """All of U, out of what this rank holds. Where that isn't all, every rank has to ask."""
        return self._joined(held) if self.shard else held

    def _joined(self, part: Preconditioner) -> Preconditioner:
        device = self.ranks.device
        groups = [
            group.holding({name: torch.empty_like(t, device=device) for name, t in group.tensors.items()})
            for group in self.layout
        ]
        u = Preconditioner(groups, part.history)
        u.take(part)
        held: dict[int, list[Tensor]] = {}
        for key, tensors in u.blocks.items():
            held.setdefault(self.owners[key], []).extend(tensors.values())
        self.ranks.share(held)
        return u


def deal(sizes: Mapping[str, int], ranks: int, kept: Mapping[str, int] | None = None) -> dict[str, int]:
    """An owner for each block: the largest first, each to the rank that holds the fewest bytes by then."""
    owners = dict(kept or {})
    held = [(0, rank) for rank in range(ranks)]
    for key, owner in owners.items():
        held[owner] = held[owner][0] + sizes[key], owner
    heapify(held)
    for key in sorted(sizes.keys() - owners.keys(), key=lambda key: (-sizes[key], key)):
        load, owners[key] = held[0]
        heapreplace(held, (load + sizes[key], owners[key]))
    return owners


def block_bytes(group: Group) -> int:
    """Of one block."""
    return group.structure.memory(group.shape, group.dtype.itemsize)


def _without_numbers(group: Group) -> Group:
    return group.holding({n: torch.empty_like(t, device="meta") for n, t in group.tensors.items()})


class OneProcess:
    """What LLQR.paper does with other ranks where there are none; `TrainingRanks` is its counterpart where there are."""

    several = shard = False
    group: ProcessGroup | None = None

    def due(self, schedule: Schedule) -> bool:
        """Whether a step begins with a refit."""
        return schedule.due()

    def together(self) -> AbstractContextManager[None]:
        """What one rank raises in there, all do."""
        return nullcontext()

    def refitting(self) -> AbstractContextManager[None]:
        """For the time of a refit."""
        return nullcontext()

    def owners_of(self, groups: Sequence[Group], before: BlockOwners | None = None) -> BlockOwners | None:
        """Who fits and holds which of these blocks; None where one process has all. Those that had an owner keep it."""
        return None

    def agree(self, groups: Sequence[Group], settings: object) -> None:
        """Raise where ranks are about to do different things."""

    def at_owners(
        self, owners: BlockOwners | None, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Whole gradients of the blocks that are fitted here; nobody reads the others."""
        return gradients

    def precondition(
        self,
        owners: BlockOwners | None,
        u: Preconditioner,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> Preconditioned:
        """U g with every rank's blocks."""
        return u.precondition(gradients)


class JoinedModel:
    """g and H·v of the joined batch. Each rank knows its batch's share of them, and asks for those of its own blocks.

    A product takes the direction from its owners to all ranks, runs on every rank's batch, and sums the shares up at the
    owners: each way as many numbers as there are parameters. Damping is added once, by the owner.
    """

    def __init__(self, model: QuadraticModel, division: BlockOwners, joined: bool) -> None:
        """`joined`: the model's gradient is that of all the batches already."""
        self._model, self._names, self.totals = model, division.names(), division.ranks
        self._own = division.own()
        self.gradient = {name: model.gradient[name] for name in self._own} if joined else self._summed(model.gradient)

    def curvature(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        whole = {
            name: direction[name].contiguous() if name in direction else torch.empty_like(g)
            for name, g in self._model.gradient.items()
        }
        self.totals.share(self._by_owner(whole))
        product, diagonal = self._summed(self._model.product(whole)), self._model.diagonal
        return {name: torch.add(product[name], v, alpha=diagonal[name]) for name, v in direction.items()}

    def _summed(self, shares: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._own, self.totals.collect(self._by_owner(shares)), strict=True))

    def _by_owner(self, tensors: dict[str, Tensor]) -> dict[int, list[Tensor]]:
        return {owner: [tensors[name] for name in names] for owner, names in self._names.items()}
