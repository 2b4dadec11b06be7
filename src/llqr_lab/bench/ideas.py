"""`llqr bench ideas`: LLQR as it races on SGDM against the same with one thing changed, over several seeds.

The base and the baseline find their learning rates as in `llqr bench race`, whose runs these are; every idea is run at the
baseline's rate. What is shown is the training loss at the end, and when the base's own was reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from rich import box
from rich.console import Console
from rich.table import Table

from llqr_lab import pages
from llqr_lab.bench.race import Race, Wanted, common_end, last_loss, place
from llqr_lab.experiments.collect import Result
from llqr_lab.experiments.folder import RunError
from llqr_lab.experiments.sweep import sweep
from llqr_lab.race.entries import COURSES, Entry
from llqr_lab.race.ideas import BASE, BASELINE, IDEAS
from llqr_lab.race.page import IDEAS_COMMAND, Row, ideas, ideas_body
from llqr_lab.results import provenance, write_json


def main(
    tasks: Sequence[str],
    scale: str,
    seeds: Sequence[int],
    runs: Path,
    data: Path | None,
    jobs: int,
    output: Path,
    page: Path | None = None,
) -> None:
    console, failed = Console(), list[bool]()
    rows: list[Row] = []
    if page is not None:
        pages.check(page, IDEAS_COMMAND)

    def perform(wanted: Wanted) -> None:
        failed.append(sweep(wanted, runs, data, jobs, "auto", console) is False)

    command = f"llqr bench ideas {' '.join(tasks)} --scale {scale} --seeds {','.join(map(str, seeds))}"
    for task in tasks:
        rows += compared(task, Race(COURSES[task], scale, runs, perform), seeds, data)
        write_json(output, {**provenance(command, seeds[0]), "scale": scale, "seeds": list(seeds), "rows": rows})
        report([row for row in rows if row["task"] == task], console)
    console.print(f"Wrote {output}", highlight=False, soft_wrap=True)
    if any(failed):
        raise RunError("some runs came to no end (above): the same command goes on with them, and writes the page then")
    if page is not None:
        pages.write(page, IDEAS_COMMAND, ideas_body(rows))
        console.print(f"Wrote {page}", highlight=False, soft_wrap=True)


def compared(task: str, race: Race, seeds: Sequence[int], data: Path | None) -> list[Row]:
    """The base, the baseline, then each idea at the baseline's rate."""
    grids = race.grids([BASE, BASELINE], seeds[0])
    best = race.chosen(grids, [BASE, BASELINE], seeds)
    rates = {entry.name: rate for entry, (rate,) in best.items()}
    if len(rates) < len(grids):
        return []
    runners: dict[Entry, Sequence[float]] = {BASE: [rates[BASE.name]], BASELINE: [rates[BASELINE.name]]}
    runners |= {idea.entry: [rates[BASELINE.name]] for idea in IDEAS}
    race.run(runners, seeds)
    results = {entry.name: race.results(entry, at, seeds) for entry, at in runners.items()}
    target = common_end(results[BASE.name])
    if target is None:
        return []
    times = race.step_seconds(runners, seeds[0], data)
    rows = [_row(task, entry.name, at[0], results[entry.name], target, len(seeds)) for entry, at in runners.items()]
    for row in rows:
        seconds = times[row["idea"]]
        row["time"] = seconds / times[BASE.name]
        row["seconds"] = None if row["steps"] is None else row["steps"] * seconds
    return rows


def _row(task: str, name: str, rate: float, results: list[Result], target: float, seeds: int) -> Row:
    ends = [loss for each in results if (loss := last_loss(each)) is not None]
    places = [found for each in results if (found := place(each, COURSES[task], target)) is not None]
    steps = median(places) if len(places) == seeds else None
    return {
        "task": task,
        "idea": name,
        "lr": rate,
        "seeds": seeds,
        "diverged": len(results) - len(ends),
        "train_loss": mean(ends) if ends else None,
        "least": min(ends, default=None),
        "most": max(ends, default=None),
        "target": target,
        "steps": steps,
    }


def report(rows: list[Row], console: Console) -> None:
    if not rows:
        console.print("The base, or LLQR, came to its end at no rate of the grid, or diverged with a seed", style="red")
        return
    headers, *lines = ideas(rows)
    table = Table(title=rows[0]["task"], title_justify="left", box=box.SIMPLE_HEAD)
    for header in headers:
        table.add_column(header, justify="right" if header else "left")
    for line in lines:
        table.add_row(*line)
    console.print(table)
