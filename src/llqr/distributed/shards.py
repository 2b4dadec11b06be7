"""Shards: LLQR where the parameters are sharded by `fully_shard` (FSDP2).

Each block of U, with its curvature, is on one rank, its owner. At a refit the parameters are whole on every rank. At a step the
shards of the momentum and of the base's step go to the owner, and the shards of the step along U m come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llqr.base_step import TurnedSteps, turn
from llqr.distributed import fsdp
from llqr.distributed.block_owners import deal
from llqr.distributed.paper_ranks import TrainingRanks
from llqr.distributed.processes import Blocks, Found, Process, Replicas, cost, spread
from llqr.distributed.ranks import Ranks
from llqr.errors import LLQRError
from llqr.saved_state import block_from_state, map_from_state
from llqr.statistics import Block, Sums
from llqr.structures.base import Structure


class Shards(Replicas):
    """Several ranks, each with shards of the parameters and with its own blocks of U. Of the other blocks it knows the map."""

    sharded = True

    def __init__(self, training: TrainingRanks, model: nn.Module) -> None:
        super().__init__(training)
        self._model = model
        self._owners: dict[str, int] = {}
        """Of all maps of a weight, by its name."""
        self._dealt: dict[str, int] = {}
        """The same, of a refit that isn't taken yet."""

    @contextmanager
    def refitting(self, settings: object, parameters: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        with super().refitting(settings, parameters):
            yield {name: p for name, p in self._model.named_parameters() if name in parameters}

    def stepping(self) -> AbstractContextManager[None]:
        return self.together()

    # --- refits ---

    def sum_moments(self, found: Found, of_means: bool) -> dict[str, Sums]:
        """Only the owner keeps the sums of a map."""
        summed = super().sum_moments(found, of_means)
        self._dealt = self._deal({key: (s.map.weight, cost(s.tensors)) for key, s in summed.items()}, self._owners)
        return {
            key: sums if self._dealt[sums.map.weight] == self.rank else replace(sums, tensors={})
            for key, sums in summed.items()
        }

    def _deal(self, costs: Mapping[str, tuple[str, int]], kept: Mapping[str, int]) -> dict[str, int]:
        """An owner for each weight; one that has an owner keeps it."""
        sizes = dict.fromkeys(kept, 0)
        for weight, size in costs.values():
            sizes[weight] = sizes.get(weight, 0) + size
        return deal(sizes, self._ranks.size, kept)

    def settle(self) -> None:
        self._owners = self._dealt

    def invert(self, blocks: Mapping[str, Block]) -> None:
        Process.invert(self, {key: block for key, block in blocks.items() if block.moments})

    # --- steps ---

    def local(self, tensor: Tensor) -> Tensor:
        return _sharded(tensor).to_local()

    def shard_like(self, parameter: Tensor, local: Tensor) -> Tensor:
        like = _sharded(parameter)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def turn(
        self,
        blocks: Iterable[Block],
        momenta: Mapping[str, Tensor],
        steps: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> TurnedSteps:
        """By the owners of the blocks."""
        by_owner: dict[int, list[Block]] = {}
        for block in blocks:
            if all(name in momenta and name in steps for name in block.map.members):
                by_owner.setdefault(self._owners[block.map.weight], []).append(block)
        if not by_owner:
            return TurnedSteps({}, [])
        exchange = _Exchange(self._ranks, by_owner, [momenta, steps], parameters)
        turned = turn(by_owner.get(self.rank, []), *exchange.to_owners())
        return exchange.from_owners(turned)

    # --- checkpoints: every rank takes part ---

    def gathered(self, blocks: Blocks) -> Blocks:
        with self._ranks.together():
            moments = spread(self._ranks, {key: block.moments for key, block in blocks.items() if block.moments})
        return {key: replace(block, moments=moments[key]) for key, block in blocks.items()}

    def blocks(
        self, states: Mapping[str, Any], parameters: Mapping[str, Tensor], structures: Mapping[str, Structure]
    ) -> Blocks:
        maps = {key: map_from_state(key, state, parameters) for key, state in states.items()}
        self._dealt = self._deal({key: (maps[key].weight, cost(s["moments"])) for key, s in states.items()}, {})
        return {
            key: block_from_state(key, state, parameters, structures)
            if self._dealt[maps[key].weight] == self.rank
            else Block(
                maps[key], structures[maps[key].weight], refits=state["refits"], diagonal=float(state["diagonal"])
            )
            for key, state in states.items()
        }

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()

    def part(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        like = _sharded(parameter)
        return self.shard_like(like, fsdp.shard(tensor, like, self.rank).to(like.device, like.dtype, copy=True))


class _Exchange:
    """Two messages of a step: from all to the owners and back, shard by shard."""

    def __init__(
        self,
        ranks: Ranks,
        by_owner: Mapping[int, list[Block]],
        sides: Sequence[Mapping[str, Tensor]],
        parameters: Mapping[str, Tensor],
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
