"""Together: what LLQR does for the ranks that train a model with it, if there are several."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from llqr.distributed.block_owners import Division
from llqr.distributed.processes import standing, team_of, unwrapped
from llqr.errors import LLQRError
from llqr.preconditioner import Preconditioner
from llqr.refit import Refit, Source, trainable
from llqr.settings import Schedule
from llqr.wrapper import Wrapping

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Together(Wrapping):
    """An optimizer that meets the other ranks, and does with them what one would do alone."""

    model: nn.Module
    preconditioner: Preconditioner | None
    ema: float
    warm_start: bool
    _refit: Refit
    _schedule: Schedule
    _division: Division | None

    def _gather(self, model: nn.Module, group: ProcessGroup | None, shard: bool | None) -> None:
        """The ranks of a model, which is in its wrapper if it has one."""
        self._team, self._group, self._shard = team_of(model, group, shard), group, shard
        self._standing = standing(unwrapped(model).parameters())

    def _meet(self, parameters: Mapping[str, Tensor], loads: bool = False) -> None:
        """Ranks may have met, and parameters been sharded, since this was made: as where a framework prepares the model.

        `loads`: another U is about to take the place of the one that is there.
        """
        now = standing(parameters.values())
        if now == self._standing:
            return
        team = team_of(self.model, self._group, self._shard)
        if team is not None and self.preconditioner is not None and not loads:
            raise LLQRError(
                "torch.distributed was initialised, or the model sharded, after U was fitted or loaded, so ranks may have a U "
                "each: call init_process_group() and fully_shard first, and load_state_dict() after them"
            )
        self._team, self._standing = team, now

    def _due(self) -> bool:
        if self._team is None or isinstance(self._schedule.every, int):
            return self._schedule.due()
        return self._team.ranks.decide("answer of `every`", self._schedule.due)

    def _together(self) -> AbstractContextManager[None]:
        """What one rank raises in there, all do."""
        return nullcontext() if self._team is None else self._team.ranks.together()

    def _refitting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._team is None else self._team.refitting()

    def _dealt(self, parameters: Mapping[str, Tensor], source: Source) -> tuple[list[str], Source]:
        """The parameters whose blocks are fitted here, and what there is to fit them on."""
        names = trainable(parameters)
        if self._team is None:
            return names, source
        settings = (
            self._schedule.step,
            self.ema,
            self.warm_start,
            self.preconditioner is None,
            *self._refit.settings(),
        )
        division = self._team.divide(self._refit.blocks.layout(parameters, names), settings, self._division)
        gradients = self._team.at_owners(division, parameters, source.gradients)
        return division.own(), replace(source, gradients=gradients, division=division)
