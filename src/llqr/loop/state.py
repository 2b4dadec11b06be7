"""What LLQR adds to the state of its base, looked at before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llqr.checks import check_count
from llqr.errors import LLQRError
from llqr.loop.stats import Stats
from llqr.preconditioner import Preconditioner

KEY = "llqr"
"""Where `state_dict` keeps what isn't the base's."""


@dataclass
class State:
    """The number of the coming step, the state of U (None is the identity), and the counts."""

    step: int
    preconditioner: Mapping[str, Any] | None
    stats: Stats

    @classmethod
    def of(cls, step: int, u: Preconditioner | None, stats: Stats) -> State:
        return cls(step, None if u is None else u.state_dict(), stats)

    def as_dict(self) -> dict[str, Any]:
        """Tensors and builtins alone."""
        return {"step": self.step, "preconditioner": self.preconditioner, "stats": asdict(self.stats)}

    @classmethod
    def from_dict(cls, own: Any) -> State:
        parts: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
        step: Any = parts.get("step")
        u, stats = parts.get("preconditioner"), parts.get("stats")
        whole = u is None or (isinstance(u, Mapping) and isinstance(u.get("blocks"), Mapping))
        if not {"step", "preconditioner"} <= parts.keys() or not isinstance(stats, Mapping) or not whole:
            raise LLQRError(
                f"what the state has under {KEY!r} isn't what LLQR.state_dict() puts there: a 'step', a 'preconditioner' and "
                "'stats'"
            )
        check_count(f"'step' in the state, under {KEY!r},", step)
        return cls(step, u, Stats.of(stats))


def checked_state_dict(state: Any) -> dict[str, Any]:
    """A copy of what looks like the state of an optimizer."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise LLQRError(
            "this isn't the state_dict() of an optimizer, which has 'state' and 'param_groups'; was it that of the model, or a "
            "whole checkpoint?"
        )
    groups = state["param_groups"]
    if not isinstance(state["state"], Mapping) or not isinstance(groups, (list, tuple)):
        raise LLQRError("the state of an optimizer has a mapping under 'state', and a list under 'param_groups'")
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups):
        raise LLQRError("the 'param_groups' of the state aren't those of an optimizer: each is a mapping with 'params'")
    return dict(state)
