"""`llqr report`: from folders of runs to one page, with its style, its scripts and what they draw, that needs no other file."""

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from llqr_lab.errors import RunError
from llqr_lab.experiments.collect import Result
from llqr_lab.experiments.loop import SPENT
from llqr_lab.experiments.paper import RESULTS
from llqr_lab.experiments.presets import PRESETS
from llqr_lab.experiments.table import cells, heading, method_order, verdict
from llqr_lab.report.runs import FINISHED, STATUSES, FoundRun, curve, found_runs
from llqr_lab.results import write_text

POINTS, FEWEST, MOST = 40_000, 100, 1_000
"""Of all curves of a metric together, and of one curve."""
FIRST = ("train_loss", "valid_loss", "test_loss", "train_accuracy", "test_accuracy", "bleu")
BESIDE = ("epoch", "lr", "refits", "rejected", "objective")
"""Metrics that are listed before others, and after them: of how it was trained, not of what came of it."""
PARTS = ("steps", "refits", "evaluation", "batches", "checkpoints")
MARKS = dict(zip(STATUSES, "✓↗…‖✕?", strict=True))
"""Beside the words, so that colour isn't all that tells statuses apart."""


@dataclass(frozen=True)
class Experiment:
    """The runs of one preset at one scale, by method, with what the page says of them."""

    preset: str
    scale: str
    methods: dict[str, list[FoundRun]]

    @cached_property
    def runs(self) -> list[FoundRun]:
        return [run for runs in self.methods.values() for run in runs]

    @cached_property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs if run.result is not None]

    @cached_property
    def metrics(self) -> list[str]:
        """What there is to draw, the score first."""
        found = _ordered(name for run in self.runs for name in run.metrics)
        score = self.results[0]["score"] if self.results else ""
        wanted = (score, "test_accuracy" if score == "steps_to_target" else "valid_loss", "test_loss")
        first = [name for name in wanted if name in found][:1]
        return [*first, *(name for name in found if name not in first)]

    @cached_property
    def diagnostics(self) -> list[str]:
        """Of the step that the optimizer takes first, those by layer last."""
        names = {name for run in self.runs for name in run.diagnostics if name != "step"}
        known = ("cosine.optimizer", "cosine", "fraction", "staleness", "")
        first = {name: next(place for place, each in enumerate(known) if name.startswith(each)) for name in names}
        return sorted(names, key=lambda name: (name.startswith("layers."), first[name], name))

    @cached_property
    def times(self) -> list[list[str]]:
        """Where the time went, a row for each method: means over its seeds; the first row is the header."""
        found = {label: times for label, runs in self.methods.items() if (times := _times(runs))}
        parts = [part for part in PARTS if any(part in times for times in found.values())]
        rows = [
            [label, *(f"{times[part]:,.1f}" if part in times else "–" for part in parts)]
            for label, times in found.items()
        ]
        return [["method", *(f"{part}, s" for part in parts)], *rows] if rows else []

    @cached_property
    def settings(self) -> tuple[list[list[str]], list[tuple[str, str]]]:
        """Those that differ between runs, as a table by method; and the others with their value."""
        values: dict[str, set[str]] = {}
        for run in self.runs:
            for name, value in run.settings.items():
                values.setdefault(name, set()).add(value)
        differing = [name for name, found in values.items() if len(found) > 1]
        rows = [
            [label, *(", ".join(dict.fromkeys(run.settings.get(name, "–") for run in runs)) for name in differing)]
            for label, runs in self.methods.items()
        ]
        shared = [(name, min(found)) for name, found in values.items() if len(found) == 1]
        return ([["method", *differing], *rows] if differing else []), shared

    @cached_property
    def ends(self) -> list[str]:
        known = {name for run in self.runs for name, value in run.last.items() if isinstance(value, int | float)}
        return [name for name in _ordered(known) if name not in BESIDE]

    def drawn(self, limit: int) -> dict[str, Any]:
        """The curves, by kind and metric: those of each method over its seeds, and those of each run."""
        return {
            kind: [{"name": name, "methods": self._curves(kind, name, limit)} for name in names]
            for kind, names in (("metrics", self.metrics), ("diagnostics", self.diagnostics))
        }

    def _curves(self, kind: str, name: str, limit: int) -> list[dict[str, Any]]:
        made = []
        for place, (method, runs) in enumerate(self.methods.items()):
            over = curve([getattr(run, kind) for run in runs], name, limit)
            if over is not None:
                alone = [(run.seed, curve([getattr(run, kind)], name, limit)) for run in runs]
                each = [{"label": f"{method}, seed {seed}", **found} for seed, found in alone if found]
                made.append({"place": place, "label": method, **over, "runs": each})
        return made


