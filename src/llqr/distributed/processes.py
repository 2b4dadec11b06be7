"""The processes that train a model together, as LLQR sees them: one alone, or several with a copy of the model each (DDP).

A refit sums the second moments of all ranks, so that U is what one process would find on all batches joined. Inverses are
divided among the ranks, and sent to all. Steps send nothing. Sharded parameters (FSDP2) are in `llqr.distributed.shards`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llqr.base_step import TurnedSteps, turn
from llqr.errors import LLQRError, RankError
from llqr.saved_state import block_from_state
from llqr.statistics import COLUMNS, ROWS, Block, LinearMap, Moments, Sums, merged
from llqr.structures.base import Structure
from llqr.wrapper import Schedule, often_at_first

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from llqr.distributed.paper_ranks import TrainingRanks
    from llqr.distributed.ranks import Ranks


def unwrapped(model: nn.Module) -> nn.Module:
    """What DistributedDataParallel wraps: a refit names parameters as it does, and calls it by itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def training_ranks_of(model: nn.Module, process_group: Any, shard: bool | None) -> TrainingRanks | None:
    """The ranks that train this model: those of the group that is given, of its wrapper, or else of the default group.

    None where there is one process only; but what `fully_shard` has sharded has a team, if only of one.
    """
    if shard not in (None, True, False):
        raise LLQRError(f"shard is True (each rank holds its own blocks of U), False (all of U) or None; not {shard!r}")
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise LLQRError("there is a process_group, and torch.distributed isn't initialised")
        return None
    from llqr.distributed import fsdp  # torch's DTensor takes a second to import, and most have no use for it
    from llqr.distributed.paper_ranks import TrainingRanks
    from llqr.distributed.ranks import Ranks

    fsdp.reshard(model)
    fsdp.check(model)
    group = process_group
    if group is None and isinstance(model, DistributedDataParallel):
        group = model.process_group
    if group is None:
        group = fsdp.group_of(model) or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # a group that this rank isn't in is none either
        raise LLQRError(
            "process_group is a group of torch.distributed that this rank is a member of, or None for that of the model's "
            f"wrapper or else the default one; not {group!r}"
        )
    if dist.get_world_size(group) == 1 and not fsdp.is_sharded(model):
        return None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return TrainingRanks(Ranks(group, device), model, shard)


def standing(parameters: Iterable[Tensor]) -> tuple[bool, bool]:
    """Whether processes have met, and whether the parameters are sharded: a team is for one such state of things."""
    if not dist.is_available() or not dist.is_initialized():
        return False, False
    from torch.distributed.tensor import DTensor

    return True, any(isinstance(parameter, DTensor) for parameter in parameters)


