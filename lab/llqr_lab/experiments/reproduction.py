"""docs/reproduction.md: the paper's tables and figures, with commands and what came of them. `llqr table --page` writes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from llqr_lab.experiments.collect import Result, last_loss, reached_at, summary, value
from llqr_lab.experiments.presets import PRESETS
from llqr_lab.experiments.sweep import ABLATIONS, ablation_grid, configurations
from llqr_lab.experiments.table import (
    NAMES,
    UNITS,
    cells,
    compared,
    gains,
    grouped,
    methods_of,
    ours,
    scores,
    shown,
    verdict,
)
from llqr_lab.results import markdown_table, write_page

COMMAND = "llqr table --page"

RESNET18 = [f"cifar{classes}-resnet18-{base}" for classes in (10, 100) for base in ("sgdm", "adamw")]
ARCHITECTURES = [f"cifar{c}-{net}-sgdm" for c in (10, 100) for net in ("pyramidnet110", "vgg16bn", "wrn28x10")]
LARGE = ["imagenet-resnet50-sgdm", "iwslt14-transformer-adamw"]
ADAFISHER = ["cifar100-resnet18-batch256", "imagenet-resnet50-90epochs"]
GROKKING = [name for name in PRESETS if name.startswith("grokking-")]
ABLATED = "cifar10-resnet18-adamw"
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


def write(page: Path, results: list[Result]) -> None:
    """Put the results of all presets between the marks of a page."""
    write_page(page, COMMAND, body(results))


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
        base, own = ([each for each in group if each["method"] == method] for method in ("base", "default"))
        pairs = [(b, o) for b in base for o in own if b["seed"] == o["seed"]]
        if not pairs:
            continue
        unit = UNITS.get(group[0]["score"], 1.0)
        gain = summary(gains(own, base))
        ratios = [shares(*pair) for pair in pairs]
        rows.append(
            [
                f"{preset}, {group[0]['scale']}",
                str(len(pairs)),
                NAMES[group[0]["score"]],
                shown(summary(scores(base)), unit),
                shown(summary(scores(own)), unit),
                compared(gain),
                *(_ratio(median(each)) for each in zip(*ratios, strict=True)),
            ]
        )
    header = ["task, scale", "seeds", "score", "base", "with LLQR", "verdict", "steps", "time"]
    return "\n".join(["## The default beside its base\n", markdown_table([header, *rows])]) if rows else ""


def shares(base: Result, own: Result) -> tuple[float, float]:
    """Of the base's steps and seconds, what LLQR took to the base's last training loss; in grokking to its end.

    Infinite where it never came there. A base that never grokked counts with all of its steps.
    """
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
    for method in dict.fromkeys(each for one in some for each in one.methods):
        run = [name for name in shown.presets if name in found]
        lacking = [n for n in run if method in PRESETS[n].methods and method not in _methods(found[n])]
        missing += [f"{method} on {', '.join(lacking)}"] if lacking else []
    if missing:
        lines += [f"Not run by us: {'; '.join(missing)}.", ""]
    return "\n".join(lines)


def _methods(groups: list[list[Result]]) -> set[str]:
    return {each["method"] for group in groups for each in group}


def _ablations(results: list[Result]) -> str:
    """The settings of each ablation with their scores and a figure, beside the base and the paper's settings."""
    lines = ["## Ablations", ""]
    swept = [each for each in results if each["preset"] == ABLATED and each["scale"] == "mini"]
    for name in ABLATIONS:
        methods, grid = ablation_grid(name, ABLATED, "mini")
        labels = dict.fromkeys(config.label for config, _ in configurations(ABLATED, "mini", methods, [0], grid))
        own = {label: [each for each in swept if each["method"] == label] for label in ("base", *methods, *labels)}
        figure = f"figures/ablation-{name}.png"
        lines += [f"### {name.capitalize().replace('-', ' ')}", "", "```sh"]
        seeds = sorted({each["seed"] for label in labels if "+" in label for each in own[label]})
        lines.append(f"llqr sweep {ABLATED} --scale mini --seeds {_numbers(seeds or range(3))} --ablation {name}")
        lines += [f"llqr figure {name} {ABLATED} --scale mini --output docs/{figure}", "```", ""]
        rows = [
            [f"`{label}`", str(len(runs)), shown(summary(scores(runs)), UNITS["test_accuracy"]), _beside(runs, own)]
            for label, runs in own.items()
            if runs
        ]
        if seeds:
            lines += [f"![{name}]({figure})", ""]
            lines += [markdown_table([["method, and what is set", "seeds", NAMES["test_accuracy"], ""], *rows])]
        else:
            lines += ["Not run by us.", ""]
    return "\n".join(lines)


def _beside(runs: list[Result], all_runs: dict[str, list[Result]]) -> str:
    return "" if runs is all_runs["base"] else compared(summary(gains(runs, all_runs["base"])))


def commands(group: list[Result]) -> list[str]:
    """What makes these runs: a sweep of the methods that have the same seeds; a command for each with changed settings."""
    preset, scale = group[0]["preset"], group[0]["scale"]
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for method in methods_of(group):
        seeds = tuple(sorted(each["seed"] for each in group if each["method"] == method))
        by_seeds.setdefault(seeds, []).append(method)
    usual = list(PRESETS[preset].methods)
    made = []
    for seeds, methods in by_seeds.items():
        named = "" if methods == usual else f" --methods {','.join(methods)}"
        made.append(f"llqr sweep {preset} --scale {scale}{named} --seeds {_numbers(seeds)}")
    return made


def _numbers(seeds: Sequence[int]) -> str:
    """0-2 for 0, 1, 2."""
    if len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ",".join(map(str, seeds))
