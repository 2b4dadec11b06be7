"""Training losses of several optimizers, by steps and by seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llqr_lab.figures.style import GREEN, GREY, ORANGE, SKY, drawing
from llqr_lab.race.run import Curve

LINES = ((ORANGE, "--", "s"), (ORANGE, "-", "o"), (GREEN, "--", "^"), (GREEN, "-", "D"), (SKY, "-.", "v"))


def draw(curves: Mapping[str, Curve], target: float, path: Path, log_seconds: bool = False) -> None:
    """One curve an optimizer; at most five."""
    with drawing(path, 10, 4.5) as figure:
        by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
        for (name, curve), (colour, style, marker) in zip(curves.items(), LINES[: len(curves)], strict=True):
            every = max(1, len(curve.steps) // 10)
            for axes, at in ((by_steps, curve.steps), (by_seconds, curve.seconds)):
                axes.plot(
                    at,
                    curve.losses,
                    color=colour,
                    linestyle=style,
                    marker=marker,
                    markevery=every,
                    markersize=5,
                    label=name,
                )
        for axes in (by_steps, by_seconds):
            axes.set_yscale("log")
            axes.axhline(target, color=GREY, linestyle=":", linewidth=1.2)
        by_steps.set_xlabel("training steps")
        by_steps.set_ylabel("training loss")
        by_steps.annotate(
            "target", (0.0, target), xytext=(2, 3), textcoords="offset points", color=GREY, fontsize="small"
        )
        by_steps.legend(loc="lower left")
        by_seconds.set_xlabel("seconds of training")
        if log_seconds:
            by_seconds.set_xscale("log")
