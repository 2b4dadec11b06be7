"""docs/benchmarks.md: the race as tables. `llqr bench race --page` writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from llqr_lab.pages import table
from llqr_lab.race.entries import BEYOND

COMMAND = "llqr bench race --page"
Row = dict[str, Any]
BEYOND_A_TIE = 0.9
"""The ratio of times below which LLQR is called faster; they are good to about a tenth."""
SCORES = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "valid_loss": "validation loss",
    "steps_to_target": "steps to 95%",
}
THE_END = "the end"
"""The target of tasks that say themselves when they are over."""


def body(rows: Sequence[Row], untuned: Sequence[Row]) -> str:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    parts = []
    if untuned:
        parts += ["### Nothing of LLQR tuned: at its base's best rate\n", table(untuned_lines(untuned))]
    if pairs(rows):
        parts += ["### Everybody tuned alike: LLQR against its own base\n", table(duels(rows)), *_sentences(rows)]
    for task in tasks:
        parts += [f"### {task}\n", table(everybody([row for row in rows if row["task"] == task]))]
    parts += ["### The rates that were tried\n", _about_rates(beyond=bool(pairs(rows))), table(tried(rows))]
    return "\n".join(parts)


def duels(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each task and base: when it and LLQR around it came to what the base comes to, and who else was faster."""
    header = [
        "task",
        "base",
        "to",
        "base: rate, steps, seconds",
        "LLQR: rate, steps, seconds",
        "time",
        "faster than LLQR",
    ]
    lines = []
    for base, wrapped in pairs(rows):
        label = _label(base)
        goal, own, other = (row["targets"].get(label) for row in (base, base, wrapped))
        if goal is None or own is None or other is None:
            ends = (
                f"diverged with {base['diverged_seeds']} of {base['seeds']} seeds"
                if base["lr"]
                else "diverged at every rate"
            )
            lines.append([base["task"], base["optimizer"], "–", ends, "–", "–", "–"])
            continue
        times = other["seconds"] / own["seconds"] if other["seconds"] and own["seconds"] else None
        peers = [row for row in rows if row["task"] == base["task"] and row is not wrapped]
        faster = [
            row["optimizer"]
            for row in peers
            if (seconds := row["targets"][label]["seconds"]) and seconds < (other["seconds"] or float("inf"))
        ]
        lines.append(
            [
                base["task"],
                base["optimizer"],
                _goal(goal["loss"]),
                f"{shown(base['lr'], '{:g}')}: {reached(own, base['seeds'])}",
                f"{shown(wrapped['lr'], '{:g}')}: {reached(other, wrapped['seeds'])}",
                shown(times, "**×{:.2f}**" if times and times < BEYOND_A_TIE else "×{:.2f}"),
                ", ".join(faster) or "nobody",
            ]
        )
    return [header, *lines]


def untuned_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each task and base, both at the base's best rate."""
    header = ["task", "base", "rate", "base: steps", "LLQR: steps", "steps (least, most)", "time (least, most)"]
    header += ["base: training loss", "LLQR: training loss"]
    lines = []
    for row in rows:
        sides = [row["alone"], row["llqr"]]
        steps = [", ".join(shown(each, "{:.0f}") for each in side["steps"]) or "–" for side in sides]
        ratios = [ratio(row, what) for what in ("steps", "seconds")]
        lines.append([row["task"], row["base"], f"{row['lr']:g}", *steps, *ratios, *map(_spread, sides)])
    return [header, *lines]


def ratio(row: Row, what: str) -> str:
    """LLQR's steps or seconds by its base's: the median of the seeds, its extremes, and how many seeds count if not all."""
    ratios = [math.inf if each is None else each for each in row[f"{what}_ratios"]]
    if not ratios:
        return "–"
    middle, least, most = (
        "never" if each == math.inf else f"×{each:.2f}" for each in (median(ratios), min(ratios), max(ratios))
    )
    some = "" if len(ratios) == row["seeds"] else f"; {len(ratios)} of {row['seeds']} seeds"
    return f"{middle} ({least}, {most}{some})"


def _goal(loss: float | None) -> str:
    return "95% on the test set" if loss is None else f"{loss:.4g}"


