"""docs/reproduction.md: every preset with its commands, the paper's results and ours. `llqr table --page` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llqr_lab.experiments.collect import Result, summary
from llqr_lab.experiments.paper import RESULTS
from llqr_lab.experiments.presets import GROKKING_EMA, PRESETS, Preset
from llqr_lab.experiments.sweep import ABLATIONS
from llqr_lab.experiments.table import NAMES, UNITS, cells, grouped, methods_of, ours, scores, shown, verdict
from llqr_lab.results import markdown_table, write_page

COMMAND = "llqr table --page"
CPU_SEEDS = "0-2"

RESNET18 = [f"cifar{classes}-resnet18-{base}" for classes in (10, 100) for base in ("sgdm", "adamw")]
ARCHITECTURES = [f"cifar{c}-{net}-sgdm" for c in (10, 100) for net in ("pyramidnet110", "vgg16bn", "wrn28x10")]
LARGE = ["imagenet-resnet50-sgdm", "iwslt14-transformer-adamw"]
ADAFISHER = ["cifar100-resnet18-batch256", "imagenet-resnet50-90epochs"]
GROKKING = [name for name in PRESETS if name.startswith("grokking-")]
ROSENBROCK = "run: [Rosenbrock](rosenbrock.md)"


@dataclass(frozen=True)
class Shown:
    """A table, a figure or a finding of the paper."""

    title: str
    presets: list[str]
    commands: list[str]
    """After the sweep of its presets."""
    state: str = ""
    """Where no presets have runs that tell."""


SHOWN = (
    Shown(
        "Figure 1: training curves of ImageNet and IWSLT14",
        LARGE,
        [f"llqr figure curves {' '.join(LARGE)} --methods base,kfac-ngd,ekfac-ngd --scale paper --output figure1.png"],
    ),
    Shown("Figure 2: Rosenbrock", [], ["llqr rosenbrock"], ROSENBROCK),
    Shown("Table 1: ResNet-18 on CIFAR", RESNET18, ["llqr table --presets resnet18-sgdm,resnet18-adamw --scale paper"]),
    Shown("Table 2: other networks on CIFAR", ARCHITECTURES, ["llqr table --presets pyramidnet,vgg,wrn --scale paper"]),
    Shown("Table 3: ImageNet and IWSLT14", LARGE, [f"llqr table --presets {','.join(LARGE)} --scale paper"]),
    Shown("Table 4: beside AdaFisher's", ADAFISHER, [f"llqr table --presets {','.join(ADAFISHER)} --scale paper"]),
    Shown("Figure 3: grokking", GROKKING, ["llqr figure grokking --scale paper --output figure3.png"]),
    Shown("Figure 4: Rosenbrock's paths and directions", [], ["llqr rosenbrock"], ROSENBROCK),
    Shown(
        "Figure 5: training curves on CIFAR",
        RESNET18,
        [f"llqr figure curves {' '.join(RESNET18)} --scale paper --output figure5.png"],
    ),
    Shown(
        "The cost of an epoch",
        [],
        [f"llqr table --presets {','.join((*RESNET18, *LARGE))} --scale paper"],
        "not run by us; the table has every method's time relative to the base's",
    ),
    Shown(
        "Ablations: damping, the inner loop, the EMA, warm start, inner solvers",
        [],
        [
            line
            for name in ABLATIONS
            for line in (
                f"llqr sweep cifar100-resnet18-sgdm --scale paper --seeds 0-4 --ablation {name}",
                f"llqr figure {name} cifar100-resnet18-sgdm --scale paper --output {name}.png",
            )
        ],
        "not run by us",
    ),
    Shown(
        "The EMA of grokking, for each operation",
        [],
        [
            f"llqr sweep {' '.join(GROKKING)} --scale paper --seeds 0-9 --set llqr.ema={','.join(map(str, GROKKING_EMA))}"
        ],
        "not run by us. The paper took one of these for each operation, and doesn't say which; the presets have 0.7",
    ),
)


def write(page: Path, results: list[Result]) -> None:
    """Put the results of all presets between the marks of a page."""
    write_page(page, COMMAND, body(results))


def body(results: list[Result]) -> str:
    found: dict[str, list[list[Result]]] = {}
    for preset, group in grouped(results):
        found.setdefault(preset, []).append(group)
    parts = [_overview(found), "## Tables and figures\n", *(_shown(each, found) for each in SHOWN)]
    for title, of_paper in (("The paper's", True), ("Others", False)):
        parts.append(f"## {title}\n")
        parts += [_section(n, p, found.get(n, [])) for n, p in PRESETS.items() if p.of_paper is of_paper]
    return "\n".join(parts)


def _overview(found: dict[str, list[list[Result]]]) -> str:
    """A row a preset: the base and the best LLQR, in the paper and here."""
    rows = []
    for name in PRESETS:
        reported = RESULTS.get(name, {})
        wrapped = [entry for method, entry in reported.items() if method.endswith(("-ngd", "-newton"))]
        paper = f"{reported['base'].score:.2f} → {max(entry.score for entry in wrapped):.2f}" if wrapped else "–"
        here = "; ".join(_change(group) for group in found.get(name, [])) or "not run"
        rows.append([f"[{name}](#{name})", paper, here])
    return markdown_table([["preset", "the paper: base → best with LLQR", "here: base → each with LLQR"], *rows])


def _shown(shown: Shown, found: dict[str, list[list[Result]]]) -> str:
    """A table or a figure of the paper, with its commands and whether they were run."""
    scales = {name: sorted({group[0]["scale"] for group in found.get(name, [])}) for name in shown.presets}
    told = [f"{name} at `--scale {scale}`" for name, some in scales.items() for scale in some]
    state = shown.state or f"not run by us at the paper's scale{'; run: ' + ', '.join(told) if told else ''}"
    by_seeds: dict[str, list[str]] = {}
    for name in shown.presets:
        by_seeds.setdefault(PRESETS[name].seeds, []).append(name)
    sweeps = [f"llqr sweep {' '.join(names)} --scale paper --seeds {seeds}" for seeds, names in by_seeds.items()]
    lines = [
        f"### {shown.title}",
        "",
        f"{state[0].upper()}{state[1:]}.",
        "",
        "```sh",
        *sweeps,
        *shown.commands,
        "```",
        "",
    ]
    return "\n".join(lines)


def _change(group: list[Result]) -> str:
    score = group[0]["score"]
    means = {}
    for method in methods_of(group):
        rows = [each for each in group if each["method"] == method]
        means[method] = shown(summary(scores(rows)), UNITS.get(score, 1.0)).partition(" ±")[0]
    base = means.pop("base", "–")
    others = ", ".join(f"{mean} {method}" for method, mean in means.items()) or "–"
    return f"{NAMES.get(score, score)} at `--scale {group[0]['scale']}`: {base} → {others}"


def _section(name: str, preset: Preset, groups: list[list[Result]]) -> str:
    lines = [f"### {name}", "", f"{preset.summary[0].upper()}{preset.summary[1:]}.", "", "```sh"]
    for scale, seeds in (("paper", preset.seeds), ("cpu", CPU_SEEDS)):
        if not any(group[0]["scale"] == scale for group in groups):
            lines.append(f"llqr sweep {name} --scale {scale} --seeds {seeds}  # not run by us")
    lines += [command for group in groups for command in commands(group)]
    lines += ["```", ""]
    for group in groups:
        how = "" if group[0]["scale"] == "paper" else ", not comparable with the paper"
        said = verdict(group)
        lines += [f"At `--scale {group[0]['scale']}`{how}: {ours(group)}. {said[:1].upper()}{said[1:]}".strip(), ""]
        lines.append(markdown_table([[cell.replace("\n", " ") for cell in row] for row in cells(name, group)]))
    told = {row[0] for group in groups for row in cells(name, group)}
    reported = {method: entry for method, entry in RESULTS.get(name, {}).items() if method not in told}
    if reported:
        rows = [[method, *entry.shown] for method, entry in reported.items()]
        lines.append(markdown_table([["method, not run by us", "the paper's", "time, × base"], *rows]))
    return "\n".join(lines)


def commands(group: list[Result]) -> list[str]:
    """What makes these runs: a sweep of the methods that have the same seeds; a command for each with changed settings."""
    preset, scale = group[0]["preset"], group[0]["scale"]
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for method in methods_of([each for each in group if "+" not in each["method"]]):
        seeds = tuple(sorted(each["seed"] for each in group if each["method"] == method))
        by_seeds.setdefault(seeds, []).append(method)
    usual = list(PRESETS[preset].methods)
    made = []
    for seeds, methods in by_seeds.items():
        named = "" if methods == usual else f" --methods {','.join(methods)}"
        made.append(f"llqr sweep {preset} --scale {scale}{named} --seeds {_numbers(seeds)}")
    return made + [each["command"] for each in group if "+" in each["method"] and "command" in each]


def _numbers(seeds: tuple[int, ...]) -> str:
    """0-2 for 0, 1, 2."""
    if len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ",".join(map(str, seeds))