def holds_gradients(model: nn.Module) -> bool:
    """Whether a sharded model has gradients that aren't in `.grad` yet."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from llqr.distributed import fsdp

    return fsdp.holds_gradients(model)


Found = Mapping[LinearMap, Sums]
Blocks = dict[str, Block]


class Process:
    """The only process."""

    rank, size = 0, 1
    group: ProcessGroup | None = None
    several = False
    sharded = False
    """The parameters are in shards, and every block of U is on one rank alone."""

    def due(self, schedule: Schedule) -> bool:
        """Whether a step begins with a refit."""
        return schedule.due()

    @contextmanager
    def refitting(self, settings: object, parameters: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """For the time of a refit: the parameters, whole."""
        yield parameters

    def stepping(self) -> AbstractContextManager[None]:
        """For the time of a step that asks for `turn`."""
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        """What one process raises in there, all do."""
        return nullcontext()

    def share(self, examples: int) -> float:
        """Of all examples, those of this process."""
        return 1.0

    def sum_moments(self, found: Found, of_means: bool) -> dict[str, Sums]:
        """Of all processes, by the keys of the maps. `of_means`: each has the gradients of a mean over its own examples."""
        return merged(found.values())

    def invert(self, blocks: Mapping[str, Block]) -> None:
        """Make the blocks' U."""
        for block in blocks.values():
            block.invert()

    def settle(self) -> None:
        """The blocks of the last refit are taken, by all processes."""

    def local(self, tensor: Tensor) -> Tensor:
        """What is here of a tensor."""
        return tensor

    def shard_like(self, parameter: Tensor, local: Tensor) -> Tensor:
        """The inverse of `local`, for a tensor that is divided as a parameter is."""
        return local

    def turn(
        self,
        blocks: Iterable[Block],
        momenta: Mapping[str, Tensor],
        steps: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> TurnedSteps:
        """As `llqr.base_step.turn`, of and by what is `local`."""
        return turn(blocks, momenta, steps)

    # --- checkpoints ---

    def gathered(self, blocks: Blocks) -> Blocks:
        """With all that is known of them by any process."""
        return blocks

    def blocks(
        self, states: Mapping[str, Any], parameters: Mapping[str, Tensor], structures: Mapping[str, Structure]
    ) -> Blocks:
        """Those of a checkpoint, as far as they are held here."""
        return {key: block_from_state(key, state, parameters, structures) for key, state in states.items()}

    def whole(self, tensor: Tensor) -> Tensor:
        """A copy for a checkpoint."""
        return tensor.clone()

    def part(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A copy of what a checkpoint has for a parameter, as it is kept here."""
        return tensor.to(parameter, copy=True)


class Replicas(Process):
    """Several ranks, each with a copy of the model and of U."""

    several = True

    def __init__(self, training: TrainingRanks) -> None:
        self._training, self._ranks = training, training.ranks
        self.rank, self.size, self.group = self._ranks.rank, self._ranks.size, self._ranks.group

    def together(self) -> AbstractContextManager[None]:
        return self._ranks.together()

    def due(self, schedule: Schedule) -> bool:
        if isinstance(schedule.every, int) or schedule.every is often_at_first:
            return schedule.due()
        return self._ranks.decide("answer of `every`", schedule.due)

    @contextmanager
    def refitting(self, settings: object, parameters: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """What one rank raises in there, all do."""
        with self._training.refitting():
            self._ranks.agree("settings of LLQR", settings)
            _agree_on_names(self._ranks, [name for name, p in parameters.items() if p.requires_grad])
            yield parameters

    def share(self, examples: int) -> float:
        return examples / self._ranks.sums([float(examples)])[0]

    def sum_moments(self, found: Found, of_means: bool) -> dict[str, Sums]:
        known = self._known(found)
        names = [(sums, name) for sums in known for name in sums.tensors]
        totals = self._ranks.total([sums.tensors[name] for sums, name in names])
        places = self._ranks.total(
            [torch.tensor([s.places for s in known], dtype=torch.float64, device=self._ranks.device)]
        )
        summed = {
            id(s): replace(s, tensors={}, places=count) for s, count in zip(known, places[0].tolist(), strict=True)
        }
        for (sums, name), total in zip(names, totals, strict=True):
            inputs = ROWS if sums.map.inputs_on_rows else COLUMNS
            # the mean over all examples is the mean of the ranks' means
            means = of_means and name != inputs
            summed[id(sums)].tensors[name] = total / self._ranks.size**2 if means else total.clone()
        return merged(summed.values())

    def _known(self, found: Found) -> list[Sums]:
        """In the same order on all ranks; nothing was added to the sums of a map that only other ranks have used."""
        known = dict(found)
        if not self._ranks.same(sorted((_order(map_), _layout(sums.tensors)) for map_, sums in known.items())):
            told = self._ranks.gather([(s.map, s.structure, _layout(s.tensors)) for s in known.values()])
            for map_, structure, layout in (one for rank in told for one in rank):
                if map_ not in known:
                    zeros = {n: torch.zeros(shape, dtype=d, device=self._ranks.device) for n, shape, d in layout}
                    known[map_] = Sums(map_, structure, zeros)
        return [known[map_] for map_ in sorted(known, key=_order)]

    def invert(self, blocks: Mapping[str, Block]) -> None:
        """Each rank its own, divided by cost; then all have all."""
        from llqr.distributed.block_owners import deal

        owners = deal({key: cost(block.moments) for key, block in blocks.items()}, self._ranks.size)
        own = {key: block for key, block in blocks.items() if owners[key] == self.rank}
        super().invert(own)
        for key, tensors in spread(self._ranks, {key: block.inverse for key, block in own.items()}).items():
            blocks[key].inverse = tensors

    def blocks(
        self, states: Mapping[str, Any], parameters: Mapping[str, Tensor], structures: Mapping[str, Structure]
    ) -> Blocks:
        blocks = super().blocks(states, parameters, structures)
        for block in blocks.values():
            block.inverse = {name: tensor.contiguous() for name, tensor in block.inverse.items()}  # as they are sent
        return blocks


def processes_of(model: nn.Module, group: Any) -> Process:
    """Those that train a model, in its wrapper if it has one."""
    ranks = training_ranks_of(model, group, None)
    if ranks is None:
        return Process()
    if not ranks.shard:
        return Replicas(ranks)
    from llqr.distributed.shards import Shards  # with torch's DTensor, which takes a second to import

    return Shards(ranks, model)


def spread(ranks: Ranks, own: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Moments]:
    """What every rank has under its own keys, on all ranks, in the same memory layout."""
    whole: dict[str, Moments] = {}
    held: dict[int, list[Tensor]] = {}
    for rank, layouts in enumerate(ranks.gather({key: _layout(tensors) for key, tensors in own.items()})):
        for key, layout in layouts.items():
            whole[key] = {
                name: own[key][name].contiguous()
                if rank == ranks.rank
                else torch.empty(shape, dtype=dtype, device=ranks.device)
                for name, shape, dtype in layout
            }
            held.setdefault(rank, []).extend(whole[key].values())
    ranks.share(held)
    return whole


def cost(moments: Mapping[str, Tensor]) -> int:
    """Of an inverse: n³ for each matrix of n × n, n for each diagonal."""
    return sum(m.numel() * (m.shape[-1] if m.dim() == 3 and m.shape[1] == m.shape[2] else 1) for m in moments.values())


def _layout(tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def _order(map_: LinearMap) -> tuple[Any, ...]:
    return map_.weight, map_.first, map_.inputs_on_rows, map_.kernel, map_.bias or "", map_.shape


def _agree_on_names(ranks: Ranks, names: list[str]) -> None:
    """Raise unless all ranks train the same parameters."""
    if ranks.same(names):
        return
    told = ranks.gather(names)
    apart = sorted({name for known in told for name in known if any(name not in other for other in told)})
    if not apart:
        raise RankError("the ranks don't have the same parameters in the same order")
    where = [rank for rank, known in enumerate(told) if apart[0] in known]
    others = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
    raise RankError(
        f"the ranks don't train the same parameters: {apart[0]!r}{others} is trained on ranks {where} alone"
    )
