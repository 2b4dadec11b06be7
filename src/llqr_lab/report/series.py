"""Series: what a run measured, in so few points that a page can hold it, and without hiding anything.

Points are put into buckets of equal numbers of steps, 1, 2, 4, … of them: the smallest width with which there are no more than
`limit` buckets that aren't empty. A bucket keeps the last value, which is drawn, and the smallest and the largest, so that no
spike is lost. Widths are powers of two, so that the buckets of two runs fit into each other. Memory doesn't grow with the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llqr_lab.report.lines import Floats

Steps = NDArray[np.int64]


@dataclass(frozen=True)
class Column:
    """Of one metric, a value a bucket: NaN where it wasn't measured; `last` is infinite where it wasn't a finite number."""

    last: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, values: Floats) -> Column:
        finite = np.where(np.isfinite(values), values, np.nan)
        return cls(values, finite, finite)

    @classmethod
    def nothing(cls, length: int) -> Column:
        return cls.of(np.full(length, np.nan))

    def followed(self, other: Column) -> Column:
        pairs = ((self.last, other.last), (self.low, other.low), (self.high, other.high))
        return Column(*(np.concatenate(pair) for pair in pairs))

    def merged(self, starts: NDArray[np.intp]) -> Column:
        """With the places from each start to the next as one."""
        present = np.where(np.isnan(self.last), -1, np.arange(len(self.last)))
        newest = np.maximum.reduceat(present, starts)
        last = np.where(newest >= 0, self.last[newest], np.nan)
        with np.errstate(invalid="ignore"):
            return Column(last, np.fmin.reduceat(self.low, starts), np.fmax.reduceat(self.high, starts))


class Series:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.width = 1
        """Steps of a bucket; bucket k has those above k·width up to (k + 1)·width."""
        self.points = 0
        """Before they were put into buckets."""
        self.step: Steps = np.empty(0, np.int64)
        """The last of each bucket."""
        self.columns: dict[str, Column] = {}
        self.not_finite: dict[str, int] = {}
        """How many values weren't finite numbers, by the metric's name."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def names(self) -> list[str]:
        """Of the columns that have a number somewhere."""
        return [name for name, column in self.columns.items() if np.isfinite(column.low).any()]

    def add(self, step: Steps, columns: dict[str, Floats]) -> None:
        """More points. Their steps should rise; where they don't, later points of a bucket still count as later."""
        self.points += len(step)
        for name, values in columns.items():
            count = int(np.isinf(values).sum())
            if count:
                self.not_finite[name] = self.not_finite.get(name, 0) + count
        more = {name: Column.of(values) for name, values in columns.items()}
        before, length = len(self), len(step)
        joined = {
            name: self.columns.get(name, Column.nothing(before)).followed(more.get(name, Column.nothing(length)))
            for name in {**self.columns, **more}
        }
        self._take(np.concatenate((self.step, step)), joined)

    def coarsened(self, width: int) -> Series:
        """The same in wider buckets; exactly what they would have been."""
        other = Series(self.limit)
        other.width, other.points, other.not_finite = max(width, self.width), self.points, self.not_finite
        other._take(self.step, self.columns)
        return other

    def _take(self, step: Steps, columns: dict[str, Column]) -> None:
        if not len(step):
            return
        if (np.diff(step) < 0).any():
            order = np.argsort(step, kind="stable")
            step = step[order]
            columns = {
                name: Column(each.last[order], each.low[order], each.high[order]) for name, each in columns.items()
            }
        while 1 + np.count_nonzero(np.diff((step - 1) // self.width)) > self.limit:
            self.width *= 2
        starts = np.flatnonzero(np.diff((step - 1) // self.width, prepend=(step[0] - 1) // self.width - 1))
        self.step = np.maximum.reduceat(step, starts)
        self.columns = {name: each.merged(starts) for name, each in columns.items()}
