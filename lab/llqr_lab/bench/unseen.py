"""`llqr bench unseen`: does LLQR, with nothing set, ever do harm? Tasks that nothing was chosen by, rates that aren't the best.

SGDM and AdamW each get their best learning rate from a grid with the first seed, at a cosine schedule, wider where the best is
at its edge. Then each, alone and with LLQR around it, runs at a third, one and three times that rate, at cosine and constant
schedules.
"""

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch.optim import SGD, AdamW, Optimizer

from llqr import LLQR
from llqr_lab.bench.measure import one_thread
from llqr_lab.bench.race import WIDEST, one_more, rounded
from llqr_lab.bench.unseen_tasks import UNSEEN
from llqr_lab.errors import RunError
from llqr_lab.results import bar, check_page, markdown_table, provenance, say, write_json, write_page

COMMAND = "llqr bench unseen --page"
BASES = {"SGDM": "sgdm", "AdamW": "adamw"}
SCHEDULES = ("cosine", "constant")
FACTORS = (1 / 3, 1.0, 3.0)
"""Times the base's best rate."""
HARM = 1.02
"""The ratio of last losses above which LLQR is said to do harm."""
Row = dict[str, Any]


class Trial(NamedTuple):
    task: str
    base: str
    llqr: bool
    schedule: str
    rate: float
    seed: int
    steps: int


def main(
    tasks: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    data: Path | None,
    jobs: int,
    output: Path,
    page: Path | None = None,
) -> None:
    check_page(page, COMMAND)
    for task in tasks:
        UNSEEN[task].load(data, 0)  # so that data that isn't there is told before the first run
    bench = Comparison(data, jobs, steps)
    rows = bench.rows(bench.best_rates(tasks, seeds[0]), seeds)
    command = f"llqr bench unseen {' '.join(tasks)} --seeds {','.join(map(str, seeds))} --steps {steps}"
    write_json(output, {**provenance(command, seeds[0]), "steps": steps, "seeds": list(seeds), "rows": rows})
    say(Console(), f"{body(rows)}\nWrote {output}")
    if page is not None:
        write_page(page, COMMAND, body(rows))


class Comparison:
    """Runs, each of which is made once."""

    def __init__(self, data: Path | None, jobs: int, steps: int) -> None:
        self.data, self.jobs, self.steps = data, jobs, steps
        self.known: dict[Trial, Row] = {}

    def best_rates(self, tasks: Iterable[str], seed: int) -> dict[tuple[str, str], float]:
        """Of each task and base, by its last loss at a cosine schedule."""
        ends: dict[tuple[str, str], dict[float, float]] = {(task, base): {} for task in tasks for base in BASES}
        coming = {(task, base): list(getattr(UNSEEN[task], BASES[base])) for task, base in ends}
        for _ in range(1 + WIDEST):
            runs = {Trial(*key, False, "cosine", rate, seed, self.steps): key for key in coming for rate in coming[key]}
            for run, result in self.results(list(runs)).items():
                ends[runs[run]][run.rate] = math.inf if result["last"] is None else result["last"]
            coming = {key: wider for key in coming if (wider := one_more(ends[key]))}
        for (task, base), found in ends.items():
            if min(found.values()) == math.inf:
                raise RunError(f"{base} diverged on {task} at every rate that was tried: {sorted(found)}")
        return {key: min(found, key=lambda rate: found[rate]) for key, found in ends.items()}

    def rows(self, rates: dict[tuple[str, str], float], seeds: Sequence[int]) -> list[Row]:
        """One for each task, base, schedule and rate: the last losses of both, and their ratio."""
        places = [
            (task, base, schedule, factor, rounded(factor * rate))
            for (task, base), rate in rates.items()
            for schedule in SCHEDULES
            for factor in FACTORS
        ]
        wanted = {
            (place, llqr): [Trial(*place[:2], llqr, place[2], place[4], seed, self.steps) for seed in seeds]
            for place in places
            for llqr in (False, True)
        }
        found = self.results([run for each in wanted.values() for run in each])
        rows = []
        for place in places:
            alone, wrapped = ([found[run] for run in wanted[place, llqr]] for llqr in (False, True))
            row: Row = dict(zip(("task", "base", "schedule", "factor", "rate"), place, strict=True))
            row |= {"first": fmean(each["first"] for each in alone), "alone": _mean(alone), "llqr": _mean(wrapped)}
            row["trains"] = row["alone"] is not None and row["alone"] < row["first"]
            both = row["alone"] is not None and row["llqr"] is not None
            row["ratio"] = row["llqr"] / row["alone"] if both else None
            row["harm"] = row["trains"] and (row["ratio"] is None or row["ratio"] > HARM)
            seconds = [fmean(each["seconds"] for each in side) for side in (alone, wrapped)]
            rows.append({**row, "seconds": dict(zip(("alone", "llqr"), seconds, strict=True))})
        return rows

    def results(self, wanted: Sequence[Trial]) -> dict[Trial, Row]:
        """Of these runs; those that aren't there are made, so many at a time."""
        missing = [run for run in dict.fromkeys(wanted) if run not in self.known]
        make = partial(perform, data=self.data)
        with bar(len(missing), "training") as done, ExitStack() as stack:
            made: Iterable[Row] = map(make, missing)
            if self.jobs > 1 and len(missing) > 1:
                pool = ProcessPoolExecutor(self.jobs, mp_context=get_context("spawn"))
                made = stack.enter_context(pool).map(make, missing)
            for run, result in zip(missing, made, strict=True):
                self.known[run] = result
                done()
        return {run: self.known[run] for run in wanted}


