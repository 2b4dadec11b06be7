"""Shards: LLQR where the parameters are sharded by `fully_shard` (FSDP2).

Each block of U, with its curvature, is on one rank, its owner. At a refit the parameters are whole on every rank. At a step the
shards of the momentum and of the base's step go to the owner, and the shards of the step along U m come back. LLQR.paper has
all of U on every rank, and its gradients are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llqr.base_step import TurnedSteps, turn
from llqr.curvature.linear_maps import Block
from llqr.curvature.statistics import Sums
from llqr.distributed import fsdp
from llqr.distributed.processes import Process, Replicas, Tensors, cost, deal
from llqr.distributed.ranks import Ranks
from llqr.errors import LLQRError


class Shards(Replicas):
    """Several ranks, each with shards of the parameters and with its own blocks of U. Of the other blocks it knows the map."""

    sharded = True

    @contextmanager
    def refitting(self, settings: object, parameters: Tensors) -> Iterator[Tensors]:
        with super().refitting(settings, parameters), fsdp.whole_parameters(self._model, self._ranks):
            yield {name: p for name, p in self._model.named_parameters() if name in parameters}

    def stepping(self) -> AbstractContextManager[None]:
        return self.together()

    def sum_moments(self, found: Iterable[Sums], of_means: bool, blocks: Mapping[str, Block]) -> dict[str, Sums]:
        """Only the owner keeps the sums of a map; all maps of a weight have one."""
        summed = super().sum_moments(found, of_means, blocks)
        owners = self._owners(summed.values(), {block.map.weight: block.owner for block in blocks.values()})
        for sums in summed.values():
            sums.owner = owners[sums.map.weight]
            if sums.owner != self.rank:
                sums.tensors = {}
        return summed

    def _owners(self, found: Iterable[Sums], kept: Mapping[str, int]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for sums in found:
            sizes[sums.map.weight] = sizes.get(sums.map.weight, 0) + cost(sums.tensors)
        return deal(sizes, self.size, kept)

    def invert(self, blocks: Mapping[str, Block]) -> None:
        Process.invert(self, {key: block for key, block in blocks.items() if block.moments})

    def local(self, tensor: Tensor) -> Tensor:
        return _sharded(tensor).to_local()

    def turn(self, blocks: Iterable[Block], momenta: Tensors, steps: Tensors, parameters: Tensors) -> TurnedSteps:
        """By the owners of the blocks."""
        by_owner: dict[int, list[Block]] = {}
        for block in blocks:
            if all(name in momenta and name in steps for name in block.map.members):
                by_owner.setdefault(block.owner, []).append(block)
        if not by_owner:
            return TurnedSteps({}, [])
        exchange = _Exchange(self._ranks, by_owner, [momenta, steps], parameters)
        turned = turn(by_owner.get(self.rank, []), *exchange.to_owners())
        return exchange.from_owners(turned)

    def whole(self, tensors: Tensors) -> dict[str, Tensor]:
        self._ranks.agree("gradients", list(tensors))
        return {name: self._ranks.send(_sharded(tensor).full_tensor) for name, tensor in tensors.items()}

    def part(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        like = _sharded(parameter)
        local = fsdp.shard(tensor, like, self.rank).contiguous()
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def gathered(self, blocks: Mapping[str, Block]) -> Mapping[str, Block]:
        with self.together():
            moments = self._spread({key: block.moments for key, block in blocks.items() if block.moments})
        return {key: replace(block, moments=moments[key]) for key, block in blocks.items()}

    def hold(self, blocks: Mapping[str, Block]) -> None:
        owners = self._owners([Sums(block.map, block.structure, block.moments) for block in blocks.values()], {})
        for block in blocks.values():
            block.owner = owners[block.map.weight]
            if block.owner != self.rank:
                block.moments = {}
        self.invert(blocks)


class _Exchange:
    """Two messages of a step: from all to the owners and back, shard by shard."""

    def __init__(
        self,
        ranks: Ranks,
        by_owner: Mapping[int, list[Block]],
        sides: Sequence[Tensors],
        parameters: Tensors,
    ) -> None:
        self._ranks, self._blocks, self._sides = ranks, by_owner, sides
        self._names = {
            owner: list(dict.fromkeys(name for block in own for name in block.map.members))
            for owner, own in by_owner.items()
        }
        self._like = {name: _sharded(parameters[name]) for names in self._names.values() for name in names}
        self._dtype = reduce(torch.promote_types, (t.dtype for side in sides for t in side.values()))
        self._own = self._names.get(ranks.rank, [])

    def to_owners(self) -> list[dict[str, Tensor]]:
        """Whole tensors of this rank's blocks, of each side."""
        wholes = [{name: self._empty(name) for name in self._own} for _ in self._sides]
        outgoing = [
            [side[name].to(self._dtype) for side in self._sides for name in self._names.get(owner, ())]
            for owner in range(self._ranks.size)
        ]
        incoming = [
            [self._shard(name, whole, rank) for side in wholes for name, whole in side.items()]
            for rank in range(self._ranks.size)
        ]
        self._ranks.swap(outgoing, incoming)
        return [
            {name: whole.to(side[name].dtype) for name, whole in held.items()}
            for held, side in zip(wholes, self._sides, strict=True)
        ]

    def from_owners(self, turned: TurnedSteps) -> TurnedSteps:
        """Shards of the new steps. What an owner has turned, and which maps it has left as they were, travels along."""
        me, everyone, steps = self._ranks.rank, range(self._ranks.size), self._sides[1]
        words = {
            owner: torch.zeros(len(self._names[owner]) + len(blocks), dtype=self._dtype, device=self._ranks.device)
            for owner, blocks in self._blocks.items()
        }
        shards = {
            owner: {name: torch.empty_like(steps[name], dtype=self._dtype) for name in names}
            for owner, names in self._names.items()
        }
        outgoing: list[list[Tensor]] = [[] for _ in everyone]
        if self._own:
            said = [name in turned.steps for name in self._own]
            said += [block.map.key in turned.left for block in self._blocks[me]]
            words[me].copy_(torch.tensor(said))
            own = {name: turned.steps[name] if name in turned.steps else self._empty(name) for name in self._own}
            outgoing = [
                [words[me], *(self._shard(name, step, rank).to(self._dtype) for name, step in own.items())]
                for rank in everyone
            ]
        incoming = [[words[owner], *shards[owner].values()] if owner in words else [] for owner in everyone]
        self._ranks.swap(outgoing, incoming)
        result = TurnedSteps({}, [])
        for owner, names in self._names.items():
            heard = [word != 0 for word in words[owner].tolist()]
            result.steps.update({n: shards[owner][n] for n, yes in zip(names, heard, strict=False) if yes})
            left = zip(self._blocks[owner], heard[len(names) :], strict=True)
            result.left.extend(block.map.key for block, yes in left if yes)
        return result

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self._like[name].shape, dtype=self._dtype, device=self._like[name].device)

    def _shard(self, name: str, whole: Tensor, rank: int) -> Tensor:
        return fsdp.shard(whole, self._like[name], rank)


def _sharded(tensor: Tensor) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise LLQRError(
            "the base keeps whole tensors for sharded parameters: its momentum can't be sent to the owners of U"
        )
    return tensor
