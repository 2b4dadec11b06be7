"""The race: every task's training losses by seconds, one line an optimizer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogFormatter

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


def _seconds(row: dict[str, Any]) -> float:
    return float((row["step_seconds"] or 0.0) * (row["steps"] or 0.0))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    columns = min(3, len(tasks))
    height = math.ceil(len(tasks) / columns)
    with drawing(path, 4.5 * columns, 3.6 * height + 0.6) as figure:
        grid = figure.subplots(height, columns, squeeze=False).flat
        for axes, task in zip(grid, tasks, strict=False):
            for row in rows:
                if row["task"] == task and row["curve"] and row["step_seconds"]:
                    colour, style = LINES.get(row["optimizer"], (BLUE, "-"))
                    seconds = [step * row["step_seconds"] for step in row["curve"]["step"]]
                    axes.plot(
                        seconds, row["curve"]["train_loss"], color=colour, linestyle=style, label=row["optimizer"]
                    )
            axes.set_title(task)
            axes.set_yscale("log")
            for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                ticks(LogFormatter(minor_thresholds=(1.5, 0.5)))
            axes.set_xlabel("seconds of training")
            plain = [_seconds(row) for row in rows if row["task"] == task and row["optimizer"] in PLAIN]
            if max(plain, default=0.0) > 0:
                axes.set_xlim(0, 2 * max(plain))
        for axes in list(grid)[len(tasks) :]:
            axes.set_visible(False)
        figure.axes[0].set_ylabel("training loss")
        drawn = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        labels = [name for name in LINES if name in drawn]
        if labels:
            figure.legend([drawn[label] for label in labels], labels, loc="outside lower center", ncols=5)
