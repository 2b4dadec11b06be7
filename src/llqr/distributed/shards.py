"""LLQR where the parameters are sharded by `fully_shard` (FSDP2): what can be sharded how, and what goes between the ranks.

Each block of U, with its curvature, is on one rank, its owner. At a refit the parameters are whole on every rank. At a step the
shards of the momentum and of the base's step go to the owner, and the shards of the step along U m come back. LLQR.paper has
all of U on every rank, and its gradients are gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from llqr.base_step import TurnedSteps, turn
from llqr.curvature.linear_maps import Block
from llqr.curvature.statistics import Sums
from llqr.distributed.processes import Process, Replicas, Tensors, cost, deal
from llqr.distributed.ranks import Ranks
from llqr.errors import LLQRError
from llqr.wrapper import replaced


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
            for param in (param for group in groups if group is not None for param in group.fsdp_params):
                whole = getattr(param, "_unsharded_param", None)
                if param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                    return True
    return False


def check_sharding(model: nn.Module) -> None:
    """Raise for what is sharded otherwise than by `fully_shard` over one group of ranks."""
    for name, module in model.named_modules():
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
            what = f"{name!r} is" if name else "the model is"
            raise LLQRError(f"{what} wrapped in FullyShardedDataParallel (FSDP1): use fully_shard (FSDP2)")
    meshes = set()
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        meshes.add(mesh)
        if mesh.ndim != 1 or type(placements[0]) is not Shard or len(meshes) > 1:
            raise LLQRError(
                f"{name!r} is distributed as {tuple(placements)} over a mesh of {mesh.ndim} dimensions: LLQR works where "
                "fully_shard has sharded over one group of ranks, not with tensor parallelism, hybrid sharding or replicas"
            )
    if meshes:
        whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        if whole:
            raise LLQRError(f"{whole[0]!r} isn't sharded, and others are: call fully_shard on the whole model")
        if len({parameter.dtype for parameter in model.parameters()}) > 1:
            raise LLQRError("the sharded parameters are of several dtypes: make them one, as in model.float()")


@contextmanager
def whole_parameters(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """The model as if it had never been sharded: parameters whole, on every rank, and none of FSDP's hooks.

    The sharded ones have no gradients meanwhile, so a closure finds nothing to clear.
    """
    sharded = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    ranks.check()
    with torch.no_grad():
        found = {id(p): nn.Parameter(ranks.send(p.full_tensor), p.requires_grad) for p in sharded.values()}
    modules = list(model.modules())
    slots = [(m._parameters, n, p) for m in modules for n, p in m._parameters.items() if isinstance(p, DTensor)]
    hooks = [(held, dict(held)) for m in modules for held in (m._forward_pre_hooks, m._forward_hooks)]
    with replaced(sharded, dict.fromkeys(sharded)):
        try:
            for slot, name, parameter in slots:
                slot[name] = found[id(parameter)]
            for held, before in hooks:
                for key, hook in before.items():
                    if _is_fsdp(hook):
                        del held[key]
            yield
        finally:
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


class Shards(Replicas):
    """Several ranks, each with shards of the parameters and with its own blocks of U. Of the other blocks it knows the map."""

    sharded = True

    @contextmanager
    def refitting(self, settings: object, parameters: Tensors) -> Iterator[Tensors]:
        with super().refitting(settings, parameters), whole_parameters(self._model, self):
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

    def lengths(self, steps: Collection[Tensor]) -> list[float]:
        own = torch.tensor(super().lengths(steps), dtype=torch.float64, device=self.device)
        return self.total([own.square()])[0].sqrt().tolist()

    def turn(self, blocks: Iterable[Block], momenta: Tensors, steps: Tensors, parameters: Tensors) -> TurnedSteps:
        """By the owners of the blocks: shards of m and of the base's steps go there, and shards of the new steps come back."""
        sides, everyone = (momenta, steps), range(self.size)
        owned: list[list[Block]] = [[] for _ in everyone]
        for block in blocks:
            if all(name in momenta and name in steps for name in block.map.members):
                owned[block.owner].append(block)
        names = [list(dict.fromkeys(name for block in own for name in block.map.members)) for own in owned]
        like = {name: _sharded(parameters[name]) for each in names for name in each}
        if not like:
            return TurnedSteps({}, [])
        dtype = reduce(torch.promote_types, (t.dtype for side in sides for t in side.values()))

        def of_ranks(*wholes: Tensors) -> list[list[Tensor]]:
            return [[shard(t, like[name], rank) for side in wholes for name, t in side.items()] for rank in everyone]

        wholes = [
            {name: torch.empty(like[name].shape, dtype=dtype, device=like[name].device) for name in names[self.rank]}
            for _ in sides
        ]
        outgoing = [[side[name].to(dtype) for side in sides for name in each] for each in names]
        self.swap(outgoing, of_ranks(*wholes))
        pairs = zip(wholes, sides, strict=True)
        turned = turn(owned[self.rank], *({n: t.to(side[n].dtype) for n, t in whole.items()} for whole, side in pairs))

        # what an owner has turned, and which maps it has left as they were, travels along
        words = [
            torch.zeros(len(n) + len(own), dtype=dtype, device=self.device) for n, own in zip(names, owned, strict=True)
        ]
        said = [name in turned.steps for name in names[self.rank]]
        said += [block.map.key in turned.left for block in owned[self.rank]]
        words[self.rank].copy_(torch.tensor(said))
        new = {name: turned.steps.get(name, step).to(dtype) for name, step in wholes[1].items()}
        shards = [{name: torch.empty_like(steps[name], dtype=dtype) for name in each} for each in names]
        incoming = [[word, *own.values()] for word, own in zip(words, shards, strict=True)]
        self.swap([[words[self.rank], *own] for own in of_ranks(new)], incoming)
        result = TurnedSteps({}, [])
        for own, word, parts in zip(owned, words, shards, strict=True):
            heard = [number != 0 for number in word.tolist()]
            result.steps.update({name: part for (name, part), yes in zip(parts.items(), heard, strict=False) if yes})
            left = zip(own, heard[len(parts) :], strict=True)
            result.left.extend(block.map.key for block, yes in left if yes)
        return result

    def whole(self, tensors: Tensors) -> dict[str, Tensor]:
        self.agree("gradients", list(tensors))
        return {name: self.send(_sharded(tensor).full_tensor) for name, tensor in tensors.items()}

    def part(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        like = _sharded(parameter)
        local = shard(tensor, like, self.rank).clone(memory_format=torch.contiguous_format)  # not a view of the whole
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


def _sharded(tensor: Tensor) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise LLQRError("the base keeps whole tensors for sharded parameters: take one that keeps what is like them")
    return tensor
