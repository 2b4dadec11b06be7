"""`llqr table`: ours beside the paper's, one table for each preset and scale, never mixed; and docs/reproduction.md."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.markup import escape

from llqr_lab.experiments.collect import Result, Summary, last_loss, reached_at, summary, value
from llqr_lab.experiments.paper import PUBLISHED, RESULTS
from llqr_lab.experiments.presets import PRESETS
from llqr_lab.experiments.sweep import ABLATED, ABLATIONS, ablation_grid, configurations
from llqr_lab.results import markdown_table, say, show_table, simple_table

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
    methods = by_method(group)
    made = [header]
    for method, rows in methods.items():
        row = [
            method,
            seeds(rows),
            shown(summary(scores(rows)), UNITS.get(score, 1.0)),
            times(rows, methods.get("base", [])),
        ]
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


def by_method(group: Sequence[Result]) -> dict[str, list[Result]]:
    """In the order of the preset, others after it."""
    order = method_order(group[0]["preset"], (each["method"] for each in group))
    return {method: [each for each in group if each["method"] == method] for method in order}


def method_order(preset: str, methods: Iterable[str]) -> list[str]:
    known = PRESETS[preset].methods if preset in PRESETS else ()
    return sorted(set(methods), key=lambda method: (known.index(method) if method in known else len(known), method))


def scores(rows: list[Result]) -> list[float]:
    return [found for found in map(value, rows) if found is not None]


def seeds(rows: list[Result]) -> str:
    reached = len(scores(rows))
    return str(len(rows)) if reached == len(rows) else f"{reached} of {len(rows)}"


def shown(found: Summary | None, unit: float) -> str:
    """The mean with four digits that count and its error with two, and all that are before the point."""
    if found is None:
        return "–"
    numbers = [(unit * found.mean, 4)] + ([] if found.error is None else [(unit * found.error, 2)])
    return " ± ".join(f"{x:.0f}" if x >= 10**digits else f"{x:.{digits}g}" for x, digits in numbers)


def times(rows: list[Result], base: list[Result]) -> str:
    """The seconds that a training step takes, refits included, by the base's: the median of the seeds that both have from the
    same machine."""
    if len({each["clock"] for each in (*rows, *base)} | {"mixed"}) > 2:
        return "–"  # seconds of two kinds
    own, alone = (
        {(each["seed"], machine(each)): each["seconds"] / each["steps"] for each in some} for some in (rows, base)
    )
    ratios = [own[which] / alone[which] for which in own.keys() & alone.keys() if alone[which]]
    return f"×{median(ratios):.3g}" if ratios else "–"


def machine(result: Result) -> tuple[object, ...]:
    """What tells machines apart, as far as a result says."""
    return tuple(result.get(what) for what in ("cores", "memory_bytes", "device"))


def verdict(group: list[Result]) -> str:
    """Which methods beat the base by more than two standard errors, which it beats, which neither: by the seeds that both came
    to a score with. A method that failed more often than the base isn't better."""
    rows = by_method(group)
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
    if gain is None:
        return "no seed in common with the base"
    if gain.error is None:
        return f"{'better' if gain.mean > 0 else 'not better'} with one seed, which says little"
    if abs(gain.mean) <= 2 * gain.error:
        return "within two standard errors of the base"
    return f"{'better than the base' if gain.mean > 0 else 'worse'} by over two standard errors"


# the page

COMMAND = "llqr table --page"

RESNET18 = [f"cifar{classes}-resnet18-{base}" for classes in (10, 100) for base in ("sgdm", "adamw")]
ARCHITECTURES = [f"cifar{c}-{net}-sgdm" for c in (10, 100) for net in ("pyramidnet110", "vgg16bn", "wrn28x10")]
LARGE = ["imagenet-resnet50-sgdm", "iwslt14-transformer-adamw"]
ADAFISHER = ["cifar100-resnet18-batch256", "imagenet-resnet50-90epochs"]
GROKKING = [name for name in PRESETS if name.startswith("grokking-")]
ABLATED_PRESET = "cifar10-resnet18-adamw"
"""Where the paper's E-KFAC gains most."""


