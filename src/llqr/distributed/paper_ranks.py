"""What LLQR.paper does where several ranks train one model: refits together, and U g where each rank holds its own blocks of U.

Gradients go to the owners of their blocks, and U g comes back. Under DDP every rank has every gradient, and a step sends as
many numbers as there are parameters, from the owners to all. Under FSDP2 a rank has a shard of each gradient: it sends it to
the owner and gets a shard of U g for it, so a step sends twice the numbers of a rank's shards.

What owners have noted (no gradient, a block that isn't finite) travels along, so that all ranks do and count the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import compress

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from llqr.curvature.precision import at_least_single
from llqr.distributed import fsdp
from llqr.distributed.block_owners import BlockOwners, OneProcess
from llqr.distributed.ranks import Ranks
from llqr.errors import LLQRError
from llqr.preconditioner import Preconditioned, Preconditioner
from llqr.structures.stacks import Group
from llqr.wrapper import Schedule

NO_GRADIENT, STEERED, UNKNOWN = range(3)
"""What an owner says of a parameter: it has no gradient there; here is U g; U doesn't know it. Of a block: whether it isn't
finite."""


class Sharing(ABC):
    """How gradients come to the owners of their blocks, and U g from there."""

    def __init__(self, owners: BlockOwners, parameters: Mapping[str, Tensor]) -> None:
        self._owners, self._ranks, self._parameters = owners, owners.ranks, parameters
        self._names = {owner: [name for name in names if name in parameters] for owner, names in owners.names().items()}
        self._keys = {owner: owners.keys(owner) for owner in self._names}

    def fits(self, owners: BlockOwners, parameters: Mapping[str, Tensor]) -> bool:
        """Whether it was made for these."""
        return self._owners is owners and self._parameters is parameters

    @abstractmethod
    def at_owner(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of this rank's blocks, whole; a collective operation."""

    @abstractmethod
    def _from_owners(self, steered: Mapping[str, Tensor], notes: dict[int, Tensor]) -> dict[str, Tensor]:
        """U g of all parameters, in the form in which the parameters are here. `notes` are overwritten by the owners' own."""

    def precondition(self, u: Preconditioner, gradients: Mapping[str, Tensor]) -> Preconditioned:
        """U g of all blocks; `u` are this rank's, and without them it is g."""
        own = self.at_owner(gradients)
        steered = u.precondition(own)
        notes = {owner: self._notes(owner, own, steered) for owner in self._names}
        values = self._from_owners({n: g for n, g in steered.gradients.items() if g is not None}, notes)
        shared = Preconditioned({}, [])
        for owner, names in self._names.items():
            said = list(map(int, notes[owner].tolist()))
            for name, word in zip(names, said, strict=False):
                if word != UNKNOWN:
                    shared.gradients[name] = values[name] if word == STEERED else None
            shared.nonfinite.extend(compress(self._keys[owner], said[len(names) :]))
        return shared

    def _notes(self, owner: int, own: Mapping[str, Tensor], steered: Preconditioned) -> Tensor:
        """A word for each parameter and each block of an owner, in the dtype of what it sends."""
        names, keys = self._names[owner], self._keys[owner]
        like = self._parameters[names[0]] if names else torch.empty(0)
        words = [
            NO_GRADIENT if name not in own else STEERED if name in steered.gradients else UNKNOWN for name in names
        ]
        words += [key in steered.nonfinite for key in keys]
        return torch.tensor(words, dtype=like.dtype, device=like.device)


class Replicated(Sharing):
    """Every rank has every parameter and every gradient whole."""

    def at_owner(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: gradients[name] for name in self._names.get(self._ranks.rank, ()) if name in gradients}

    def _from_owners(self, steered: Mapping[str, Tensor], notes: dict[int, Tensor]) -> dict[str, Tensor]:
        values = {
            name: steered[name].contiguous() if name in steered else self._zeros(name)
            for names in self._names.values()
            for name in names
        }
        held = {owner: [notes[owner], *(values[name] for name in names)] for owner, names in self._names.items()}
        self._ranks.share(held)
        return values

    def _zeros(self, name: str) -> Tensor:
        """In the layout of what is sent, whatever the parameter's."""
        like = self._parameters[name]
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


