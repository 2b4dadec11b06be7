"""Figures of `llqr figure`: training curves with bands, box plots of grokking, ablations."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter

from llqr_lab.errors import ConfigError, RunError, check_names
from llqr_lab.experiments.collect import Result, collected, summary, value
from llqr_lab.experiments.config import toml
from llqr_lab.experiments.presets import SCALES, known_preset
from llqr_lab.experiments.sweep import ABLATED, ABLATIONS, ablation_grid, configurations, points
from llqr_lab.experiments.table import NAMES, UNITS, by_method, scores
from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing, shared_legend

COLOURS = (BLUE, ORANGE, GREEN, PINK)
LINES = ((GREY, "--"), *((colour, style) for style in ("-", ":") for colour in COLOURS))


def draw(kind: str, presets: list[str], methods: list[str], sources: Sequence[Path], scale: str, output: Path) -> None:
    """Of finished runs: with nothing changed by hand (curves, grokking), or an ablation's."""
    check_names([kind], ("curves", "grokking", *ABLATIONS), "figure")
    check_names([scale], SCALES, "scale")
    if (kind == "grokking" and presets) or (kind in ABLATIONS and len(presets) > 1):
        raise ConfigError(
            "'grokking' has all of its operations, and an ablation is of one preset: leave out the others"
        )
    for preset in presets or [""] * (kind != "grokking"):
        known_preset(preset)
    results = [each for each in collected(*sources) if each["scale"] == scale]
    if methods:
        results = [each for each in results if each["method"].partition("+")[0] in methods]
    plain = [each for each in results if "+" not in each["method"]]
    if kind == "curves":
        groups = [[each for each in plain if each["preset"] == preset] for preset in presets]
        curves([_some(group, name, scale) for group, name in zip(groups, presets, strict=True)], output)
    elif kind == "grokking":
        boxes(_some([each for each in plain if each["preset"].startswith("grokking-")], "grokking", scale), output)
    else:
        grid = ablation_grid(kind, presets[0], scale)
        chosen = [each for each in results if each["preset"] == presets[0]]
        swept = dict.fromkeys(each["method"].partition("+")[0] for each in chosen if "+" in each["method"])
        if len(swept) > 1:
            raise ConfigError(f"an ablation is drawn of one method: name one of {', '.join(swept)} with --methods")
        ablation(_some(chosen, presets[0], scale), next(iter(swept), ABLATED), grid, output)


def _some(results: list[Result], what: str, scale: str) -> list[Result]:
    if not results:
        raise RunError(f"no finished runs of {what} at scale {scale}: make them with `llqr sweep`")
    return results


def curves(groups: list[list[Result]], path: Path) -> None:
    """Mean and standard error over seeds. Of one preset: training loss and held-out error (or loss), by steps and by seconds.
    Of several, one panel each, two in a row: held-out error by steps."""
    alone = len(groups) == 1
    panels = [(group, _held_out(group), "step") for group in groups]
    if alone:
        panels = [(groups[0], name, by) for name in ("train_loss", panels[0][1]) for by in ("step", "seconds")]
    lines = math.ceil(len(panels) / 2)
    names = dict.fromkeys(method for group in groups for method in by_method(group))
    styles = dict(zip(names, itertools.cycle(LINES), strict=False))
    with drawing(path, 11, 4.25 * lines) as figure:
        shared: Any = {"sharex": "col", "sharey": "row"} if alone else {}
        grid = figure.subplots(lines, 2, squeeze=False, **shared)
        for axes, (results, name, along) in zip(grid.flat, panels, strict=False):
            for method, rows in by_method(results).items():
                diverged = sum(each["diverged"] for each in rows)
                label = f"{method} ({diverged} of {len(rows)} diverged)" if diverged else method
                _band(axes, rows, along, name, label, *styles[method])
            below = "training steps" if along == "step" else "seconds of training"
            axes.set(xlabel=below, ylabel=HELD_OUT.get(name, "training loss"), yscale="log")
            # plain numbers, also between the powers of ten where there are few of these
            for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                ticks(LogFormatter(minor_thresholds=(1.5, 0.5)))
            if alone:
                axes.label_outer()
            else:
                axes.set_title(_title(results), fontsize="medium")
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        shared_legend(figure, grid.flat[: len(panels)])
        if alone:
            figure.suptitle(_title(groups[0]), fontsize="medium")


HELD_OUT = {"test_accuracy": "test error, %", "valid_loss": "validation loss", "test_loss": "test loss"}


def _held_out(results: list[Result]) -> str:
    """What tells most of how good a run is, of what all of them have measured."""
    accuracy = results[0]["score"] in ("test_accuracy", "steps_to_target")
    known = (name for name in HELD_OUT if all(name in each["curve"] for each in results))
    return next(name for name in known if accuracy or name != "test_accuracy")