def perform(run: Trial, data: Path | None) -> Row:
    torch.set_flush_denormal(True)
    with one_thread():
        return train(run, data)


def train(run: Trial, data: Path | None) -> Row:
    """The loss at the start, its mean over the last tenth of the steps (None if it diverged), and the curve between."""
    task = UNSEEN[run.task]
    model, draw = task.start(run.seed), task.load(data, run.seed)
    optimizer: Optimizer = (
        SGD(model.parameters(), lr=run.rate, momentum=0.9)
        if run.base == "SGDM"
        else AdamW(model.parameters(), lr=run.rate, weight_decay=0.0)
    )
    if run.llqr:
        optimizer = LLQR(optimizer, model)
    torch.manual_seed(run.seed)
    losses: list[float] = []
    seconds = 0.0
    for step in range(run.steps):
        if run.schedule == "cosine":
            for group in optimizer.param_groups:
                group["lr"] = run.rate * 0.5 * (1 + math.cos(math.pi * step / run.steps))
        inputs, targets = draw(step)
        begun = time.process_time()
        optimizer.zero_grad()
        loss = task.loss(model(*inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds += time.process_time() - begun
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
    tenth = max(1, run.steps // 10)
    whole = len(losses) == run.steps and math.isfinite(losses[-1])
    curve = [fmean(losses[k : k + tenth]) for k in range(0, run.steps, tenth)] if whole else []
    return {"first": losses[0], "last": fmean(losses[-tenth:]) if whole else None, "curve": curve, "seconds": seconds}


def body(rows: Sequence[Row]) -> str:
    """The table: a line for each task, base and schedule, and of each rate the ratio and both last losses."""
    header = ["task", "base", "best rate", "schedule", "a third of it", "it", "three times"]
    lines = []
    for key in dict.fromkeys((row["task"], row["base"], row["schedule"]) for row in rows):
        own = [row for row in rows if (row["task"], row["base"], row["schedule"]) == key]
        rate = next(row["rate"] for row in own if row["factor"] == 1.0)
        lines.append([key[0], key[1], f"{rate:g}", key[2], *map(cell, own)])
    trained = [row for row in rows if row["trains"]]
    harmed = [row for row in trained if row["harm"]]
    said = (
        f"LLQR's last training loss over its base's (the base's → LLQR's). The base trains in {len(trained)} of {len(rows)} "
        f"settings; in {len(harmed)} of these LLQR's loss is more than {HARM:g} of it (bold)."
    )
    return f"{markdown_table([header, *lines])}\n{said}\n"


def cell(row: Row) -> str:
    ends = " → ".join("diverged" if row[side] is None else f"{row[side]:.4g}" for side in ("alone", "llqr"))
    if not row["trains"]:
        return f"the base doesn't train ({ends})"
    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.3f}"
    return f"**{ratio}** ({ends})" if row["harm"] else f"{ratio} ({ends})"


def _mean(results: Sequence[Row]) -> float | None:
    ends = [each["last"] for each in results]
    return None if None in ends else fmean(ends)
