"""`llqr table`: ours beside the paper's, one table for each preset and scale, never mixed."""

from statistics import median

from rich.console import Console
from rich.markup import escape

from llqr_lab.experiments.collect import Result, Summary, summary, value
from llqr_lab.experiments.paper import PUBLISHED, RESULTS
from llqr_lab.experiments.presets import PRESETS
from llqr_lab.results import say, show_table, simple_table

UNITS = {"test_accuracy": 100.0}
"""Accuracies are shown in percent, as the paper's."""
NAMES = {
    "test_accuracy": "test accuracy, %",
    "test_loss": "test loss",
    "valid_loss": "validation loss",
    "bleu": "BLEU",
    "steps_to_target": "steps to 95%",
}
LOWER_IS_BETTER = ("test_loss", "valid_loss", "steps_to_target")


def show(results: list[Result], console: Console) -> None:
    for preset, group in grouped(results):
        for line in heading(preset, group):
            say(console, line)
        headers, *rows = cells(preset, group)
        made = simple_table(None, *headers)
        for row in rows:
            made.add_row(*map(escape, row))
        show_table(console, made)
        say(console, f"{verdict(group)}\n")


def grouped(results: list[Result]) -> list[tuple[str, list[Result]]]:
    """The results of each preset and scale, with the preset's name."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result["preset"], result["scale"]), []).append(result)
    return [(preset, group) for (preset, _), group in groups.items()]


def heading(preset: str, group: list[Result]) -> tuple[str, str]:
    """What the paper's experiment is, and what ours was."""
    scale = group[0]["scale"]
    known = PRESETS[preset].summary if preset in PRESETS else preset
    how = "" if scale == "paper" else ", not comparable with the paper"
    return f"{preset}: {known}", f"ours at --scale {scale}{how}: {ours(group)}"


def cells(preset: str, group: list[Result]) -> list[list[str]]:
    """The header, then a row a method: the score over seeds, the time, and the paper's where it has one."""
    score = group[0]["score"]
    name = NAMES.get(score, score)
    reported = RESULTS.get(preset, {})
    header = ["method", "seeds", f"{name}\nours", "time a step,\n× base, ours"]
    if score == "steps_to_target":
        header.append("seconds\nto 95%")
    if reported:
        header += [f"{name}\npaper", "time,\n× base, paper"]
    base = [each for each in group if each["method"] == "base"]
    made = [header]
    for method in methods_of(group):
        rows = [each for each in group if each["method"] == method]
        row = [method, seeds(rows), shown(summary(scores(rows)), UNITS.get(score, 1.0)), times(rows, base)]
        if score == "steps_to_target":
            row.append(shown(summary(each["seconds_to_target"] for each in rows if value(each) is not None), 1.0))
        if reported:
            paper = reported.get(method)
            row += paper.shown if paper else ("", "")
        made.append(row)
    if PUBLISHED in reported:
        made.append([PUBLISHED, "", "", "", *reported[PUBLISHED].shown])
    return made


def ours(group: list[Result]) -> str:
    """What was trained on what, for how long."""
    networks = sorted({f"{each['model']} on {each['data']}" for each in group})
    sizes = sorted({(each.get("examples"), each.get("whole")) for each in group}, key=str)
    told = [f"{size:,}" + (f" of its {whole:,}" if whole and whole != size else "") for size, whole in sizes if size]
    steps = sorted({each["steps"] for each in group})
    length = f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else "")
    examples = f" ({', '.join(told)} examples)" if told else ""
    return f"{', '.join(networks)}{examples}, {length} steps of {group[0]['batch']}"


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
    """The mean with four digits that count and its error with two, and all that are before the point."""
    if found is None:
        return "–"
    numbers = [(unit * found.mean, 4)] + ([] if found.error is None else [(unit * found.error, 2)])
    return " ± ".join(f"{x:.0f}" if x >= 10**digits else f"{x:.{digits}g}" for x, digits in numbers)


def times(rows: list[Result], base: list[Result]) -> str:
    """Medians over seeds of the seconds that a training step takes, refits included."""
    if not base or len({each["clock"] for each in (*rows, *base)} | {"mixed"}) > 2:
        return "–"  # nothing to compare with, or seconds of two kinds
    own, alone = (median(each["seconds"] / each["steps"] for each in some) for some in (rows, base))
    return f"×{own / alone:.3g}" if alone else "–"


def verdict(group: list[Result]) -> str:
    """Which methods beat the base by more than two standard errors, which it beats, which neither: seed by seed.

    Seeds that one of the two came to no score with are left out; a method that failed more often than the base isn't better.
    """
    rows = {method: [each for each in group if each["method"] == method] for method in methods_of(group)}
    base = rows.pop("base", [])
    if not rows:
        return ""
    if not scores(base):
        none = "The base came to no score: there is nothing to compare with."
        return none if base else "There is no run of the base."
    said: dict[str, list[str]] = {}
    for method, own in rows.items():
        failed, usual = (1 - len(scores(some)) / len(some) for some in (own, base))
        label = method if not failed else f"{method} ({seeds(own)} seeds came to a score)"
        kind = "failed more often than the base" if failed > usual else compared(summary(gains(own, base)))
        said.setdefault(kind, []).append(label)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in said.items()) + "."


def gains(rows: list[Result], base: list[Result]) -> list[float]:
    """By how much each run is better than the base's of the same seed, which began with the same weights and batches."""
    sign = -1.0 if rows[0]["score"] in LOWER_IS_BETTER else 1.0
    alone = {each["seed"]: value(each) for each in base}
    pairs = [(value(each), alone.get(each["seed"])) for each in rows]
    return [sign * (own - other) for own, other in pairs if own is not None and other is not None]


def compared(gain: Summary | None) -> str:
    """A gain over the base, in words."""
    if gain is None:
        return "no seed in common with the base"
    if gain.error is None:
        return f"{'better' if gain.mean > 0 else 'not better'} with one seed, which says little"
    if abs(gain.mean) <= 2 * gain.error:
        return "within two standard errors of the base"
    return f"{'better than the base' if gain.mean > 0 else 'worse'} by over two standard errors"
