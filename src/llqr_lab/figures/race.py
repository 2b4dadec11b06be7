"""The race: every task's training losses, by seconds with everybody tuned alike, and by steps with LLQR at its base's rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing

LINES = {
    "SGDM": (ORANGE, "--"),
    "AdamW": (GREEN, "--"),
    "Muon": (PINK, "--"),
    "SOAP": (GREY, "-."),
    "Shampoo": (GREY, ":"),
    "SINGD": (GREY, (0, (1, 3))),
    "LLQR on SGDM": (ORANGE, "-"),
    "LLQR on AdamW": (GREEN, "-"),
    "LLQR on Muon": (PINK, "-"),
}
"""LLQR has the colour of its base, unbroken."""
PLAIN = ("SGDM", "AdamW")
"""Twice the time of these is shown: the slowest would take most of the picture."""
COLUMNS = 3

Row = dict[str, Any]


def draw(rows: list[Row], untuned: list[Row], path: Path) -> None:
    # the bases alone of a task are beside LLQR at their rates too
    shown = {row["task"] for row in rows if row["optimizer"] not in PLAIN}
    rows = [row for row in rows if row["task"] in shown or row["task"] not in {each["task"] for each in untuned}]
    tuned, same = (list(dict.fromkeys(row["task"] for row in each)) for each in (rows, untuned))
    columns = max(1, min(COLUMNS, max(len(tuned), len(same))))
    heights = [math.ceil(len(tasks) / columns) for tasks in (tuned, same)]
    with drawing(path, 4.5 * columns, 3.6 * max(1, sum(heights)) + 0.6) as figure:
        grid = list(figure.subplots(max(1, sum(heights)), columns, squeeze=False).flat)
        for axes, task in zip(grid, tuned, strict=False):
            _by_seconds(axes, task, [row for row in rows if row["task"] == task])
        for axes, task in zip(grid[heights[0] * columns :], same, strict=False):
            _by_steps(axes, task, [row for row in untuned if row["task"] == task])
        for axes in grid:
            axes.set_visible(axes.has_data())
        drawn = {
            label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        labels = [name for name in LINES if name in drawn]
        if labels:
            figure.legend(
                [drawn[label] for label in labels], labels, loc="outside lower center", ncols=min(5, 2 * columns)
            )


def _by_seconds(axes: Axes, task: str, rows: list[Row]) -> None:
    for row in rows:
        if row["curve"] and row["step_seconds"]:
            seconds = [step * row["step_seconds"] for step in row["curve"]["step"]]
            _line(axes, row["optimizer"], seconds, row["curve"])
    _labelled(axes, f"{task}, tuned alike", "seconds of training")
    plain = [(row["step_seconds"] or 0.0) * (row["steps"] or 0.0) for row in rows if row["optimizer"] in PLAIN]
    if max(plain, default=0.0) > 0:
        axes.set_xlim(0, 2 * max(plain))


def _by_steps(axes: Axes, task: str, rows: list[Row]) -> None:
    for row in rows:
        for name, side in ((row["base"], row["alone"]), (f"LLQR on {row['base']}", row["llqr"])):
            if side["curve"]:
                _line(axes, name, side["curve"]["step"], side["curve"])
    _labelled(axes, f"{task}, LLQR at its base's rate", "steps")


def _line(axes: Axes, name: str, at: list[float], curve: dict[str, list[Any]]) -> None:
    colour, style = LINES.get(name, (BLUE, "-"))
    axes.plot(at, curve["train_loss"], color=colour, linestyle=style, label=name)


def _labelled(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks("{x:g}")
    axes.set_xlabel(below)
    axes.set_ylabel("training loss")
