"""Stats: what the refits of an optimizer came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from llqr.checks import check_amount, check_count
from llqr.errors import LLQRError


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
