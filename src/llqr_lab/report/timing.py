"""Where a run's time went, as far as its records tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llqr_lab.experiments.loop import SPENT
from llqr_lab.report.runs import FoundRun

PARTS = ("steps", "refits", "steps and refits", "evaluation", "batches", "checkpoints")
"""Steps and refits are one part where the records don't tell them apart."""


@dataclass(frozen=True)
class Timing:
    """Seconds of each part that is known, means over seeds."""

    method: str
    parts: dict[str, float]
    clock: str
    refit_wall: float | None
    """Seconds of refits by the clock on the wall, where only that is known."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def timing(method: str, runs: Sequence[FoundRun]) -> Timing | None:
    """Of the runs that came to their end; of all, where none did."""
    chosen = [run for run in runs if run.ended] or list(runs)
    known = [(run, parts) for run in chosen if (parts := _parts(run))]
    # a mean over runs that were recorded in different ways would be of nothing
    alike = [(run, parts) for run, parts in known if parts.keys() == known[0][1].keys()]
    if not alike:
        return None
    means = {name: sum(parts[name] for _, parts in alike) / len(alike) for name in PARTS if name in alike[0][1]}
    walls = [wall for run, _ in alike if (wall := _number(run, "refit_wall_seconds", "refit_seconds"))]
    clocks = {str((run.result or {}).get("clock", "")) for run, _ in alike}
    apart = "steps and refits" in means and len(walls) == len(alike)
    return Timing(method, means, " and ".join(sorted(clocks - {""})), sum(walls) / len(walls) if apart else None)


def _parts(run: FoundRun) -> dict[str, float]:
    seconds = _number(run, "seconds")
    if seconds is None:
        return {}
    refitting, evaluation, batches, checkpoints = (_number(run, name) for name in SPENT)
    fits = int((_number(run, "refits") or 0) + (_number(run, "rejected") or 0))
    wall = _number(run, "refit_wall_seconds")
    steps = int(_number(run, "step") or 0)
    if not fits:
        found = {"steps": seconds}
    elif refitting is not None and fits < steps:
        # a refit is what the steps with one take beyond what the others do
        refits = max(0.0, refitting - fits * (seconds - refitting) / (steps - fits))
        found = {"steps": seconds - refits, "refits": refits}
    elif wall is not None and (run.result or {}).get("clock") == "wall" and wall <= seconds:
        found = {"steps": seconds - wall, "refits": wall}
    else:
        found = {"steps and refits": seconds}
    beside = {"evaluation": evaluation, "batches": batches, "checkpoints": checkpoints}
    return found | {name: value for name, value in beside.items() if value is not None}


def _number(run: FoundRun, *names: str) -> float | None:
    """What the result says, or else what was measured last."""
    for name in names:
        for place in (run.result or {}, run.last):
            value = place.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return float(value)
    return None
