"""The race as tables (docs/benchmarks.md; `llqr bench race --page` writes them) and as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.ticker import LogLocator

from llqr_lab.experiments.table import NAMES
from llqr_lab.figures.style import GREEN, ORANGE, PINK, drawing, shared_legend
from llqr_lab.results import markdown_table

COMMAND = "llqr bench race --page"
Row = dict[str, Any]
THE_END = "the end"
"""The target of tasks that say themselves when they are over."""


def body(rows: Sequence[Row], untuned: Sequence[Row]) -> str:
    parts = []
    if untuned:
        parts += ["### Nothing of LLQR tuned: at its base's best rate\n", markdown_table(untuned_lines(untuned))]
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        parts += [f"### {task}, everybody tuned alike\n", markdown_table(everybody(own))]
    still = [f"{row['optimizer']} on {row['task']} ({', '.join(row['unmoved'])})" for row in rows if row["unmoved"]]
    moved = f"Parameters that never moved: {'; '.join(still)}." if still else "Every optimizer moved every parameter."
    about = "With the first seed. A dash is a run of modular addition that didn't get there."
    parts += [f"{moved}\n", "### The rates that were tried\n", f"{about}\n", markdown_table(tried(rows))]
    return "\n".join(parts)


def untuned_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each task and base, both at the base's best rate."""
    header = ["task", "base", "rate", "base: steps", "LLQR: steps", "steps (least, most)", "time (least, most)"]
    header += ["base: training loss", "LLQR: training loss"]
    lines = []
    for row in rows:
        sides = [row["alone"], row["llqr"]]
        steps = [", ".join(shown(each, "{:.0f}") for each in side["steps"]) or "–" for side in sides]
        ratios = [ratio(row, what) for what in ("steps", "seconds")]
        lines.append([row["task"], row["base"], f"{row['lr']:g}", *steps, *ratios, *map(_spread, sides)])
    return [header, *lines]


def ratio(row: Row, what: str) -> str:
    """LLQR's steps or seconds by its base's: the median of the seeds, its extremes, and how many seeds count if not all."""
    ratios = [math.inf if each is None else each for each in row[f"{what}_ratios"]]
    if not ratios:
        return "–"
    middle, least, most = (
        "never" if each == math.inf else f"×{each:.2f}" for each in (median(ratios), min(ratios), max(ratios))
    )
    some = "" if len(ratios) == row["seeds"] else f"; {len(ratios)} of {row['seeds']} seeds"
    return f"{middle} ({least}, {most}{some})"


def everybody(rows: Sequence[Row]) -> list[list[str]]:
    labels = list(rows[0]["targets"])
    goals = [rows[0]["targets"][label]["loss"] for label in labels]
    score = next((row["score_name"] for row in rows if row["score_name"]), "")
    names = [label if goal is None else f"{label}'s {goal:.4g}" for label, goal in zip(labels, goals, strict=True)]
    header = ["optimizer", "rate", "training loss (least, most)", NAMES.get(score, "").removesuffix(", %")]
    header += [*(f"to {name}: steps, seconds" for name in names), "ms a step", "MB"]
    lines = []
    for row in rows:
        times = [reached(row["targets"][label], row["seeds"]) for label in labels]
        ends = [shown(row["lr"], "{:g}"), _spread(row), shown(row["score"], "{:.4g}")]
        rest = [shown(row["step_seconds"], "{:.1f}", 1e3), shown(row["peak_bytes"], "{:.0f}", 1e-6)]
        lines.append([row["optimizer"], *ends, *times, *rest])
    return [header, *lines]


def _spread(row: Row) -> str:
    """The training loss at the end: the median of the seeds, and its extremes."""
    middle = shown(row["train_loss"], "{:.4f}")
    known = [loss for loss in row["train_losses"] if loss is not None]
    return f"{middle} ({min(known):.4g}, {max(known):.4g})" if known else middle


def tried(rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for row in rows:
        ends = [
            f"{rate}: {'diverged' if rate in row['diverged'] else '–' if end is None else f'{end:.4g}'}"
            for rate, end in sorted(row["tried"].items(), key=lambda each: float(each[0]))
        ]
        lines.append([row["task"], row["optimizer"], "; ".join(ends)])
    return [["task", "optimizer", "rate: training loss at the end (modular addition: steps)"], *lines]


def reached(target: Row, seeds: int) -> str:
    if target["steps"] is None:
        return f"– ({target['reached']} of {seeds} seeds)"
    return f"{target['steps']:.0f}, {target['seconds']:.1f}"


def shown(number: float | None, form: str, unit: float = 1.0) -> str:
    return "–" if number is None else form.format(unit * number)


# the picture

COLOURS = {"SGDM": ORANGE, "AdamW": GREEN, "Muon": PINK}
"""LLQR has the colour of its base, unbroken."""


def draw(untuned: Sequence[Row], path: Path) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in untuned)) or [""]
    columns = min(3, len(tasks))
    lines = math.ceil(len(tasks) / columns)
    with drawing(path, 4.5 * columns, 3.6 * lines + 0.6) as figure:
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, task in zip(grid, tasks, strict=False):
            for row in (each for each in untuned if each["task"] == task):
                for side, label, line in (("alone", row["base"], "--"), ("llqr", f"LLQR on {row['base']}", "-")):
                    if curve := row[side]["curve"]:
                        how = {"color": COLOURS[row["base"]], "linestyle": line, "label": label}
                        axes.plot(curve["step"], curve["train_loss"], **how)
            axes.set(title=f"{task}, LLQR at its base's rate", yscale="log", xlabel="steps", ylabel="training loss")
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                ticks("{x:g}")
        for axes in grid[len(tasks) :]:
            axes.remove()
        shared_legend(figure, grid[: len(tasks)], 2 * columns)
