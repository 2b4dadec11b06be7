"""docs/reproduction.md: every preset with its commands, the paper's results and ours. `llqr table --page` writes it."""

from __future__ import annotations

from pathlib import Path

from llqr_lab import pages
from llqr_lab.experiments.collect import Result, summary
from llqr_lab.experiments.paper import RESULTS
from llqr_lab.experiments.presets import PRESETS, Preset
from llqr_lab.experiments.table import NAMES, UNITS, cells, grouped, methods_of, ours, scores, shown, verdict

COMMAND = "llqr table --page"
PAPER_SEEDS, CPU_SEEDS = "0-4", "0-2"


def write(page: Path, results: list[Result]) -> None:
    """Put the results of all presets between the marks of a page."""
    pages.write(page, COMMAND, body(results))


def body(results: list[Result]) -> str:
    found: dict[str, list[list[Result]]] = {}
    for preset, group in grouped(results):
        found.setdefault(preset, []).append(group)
    parts = [_overview(found)]
    for title, of_paper in (("The paper's", True), ("Others", False)):
        parts.append(f"## {title}\n")
        parts += [_section(n, p, found.get(n, [])) for n, p in PRESETS.items() if p.of_paper is of_paper]
    return "\n".join(parts)


def _overview(found: dict[str, list[list[Result]]]) -> str:
    """A row a preset: the base and the best LLQR, in the paper and here."""
    rows = []
    for name in PRESETS:
        reported = RESULTS.get(name, {})
        wrapped = [entry for method, entry in reported.items() if method != "base"]
        paper = f"{reported['base'].score:.2f} → {max(entry.score for entry in wrapped):.2f}" if wrapped else "–"
        here = "; ".join(_change(group) for group in found.get(name, [])) or "not run"
        rows.append([f"[{name}](#{name})", paper, here])
    return pages.table([["preset", "the paper: base → best with LLQR", "here: base → each with LLQR"], *rows])


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
    for scale, seeds in (("paper", PAPER_SEEDS), ("cpu", CPU_SEEDS)):
        if not any(group[0]["scale"] == scale for group in groups):
            lines.append(f"llqr sweep {name} --scale {scale} --seeds {seeds}  # not run by us")
    lines += [command for group in groups for command in commands(group)]
    lines += ["```", ""]
    for group in groups:
        how = "" if group[0]["scale"] == "paper" else ", not comparable with the paper"
        said = verdict(group)
        lines += [f"At `--scale {group[0]['scale']}`{how}: {ours(group)}. {said[:1].upper()}{said[1:]}".strip(), ""]
        lines.append(pages.table([[cell.replace("\n", " ") for cell in row] for row in cells(name, group)]))
    run = {each["method"] for group in groups for each in group}
    reported = {method: entry for method, entry in RESULTS.get(name, {}).items() if method not in run}
    if reported:
        rows = [[m, f"{r.score:.2f} ± {r.error:.2f}", f"×{r.time:.3g}"] for m, r in reported.items()]
        lines.append(pages.table([["method, not run by us", "the paper's", "time, × base"], *rows]))
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
