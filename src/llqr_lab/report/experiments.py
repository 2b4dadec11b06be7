"""Experiments: the runs of one preset at one scale, by method, with what the page says of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llqr_lab.experiments.collect import Result
from llqr_lab.experiments.paper import RESULTS
from llqr_lab.experiments.presets import PRESETS
from llqr_lab.experiments.table import cells, heading, methods_of, verdict
from llqr_lab.report.bands import Band, band
from llqr_lab.report.format import number
from llqr_lab.report.runs import FoundRun
from llqr_lab.report.series import Series
from llqr_lab.report.timing import PARTS, Timing, timing

FIRST = ("train_loss", "valid_loss", "test_loss", "train_accuracy", "test_accuracy", "bleu")
"""Metrics that are listed before others."""
BESIDE = ("epoch", "lr", "refits", "rejected", "objective")
"""Metrics that are listed after others: of how it was trained, not of what came of it."""


@dataclass(frozen=True)
class Method:
    label: str
    runs: list[FoundRun]

    @cached_property
    def band(self) -> Band | None:
        """Over seeds, where there are several."""
        return _band([(run.series, run.ended) for run in self.runs])

    @cached_property
    def diagnostics_band(self) -> Band | None:
        return _band([(run.diagnostics, run.ended) for run in self.runs])


def _band(runs: Sequence[tuple[Series, bool]]) -> Band | None:
    known = [(series, ended) for series, ended in runs if len(series)]
    return band(known) if len(known) > 1 else None


@dataclass(frozen=True)
class Experiment:
    preset: str
    scale: str
    methods: list[Method]

    @property
    def runs(self) -> list[FoundRun]:
        return [run for method in self.methods for run in method.runs]

    @property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs if run.result is not None]

    @property
    def summary(self) -> str:
        return PRESETS[self.preset].summary if self.preset in PRESETS else ""

    @property
    def ours(self) -> str:
        """What was trained, at which scale; "" as long as nothing is finished."""
        return heading(self.preset, self.results)[1] if self.results else ""

    @property
    def statuses(self) -> list[tuple[str, int]]:
        return Counter(run.status for run in self.runs).most_common()

    @property
    def table(self) -> list[list[str]]:
        """Beside the paper's; the first row is the header."""
        return cells(self.preset, self.results) if self.results else []

    @property
    def reported(self) -> bool:
        """Whether the paper has results of it."""
        return self.preset in RESULTS

    @property
    def verdict(self) -> str:
        return verdict(self.results) if self.results else ""

    @cached_property
    def metrics(self) -> list[str]:
        """What there is to draw, by importance."""
        return _ordered(name for run in self.runs for name in run.series.names if not _is_time(name))

    @property
    def chosen(self) -> str:
        """The metric that is drawn at first: the score, or what is nearest to it."""
        score = self.results[0]["score"] if self.results else ""
        wanted = (score, "test_accuracy" if score == "steps_to_target" else "valid_loss", "test_loss", "train_loss")
        return next((name for name in wanted if name in self.metrics), self.metrics[0] if self.metrics else "")

    @property
    def final_metrics(self) -> list[str]:
        """What the table of runs has of the end of each."""
        known = {name for run in self.runs for name, value in run.last.items() if _is_number(value)}
        return [name for name in _ordered(known) if name not in BESIDE and name != "step" and not _is_time(name)]

    def final(self, run: FoundRun, name: str) -> str:
        """With as many decimals as the others in its column, so that they can be compared at a glance."""
        value = run.last.get(name)
        column = [abs(each.last[name]) for each in self.runs if _is_finite(each.last.get(name)) and each.last[name]]
        if not _is_finite(value) or not column or max(column) >= 1e7 or min(column) < 1e-3:
            return number(value)
        whole = all(isinstance(each, int) for each in column)
        return f"{value:,.{0 if whole else 4 - max(0, min(4, math.floor(math.log10(max(column)))))}f}"

    @cached_property
    def timings(self) -> list[Timing]:
        return [found for method in self.methods if (found := timing(method.label, method.runs))]

    @property
    def longest(self) -> float:
        """Seconds of the longest training."""
        return max((run.seconds or 0.0 for run in self.runs), default=0.0)

    @property
    def time_parts(self) -> list[str]:
        return [part for part in PARTS if any(part in each.parts for each in self.timings)]

    @cached_property
    def settings(self) -> tuple[list[str], list[tuple[str, str, str]]]:
        """The names of settings that differ between runs; the others with their value, and the methods that don't have them."""
        values: dict[str, set[str]] = {}
        for run in self.runs:
            for name, value in run.settings.items():
                values.setdefault(name, set()).add(value)
        differing = [name for name in values if len(values[name]) > 1]
        return differing, [(name, min(found), self._without(name)) for name, found in values.items() if len(found) == 1]

    def _without(self, name: str) -> str:
        lacking = [method.label for method in self.methods if all(name not in run.settings for run in method.runs)]
        return ", ".join(lacking) if len(lacking) < 4 else f"{len(lacking)} methods"

    def setting(self, method: Method, name: str) -> str:
        return ", ".join(dict.fromkeys(run.settings[name] for run in method.runs if name in run.settings)) or "–"

    def unusual(self, method: Method, name: str) -> bool:
        """Whether a method has another value than most have."""
        usual, _ = Counter(self.setting(each, name) for each in self.methods).most_common(1)[0]
        return self.setting(method, name) != usual

    @property
    def diagnosed(self) -> list[FoundRun]:
        return [run for run in self.runs if len(run.diagnostics)]

    @cached_property
    def diagnostics(self) -> list[str]:
        """The diagnostics that are single numbers: of the step that the optimizer takes first, those by layer last."""
        names = {name for run in self.runs for name in run.diagnostics.names}
        names -= {name for run in self.runs for names in run.spectra.values() for name in names}
        known = ("cosine.optimizer", "cosine", "fraction", "staleness")
        rank = {prefix: number for number, prefix in enumerate(known)}
        parts = {name: (name, name.partition(".")[0]) for name in names}
        return sorted(
            names,
            key=lambda name: (
                name.startswith("layers."),
                min(rank.get(each, len(known)) for each in parts[name]),
                name,
            ),
        )

    @property
    def widths(self) -> list[int]:
        """Steps of the buckets that points were put into, where there were more than the page holds."""
        return sorted({run.series.width for run in self.runs if run.series.points > len(run.series)})


def experiments(runs: Iterable[FoundRun]) -> list[Experiment]:
    """Runs by preset and scale, then by method in the preset's order, then by seed."""
    groups: dict[tuple[str, str], list[FoundRun]] = {}
    for run in runs:
        groups.setdefault((run.preset, run.scale), []).append(run)
    found = []
    for (preset, scale), group in sorted(groups.items()):
        labels = methods_of([{"preset": preset, "method": run.method} for run in group])
        by_seed = sorted(group, key=lambda run: run.seed)
        methods = [Method(label, [run for run in by_seed if run.method == label]) for label in labels]
        found.append(Experiment(preset, scale, methods))
    return found


def _ordered(names: Iterable[str]) -> list[str]:
    def rank(name: str) -> tuple[int, str]:
        if name in FIRST:
            return FIRST.index(name), ""
        return (len(FIRST) + 1 + BESIDE.index(name), "") if name in BESIDE else (len(FIRST), name)

    return sorted(set(names), key=rank)


def _is_time(name: str) -> bool:
    return name == "seconds" or name.endswith("_seconds")


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
