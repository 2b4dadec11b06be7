"""Figures of `llqr figure`: training curves with bands, box plots of grokking, ablations."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from llqr_lab.experiments.collect import Result, summary, value
from llqr_lab.experiments.table import NAMES, UNITS, methods_of, scores
from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing

LINES = (
    (GREY, "--"),
    (BLUE, "-"),
    (ORANGE, "-"),
    (GREEN, "-"),
    (PINK, "-"),
    (BLUE, ":"),
    (ORANGE, ":"),
    (GREEN, ":"),
    (PINK, ":"),
)


def curves(results: list[Result], path: Path) -> None:
    """Training loss and held-out error (or loss) of one preset and scale, by steps and by seconds: mean and standard error."""
    held_out = "test_accuracy" if results[0]["score"] == "test_accuracy" else "test_loss"
    with drawing(path, 11, 8) as figure:
        grid = figure.subplots(2, 2, sharey="row", sharex="col", squeeze=False)
        for method, (colour, style) in zip(methods_of(results), LINES * 9, strict=False):
            rows = [each for each in results if each["method"] == method]
            for line, (name, view) in enumerate(
                (("train_loss", _same), (held_out, _error if held_out == "test_accuracy" else _same))
            ):
                for axes, along in zip(grid[line], ("step", "seconds"), strict=True):
                    _band(axes, rows, along, name, view, colour=colour, style=style, label=method)
        for axes, label in zip(grid[-1], ("training steps", "seconds of training"), strict=True):
            axes.set_xlabel(label)
        grid[0, 0].set_ylabel("training loss")
        grid[1, 0].set_ylabel("test error, %" if held_out == "test_accuracy" else "test loss")
        for axes in grid.flat:
            axes.set_yscale("log")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4)
        figure.suptitle(_title(results), fontsize="medium")


def _same(number: float) -> float:
    return number


def _error(accuracy: float) -> float:
    return 100 * (1 - accuracy)


def _band(
    axes: Axes,
    rows: list[Result],
    along: str,
    name: str,
    view: Callable[[float], float],
    *,
    colour: str,
    style: str,
    label: str,
) -> None:
    """The mean over seeds at each step, and the standard error around it where there are several seeds."""
    by_step: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        curve = row["curve"]
        for step, at, measured in zip(curve["step"], curve[along], curve[name], strict=True):
            if measured is not None:
                by_step.setdefault(step, []).append((at, view(measured)))
    steps = sorted(step for step, points in by_step.items() if len(points) == max(map(len, by_step.values())))
    if not steps:
        return
    found = [summary(point[1] for point in by_step[step]) for step in steps]
    at = [math.fsum(point[0] for point in by_step[step]) / len(by_step[step]) for step in steps]
    means = [each.mean for each in found if each]
    axes.plot(at, means, color=colour, linestyle=style, label=label)
    if len(rows) > 1:
        errors = [each.error or 0.0 for each in found if each]
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)


def _title(results: list[Result]) -> str:
    counts = {sum(1 for each in results if each["method"] == method) for method in methods_of(results)}
    many = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"{results[0]['preset']} at --scale {results[0]['scale']}; seeds: {many}, bands: standard error"


def boxes(results: list[Result], path: Path) -> None:
    """Steps and seconds to grokking, one box an operation and method; runs that never got there are counted beside it."""
    presets = list(dict.fromkeys(each["preset"] for each in results))
    methods = methods_of(results)
    with drawing(path, 11, 4.5) as figure:
        left, right = figure.subplots(1, 2)
        for axes, name, label in ((left, "steps_to_target", "steps"), (right, "seconds_to_target", "seconds")):
            for number, (method, (colour, _)) in enumerate(zip(methods, LINES, strict=False)):
                for place, preset in enumerate(presets):
                    rows = [each for each in results if each["preset"] == preset and each["method"] == method]
                    reached = [each[name] for each in rows if value(each) is not None]
                    at = place + (number - (len(methods) - 1) / 2) * 0.8 / len(methods)
                    if reached:
                        # whiskers reach to the most extreme points within 1.5 times the interquartile range, as in the paper
                        drawn = axes.boxplot(
                            [reached], positions=[at], widths=0.7 / len(methods), patch_artist=True, manage_ticks=False
                        )
                        drawn["boxes"][0].set(facecolor=colour, alpha=0.6)
                        drawn["medians"][0].set(color="black")
                    if len(reached) < len(rows):
                        axes.annotate(
                            f"{len(rows) - len(reached)} not",
                            (at, 1.0),
                            xycoords=("data", "axes fraction"),
                            ha="center",
                            va="top",
                            fontsize="x-small",
                            color=colour,
                        )
                axes.bar([0], [0], color=colour, alpha=0.6, label=method)
            axes.set_xticks(range(len(presets)), [preset.removeprefix("grokking-") for preset in presets])
            axes.set_ylabel(f"{label} to 95% test accuracy")
            axes.set_ylim(bottom=0)
        left.legend(loc="best")
        figure.suptitle(f"Grokking at --scale {results[0]['scale']}", fontsize="medium")


def ablation(results: list[Result], grid: dict[str, list[Any]], path: Path) -> None:
    """The score against each setting of an ablation: one point a run, the mean joined; the base as a line."""
    score = results[0]["score"]
    unit = UNITS.get(score, 1.0)
    base = summary(scores([each for each in results if each["method"] == "base"]))
    with drawing(path, 4.5 * len(grid) + 0.5, 4) as figure:
        panels = figure.subplots(1, len(grid), sharey=True, squeeze=False)[0]
        for axes, (setting, values) in zip(panels, grid.items(), strict=True):
            for place, wanted in enumerate(values):
                rows = [each for each in results if f"{setting}={wanted}" in each["method"].split("+")]
                found = [unit * each for each in scores(rows)]
                axes.plot([place] * len(found), found, "o", color=BLUE, alpha=0.5)
                mean = summary(found)
                if mean:
                    axes.plot(place, mean.mean, "_", color=ORANGE, markersize=24, markeredgewidth=2.5)
                if len(found) < len(rows):
                    axes.annotate(
                        f"{len(rows) - len(found)} failed",
                        (place, 0.02),
                        xycoords=("data", "axes fraction"),
                        ha="center",
                    )
            axes.set_xticks(range(len(values)), [str(each) for each in values])
            axes.set_xlabel(setting)
            if base:
                axes.axhline(unit * base.mean, color=GREY, linestyle="--", label="base")
        panels[0].set_ylabel(NAMES.get(score, score))
        if base:
            panels[0].legend()
        figure.suptitle(_title(results), fontsize="medium")
