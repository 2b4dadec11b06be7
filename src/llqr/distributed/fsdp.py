"""FSDP2 (`fully_shard`): what can be sharded how, and the model with its parameters whole for the time of a refit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from llqr.distributed.ranks import Ranks
from llqr.errors import LLQRError


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that the parameters are sharded over; None where they aren't."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh.get_group()
    return None


def reshard(model: nn.Module) -> bool:
    """Put sharded parameters back where a forward pass left whole ones, as one without a backward pass does.

    Returns whether there is something that fully_shard has sharded.
    """
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in found:
        module.reshard()
    return bool(found)


def holds_gradients(model: nn.Module) -> bool:
    """Whether gradients wait to be reduced, as after set_requires_gradient_sync(False): they aren't in `.grad` then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            held = [param for group in groups if group is not None for param in group.fsdp_params]
            if any(p.unsharded_accumulated_grad is not None for p in held):
                return True
            wholes = [getattr(param, "_unsharded_param", None) for param in held]
            if any(whole is not None and whole.grad is not None for whole in wholes):
                return True
    return False


def check(model: nn.Module) -> None:
    """Raise for what is sharded otherwise than by `fully_shard` over one group of ranks."""
    for name, module in model.named_modules():
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
            raise LLQRError(
                f"{f'{name!r} is' if name else 'the model is'} wrapped in FullyShardedDataParallel (FSDP1), which flattens "
                "its parameters so that they have no shape: use fully_shard (FSDP2)"
            )
    meshes = set()
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        meshes.add(mesh)
        if mesh.ndim != 1 or type(placements[0]) is not Shard or len(meshes) > 1:
            raise LLQRError(
                f"{name!r} is distributed as {tuple(placements)} over a mesh of {mesh.ndim} dimensions: LLQR works with "
                "parameters that fully_shard has sharded over one group of ranks, and not yet with tensor parallelism, hybrid "
                "sharding (HSDP) or replicated DTensors"
            )
    if meshes:
        whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        if whole:
            raise LLQRError(
                f"some parameters are sharded and {whole[0]!r} isn't: call fully_shard on the whole model as well"
            )
        if len({parameter.dtype for parameter in model.parameters()}) > 1:
            raise LLQRError("the sharded parameters are of several dtypes: make them one, as in model.float()")


@contextmanager
def whole_parameters(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """The model as if it had never been sharded: parameters whole, on every rank, and none of FSDP's hooks.

    The sharded ones have no gradients meanwhile, so a closure finds nothing to clear.
    """
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    ranks.check()
    with torch.no_grad():
        found = {id(p): nn.Parameter(ranks.send(p.full_tensor), p.requires_grad) for p in sharded}
    gradients = [p.grad for p in sharded]
    slots: list[tuple[dict[str, Any], str, Any]] = []
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                slots.append((module._parameters, name, parameter))
        hooks += [(held, dict(held)) for held in (module._forward_pre_hooks, module._forward_hooks)]
    try:
        for parameter in sharded:
            parameter.grad = None
        for slot, name, parameter in slots:
            slot[name] = found[id(parameter)]
        for held, before in hooks:
            for key, hook in before.items():
                if _is_fsdp(hook):
                    del held[key]
        yield
    finally:
        for parameter, gradient in zip(sharded, gradients, strict=True):
            parameter.grad = gradient
        for slot, name, parameter in slots:
            slot[name] = parameter
        for held, before in hooks:
            later = {key: hook for key, hook in held.items() if key not in before}
            held.clear()
            held.update({**before, **later})


def _is_fsdp(hook: Any) -> bool:
    """Registered by fully_shard: a method of its state, or one wrapped for a group of modules."""
    owner = getattr(hook, "__self__", None) or getattr(getattr(hook, "__wrapped__", None), "__self__", None)
    return type(owner).__name__ == "FSDPState"


def shard(whole: Tensor, like: DTensor, rank: int) -> Tensor:
    """A rank's part of a tensor that is sharded like another: rows in equal chunks, the last ones shorter or empty."""
    (placement,) = like.placements
    assert isinstance(placement, Shard)
    side, ranks = like.shape[placement.dim], like.device_mesh.size()
    chunk = -(-side // ranks)
    start = min(rank * chunk, side)
    return whole.narrow(placement.dim, start, min(chunk, side - start))
