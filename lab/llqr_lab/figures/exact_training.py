"""The figures of `llqr bench exact-training`: error by seconds, and what a step costs; and those of its example pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import NullFormatter

from llqr import Exact
from llqr_lab.exact_training.bench import GRIDS, best
from llqr_lab.exact_training.problems import EQUATIONS, PROBLEMS, Problem, grid
from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing

LINES = {"Exact": (BLUE, "-"), "Adam": (ORANGE, "--"), "L-BFGS": (GREEN, "-."), "SOAP": (GREY, ":")}
STEPS = 60
"""Exact steps of the pages' figures."""
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
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("residuals" if sweep == "residuals" else "parameters")
        panels[1][0].set_ylabel("seconds of one core")
        panels[1][0].legend()


def curves(axes: Any, result: dict[str, Any], problem: str, quantity: str) -> None:
    for name in GRIDS:
        colour, line = LINES[name]
        curve = best(result["runs"], problem, name)[1]
        axes.plot(curve["seconds"], curve[quantity], color=colour, linestyle=line, label=name)
    axes.set(xscale="log", yscale="log", xlabel="seconds of one core")


def draw_pages(result: dict[str, Any], folder: Path, seed: int) -> None:
    """For each problem: what some exact steps come to, where it is wrong, and the loss of all optimizers by seconds."""
    for name, make in PROBLEMS.items():
        problem = make(seed)
        optimizer = Exact(problem.model)
        for _ in range(STEPS):
            optimizer.step(problem.residuals)
        with drawing(folder / f"exact_{name}.png", 12, 3.6) as figure, torch.no_grad():
            fitted, wrong, loss = figure.subplots(1, 3)
            (_autoencoder if name == "autoencoder" else _surface)(figure, fitted, wrong, problem)
            curves(loss, result, name, "loss")
            loss.set(title="loss", xlabel="seconds of one core")
            loss.legend()


def _surface(figure: Any, fitted: Any, wrong: Any, problem: Problem) -> None:
    at = grid()
    values, truth = problem.model(at)[:, 0].reshape(100, 100).T, problem.truth(at).reshape(100, 100).T
    second = "t" if problem.name in ("heat", "burgers") else "y"
    for axes, shown, title, colours in (
        (fitted, values, f"u after {STEPS} steps", "viridis"),
        (wrong, values - truth, "its error", "coolwarm"),
    ):
        image = axes.imshow(shown, origin="lower", extent=(0, 1, 0, 1), cmap=colours, aspect="auto")
        axes.set(title=title, xlabel="(x + 1)/2" if problem.name == "burgers" else "x", ylabel=second)
        axes.grid(visible=False)
        figure.colorbar(image, ax=axes)


def _autoencoder(figure: Any, fitted: Any, wrong: Any, problem: Problem) -> None:
    at = grid(20)
    points = problem.truth(at)
    codes, error = problem.model[0](points), (problem.model(points) - points).norm(dim=1)  # type: ignore[index]
    for axes, colour, title in (
        (fitted, at[:, 0], f"the two numbers after {STEPS} steps"),
        (wrong, error, "distance from the surface"),
    ):
        image = axes.scatter(*codes.T, c=colour, s=12)
        axes.set(title=title, xlabel="first", ylabel="second")
        figure.colorbar(image, ax=axes)
