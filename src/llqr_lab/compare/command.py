"""What the command writes: a table for each moment, JSON, and the figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from llqr_lab.bench.measure import one_thread
from llqr_lab.compare.look import Settings
from llqr_lab.compare.run import compare
from llqr_lab.compare.subjects import subject
from llqr_lab.figures.compare import draw
from llqr_lab.progress import bar
from llqr_lab.results import provenance, write_json
from llqr_lab.tables import show_table


def main(
    name: str,
    base: str,
    rate: float,
    at: Sequence[int],
    batch: int,
    settings: Settings,
    seed: int,
    data: Path | None,
    output: Path,
    figure: Path,
) -> None:
    chosen = subject(name, batch, seed, data)
    command = f"llqr compare {name} --base {base} --lr {rate:g} --at {','.join(map(str, at))} --batch {batch}"
    command += f" --damping {settings.damping:g} --products {settings.products} --draws {settings.draws}"
    command += f" --inner {settings.inner} --seed {seed}{'' if settings.blocks else ' --no-blocks'}"
    result: dict[str, Any] = {
        **provenance(command, seed),
        "network": name,
        "base": base,
        "lr": rate,
        "batch": batch,
        "damping": settings.damping,
        "parameters": sum(p.numel() for p in chosen.model.parameters()),
        "looks": [],
    }
    console = Console()
    with one_thread(), bar(len(at), "comparing") as done:
        for look in compare(chosen, base, rate, at, settings):
            result["looks"].append(look)
            write_json(output, result)  # a look can take minutes: what there is, is kept
            report(look, result, console)
            done()
    draw(result, figure)
    console.print(f"Wrote {output} and {figure}", highlight=False, soft_wrap=True)


def report(look: dict[str, Any], result: dict[str, Any], console: Console) -> None:
    exact = look["exact"]
    unconverged = "" if exact["converged"] else ", NOT converged"
    table = Table(
        title=f"{result['network']} after {look['step']} steps of {result['base']}: loss {look['loss']:.4g}, damping "
        f"{result['damping']:g}, attainable {look['attainable']:.3g} (the exact step changes the loss by "
        f"{look['exact_actual']:.3g})",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=f"Exact step by {exact['method']}, residual {exact['residual']:.1e}{unconverged}. Fractions of the attainable "
        "decrease: m of the step as proposed; best, at its best length; other, the same on another batch at the same weights.",
        caption_justify="left",
    )
    table.add_column("optimizer", no_wrap=True)
    for header in ("cosine", "in H", "m", "best", "other", "pred.", "actual"):
        table.add_column(header, justify="right", no_wrap=True)
    there = look["another_batch"]["fraction_along"]
    for name, numbers in look["rows"].items():
        keys = ("cosine", "cosine_h", "fraction", "fraction_along")
        cells = [_cell(numbers[key], ".2f") for key in keys]
        table.add_row(
            name,
            *cells,
            _cell(there.get(name), ".2f"),
            _cell(numbers["predicted"], ".2g"),
            _cell(numbers["actual"], ".2g"),
        )
    show_table(console, table)


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return format(value, ".0e" if form == ".2f" and abs(value) >= 100 else form)
