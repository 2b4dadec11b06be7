"""Which processes train a model together, and what is inside the wrapper that makes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llqr.errors import LLQRError

if TYPE_CHECKING:
    from llqr.distributed.team import Team


def unwrapped(model: nn.Module) -> nn.Module:
    """What DistributedDataParallel wraps: a refit names parameters as it does, and calls it by itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def team_of(model: nn.Module, process_group: Any, shard: bool | None) -> Team | None:
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
    from llqr.distributed.ranks import Ranks
    from llqr.distributed.team import Team

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
    return Team(Ranks(group, device), model, shard)


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
