"""The figure of `llqr compare`: cosines with the exact step along a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing

LINES: dict[str, tuple[str, str, str]] = {
    "SGD": (GREY, "--", "s"),
    "Adam": (ORANGE, "--", "v"),
    "K-FAC": (PINK, "-.", "D"),
    "exact, by layer": ("#000000", ":", "x"),
    "exact": ("#000000", "-", "+"),
    "LLQR scalar": ("#56B4E9", "-", "P"),
    "LLQR diagonal": ("#E69F00", "-", "o"),
    "LLQR kfac": (BLUE, "-", "^"),
    "LLQR ekfac": (GREEN, "-", "*"),
}
PANELS = (
    ("cosine", "cosine with the exact step"),
    ("cosine_h", "the same in the metric of H"),
    ("elsewhere", "on another batch, in the metric of H"),
)


def draw(result: dict[str, Any], path: Path) -> None:
    """One line an optimizer, by the steps taken before; U is fitted afresh at each moment, on the batch of the first panels."""
    looks = result["looks"]
    with drawing(path, 13, 4.4) as figure:
        for axes, (number, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
            for name, (colour, style, marker) in LINES.items():
                points = [(place, _value(look, name, number)) for place, look in enumerate(looks)]
                there = [(place, value) for place, value in points if value is not None]
                if there:
                    places, values = zip(*there, strict=True)
                    axes.plot(places, values, color=colour, linestyle=style, marker=marker, label=name)
            axes.set_xticks(range(len(looks)), [str(look["step"]) for look in looks])
            axes.set_xlabel("after so many training steps")
            axes.set_title(title)
        figure.axes[0].set_ylim(top=1.05)  # of all panels, and after the last line: it ends their scaling
        entries = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        known = {name: entries[name] for name in LINES if name in entries}
        labels = ["(H + λ)⁻¹ of the first batch" if name == "exact" else name for name in known]
        figure.legend(list(known.values()), labels, loc="outside lower center", ncols=5)


def _value(look: dict[str, Any], name: str, number: str) -> float | None:
    if number == "elsewhere":  # the best fraction is the squared cosine
        value = look["another_batch"]["fraction_along"].get(name)
        return None if value is None else float(max(0.0, value)) ** 0.5
    row = look["rows"].get(name)
    return None if row is None else row[number]
