"""`llqr table`: ours beside the paper's, one table for each preset and scale, never mixed."""

from __future__ import annotations

from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from llqr_lab.experiments.collect import Result, Summary, summary, value
from llqr_lab.experiments.paper import RESULTS
from llqr_lab.experiments.presets import PRESETS

UNITS = {"test_accuracy": 100.0}
"""Accuracies are shown in percent, as the paper's."""
NAMES = {
    "test_accuracy": "test accuracy, %",
    "test_loss": "test loss",
    "bleu": "BLEU",
    "steps_to_target": "steps to 95%",
}
LOWER_IS_BETTER = ("test_loss", "steps_to_target")


def show(results: list[Result], console: Console) -> None:
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result["preset"], result["scale"]), []).append(result)
    for (preset, scale), group in groups.items():
        known = PRESETS[preset].summary if preset in PRESETS else preset
        how = "" if scale == "paper" else ", not comparable with the paper"
        console.print(f"{preset}: {known}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"ours at --scale {scale}{how}", highlight=False, markup=False, soft_wrap=True)
        console.print(table(preset, group))
        console.print(verdict(group), highlight=False, markup=False, soft_wrap=True)
        console.print()


def table(preset: str, group: list[Result]) -> Table:
    """A row a method: the score over seeds, the time, and the paper's where it has one."""
    score = group[0]["score"]
    reported = RESULTS.get(preset, {})
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("method", no_wrap=True)
    for header in ("seeds", f"{NAMES.get(score, score)}\nours", "time a step,\n× base, ours"):
        made.add_column(header, justify="right")
    if score == "steps_to_target":
        made.add_column("seconds\nto 95%", justify="right")
    if reported:
        made.add_column(f"{NAMES.get(score, score)}\npaper", justify="right")
        made.add_column("time,\n× base, paper", justify="right")
    base = [each for each in group if each["method"] == "base"]
    for method in methods_of(group):
        rows = [each for each in group if each["method"] == method]
        cells = [method, seeds(rows), shown(summary(scores(rows)), UNITS.get(score, 1.0)), times(rows, base)]
        if score == "steps_to_target":
            cells.append(shown(summary(each["seconds_to_target"] for each in rows if value(each) is not None), 1.0))
        if reported:
            paper = reported.get(method)
            cells += [f"{paper.score:.2f} ± {paper.error:.2f}", f"×{paper.time:.3g}"] if paper else ["", ""]
        made.add_row(*cells)
    return made


def methods_of(group: list[Result]) -> list[str]:
    """In the order of the preset, others after it."""
    found = list(dict.fromkeys(each["method"] for each in group))
    preset = PRESETS.get(group[0]["preset"])
    wanted = list(preset.methods) if preset else []
    return sorted(found, key=lambda method: (wanted.index(method) if method in wanted else len(wanted), method))


def scores(rows: list[Result]) -> list[float]:
    return [found for found in map(value, rows) if found is not None]


def seeds(rows: list[Result]) -> str:
    """How many, and how many of them came to a score."""
    reached = len(scores(rows))
    return str(len(rows)) if reached == len(rows) else f"{reached} of {len(rows)}"


def shown(found: Summary | None, unit: float) -> str:
    if found is None:
        return "–"
    mean = f"{unit * found.mean:.4g}" if unit * found.mean < 1e4 else f"{unit * found.mean:.0f}"
    return mean if found.error is None else f"{mean} ± {unit * found.error:.2g}"


def times(rows: list[Result], base: list[Result]) -> str:
    """Medians over seeds of the seconds that a training step takes, refits included."""
    if not base:
        return "–"
    own, alone = (median(each["seconds"] / each["steps"] for each in some) for some in (rows, base))
    return f"×{own / alone:.3g}"


def verdict(group: list[Result]) -> str:
    """Which methods beat the base by more than two standard errors of the difference, which it beats, which neither."""
    score = group[0]["score"]
    by_method = {
        method: summary(scores([each for each in group if each["method"] == method])) for method in methods_of(group)
    }
    base = by_method.pop("base", None)
    if base is None or not by_method:
        return ""
    sign = -1.0 if score in LOWER_IS_BETTER else 1.0
    better: list[str] = []
    worse: list[str] = []
    even: list[str] = []
    single: list[str] = []
    for method, found in by_method.items():
        if found is None:
            worse.append(f"{method} (no score)")
        elif found.error is None or base.error is None:
            single.append(f"{method} {'better' if sign * (found.mean - base.mean) > 0 else 'not better'}")
        else:
            difference = sign * (found.mean - base.mean)
            margin = 2 * (found.error**2 + base.error**2) ** 0.5
            (better if difference > margin else worse if difference < -margin else even).append(method)
    parts = [
        f"{label}: {', '.join(names)}"
        for label, names in (
            ("better than the base by over two standard errors", better),
            ("within two standard errors of it", even),
            ("worse", worse),
            ("one seed, which says little", single),
        )
        if names
    ]
    return "; ".join(parts) + "."