def experiments(runs: Iterable[FoundRun]) -> list[Experiment]:
    """Runs by preset and scale, then by method in the preset's order, then by seed."""
    groups: dict[tuple[str, str], list[FoundRun]] = {}
    for run in sorted(runs, key=lambda run: (run.preset, run.scale, run.seed)):
        groups.setdefault((run.preset, run.scale), []).append(run)
    found = []
    for (preset, scale), group in groups.items():
        labels = method_order(preset, (run.method for run in group))
        methods = {label: [run for run in group if run.method == label] for label in labels}
        found.append(Experiment(preset, scale, methods))
    return found


def _ordered(names: Iterable[str]) -> list[str]:
    """By importance; times are an axis, or in a table of their own."""
    order = [*FIRST, "", *BESIDE]
    kept = {name for name in names if name not in ("step", "seconds") and not name.endswith("_seconds")}
    return sorted(kept, key=lambda name: (order.index(name) if name in order else len(FIRST), name))


def _times(runs: Sequence[FoundRun]) -> dict[str, float]:
    """Seconds of each part, means over the runs that came to their end, or over all. A refit is what the steps with one take
    beyond the mean of the others."""
    found: dict[str, list[float]] = {}
    for run in [run for run in runs if run.status == FINISHED] or runs:
        seconds, steps = run.number("seconds"), run.number("step", "steps")
        with_refit, *others = (run.number(name) for name in SPENT)
        if seconds is None:
            continue
        fits = (run.number("refits") or 0) + (run.number("rejected") or 0)
        refits = 0.0
        if fits and with_refit is not None and steps and fits < steps:
            refits = max(0.0, with_refit - fits * (seconds - with_refit) / (steps - fits))
        parts = {"steps": seconds - refits, "refits": refits or None}
        parts |= dict(zip(PARTS[2:], others, strict=True))
        for part, value in parts.items():
            if value is not None:
                found.setdefault(part, []).append(value)
    return {part: sum(values) / len(values) for part, values in found.items()}


def shown(value: Any) -> str:
    """A number with five digits, or what there is."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def page(experiments: list[Experiment], made: datetime) -> str:
    """Everything from runs goes through templates that escape it, or through JSON that the scripts never take for HTML."""
    loader = PackageLoader("llqr_lab.report", "static")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shown": shown, "title": lambda name: name.replace("_", " ")}
    asked = {"cells": cells, "heading": heading, "verdict": verdict, "Counter": Counter}
    environment.globals |= {**asked, "PRESETS": PRESETS, "RESULTS": RESULTS}
    count = sum(len(each.runs) for each in experiments)
    limit = min(max(POINTS // max(1, count), FEWEST), MOST)
    payload = json.dumps([each.drawn(limit) for each in experiments], allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # what would end the element that it is in
        payload = payload.replace(character, f"\\u{ord(character):04x}")
    style = _ours("uPlot.min.css") + _ours("report.css")
    script = _ours("uPlot.iife.min.js") + _ours("report.js")
    return environment.get_template("page.html").render(
        experiments=experiments,
        count=count,
        made=made.strftime("%Y-%m-%d %H:%M"),
        version=version("llqr"),
        marks=MARKS,
        # nothing is loaded from anywhere, and no script runs but this
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        payload=Markup(payload),
    )


def _ours(name: str) -> str:
    return files("llqr_lab.report").joinpath("static", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_report(sources: Sequence[Path], output: Path) -> str:
    found = experiments(found_runs(sources))
    # names may hold halves of characters, which no file can
    text = page(found, datetime.now()).encode("utf-8", "replace").decode("utf-8")
    try:
        write_text(output, text)
    except OSError as error:
        raise RunError(f"'{output}' couldn't be written ({error}): make room, or name another file with -o") from None
    count = sum(len(each.runs) for each in found)
    return f"Wrote {output}: {count:,} runs of {len(found)} experiments, {output.stat().st_size / 1e6:.1f} MB"
