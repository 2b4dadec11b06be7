"""`llqr bench target`: steps and seconds to a training loss, LLQR against the base at the same learning rate.

Each seed has its own start and batches, shared by all the optimizers. A run is written as soon as it has ended, and one that
is there already isn't made again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from llqr_lab.bench.measure import one_thread
from llqr_lab.figures.target import draw
from llqr_lab.progress import bar
from llqr_lab.race.methods import BASE, SUITES, sgdm
from llqr_lab.race.run import Curve, train
from llqr_lab.race.tasks import TASKS
from llqr_lab.results import provenance, write_json

Row = dict[str, Any]


def main(name: str, output: Path, figure: Path, data: Path | None, seed: int, seeds: int, quick: bool) -> None:
    suite = SUITES[name]
    tasks, rates = (suite.tasks[:1], suite.rates[:1]) if quick else (suite.tasks, suite.rates)
    loaded = {task: TASKS[task].load(data) for task in tasks}  # first, so that a missing data set is told at once
    methods: dict[str, Mapping[str, Any] | None] = {BASE: None, **suite.methods()}
    result = _begun(name, output, tasks, methods, seed, seeds, quick)
    order = product(tasks, rates, range(seed, seed + seeds), methods)
    with one_thread(), bar(len(tasks) * len(rates) * seeds * len(methods), "training") as done:
        for task, rate, number, method in order:
            key = {"task": task, "lr": rate, "seed": number, "method": method}
            if not any(key.items() <= row.items() for row in result["runs"]):
                steps = 2 * TASKS[task].interval if quick else None
                curve = train(TASKS[task], loaded[task], number, sgdm(rate), methods[method], steps, TASKS[task].target)
                result["runs"].append({**key, **_outcome(curve, TASKS[task].target)})
                write_json(output, result)
            done()
    result["summary"] = summary(result["runs"])
    write_json(output, result)
    draw(result["summary"], figure)
    console = Console()
    report(result["summary"], console)
    console.print(f"Wrote {output} and {figure}", highlight=False, soft_wrap=True)


def _begun(
    name: str,
    output: Path,
    tasks: Sequence[str],
    methods: Mapping[str, Mapping[str, Any] | None],
    seed: int,
    seeds: int,
    quick: bool,
) -> dict[str, Any]:
    """What was made before by the same settings, or a new result."""
    origin = provenance(f"llqr bench target {name}" + (" --quick" if quick else ""), seed)
    described = {task: {k: getattr(TASKS[task], k) for k in ("target", "steps", "batch")} for task in tasks}
    told = {method: {k: str(v) for k, v in (own or {}).items()} for method, own in methods.items()}
    settings = {"tasks": described, "base": "SGD, momentum 0.9", "methods": told, "seeds": seeds, "threads": 1}
    if output.exists():
        before: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        if before.get("settings") == settings and before.get("command") == origin["command"]:
            return {**origin, "settings": settings, "runs": before["runs"]}
    return {**origin, "settings": settings, "runs": []}


def _outcome(curve: Curve, target: float) -> Row:
    place = curve.reached(target)
    return {
        "steps": None if place is None else curve.steps[place],
        "seconds": None if place is None else curve.seconds[place],
        "seconds_per_step": curve.seconds[-1] / max(1, curve.steps[-1]),
        "last_loss": curve.losses[-1] if math.isfinite(curve.losses[-1]) else None,
        **{name: curve.stats.get(name) for name in ("refits", "rejected", "turned")},
    }


def summary(runs: list[Row]) -> list[Row]:
    """For each task, rate and method: how many seeds reached the target, and the median and range of steps and seconds.

    `steps_ratio` and `seconds_ratio` are medians over seeds of the method's figure over the base's with the same seed.
    """
    base = {(row["task"], row["lr"], row["seed"]): row for row in runs if row["method"] == BASE}
    rows: list[Row] = []
    for task, lr, method in dict.fromkeys((row["task"], row["lr"], row["method"]) for row in runs):
        own = [row for row in runs if (row["task"], row["lr"], row["method"]) == (task, lr, method)]
        there = [row for row in own if row["steps"] is not None]
        entry: Row = {"task": task, "lr": lr, "method": method, "runs": len(own), "reached": len(there)}
        for name in ("steps", "seconds"):
            values = [row[name] for row in there]
            entry[name] = [min(values), statistics.median(values), max(values)] if values else None
            pairs = [(row[name], base[task, lr, row["seed"]][name]) for row in there]
            ratios = [mine / theirs for mine, theirs in pairs if theirs]
            entry[f"{name}_ratio"] = statistics.median(ratios) if ratios and len(there) == len(own) else None
        rows.append(entry)
    return rows


def report(rows: list[Row], console: Console) -> None:
    for task, lr in dict.fromkeys((row["task"], row["lr"]) for row in rows):
        title = f"{task} to loss {TASKS[task].target:g}, learning rate {lr:g}: median (least–most) of the seeds"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("optimizer", no_wrap=True)
        for header in ("reached", "steps", "ratio", "seconds", "ratio"):
            table.add_column(header, justify="right", no_wrap=True)
        for row in rows:
            if (row["task"], row["lr"]) == (task, lr):
                cells = [f"{row['reached']}/{row['runs']}"]
                for name, form in (("steps", "{1:.0f} ({0:.0f}–{2:.0f})"), ("seconds", "{1:.1f} ({0:.1f}–{2:.1f})")):
                    ratio = row[f"{name}_ratio"]
                    cells += [
                        "–" if row[name] is None else form.format(*row[name]),
                        "–" if ratio is None else f"{ratio:.2f}",
                    ]
                table.add_row(row["method"], *cells)
        console.print(table)
