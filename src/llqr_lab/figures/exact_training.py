"""The picture of `llqr exact`: training loss by steps and by seconds."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from llqr_lab.exact_training.loops import Run
from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, drawing

LINES = ((ORANGE, "--", "s"), (BLUE, "-", "o"), (GREEN, "-.", "^"))


def draw(runs: dict[str, Run], target: float, steps: int, path: Path) -> None:
    with drawing(path, 10, 4.5) as figure:
        by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
        for (name, run), line in zip(runs.items(), LINES, strict=True):
            _curve(by_steps, list(range(steps + 1)), run.losses[: steps + 1], name, line)
            _curve(by_seconds, run.seconds[1:], run.losses[1:], name, line)
        for axes in (by_steps, by_seconds):
            axes.set_yscale("log")
            axes.axhline(target, color=GREY, linestyle=":", linewidth=1.2)
        by_steps.set_xlabel("training steps")
        by_steps.set_ylabel("training loss")
        by_steps.annotate(
            "target", (0.0, target), xytext=(2, 3), textcoords="offset points", color=GREY, fontsize="small"
        )
        by_steps.legend(loc="lower left")
        by_seconds.set_xscale("log")
        by_seconds.set_xlabel("seconds")


def _curve(axes: Axes, at: list[float] | list[int], losses: list[float], name: str, line: tuple[str, str, str]) -> None:
    colour, style, marker = line
    axes.plot(at, losses, color=colour, linestyle=style, marker=marker, markevery=max(1, len(at) // 10), label=name)
