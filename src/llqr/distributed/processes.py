"""The processes that train a model together, as both optimizers see them: one alone, or several with a copy of the model each.

A refit of LLQR sums the second moments of all ranks, so that U is what one process would find on all batches joined. Inverses
are divided among the ranks, and sent to all. A refit of LLQR.paper sums gradients and curvature products, and every rank fits
the same U. Steps send nothing. Sharded parameters (FSDP2) are in `llqr.distributed.shards`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llqr.base_step import TurnedSteps, turn
from llqr.checks import replaced
from llqr.curvature.linear_maps import COLUMNS, ROWS, Block, LinearMap, Moments
from llqr.curvature.statistics import Sums, merged
from llqr.distributed.ranks import Ranks
from llqr.errors import LLQRError, RankError

if TYPE_CHECKING:
    from llqr.wrapper import Schedule

Tensors = Mapping[str, Tensor]


class Process:
    """The only process."""

    rank, size = 0, 1
    several = False
    sharded = False
    """The parameters are in shards, and every block of LLQR's U is on one rank alone."""

    def due(self, schedule: Schedule) -> bool:
        """Whether a step begins with a refit."""
        return schedule.due()

    def together(self) -> AbstractContextManager[None]:
        """What one process raises in there, all do."""
        return nullcontext()

    @contextmanager
    def refitting(self, settings: object, parameters: Tensors) -> Iterator[Tensors]:
        """For the time of a refit: the parameters, whole."""
        yield parameters

    def stepping(self) -> AbstractContextManager[None]:
        """For the time of a step, which may ask for `turn` or `whole`."""
        return nullcontext()

    # --- refits ---

    def sums(self, *values: float) -> list[float]:
        return list(values)

    def total(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of all processes, summed up."""
        return tensors

    def firsts(self, tensors: Tensors) -> Tensors:
        """What the first process has."""
        return tensors

    def sum_moments(self, found: Iterable[Sums], of_means: bool, blocks: Mapping[str, Block]) -> dict[str, Sums]:
        """Of all processes, by the keys of the maps. `of_means`: each has the gradients of a mean over its own examples.

        `blocks` are those of the refits before.
        """
        return merged(found)

    def invert(self, blocks: Mapping[str, Block]) -> None:
        """Make the blocks' U."""
        for block in blocks.values():
            block.invert()

    # --- steps ---

    def local(self, tensor: Tensor) -> Tensor:
        """What is here of a tensor."""
        return tensor

    def lengths(self, steps: Collection[Tensor]) -> list[float]:
        """Of what is `local` of some tensors, the norms of the tensors as a whole."""
        return torch.stack([norm.double() for norm in torch._foreach_norm(list(steps))]).tolist()

    def turn(self, blocks: Iterable[Block], momenta: Tensors, steps: Tensors, parameters: Tensors) -> TurnedSteps:
        """As `llqr.base_step.turn`, of and by what is `local`."""
        return turn(blocks, momenta, steps)

    def whole(self, tensors: Tensors) -> dict[str, Tensor]:
        """All of tensors that may be divided as their parameters are."""
        return dict(tensors)

    def part(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """The inverse of `whole`."""
        return tensor

    # --- checkpoints ---

    def gathered(self, blocks: Mapping[str, Block]) -> Mapping[str, Block]:
        """With all that is known of them by any process."""
        return blocks

    def hold(self, blocks: Mapping[str, Block]) -> None:
        """Make U of the blocks of a checkpoint, as far as they are to be held here."""
        Process.invert(self, blocks)


class Replicas(Ranks, Process):
    """Several ranks, each with a copy of the model and of U. `model` is in its wrapper, if it has one."""

    several = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, model: nn.Module) -> None:
        super().__init__(group, device)
        self._model = model

    def due(self, schedule: Schedule) -> bool:
        return schedule.due() if schedule.is_fixed else self.decide("answer of `every`", schedule.due)

    @contextmanager
    def refitting(self, settings: object, parameters: Tensors) -> Iterator[Tensors]:
        """What one rank raises in there, all do."""
        with self.together(), _silent(self._model):
            self.agree("settings of LLQR", settings)
            self._agree_on_names([name for name, p in parameters.items() if p.requires_grad])
            yield parameters

    def _agree_on_names(self, names: list[str]) -> None:
        """Raise unless all ranks train the same parameters."""
        if self.same(names):
            return
        told = self.gather(names)
        apart = sorted(name for name in set().union(*told) if not all(name in known for known in told))
        if not apart:
            raise RankError("the ranks don't have the same parameters in the same order")
        where = [rank for rank, known in enumerate(told) if apart[0] in known]
        others = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
        raise RankError(
            f"the ranks don't train the same parameters: {apart[0]!r}{others} is trained on ranks {where} alone"
        )

    def firsts(self, tensors: Tensors) -> Tensors:
        self.agree("gradients", list(tensors))
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        self.share({0: list(copies.values())})
        return copies

    def sum_moments(self, found: Iterable[Sums], of_means: bool, blocks: Mapping[str, Block]) -> dict[str, Sums]:
        known = self._in_order({sums.map: sums for sums in found})
        names = [(sums, name) for sums in known for name in sums.tensors]
        counts = torch.tensor([s.places for s in known], dtype=torch.float64, device=self.device)
        totals, (places,) = self.total([sums.tensors[name] for sums, name in names]), self.total([counts])
        summed = {id(s): replace(s, tensors={}, places=count) for s, count in zip(known, places.tolist(), strict=True)}
        for (sums, name), total in zip(names, totals, strict=True):
            inputs = ROWS if sums.map.inputs_on_rows else COLUMNS
            # the mean over all examples is the mean of the ranks' means
            means = of_means and name != inputs
            summed[id(sums)].tensors[name] = total / self.size**2 if means else total.clone()
        return merged(summed.values())

    def _in_order(self, known: dict[LinearMap, Sums]) -> list[Sums]:
        """In the same order on all ranks; nothing was added to the sums of a map that only other ranks have used."""
        if not self.same(sorted((_order(map_), _layout(sums.tensors)) for map_, sums in known.items())):
            told = self.gather([(s.map, s.structure, _layout(s.tensors)) for s in known.values()])
            for map_, structure, layout in (one for rank in told for one in rank):
                if map_ not in known:
                    zeros = {n: torch.zeros(shape, dtype=d, device=self.device) for n, shape, d in layout}
                    known[map_] = Sums(map_, structure, zeros)
        return [known[map_] for map_ in sorted(known, key=_order)]

    def invert(self, blocks: Mapping[str, Block]) -> None:
        """Each rank its own, divided by cost; then all have all."""
        owners = deal({key: cost(block.moments) for key, block in blocks.items()}, self.size)
        own = {key: block for key, block in blocks.items() if owners[key] == self.rank}
        super().invert(own)
        for key, tensors in self._spread({key: block.inverse for key, block in own.items()}).items():
            blocks[key].inverse = tensors

    def _spread(self, own: Mapping[str, Tensors]) -> dict[str, Moments]:
        """What every rank has under its own keys, on all ranks."""
        whole: dict[str, Moments] = {}
        held: dict[int, list[Tensor]] = {}
        for rank, layouts in enumerate(self.gather({key: _layout(tensors) for key, tensors in own.items()})):
            for key, layout in layouts.items():
                whole[key] = (
                    dict(own[key])
                    if rank == self.rank
                    else {n: torch.empty(shape, dtype=d, device=self.device) for n, shape, d in layout}
                )
                held.setdefault(rank, []).extend(whole[key].values())
        self.share(held)
        return whole


def _silent(model: nn.Module) -> AbstractContextManager[None]:
    """A closure that a refit evaluates may call DDP, which then sends nothing: neither gradients nor buffers."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return replaced(model, require_backward_grad_sync=False, require_forward_param_sync=False)


def unwrapped(model: nn.Module) -> nn.Module:
    """What DistributedDataParallel wraps: a refit names parameters as it does, and calls it by itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def processes_of(model: nn.Module, group: Any) -> Process:
    """Those that train a model: of the group that is given, of the model's wrapper, or else of the default group.

    What `fully_shard` has sharded has ranks, if only one.
    """
    shards = sharding()
    if shards is None:
        if group is not None:
            raise LLQRError("there is a process_group, and torch.distributed isn't initialised")
        return Process()
    shards.reshard(model)
    shards.check_sharding(model)
    sharded_over = shards.group_of(model)
    if group is None:
        own = model.process_group if isinstance(model, DistributedDataParallel) else sharded_over
        group = own or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # a group that this rank isn't in is none either
        raise LLQRError(
            f"process_group is a group of torch.distributed that this rank is a member of, or None; not {group!r}"
        )
    if dist.get_world_size(group) == 1 and sharded_over is None:
        return Process()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return (Replicas if sharded_over is None else shards.Shards)(group, device, model)


def sharding() -> Any:
    """`llqr.distributed.shards`, if processes have met: torch's DTensor takes a second to import, and most don't need it."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from llqr.distributed import shards

    return shards


def standing(parameters: Iterable[Tensor]) -> tuple[bool, bool]:
    """Whether processes have met, and whether the parameters are sharded: `processes_of` is for one such state of things."""
    shards = sharding()
    return shards is not None, shards is not None and any(isinstance(p, shards.DTensor) for p in parameters)


def holds_gradients(model: nn.Module) -> bool:
    """Whether a sharded model has gradients that aren't in `.grad` yet."""
    shards = sharding()
    return shards is not None and shards.holds_gradients(model)


def deal(sizes: Mapping[str, int], ranks: int, kept: Mapping[str, int] | None = None) -> dict[str, int]:
    """An owner for each: the largest first, each to the rank that has least by then; what has an owner keeps it."""
    owners = dict(kept or {})
    held = [(0, rank) for rank in range(ranks)]
    for key, owner in owners.items():
        held[owner] = held[owner][0] + sizes.get(key, 0), owner
    heapify(held)
    for key in sorted(sizes.keys() - owners.keys(), key=lambda key: (-sizes[key], key)):
        load, owners[key] = held[0]
        heapreplace(held, (load + sizes[key], owners[key]))
    return owners


def cost(moments: Tensors) -> int:
    """Of an inverse: n³ for each matrix of n × n, n for each diagonal."""
    return sum(m.numel() * (m.shape[-1] if m.dim() == 3 and m.shape[1] == m.shape[2] else 1) for m in moments.values())


def _layout(tensors: Tensors) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def _order(map_: LinearMap) -> tuple[Any, ...]:
    return map_.weight, map_.first, map_.inputs_on_rows, map_.bias or "", map_.shape
