"""`llqr bench sizes`: how LLQR's gain goes with the batch, and with the width and the depth of a network.

By the batch: everybody at a constant rate of its own, found for each batch; steps and seconds to the same training loss.
By width and depth: LLQR on AdamW at AdamW's best rate; its steps and seconds to AdamW's last loss, over AdamW's.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from llqr_lab.bench.race import ENTRIES, Course, Performed, Race, at_rates_of_bases, course_of
from llqr_lab.experiments.collect import Result, reached_at
from llqr_lab.experiments.table import shares
from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, drawing
from llqr_lab.results import finite, markdown_table, provenance, write_json

COMMAND = "llqr bench sizes --page"
Row = dict[str, Any]
LOSS = 0.3
"""The training loss of the convnet on Fashion-MNIST that batches are compared at."""
BATCHES = {32: 4000, 128: 2000, 512: 800, 2048: 400}
"""With the most steps that a run takes."""
WIDTHS, DEPTHS = (64, 256, 1024), (1, 2, 4, 8)
RACERS = ("AdamW", "Muon", "SOAP", "LLQR on AdamW")
COLOURS = dict(zip(RACERS, (GREY, GREEN, ORANGE, BLUE), strict=True))


def main(
    scale: str,
    seeds: Sequence[int],
    runs: Path,
    data: Path | None,
    jobs: int,
    output: Path,
    figure: Path,
    page: Path | None = None,
) -> None:
    perform = Performed(COMMAND, page, runs, data, jobs)
    command = f"llqr bench sizes --scale {scale} --seeds {','.join(map(str, seeds))}"
    found: dict[str, list[Row]] = {"batch": [], "width": [], "layers": []}
    quick = scale == "smoke"
    for size, steps in {4: 4, 8: 4}.items() if quick else BATCHES.items():
        constant = {"batch": size, "schedule.name": "constant", **course_of(steps, 100)}
        race = Race(Course("fashion-convnet", constant, target=LOSS), scale, runs, perform)
        entries = [entry for entry in ENTRIES if entry.name in RACERS]
        best = race.chosen(race.grids(entries, seeds[0]), entries, seeds)
        for entry in entries:
            rates = best.get(entry, [])
            found["batch"].append(_racer(size, entry.name, rates, race.results(entry, rates, seeds)))
    for name, sizes in (("width", WIDTHS), ("layers", DEPTHS)):
        for size in (4, 8) if quick else sizes:
            form = {f"model.{name}": size, **course_of(4 if quick else 600, 100)}
            race = Race(Course("fashion-mlp", form), scale, runs, perform)
            entries = [entry for entry in ENTRIES if entry.base == "adamw"]
            best = race.chosen(race.grids(entries[:1], seeds[0]), entries[:1], seeds)
            wrapped = at_rates_of_bases(entries, best)
            race.run(wrapped, seeds)
            base, own = (race.results(entry, some[entry], seeds) for some in (best, wrapped) for entry in some)
            found[name].append(_gain(size, base, own))
    write_json(output, {**provenance(command, seeds[0]), "scale": scale, "seeds": list(seeds), "loss": LOSS, **found})
    draw(found, figure)
    perform.report(body(found), output, figure)


def _racer(size: int, name: str, rates: Sequence[float], results: list[Result]) -> Row:
    """Medians over the seeds; None where one of them never came to the loss."""
    middle = {}
    for along in ("step", "seconds"):
        places = [reached_at(each, LOSS, along) for each in results]
        middle[along] = finite(median(math.inf if at is None else at for at in places) if places else math.inf)
    return {"size": size, "optimizer": name, "lr": rates[0] if rates else None, **middle}


def _gain(size: int, base: list[Result], own: list[Result]) -> Row:
    others = {each["seed"]: each for each in own}
    pairs = [shares(each, others[each["seed"]]) for each in base]
    steps, seconds = (finite(median(each)) for each in zip(*pairs, strict=True))
    return {"size": size, "lr": base[0]["lr"], "steps": steps, "seconds": seconds}


def body(found: dict[str, list[Row]]) -> str:
    names = list(dict.fromkeys(row["optimizer"] for row in found["batch"]))
    lines = [["batch", *(f"{name}: steps, seconds (rate)" for name in names)]]
    for size in dict.fromkeys(row["size"] for row in found["batch"]):
        lines.append([f"{size:,}", *(_shown(row) for row in found["batch"] if row["size"] == size)])
    gains = [["network", "AdamW's rate", "LLQR's steps", "LLQR's time"]]
    for name, label in (("width", "width"), ("layers", "hidden layers")):
        for row in found[name]:
            ratios = ("not reached" if row[what] is None else f"{row[what]:.2f}" for what in ("steps", "seconds"))
            gains.append([f"{label} {row['size']:,}", f"{row['lr']:g}", *ratios])
    return "\n".join([markdown_table(lines), markdown_table(gains)])


def _shown(row: Row) -> str:
    if row["step"] is None:
        return "not reached"
    return f"{row['step']:,.0f}, {row['seconds']:.1f} ({row['lr']:g})"


def draw(found: dict[str, list[Row]], path: Path) -> None:
    """Steps and seconds to the loss by the batch; LLQR's share of AdamW's steps by width and depth."""
    with drawing(path, 12, 4) as figure:
        left, middle, right = figure.subplots(1, 3)
        for axes, along, label in ((left, "step", "steps"), (middle, "seconds", "seconds")):
            for name, colour in COLOURS.items():
                rows = [row for row in found["batch"] if row["optimizer"] == name and row[along] is not None]
                axes.plot([row["size"] for row in rows], [row[along] for row in rows], "o-", color=colour, label=name)
            _logarithmic(axes, sorted({row["size"] for row in found["batch"]}), "batch")
            if any(row[along] for row in found["batch"]):  # an empty axis can't be logarithmic
                axes.set_yscale("log")
            axes.set_ylabel(f"{label} to a training loss of {LOSS:g}")
        left.legend()
        for name, label, colour in (("width", "width", BLUE), ("layers", "hidden layers", ORANGE)):
            for what, style in (("steps", "o-"), ("seconds", "o:")):
                rows = [row for row in found[name] if row[what] is not None]
                told = f"{label}: {'steps' if what == 'steps' else 'time'}"
                right.plot([row["size"] for row in rows], [row[what] for row in rows], style, color=colour, label=told)
        right.axhline(1.0, color=GREY, linestyle="--")
        _logarithmic(right, sorted({row["size"] for name in ("width", "layers") for row in found[name]}), "size")
        right.set_ylim(bottom=0)
        right.set_ylabel("LLQR / AdamW, to AdamW's last loss")
        right.legend()


def _logarithmic(axes: Axes, ticks: list[int], label: str) -> None:
    axes.set(xscale="log", xlabel=label)
    axes.set_xticks(ticks, [f"{each:,}" for each in ticks])
    axes.minorticks_off()
