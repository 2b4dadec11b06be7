"""The figure of `llqr bench target`: steps and seconds to the target, relative to the base's median."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llqr_lab.figures.style import BLUE, GREY, ORANGE, drawing


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Least, median and most over seeds, one panel a task and learning rate; methods that never arrive have no mark."""
    panels = list(dict.fromkeys((row["task"], row["lr"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    with drawing(path, 5.5 * len(panels), 0.42 * len(methods) + 1.6) as figure:
        axes_of = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (task, lr) in zip(axes_of, panels, strict=True):
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
            axes.set_xlabel("to the target, relative to the base's median")
            axes.set_xscale("log")
            axes.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
            axes.minorticks_off()
        axes_of[0].set_yticks(range(len(methods)), methods)
        axes_of[0].invert_yaxis()
        if axes_of[-1].get_legend_handles_labels()[0]:
            axes_of[-1].legend(loc="lower right")
