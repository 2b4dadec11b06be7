"""Band: several seeds of one method as a curve and what is around it, step by step.

Between its evaluations a run has the value that it had, and so it does after its end if it came to one; a run that was stopped,
is still going, or diverged, is left out from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llqr_lab.report.lines import Floats
from llqr_lab.report.series import Column, Series, Steps


@dataclass(frozen=True)
class Spread:
    """Of one metric over seeds, a value a step; NaN where no seed has one."""

    mean: Floats
    median: Floats
    deviation: Floats
    """The standard deviation of the seeds, √(Σ(x - x̄)²/(n - 1)); NaN for a single one."""
    low: Floats
    high: Floats
    """The smallest and the largest that any seed had in the bucket that ends here."""
    count: Floats
    """Seeds that have a value."""


@dataclass(frozen=True)
class Band:
    width: int
    step: Steps
    spreads: dict[str, Spread]


def band(runs: Sequence[tuple[Series, bool]]) -> Band:
    """Over seeds, each with whether it came to its end."""
    width = max(series.width for series, _ in runs)
    seeds = [(series.coarsened(width), ended) for series, ended in runs if len(series)]
    steps: Steps = np.unique(np.concatenate([series.step for series, _ in seeds]))
    # seeds that end within one bucket at different steps share its end
    bucket = (steps - 1) // width
    steps = steps[np.append(np.diff(bucket) > 0, True)]
    names = dict.fromkeys(name for series, _ in seeds for name in series.columns)
    return Band(width, steps, {name: _spread(name, seeds, steps, width) for name in names})


def _spread(name: str, seeds: Sequence[tuple[Series, bool]], steps: Steps, width: int) -> Spread:
    held = [
        _held(series, series.columns[name], ended, steps, width) for series, ended in seeds if name in series.columns
    ]
    last, low, high = (np.stack([getattr(each, part) for each in held]) for part in ("last", "low", "high"))
    known = np.isfinite(last)
    count = known.sum(axis=0)
    values = np.where(known, last, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = values.sum(axis=0) / count
        squares = np.where(known, (last - mean) ** 2, 0.0).sum(axis=0)
        deviation = np.sqrt(squares / np.where(count > 1, count - 1, np.nan))
    return Spread(
        mean, _median(last, count), deviation, np.fmin.reduce(low), np.fmax.reduce(high), count.astype(np.float64)
    )


def _median(last: Floats, count: Steps) -> Floats:
    """Of what is finite, down the columns."""
    ordered = np.sort(last, axis=0)  # what isn't finite comes last
    places = np.arange(last.shape[1])
    lower, upper = np.maximum(count - 1, 0) // 2, count // 2
    middle = (ordered[lower, places] + ordered[np.minimum(upper, len(last) - 1), places]) / 2
    return np.where(count > 0, middle, np.nan)


def _held(series: Series, column: Column, ended: bool, steps: Steps, width: int) -> Column:
    """A run's values at other steps than its own."""
    there = np.flatnonzero(~np.isnan(column.last))
    own = series.step[there]
    bucket, own_bucket = (steps - 1) // width, (own - 1) // width
    place = np.searchsorted(own_bucket, bucket, side="right") - 1
    known = (place >= 0) & (ended | (bucket <= (series.step[-1] - 1) // width))
    chosen = there[np.maximum(place, 0)]
    here = known & (own_bucket[np.maximum(place, 0)] == bucket)
    last = np.where(known, column.last[chosen], np.nan)
    finite = np.where(np.isfinite(last), last, np.nan)
    return Column(last, np.where(here, column.low[chosen], finite), np.where(here, column.high[chosen], finite))
