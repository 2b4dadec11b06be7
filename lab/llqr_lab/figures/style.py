"""How figures look: a palette that the colour-blind can tell apart (Okabe and Ito's), and fonts that survive a page."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7F7F7F"

_STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "svg.hashsalt": "llqr",
}


@contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches to draw into, saved at the end."""
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def shared_legend(figure: Figure, panels: Iterable[Axes], columns: int = 4) -> None:
    """One for all panels, below them, with each label once."""
    found = [axes.get_legend_handles_labels() for axes in panels]
    handles = {label: handle for pair in found for handle, label in zip(*pair, strict=True)}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
