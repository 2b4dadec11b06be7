"""What LLQR adds to the state of its base, looked at before anything is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from llqr.errors import LLQRError, LLQRWarning, callers_level
from llqr.loop.stats import Stats
from llqr.loop.trust import Trust, check_saved
from llqr.loop.updates import GRADIENT, UPDATE
from llqr.preconditioner import Preconditioner

KEY = "llqr"
"""Where `state_dict` keeps what isn't the base's."""


@dataclass
class State:
    """The number of the coming step, the state of U (None is the identity), the counts, and what U has earned."""

    step: int
    preconditioner: Mapping[str, Any] | None
    stats: Stats
    trust: Mapping[str, Any] = field(default_factory=dict)
    acts_on: str = GRADIENT

    @classmethod
    def of(cls, step: int, u: Preconditioner | None, stats: Stats, trust: Trust | None, acts_on: str) -> State:
        return cls(
            step, None if u is None else u.state_dict(), stats, {} if trust is None else trust.as_dict(), acts_on
        )

    def as_dict(self) -> dict[str, Any]:
        """Tensors and builtins alone."""
        own = {"step": self.step, "preconditioner": self.preconditioner, "stats": asdict(self.stats)}
        return {**own, "trust": dict(self.trust), "acts_on": self.acts_on}

    @classmethod
    def from_dict(cls, own: Any) -> State:
        parts: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
        step, u, stats = parts.get("step"), parts.get("preconditioner"), parts.get("stats")
        whole = u is None or (isinstance(u, Mapping) and isinstance(u.get("blocks"), Mapping))
        if not isinstance(step, int) or not isinstance(stats, Mapping) or not whole:
            raise LLQRError(
                f"what the state has under {KEY!r} isn't what LLQR.state_dict() puts there: a 'step', a 'preconditioner' and "
                "'stats'"
            )
        counts = Stats(**{f.name: stats[f.name] for f in fields(Stats) if f.name in stats})
        acts_on = parts.get("acts_on", GRADIENT)  # of states from before there was a choice
        if acts_on not in (GRADIENT, UPDATE):
            raise LLQRError(f"the state's U acts on {acts_on!r}, which is neither {GRADIENT!r} nor {UPDATE!r}")
        return cls(step, u, counts, check_saved(parts.get("trust")), acts_on)

    def fits(self, acts_on: str) -> bool:
        """Whether its U acts on the same; says so where it doesn't."""
        if acts_on != self.acts_on:
            warnings.warn(
                f"the state's U acts on the {self.acts_on}, and here it acts on the {acts_on}: it begins at the identity. To "
                f'go on with it, write acts_on="{self.acts_on}"',
                LLQRWarning,
                stacklevel=callers_level(),
            )
        return acts_on == self.acts_on


def checked_state_dict(state: Any) -> dict[str, Any]:
    """A copy of what looks like the state of an optimizer."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise LLQRError(
            "this isn't the state_dict() of an optimizer, which has 'state' and 'param_groups'; was it that of the model, or a "
            "whole checkpoint?"
        )
    return dict(state)
