"""The figure of `llqr bench exact`: seconds and memory of both methods, by depth, width and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from llqr_lab.figures.style import BLUE, GREY, ORANGE, drawing

METHODS = {"riccati": ("Riccati", BLUE, "o", "-"), "dense": ("dense", ORANGE, "s", "--")}
THEORY = {
    "seconds": {"depth": 1, "width": 4, "batch": 2},
    "peak_bytes": {"depth": 1, "width": 3, "batch": 2},
}
"""The power of its arithmetic and its storage that Riccati comes to in the end. A layer of n = batch · width states and
P ~ width² parameters has a B of n P numbers, a K of n², and products of n² P."""
QUANTITIES = {"seconds": ("seconds a step", 1.0), "peak_bytes": ("peak memory, MiB", 2.0**20)}


def draw(result: dict[str, Any], path: Path) -> None:
    sweeps = list(result["growth"])
    with drawing(path, 4 * len(sweeps), 7) as figure:
        panels = figure.subplots(len(QUANTITIES), len(sweeps), squeeze=False, sharey="row")
        for across, sweep in enumerate(sweeps):
            rows = [row for row in result["rows"] if row["sweep"] == sweep]
            for down, quantity in enumerate(QUANTITIES):
                _panel(panels[down][across], sweep, quantity, rows)
            fixed = ", ".join(f"{name} {rows[0][name]}" for name in ("depth", "width", "batch") if name != sweep)
            panels[0][across].set_title(f"by {sweep} ({fixed})")
        for down, (label, _) in enumerate(QUANTITIES.values()):
            panels[down][0].set_ylabel(label)


def _panel(axes: Axes, sweep: str, quantity: str, rows: list[dict[str, Any]]) -> None:
    unit = QUANTITIES[quantity][1]
    axes.set_xscale("log")
    axes.set_yscale("log")
    for method, (label, colour, marker, line) in METHODS.items():
        seen = [(row[sweep], row[quantity][method] / unit) for row in rows if row[quantity][method]]
        if seen:
            axes.plot(*zip(*seen, strict=True), color=colour, marker=marker, linestyle=line, label=label)
    _slope(
        axes,
        [(row[sweep], row[quantity]["riccati"] / unit) for row in rows if row[quantity]["riccati"]],
        quantity,
        sweep,
    )
    left_out = [row for row in rows if row["dense_skipped"]]
    if left_out:
        note = f"dense left out at {', '.join(str(row[sweep]) for row in left_out)}:\n{left_out[0]['dense_skipped']}"
        axes.text(0.98, 0.03, note, transform=axes.transAxes, ha="right", color=GREY, fontsize="small")
    sizes = [row[sweep] for row in rows]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(sweep)
    if axes.get_legend_handles_labels()[0]:  # the smallest sizes may take no memory that can be seen
        axes.legend(loc="upper left")


def _slope(axes: Axes, seen: list[tuple[float, float]], quantity: str, sweep: str) -> None:
    """A line of the theoretical slope, a little below the last points of Riccati."""
    if len(seen) < 2:
        return
    power = THEORY[quantity][sweep]
    (first, _), (last, top) = seen[-2 if power > 1 else -min(3, len(seen))], seen[-1]
    end = 0.6 * top
    label = sweep if power == 1 else f"{sweep}$^{power}$"
    axes.plot([first, last], [end * (first / last) ** power, end], color=GREY, linestyle=":", label=f"∝ {label}")
