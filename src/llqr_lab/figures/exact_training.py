"""The figures of `llqr bench exact-training`: error by seconds, and what a step costs; and those of its example pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llqr_lab.exact_training.bench import GRIDS, best
from llqr_lab.exact_training.problems import EQUATIONS
from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing

LINES = {"Exact": (BLUE, "-"), "Adam": (ORANGE, "--"), "L-BFGS": (GREEN, "-."), "SOAP": (GREY, ":")}
METHODS = {"dual": (BLUE, "o"), "primal": (ORANGE, "s"), "cg": (GREEN, "^"), "auto": (PINK, "x")}


def draw(result: dict[str, Any], path: Path) -> None:
    with drawing(path, 12, 7) as figure:
        panels = figure.subplots(2, 3)
        for axes, problem in zip(panels[0], EQUATIONS, strict=True):
            curves(axes, result, problem, "error")
            axes.set_title(problem.capitalize())
        panels[0][0].set_ylabel("relative error of the solution")
        panels[0][0].legend()
        for axes, (sweep, rows) in zip(panels[1], result["costs"].items(), strict=True):
            for method, (colour, marker) in METHODS.items():
                own = [row for row in rows if row["method"] == method]
                places = [row["residuals"] if sweep == "residuals" else row["parameters"] for row in own]
                line = "none" if method == "auto" else "-"
                axes.plot(
                    places, [row["seconds"] for row in own], color=colour, marker=marker, linestyle=line, label=method
                )
            axes.set(xscale="log", yscale="log", title=f"one step, by {sweep}")
            axes.set_xlabel("residuals" if sweep == "residuals" else "parameters")
        panels[1][0].set_ylabel("seconds of one core")
        panels[1][0].legend()


def curves(axes: Any, result: dict[str, Any], problem: str, quantity: str) -> None:
    for name in GRIDS:
        colour, line = LINES[name]
        curve = best(result["runs"], problem, name)[1]
        axes.plot(curve["seconds"], curve[quantity], color=colour, linestyle=line, label=name)
    axes.set(xscale="log", yscale="log", xlabel="seconds of one core")