class FullySharded(Sharing):
    """Every rank has a shard of each parameter and of its gradient, as FSDP2 cuts them."""

    def at_owner(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = self._names.get(self._ranks.rank, [])
        wholes = {name: self._empty(name) for name in own if name in gradients}
        outgoing = [
            [_local(gradients[name]) for name in self._names.get(owner, ()) if name in gradients]
            for owner in range(self._ranks.size)
        ]
        incoming = [[fsdp.shard(w, self._like(name), rank) for name, w in wholes.items()] for rank in self._everyone]
        self._ranks.swap(outgoing, incoming)
        return wholes

    def _from_owners(self, steered: Mapping[str, Tensor], notes: dict[int, Tensor]) -> dict[str, Tensor]:
        me = self._ranks.rank
        own = {
            name: steered[name] if name in steered else self._empty(name).zero_() for name in self._names.get(me, ())
        }
        locals_ = {
            name: torch.empty_like(_local(self._parameters[name])) for names in self._names.values() for name in names
        }
        outgoing = [
            [notes[me], *(fsdp.shard(value, self._like(name), rank) for name, value in own.items())] if own else []
            for rank in self._everyone
        ]
        incoming = [
            [notes[owner], *(locals_[name] for name in self._names[owner])] if self._names.get(owner) else []
            for owner in self._everyone
        ]
        self._ranks.swap(outgoing, incoming)
        return {name: self._sharded(name, local) for name, local in locals_.items()}

    @property
    def _everyone(self) -> range:
        return range(self._ranks.size)

    def _like(self, name: str) -> DTensor:
        parameter = self._parameters[name]
        assert isinstance(parameter, DTensor)
        return parameter

    def _empty(self, name: str) -> Tensor:
        like = self._like(name)
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def _sharded(self, name: str, local: Tensor) -> DTensor:
        like = self._like(name)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


class TrainingRanks(OneProcess):
    """The ranks that train a model.

    A refit divides the blocks among the ranks. With `shard`, each keeps its own, and a step exchanges U g; without, all get
    all of U at the end of the refit, and steps and checkpoints are each rank's own affair.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, shard: bool | None) -> None:
        """`model` is what LLQR was given: in its wrapper, if it was."""
        self.ranks, self._model, self._fsdp = ranks, model, fsdp.is_sharded(model)
        if self._fsdp and shard is not None and not shard:
            raise LLQRError("the parameters are sharded by fully_shard, and so is U: leave shard out, or make it True")
        self.shard, self.several, self.group = self._fsdp or bool(shard), True, ranks.group
        self._sharing: Sharing | None = None

    @contextmanager
    def refitting(self) -> Iterator[None]:
        """For the time of a refit: what one rank raises, all do; the model's parameters are whole."""
        with ExitStack() as stack:
            stack.enter_context(self.ranks.together())
            self.ranks.check()
            if self._fsdp:
                stack.enter_context(fsdp.whole_parameters(self._model, self.ranks))
            if isinstance(self._model, DistributedDataParallel):
                stack.enter_context(_silent(self._model))
            yield

    def due(self, schedule: Schedule) -> bool:
        if isinstance(schedule.every, int):
            return schedule.due()
        return self.ranks.decide("answer of `every`", schedule.due)

    def together(self) -> AbstractContextManager[None]:
        return self.ranks.together()

    def owners_of(self, groups: Sequence[Group], before: BlockOwners | None = None) -> BlockOwners:
        return BlockOwners.of(self.ranks, self.shard, groups, before)

    def agree(self, groups: Sequence[Group], settings: object) -> None:
        blocks = [(g.structure, g.keys, g.members, tuple(map(tuple, g.shapes)), g.dtype) for g in groups]
        self.ranks.agree("trainable parameters and structures", blocks)
        self.ranks.agree("settings of LLQR", settings)

    def at_owners(
        self, owners: BlockOwners | None, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """The gradients of the others' blocks are zeros without memory."""
        if not self._fsdp or owners is None:
            return gradients
        own = FullySharded(owners, parameters).at_owner(gradients)
        return {
            name: own[name]
            if name in own
            else torch.zeros((), dtype=at_least_single(g.dtype), device=g.device).expand(g.shape)
            for name, g in gradients.items()
        }

    def precondition(
        self,
        owners: BlockOwners | None,
        u: Preconditioner,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> Preconditioned:
        if owners is None or not self.shard:
            return u.precondition(gradients)
        with self.together():
            if self._sharing is None or not self._sharing.fits(owners, parameters):
                self._sharing = (FullySharded if self._fsdp else Replicated)(owners, parameters)
            return self._sharing.precondition(u, gradients)


@contextmanager
def _silent(model: DistributedDataParallel) -> Iterator[None]:
    """A closure that a refit evaluates may call the wrapper, which then sends nothing: neither gradients nor buffers."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = False
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
