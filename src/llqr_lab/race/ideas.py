"""What `llqr bench ideas` holds against each other: LLQR as it races on SGDM, and the same with one thing changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llqr_lab.race.entries import ENTRIES, LENGTHS, Entry

TASKS = ("fashion-convnet", "shakespeare")
BASE = next(entry for entry in ENTRIES if entry.name == "SGDM")
BASELINE = next(entry for entry in ENTRIES if entry.name == "LLQR on SGDM")


@dataclass(frozen=True)
class Idea:
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    method: str = LENGTHS

    @property
    def entry(self) -> Entry:
        """In the race with one thing changed, at the baseline's learning rates."""
        return Entry(self.name, BASELINE.base, BASELINE.rates, self.method, tuple(self.changes.items()))


IDEAS = (
    Idea("diagonal", method="diagonal-ngd-scalefree"),
    Idea("K-FAC", method="kfac-ngd-scalefree"),
    Idea("E-KFAC", method="ekfac-ngd-scalefree"),
    Idea("the paper's solver, E-KFAC", {"llqr.every": 50}, "ekfac-ngd"),
    Idea("curvature of the whole batch", {"llqr.sample": 1.0}),
    Idea("3 inner steps", {"llqr.steps": 3}),
    Idea("10 inner steps", {"llqr.steps": 10}),
    Idea("refits every 25 steps", {"llqr.every": 25}),
    Idea("refits every 100 steps", {"llqr.every": 100}),
    Idea("a little every 10 steps, from the last U", {"llqr.every": 10, "llqr.warm_start": True, "llqr.ema": 0.9}),
    Idea("trust 0.1, not earned", {"llqr.trust": 0.1}),
    Idea("trust 1: U only shortens", {"llqr.trust": 1.0}),
    Idea("the paper's objective (trust 0)", {"llqr.trust": 0.0}),
)
