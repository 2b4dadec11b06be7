"""What LLQR adds to the state of its base, looked at before anything is loaded, and what its refits came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from llqr.checks import check_amount, check_count
from llqr.errors import LLQRError
from llqr.preconditioner import Preconditioner


@dataclass
class Stats:
    """Counts since the first step; they are saved and loaded with the optimizer."""

    refits: int = 0
    """Refits whose U was taken."""
    rejected: int = 0
    """Refits whose U wasn't, because something wasn't finite. The U from before stayed."""
    nonfinite: int = 0
    """Blocks, or parameters where there is no U yet, whose step the base took as it would have alone, because something wasn't
    finite; summed over the steps."""
    objective_before: float | None = None
    """J of the last fit at its start, and"""
    objective_after: float | None = None
    """at its end."""
    seconds: float = 0.0
    """Time spent in refits."""
    memory: int = 0
    """Bytes of U."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Stats:
        """From a state, which may be of another version; an error where it has something else than numbers."""
        found = {f.name: saved[f.name] for f in fields(cls) if f.name in saved}
        for name, value in found.items():
            what = f"{name!r} in the state's 'stats'"
            if name.startswith("objective"):  # of a fit that failed it may be anything
                if value is not None and not isinstance(value, float):
                    raise LLQRError(f"{what} isn't a number or None")
            elif name == "seconds":
                check_amount(what, value)
            else:
                check_count(what, value)
        return cls(**found)

    def in_words(self) -> str:
        left = f", {self.nonfinite} steps of blocks left to the base" if self.nonfinite else ""
        refits = f"{self.refits} refits ({self.seconds:.1f} s), {self.rejected} rejected"
        return f"{refits}{left}, {self.memory / 2**20:.1f} MiB of curvature and U"

    def as_logs(self, prefix: str = "llqr/") -> dict[str, float]:
        """What a logger takes: numbers by name, without those that there aren't yet."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items() if value is not None}


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