def _band(axes: Axes, rows: list[Result], along: str, name: str, label: str, colour: str, style: str) -> None:
    """The mean over seeds, with the standard error; of an accuracy, the error in percent. Between its evaluations and after its
    end a run has the value that it had; one that diverged is left out from there on."""
    looked = [
        [s for s, v in zip(row["curve"]["step"], row["curve"][name], strict=True) if v is not None] for row in rows
    ]
    at, means, errors = [], [], []
    for step in max(looked, key=lambda some: some[-1] if some else 0):
        points = [point for row in rows if (point := _point(row, step, along, name)) is not None]
        values = [measured for _, measured in points]
        if name == "test_accuracy":
            values = [max(100 * (1 - each), 0.01) for each in values]  # the axis is logarithmic
        if found := summary(values):
            at.append(math.fsum(place for place, _ in points) / len(points))
            means.append(found.mean)
            errors.append(found.error or 0.0)
    axes.plot(at, means, color=colour, linestyle=style, label=label)
    if len(rows) > 1:
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)


def _point(row: Result, step: float, along: str, name: str) -> tuple[float, float] | None:
    """Where a run was at a step, and what it had measured last; None before its first evaluation and where it had diverged."""
    curve = row["curve"]
    last = bisect_right(curve["step"], step) - 1
    measured = [value for value in curve[name][: last + 1] if value is not None]
    if not measured or (row["diverged"] and last == len(curve["step"]) - 1):
        return None
    return (step if along == "step" else curve[along][last]), measured[-1]


def _title(results: list[Result]) -> str:
    counts = set(map(len, by_method(results).values()))
    many = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    bands = "" if max(counts) == 1 else ", bands: standard error"
    return f"{results[0]['preset']} at --scale {results[0]['scale']}\nseeds: {many}{bands}"


def boxes(results: list[Result], path: Path) -> None:
    """Steps and seconds to grokking, one box an operation and method; runs that never got there are counted beside it."""
    presets = list(dict.fromkeys(each["preset"] for each in results))
    methods = by_method(results)
    with drawing(path, 11, 4.5) as figure:
        left, right = figure.subplots(1, 2)
        for axes, name, label in ((left, "steps_to_target", "steps"), (right, "seconds_to_target", "seconds")):
            for number, ((method, own), (colour, _)) in enumerate(
                zip(methods.items(), itertools.cycle(LINES), strict=False)
            ):
                for place, preset in enumerate(presets):
                    rows = [each for each in own if each["preset"] == preset]
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
                        _beside(axes, at, f"{len(rows) - len(reached)} not", colour)
                axes.bar([0], [0], color=colour, alpha=0.6, label=method)
            axes.set_xticks(range(len(presets)), [preset.removeprefix("grokking-") for preset in presets])
            axes.set_xlim(-0.5, len(presets) - 0.5)
            axes.set_ylabel(f"{label} to 95% test accuracy")
            axes.set_ylim(bottom=0)
        left.legend(loc="best")
        figure.suptitle(f"Grokking at --scale {results[0]['scale']}", fontsize="medium")


def ablation(results: list[Result], method: str, grid: dict[str, list[Any]], path: Path) -> None:
    """The score against each setting of an ablation: one point a run, the mean as a bar; lines for base and paper."""
    score = results[0]["score"]
    unit = UNITS.get(score, 1.0)
    preset, scale = results[0]["preset"], results[0]["scale"]
    # settings that were changed beside the ablation's make another run
    labels = {}
    for point in points(grid):
        (config,) = configurations(preset, scale, [method], [0], {name: [each] for name, each in point.items()})
        labels[config.label] = point
    swept = [each for each in results if each["method"] in labels]
    if not swept:
        raise RunError("no finished runs of this ablation: make them with `llqr sweep --ablation`")
    varied = {setting: values for setting, values in grid.items() if len(values) > 1}
    with drawing(path, max(4.5 * len(varied) + 0.5, 7), 4.5) as figure:
        panels = figure.subplots(1, len(varied), sharey=True, squeeze=False)[0]
        for axes, (setting, values) in zip(panels, varied.items(), strict=True):
            for place, wanted in enumerate(values):
                rows = [each for each in swept if labels[each["method"]][setting] == wanted]
                found = [unit * each for each in scores(rows)]
                axes.plot([place] * len(found), found, "o", color=BLUE, alpha=0.5, label=None if place else method)
                if mean := summary(found):
                    axes.plot(place, mean.mean, "_", color="black", markersize=24, markeredgewidth=2)
                if len(found) < len(rows):
                    _beside(axes, place, f"{len(rows) - len(found)} not", BLUE)
            axes.set_xticks(range(len(values)), [toml(each).strip('"') for each in values])
            axes.set_xlabel(setting)
            for name, colour, line, more in (("base", GREY, "--", ""), (method, BLUE, ":", " as the paper has it")):
                if level := summary(scores(by_method(results).get(name, []))):
                    axes.axhline(unit * level.mean, color=colour, linestyle=line, label=name + more)
        panels[0].set_ylabel(NAMES.get(score, score))
        shared_legend(figure, panels[:1])
        figure.suptitle(f"{preset} at --scale {scale}", fontsize="medium")


def _beside(axes: Axes, at: float, text: str, colour: str) -> None:
    axes.annotate(
        text, (at, 1.0), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize="x-small", color=colour
    )
