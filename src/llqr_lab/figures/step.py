"""The figure of `llqr bench step`: what a training step costs with LLQR, over the base optimizer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from llqr_lab.figures.style import BLUE, GREY, drawing


def draw(result: dict[str, Any], path: Path) -> None:
    rows = result["rows"]
    with drawing(path, 4.2 * max(2, len(rows)), 3.6) as figure:
        panels = figure.subplots(1, len(rows), squeeze=False, sharey=True)[0]
        for axes, row in zip(panels, rows, strict=True):
            _panel(axes, row)
        panels[0].invert_yaxis()


def _panel(axes: Axes, row: dict[str, Any]) -> None:
    names = list(row["structures"])
    values = [row["structures"][name]["by_parts"] for name in names]
    bars = axes.barh(range(len(names)), [value - 1 for value in values], left=1, color=BLUE)
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4)
    axes.axvline(1, color=GREY, linewidth=1.2)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(min(1.0, *values) - 0.01, 1 + 1.3 * max(0.1, *(value - 1 for value in values)))
    axes.set_xlabel("training step, base alone = 1")
    axes.set_title(f"{row['network']}, batch {row['batch']}")