AT_EQUAL_TIME = (
    f"{ADAFISHER[0]} is at equal time: everybody trains for as many epochs as take the time of our default's sixteen, at "
    "the rate that was best with seed 9 among three or more. A ResNet has no matrices for torch's Muon.\n\n"
    "![Training loss and test error by steps and by time](figures/equal-time.png)"
)


@dataclass(frozen=True)
class Shown:
    """A table or a figure of the paper."""

    title: str
    presets: list[str]
    command: str
    """That shows it, after the sweep of its presets; SCALE stands for the scale."""
    note: str = ""


SHOWN = (
    Shown(
        "Table 1 and Figure 5: ResNet-18 on CIFAR", RESNET18, f"llqr figure curves {' '.join(RESNET18)} --scale SCALE"
    ),
    Shown("Table 2: other networks on CIFAR", ARCHITECTURES, "llqr table --presets pyramidnet,vgg,wrn --scale SCALE"),
    Shown("Table 3 and Figure 1: ImageNet and IWSLT14", LARGE, f"llqr figure curves {' '.join(LARGE)} --scale SCALE"),
    Shown(
        "Table 4: beside AdaFisher's",
        ADAFISHER,
        f"llqr figure curves {ADAFISHER[0]} --scale SCALE --output docs/figures/equal-time.png",
        AT_EQUAL_TIME,
    ),
    Shown("Figure 3: grokking", GROKKING, "llqr figure grokking --scale SCALE"),
    Shown("Beyond the paper", [name for name, each in PRESETS.items() if not each.of_paper], ""),
)


def body(results: list[Result]) -> str:
    plain = [each for each in results if "+" not in each["method"]]
    found: dict[str, list[list[Result]]] = {}
    for preset, group in grouped(plain):
        found.setdefault(preset, []).append(group)
    return "\n".join([_default(plain), *(_shown(each, found) for each in SHOWN), _ablations(results)])


def _default(results: list[Result]) -> str:
    """A row a task: the default beside its base, at the base's own rate."""
    rows: list[list[str]] = []
    for preset, group in grouped(results):
        methods = by_method(group)
        base, own = (methods.get(method, []) for method in ("base", "default"))
        pairs = [(b, o) for b in base for o in own if b["seed"] == o["seed"]]
        if not pairs:
            continue
        unit = UNITS.get(group[0]["score"], 1.0)
        gain = summary(gains(own, base))
        steps = [shares(*pair)[0] for pair in pairs]
        seconds = [shares(b, o)[1] for b, o in pairs if machine(b) == machine(o)]
        rows.append(
            [
                f"{preset}, {group[0]['scale']}",
                str(len(pairs)),
                NAMES[group[0]["score"]],
                shown(summary(scores(base)), unit),
                shown(summary(scores(own)), unit),
                compared(gain),
                *(_ratio(median(each)) if each else "–" for each in (steps, seconds)),
            ]
        )
    header = ["task, scale", "seeds", "score", "base", "with LLQR", "verdict", "steps", "time"]
    return "\n".join(["## The default beside its base\n", markdown_table([header, *rows])]) if rows else ""


def shares(base: Result, own: Result) -> tuple[float, float]:
    """Of the base's steps and seconds, what LLQR took to the base's last training loss; in grokking to its end. Infinite where
    it never came there. A base that never grokked counts with all of its steps."""
    if base["score"] == "steps_to_target":
        if value(own) is None:
            return math.inf, math.inf
        steps, seconds = (base.get(f"{what}_to_target") or base[what] for what in ("steps", "seconds"))
        return own["steps_to_target"] / steps, own["seconds_to_target"] / seconds
    target = last_loss(base)
    if target is None or own["diverged"]:
        return math.inf, math.inf
    there = [reached_at(own, target, along) for along in ("step", "seconds")]
    whole = base["steps"], base["seconds"]
    return tuple(math.inf if at is None else at / end for at, end in zip(there, whole, strict=True))  # type: ignore[return-value]


