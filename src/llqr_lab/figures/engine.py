"""The figure of `llqr bench engine`: products and fits in training steps, and how a fit grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, drawing

LABELS = {"width": "width", "depth": "layers", "batch": "batch", "words": "vocabulary"}


def draw(result: dict[str, Any], path: Path) -> None:
    growth = result["growth"]
    with drawing(path, 13, 7 if growth else 3.5) as figure:
        grid = figure.add_gridspec(2 if growth else 1, 4)
        _products(figure.add_subplot(grid[0, :2]), result["products"])
        _fits(figure.add_subplot(grid[0, 2:]), result["fits"])
        for place, (name, found) in enumerate(growth.items()):
            _growth(figure.add_subplot(grid[1, place]), name, found)


def _products(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for shift, (name, label, colour) in enumerate((("kl", "KL", BLUE), ("newton", "Newton", ORANGE))):
        places = [index + 0.38 * (shift - 0.5) for index in range(len(rows))]
        values = [row["ratios"][name] for row in rows]
        bars = axes.bar(places, values, 0.36, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.axhline(4 / 3, color=GREY, linestyle=":", label="4/3: KL's matrix products")
    axes.set_xticks(range(len(rows)), [row["model"] for row in rows])
    axes.set_ylabel("training steps")
    axes.set_title("one curvature product")
    axes.margins(y=0.4)
    axes.legend(loc="upper right", ncols=3, fontsize="small")


def _fits(axes: Axes, fits: dict[str, Any]) -> None:
    names = list(fits["ratios"])
    bars = axes.barh(range(len(names)), [fits["ratios"][name] for name in names], color=GREEN)
    axes.bar_label(
        bars, [f"{fits['ratios'][name]:.1f}   J = {fits['objective'][name]:.3g}" for name in names], padding=4
    )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.45)
    axes.set_xlabel("training steps")
    axes.set_title(f"one refit of the {fits['model']}, from recording to U")


def _growth(axes: Axes, name: str, found: dict[str, Any]) -> None:
    points = found["points"]
    sizes = [point[name] for point in points]
    train = [point["train_seconds"] for point in points]
    fit = [point["train_seconds"] * point["fit_over_train"] for point in points]
    axes.loglog(sizes, fit, color=GREEN, marker="o", label=f"fit, slope {found['exponent_fit']:.2f}")
    axes.loglog(
        sizes, train, color=GREY, marker="s", linestyle="--", label=f"training step, {found['exponent_train']:.2f}"
    )
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(LABELS[name])
    axes.set_ylabel("seconds")
    axes.legend(fontsize="small")
