"""`llqr bench epoch`: what LLQR adds to the time of training, as the paper reports it: time with it over time without it.

A refit comes every n steps, so that an epoch takes (t + r/n) / b times as long, where b is a step of the base alone, t one with
LLQR between refits, and r what a refit adds. All three are timed in turns on the preset's own network, batches and settings; n
is the preset's or the one that is set, whatever the size of the data set at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from llqr_lab.errors import ConfigError
from llqr_lab.experiments.command import device_of, parse_change
from llqr_lab.experiments.loop import Run
from llqr_lab.experiments.paper import RESULTS
from llqr_lab.experiments.presets import BARE, resolve
from llqr_lab.results import bar, provenance, say, show_table, simple_table, write_json
from llqr_lab.tasks.base import Task, to_device
from llqr_lab.tasks.named import task_of

ROUND = 3
"""Steps of a round; the first of them begins with a refit."""
LONG = 5.0
"""Seconds of a step beside which what the first one takes more is nothing: no round to warm up."""


def main(
    preset: str,
    scale: str,
    methods: tuple[str, ...],
    output: Path,
    data: Path | None,
    seed: int,
    repeats: int,
    threads: int | None,
    device: str = "cpu",
    settings: Sequence[str] = (),
) -> None:
    """`settings` are changes of the preset's, as name=value."""
    changes = dict(map(parse_change, settings))
    if tuple(methods) == ("base",) and any(name.startswith("llqr.") for name in changes):
        raise ConfigError("there is no LLQR among the methods: leave out its settings")
    if "default" in methods:
        raise ConfigError(
            "an epoch is of the paper's methods, with one period; for the default see llqr bench overhead"
        )
    where_to = device_of(device)
    torch.set_num_threads(threads or torch.get_num_threads())
    torch.set_flush_denormal(True)
    names = ("base", *(each for each in methods if each != "base"))
    periods = {name: _period(preset, scale, name, seed, changes) for name in names}
    task = task_of(resolve(preset, scale, "base", seed, _own("base", changes)), data)
    runs = {name: _run(task, preset, scale, name, seed, changes, where_to) for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    refits: dict[str, list[float]] = {name: [] for name in names}
    warm = _seconds(runs["base"], task, 0) > LONG
    with bar((repeats + (not warm)) * len(names), "timing") as done:
        for number in range(warm, repeats + 1):
            for name, run in runs.items():
                seconds = [_seconds(run, task, number * ROUND + step) for step in range(ROUND)]
                if number > 0:  # the round before warms up
                    steps[name] += seconds[1:]
                    refits[name].append(seconds[0])
                done()
    rows = [_row(preset, name, periods[name], steps, refits) for name in names]
    where = f"llqr bench epoch {preset} --scale {scale} --methods {','.join(methods)}"
    where += f" --repeats {repeats} --threads {torch.get_num_threads()} --device {where_to.type}"
    where += "".join(f" --set {quote(setting)}" for setting in settings)
    content = {"preset": preset, "scale": scale, "threads": torch.get_num_threads(), "repeats": repeats}
    content |= {"device": torch.cuda.get_device_name(where_to) if where_to.type == "cuda" else where_to.type}
    content |= {"clock": runs["base"].clock_name, "rows": rows}
    write_json(output, {**provenance(where, seed), **content})
    console = Console()
    console.print(f"{preset} at --scale {scale}, {torch.get_num_threads()} threads", highlight=False)
    show_table(console, table(rows))
    say(console, f"Wrote {output}")


def _own(method: str, changes: dict[str, Any]) -> dict[str, Any]:
    """LLQR's settings are for its methods only."""
    return {name: value for name, value in changes.items() if method not in BARE or not name.startswith("llqr.")}


def _period(preset: str, scale: str, method: str, seed: int, changes: dict[str, Any]) -> int | None:
    wrapper = resolve(preset, scale, method, seed, _own(method, changes)).llqr
    return wrapper.every if wrapper else None


def _run(
    task: Task, preset: str, scale: str, method: str, seed: int, changes: dict[str, Any], device: torch.device
) -> Run:
    often = {} if method in BARE else {"llqr.every": ROUND}
    return Run(resolve(preset, scale, method, seed, {**_own(method, changes), **often}), task, device)


def _seconds(run: Run, task: Task, step: int) -> float:
    batch = to_device(task.train[step], run.device)
    before = run.clock()
    run.advance(batch)
    return run.clock() - before


def _row(
    preset: str, name: str, period: int | None, steps: dict[str, list[float]], refits: dict[str, list[float]]
) -> dict[str, Any]:
    base, own = median(steps["base"]), median(steps[name])
    refit = median(refits[name]) - own if period else 0.0
    reported = RESULTS.get(preset, {}).get(name)
    return {
        "method": name,
        "every": period,
        "step_seconds": own,
        "step": own / base,
        "refit": refit / base,
        "ratio": (own + refit / period if period else own) / base,
        "paper": reported.time if reported else None,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    headers = ("step between refits,\n× base", "a refit,\nin base steps", "every", "epoch,\n× base", "paper")
    made = simple_table(None, "method", *headers)
    for row in rows:
        paper = f"×{row['paper']:.3g}" if row["paper"] else ""
        numbers = (f"{row['step']:.3f}", f"{row['refit']:.1f}", str(row["every"] or ""), f"×{row['ratio']:.3f}", paper)
        made.add_row(row["method"], *numbers)
    return made
