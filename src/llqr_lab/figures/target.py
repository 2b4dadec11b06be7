"""The figure of `llqr bench target`: steps and seconds to the target, relative to the base's median."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llqr_lab.figures.style import BLUE, GREY, ORANGE, drawing


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Least, median and most over seeds, one panel a task and learning rate; methods that never arrive have no mark."""
    panels = list(dict.fromkeys((row["task"], row["lr"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = -(-len(panels) // 2)
    with drawing(path, 11, (0.36 * len(methods) + 1.2) * lines + 0.3) as figure:
        grid = figure.subplots(lines, min(2, len(panels)), sharey=True, squeeze=False)
        for unused in grid.flat[len(panels) :]:
            unused.set_visible(False)
        for axes, (task, lr) in zip(grid.flat, panels, strict=False):
            own = {row["method"]: row for row in rows if (row["task"], row["lr"]) == (task, lr)}
            base = own[methods[0]]
            for name, colour, marker, shift in (("steps", BLUE, "o", -0.15), ("seconds", ORANGE, "s", 0.15)):
                if base[name] is None:
                    continue
                unit = base[name][1]
                for place, method in enumerate(methods):
                    values = own[method][name] if method in own else None
                    if values is not None:
                        least, median, most = (value / unit for value in values)
                        axes.plot([least, most], [place + shift] * 2, color=colour, linewidth=1.4)
                        axes.plot(median, place + shift, marker, color=colour, label=name if place == 0 else None)
            axes.axvline(1.0, color=GREY, linestyle=":", linewidth=1.2)
            axes.set_title(f"{task}, learning rate {lr:g}")
            axes.set_xscale("log")
            axes.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
            axes.minorticks_off()
        grid.flat[0].set_yticks(range(len(methods)), methods)
        grid.flat[0].invert_yaxis()
        figure.supxlabel("to the target, relative to the base's median", fontsize="medium")
        handles, labels = grid.flat[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside upper right", ncols=2)
