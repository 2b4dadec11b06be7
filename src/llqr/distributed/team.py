"""Team: what LLQR does otherwise where several ranks train one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llqr.curvature.precision import at_least_single
from llqr.distributed import fsdp
from llqr.distributed.division import Division
from llqr.distributed.ranks import Ranks
from llqr.distributed.sharing import FullySharded, Replicated, Shared, Sharing
from llqr.errors import LLQRError
from llqr.preconditioner import Preconditioner
from llqr.structures.stacks import Group


class Team:
    """The ranks that train a model.

    A refit divides the blocks among the ranks. With `shard`, each keeps its own, and a step exchanges U g; without, all get
    all of U at the end of the refit, and steps and checkpoints are each rank's own affair.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, shard: bool | None) -> None:
        """`model` is what LLQR was given: in its wrapper, if it was."""
        self.ranks, self._model, self._fsdp = ranks, model, fsdp.is_sharded(model)
        if self._fsdp and shard is not None and not shard:
            raise LLQRError("the parameters are sharded by fully_shard, and so is U: leave shard out, or make it True")
        self.shard = self._fsdp or bool(shard)
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

    def divide(self, groups: Sequence[Group], settings: object, before: Division | None) -> Division:
        """The blocks of a refit, dealt out; `groups` are all of them. Raises where ranks are about to do different things."""
        blocks = [(g.structure, g.keys, g.members, tuple(map(tuple, g.shapes)), g.dtype) for g in groups]
        self.ranks.agree("trainable parameters and structures", blocks)
        self.ranks.agree("settings of LLQR", settings)
        return Division.of(self.ranks, self.shard, groups, before)

    def at_owners(
        self, division: Division, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """For a refit: whole gradients of this rank's blocks; nobody reads the others, which are zeros without memory."""
        if not self._fsdp:
            return gradients
        own = FullySharded(division, parameters).at_owner(gradients)
        return {
            name: own[name]
            if name in own
            else torch.zeros((), dtype=at_least_single(g.dtype), device=g.device).expand(g.shape)
            for name, g in gradients.items()
        }

    def steer(
        self,
        division: Division,
        u: Preconditioner,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> Shared:
        """U g with every rank's blocks."""
        if self._sharing is None or not self._sharing.fits(division, parameters):
            self._sharing = (FullySharded if self._fsdp else Replicated)(division, parameters)
        return self._sharing.steer(u, gradients)


@contextmanager
def _silent(model: DistributedDataParallel) -> Iterator[None]:
    """A closure that a refit evaluates may call the wrapper, which then sends nothing: neither gradients nor buffers."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = False
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