def everybody(rows: Sequence[Row]) -> list[list[str]]:
    """Of one task, a line an optimizer."""
    labels = list(rows[0]["targets"])
    goals = [rows[0]["targets"][label]["loss"] for label in labels]
    score = next((row["score_name"] for row in rows if row["score_name"]), "")
    names = [label if goal is None else f"{label}'s {goal:.4g}" for label, goal in zip(labels, goals, strict=True)]
    header = [
        "optimizer",
        "rate",
        "training loss (least, most)",
        SCORES.get(score, score),
        *(f"to {name}: steps, seconds" for name in names),
    ]
    header += ["ms a step", "MB"]
    lines = []
    for row in rows:
        times = [reached(row["targets"][label], row["seeds"]) for label in labels]
        ends = [shown(row["lr"], "{:g}"), _spread(row), shown(row["score"], "{:.4g}")]
        rest = [shown(_times(row["step_seconds"], 1e3), "{:.1f}"), shown(_times(row["peak_bytes"], 1e-6), "{:.0f}")]
        lines.append([row["optimizer"], *ends, *times, *rest])
    return [header, *lines]


def _spread(row: Row) -> str:
    """The training loss at the end: the median of the seeds, and its extremes."""
    middle = shown(row["train_loss"], "{:.4f}")
    known = [loss for loss in row["train_losses"] if loss is not None]
    return f"{middle} ({min(known):.4g}, {max(known):.4g})" if known else middle


def tried(rows: Sequence[Row]) -> list[list[str]]:
    """How each run of the grids ended."""
    lines = []
    for row in rows:
        ends = [
            f"{rate}: {'diverged' if rate in row['diverged'] else '–' if end is None else f'{end:.4g}'}"
            for rate, end in sorted(row["tried"].items(), key=lambda each: float(each[0]))
        ]
        lines.append([row["task"], row["optimizer"], "; ".join(ends)])
    return [["task", "optimizer", "rate: training loss at the end (modular addition: steps)"], *lines]


def blow_ups(rows: Sequence[Row]) -> list[str]:
    """Where LLQR diverged at a rate at which its base didn't."""
    found = []
    for base, wrapped in pairs(rows):
        broken = [rate for rate in compared(base, wrapped) if rate in wrapped["diverged"]]
        found += [f"{base['task']}, {wrapped['optimizer']} at {rate}" for rate in broken]
    return found


def compared(base: Row, wrapped: Row) -> list[str]:
    """The rates up to four times the base's best at which the base stayed finite, and LLQR was tried."""
    most = (1 + 1e-6) * BEYOND * (base["lr"] or 0.0)
    finite = [rate for rate in base["tried"] if rate not in base["diverged"] and float(rate) <= most]
    return [rate for rate in finite if rate in wrapped["tried"]]


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each base with LLQR around it, task by task."""
    known = {(row["task"], row["optimizer"]): row for row in rows}
    wrapped = ((row, known.get((row["task"], f"LLQR on {row['optimizer']}"))) for row in rows)
    return [(base, other) for base, other in wrapped if other is not None]


def _label(base: Row) -> str:
    return THE_END if THE_END in base["targets"] else base["optimizer"]


def _sentences(rows: Sequence[Row]) -> list[str]:
    common = [rate for base, wrapped in pairs(rows) for rate in compared(base, wrapped)]
    broken = blow_ups(rows)
    said = (
        f"At {len(common) - len(broken)} of the {len(common)} rates at which a base stayed finite and LLQR was tried, "
        "up to four times the base's best, LLQR stayed finite too."
    )
    lines = [said + "".join(f" Not so: {each}." for each in broken)]
    still = [f"{row['optimizer']} on {row['task']} ({', '.join(row['unmoved'])})" for row in rows if row["unmoved"]]
    lines.append(
        "Every optimizer moved every parameter." if not still else f"Parameters that never moved: {'; '.join(still)}."
    )
    return [f"{line}\n" for line in lines]


def _about_rates(beyond: bool) -> str:
    said = "With the first seed. A dash is a run of modular addition that didn't get there."
    if beyond:
        said += (
            " At four times the best rate of a base, it and LLQR around it were run for the sentence on finite runs above, "
            "after the best rates had been chosen."
        )
    return f"{said}\n"


def reached(target: Row, seeds: int) -> str:
    if target["steps"] is None:
        return f"– ({target['reached']} of {seeds} seeds)"
    return f"{target['steps']:.0f}, {target['seconds']:.1f}"


def _times(number: float | None, factor: float) -> float | None:
    return None if number is None else factor * number


def shown(number: float | None, form: str) -> str:
    return "–" if number is None else form.format(number)