def _ratio(share: float) -> str:
    return f"{share:.2f}" if math.isfinite(share) else "not reached"


def _shown(shown: Shown, found: dict[str, list[list[Result]]]) -> str:
    """A table or a figure of the paper: its commands at both scales, and the results of each preset."""
    some = [PRESETS[name] for name in shown.presets]
    lines = [f"## {shown.title}", "", "```sh"]
    if some[0].of_paper:
        lines.append(f"llqr sweep {' '.join(shown.presets)} --scale paper --seeds {some[0].seeds}  # not run by us")
    lines += [command for name in shown.presets for group in found.get(name, []) for command in commands(group)]
    if shown.command and any(name in found for name in shown.presets):
        lines.append(shown.command.replace("SCALE", "mini"))
    lines += ["```", "", *([shown.note, ""] if shown.note else [])]
    for name in shown.presets:
        for group in found.get(name, []):
            said = verdict(group)
            lines += [f"**{name}** ({ours(group)}). {said[:1].upper()}{said[1:]}".strip(), ""]
            lines.append(markdown_table([[cell.replace("\n", " ") for cell in row] for row in cells(name, group)]))
    missing = [name for name in shown.presets if name not in found]
    run = [name for name in shown.presets if name in found]
    for method in dict.fromkeys(each for one in some for each in one.methods):
        lacking = [
            name
            for name in run
            if method in PRESETS[name].methods and not any(method in by_method(group) for group in found[name])
        ]
        missing += [f"{method} on {', '.join(lacking)}"] if lacking else []
    if missing:
        lines += [f"Not run by us: {'; '.join(missing)}.", ""]
    return "\n".join(lines)


def _ablations(results: list[Result]) -> str:
    """The settings of each ablation with their scores and a figure, beside the base and the paper's settings."""
    lines = ["## Ablations", ""]
    swept = [each for each in results if each["preset"] == ABLATED_PRESET and each["scale"] == "mini"]
    methods = by_method(swept) if swept else {}
    for name in ABLATIONS:
        grid = ablation_grid(name, ABLATED_PRESET, "mini")
        labels = [config.label for config in configurations(ABLATED_PRESET, "mini", [ABLATED], [0], grid)]
        own = {label: methods.get(label, []) for label in ("base", ABLATED, *labels)}
        figure = f"figures/ablation-{name}.png"
        lines += [f"### {name.capitalize().replace('-', ' ')}", "", "```sh"]
        seeds = sorted({each["seed"] for label in labels if "+" in label for each in own[label]})
        lines.append(
            f"llqr sweep {ABLATED_PRESET} --scale mini --seeds {_numbers(seeds or range(3))} --ablation {name}"
        )
        lines += [f"llqr figure {name} {ABLATED_PRESET} --scale mini --output docs/{figure}", "```", ""]
        rows = [
            [
                f"`{label}`",
                str(len(runs)),
                shown(summary(scores(runs)), UNITS["test_accuracy"]),
                "" if label == "base" else compared(summary(gains(runs, own["base"]))),
            ]
            for label, runs in own.items()
            if runs
        ]
        if seeds:
            lines += [f"![{name}]({figure})", ""]
            lines += [markdown_table([["method, and what is set", "seeds", NAMES["test_accuracy"], ""], *rows])]
        else:
            lines += ["Not run by us.", ""]
    return "\n".join(lines)


def commands(group: list[Result]) -> list[str]:
    """What makes these runs: a sweep of the methods that have the same seeds; a command for each with changed settings."""
    preset, scale = group[0]["preset"], group[0]["scale"]
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for method, runs in by_method(group).items():
        by_seeds.setdefault(tuple(sorted(each["seed"] for each in runs)), []).append(method)
    usual = list(PRESETS[preset].methods)
    made = []
    for seeds, methods in by_seeds.items():
        named = "" if methods == usual else f" --methods {','.join(methods)}"
        made.append(f"llqr sweep {preset} --scale {scale}{named} --seeds {_numbers(seeds)}")
    return made


def _numbers(seeds: Sequence[int]) -> str:
    if len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ",".join(map(str, seeds))
