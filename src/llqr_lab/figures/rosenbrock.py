"""The figures of `llqr rosenbrock`: losses by iteration; paths over level curves, and cosines with Newton's step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing
from llqr_lab.rosenbrock.experiment import Outcome, Plan, Setting
from llqr_lab.rosenbrock.follow import Run, cosine
from llqr_lab.rosenbrock.methods import diagonal_newton
from llqr_lab.rosenbrock.problem import A, B, newton

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)))
"""The refit periods of one structure, from the shortest on."""
HIGHEST = 1e3
"""What of a diverging run is shown."""


def draw_losses(plan: Plan, outcome: Outcome, path: Path) -> None:
    """The loss against the iteration, with U fitted to convergence (left) and by the paper's inner solver (right)."""
    with drawing(path, 12, 6.6) as figure:
        left, right = figure.subplots(1, 2)
        _losses(left, plan.classic, outcome.classic, "U fitted to convergence")
        _losses(right, plan.valley, outcome.valley, "U fitted by the paper's inner solver")
        left.set_ylabel("loss")


def draw_paths(plan: Plan, outcome: Outcome, path: Path) -> None:
    """Paths over level curves (left), and the cosine of each direction with Newton's along them (right)."""
    relaxed = [name for name in outcome.classic if name.startswith("LLQR scalars")][-1]
    shown = ("Newton", "Riccati", relaxed, "diagonal Hessian")
    runs = {name: outcome.classic[name] for name in shown}
    with drawing(path, 12, 5.8) as figure:
        left, right = figure.subplots(1, 2)
        _paths(left, runs)
        _cosines(right, runs, relaxed)
        for axes, columns in ((left, 2), (right, 1)):
            _legend(axes, columns)


def _losses(axes: Axes, setting: Setting, runs: dict[str, Run], title: str) -> None:
    for name, run in runs.items():
        axes.plot(range(len(run.losses)), run.losses, label=_label(name, run), **_style(name, runs))
    finished = [run.iterations for run in runs.values() if run.reached(setting.target) is not None]
    axes.set_xlim(0, 1.03 * max(finished, default=setting.most))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=9))
    axes.set_xlabel("iteration")
    axes.set_title(f"{title}\nfrom {setting.start}, rate {setting.rate:g}")
    axes.set_ylim(top=min(axes.get_ylim()[1], HIGHEST))
    _legend(axes, 2)


def _paths(axes: Axes, runs: dict[str, Run]) -> None:
    xs, ys = np.meshgrid(np.linspace(-1.6, 1.4, 300), np.linspace(-0.5, 2.0, 300))
    levels = np.logspace(-2, 3, 11)
    contours = axes.contour(xs, ys, (A - xs) ** 2 + B * (ys - xs**2) ** 2, levels, colors="#BBBBBB", linewidths=0.7)
    contours.set_zorder(0)
    edge = xs[0] ** 2 + 1 / (2 * B)
    axes.fill_between(xs[0], edge, ys.max(), where=list(edge < ys.max()), color="#F4F4F4", zorder=-1)
    axes.text(0.0, 1.4, "Hessian indefinite", ha="center", color=GREY, fontsize="small")
    for name, run in runs.items():
        x, y = torch.stack(run.points).T.tolist()
        axes.plot(x, y, label=_label(name, run), **_style(name, runs))
        axes.plot(x[-1], y[-1], "o", color=_style(name, runs)["color"], markersize=5)
    x0, y0 = runs["Newton"].points[0].tolist()
    axes.plot(x0, y0, "ks", markersize=5)
    axes.plot(A, A**2, "k*", markersize=11)
    slow = runs["diagonal Hessian"]
    axes.annotate(
        f"diagonal Hessian\nafter {slow.iterations} iterations",
        (float(slow.points[-1][0]), float(slow.points[-1][1])),
        xytext=(-20, -45),
        textcoords="offset points",
        ha="right",
        fontsize="small",
        arrowprops={"arrowstyle": "-", "color": GREY},
    )
    axes.annotate("start", (x0, y0), xytext=(-6, -14), textcoords="offset points", ha="right")
    axes.annotate("minimum", (A, A**2), xytext=(4, 10), textcoords="offset points", ha="center")
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.grid(False)
    axes.set_title("paths over level curves (half a decade apart)")


def _cosines(axes: Axes, runs: dict[str, Run], relaxed: str) -> None:
    for name in (relaxed, "diagonal Hessian"):
        cosines = runs[name].cosines
        axes.plot(
            range(1, len(cosines) + 1), cosines, label=f"{name}, on its own path", **_style(name, runs, single=True)
        )
    places = runs[relaxed].points[: runs[relaxed].iterations]
    along = [cosine(diagonal_newton(point), newton(point)) for point in places]
    axes.plot(range(1, len(along) + 1), along, color=GREY, linestyle=":", label="diagonal Hessian, on LLQR's path")
    axes.set_xscale("log")
    axes.set_ylim(-1.08, 1.08)
    axes.set_xlabel("iteration")
    axes.set_title("cosine with Newton's direction")


def _legend(axes: Axes, columns: int) -> None:
    """Below the panel, where no curve is."""
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=columns)


def _label(name: str, run: Run) -> str:
    return f"{name} (diverges)" if run.diverged else name


def _style(name: str, runs: dict[str, Run], single: bool = False) -> dict[str, Any]:
    """Newton broad, so that what lies on it can be seen; LLQR by structure, dashed by refit period."""
    structure = name.partition(",")[0]
    siblings = [other for other in runs if other.partition(",")[0] == structure]
    dash = DASHES[siblings.index(name) % len(DASHES)] if not single else "-"
    if structure == "Newton":
        return {"color": ORANGE, "linewidth": 5.5, "alpha": 0.45, "solid_capstyle": "round"}
    if structure == "Riccati":
        return {"color": "black", "linewidth": 1.6, "linestyle": (0, (1, 3)), "zorder": 5}
    if structure == "LLQR scalars":
        return {"color": GREEN, "linestyle": dash, "linewidth": 2.2}
    if structure == "LLQR dense":
        return {"color": BLUE, "linestyle": dash, "linewidth": 1.6}
    if structure == "SGDM":
        return {"color": PINK, "linewidth": 1.3}
    if structure == "gradient alone":
        return {"color": "black", "linestyle": (0, (4, 1, 1, 1, 1, 1)), "linewidth": 1.2}
    return {"color": GREY, "linestyle": "-."}
