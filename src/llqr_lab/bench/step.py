"""`llqr bench step`: what LLQR adds to a training step between refits.

Each network is trained by SGD with momentum alone, and by the same inside LLQR with each structure, in turns. Two ratios come
out: of the whole training steps, and of `optimizer.step()` alone. Forward and backward passes are the same work on both sides
and vary more than LLQR adds, so the whole is also put together from its parts: 1 + (step with LLQR - step of the base) /
training step of the base, in medians. Torch runs on one thread: two that wait for each other on a busy machine say nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from llqr.paper import PaperLLQR
from llqr_lab.bench.measure import one_thread
from llqr_lab.bench.steps import BASE, Seconds, Trainer, trainers
from llqr_lab.figures.step import draw
from llqr_lab.models.named import example
from llqr_lab.progress import bar
from llqr_lab.results import provenance, write_json

Row = dict[str, Any]
DEFAULT = ("mlp", "resnet18", "transformer")
PATIENCE = 15.0
"""Seconds that a network with short steps may take for rounds beyond those that were asked for, and"""
MOST = 20
"""how many times as many at most."""


def main(output: Path, figure: Path, networks: Sequence[str], batch: int, seed: int, repeats: int) -> None:
    """Run, write the results and the figure, and print the table."""
    with one_thread(), bar(len(networks), "measuring") as done:
        result = run(networks, batch, seed, repeats, done)
    names = "" if tuple(networks) == DEFAULT else "".join(f" --networks {name}" for name in networks)
    command = f"llqr bench step --batch {batch} --seed {seed} --repeats {repeats}{names}"
    write_json(output, {**provenance(command, seed), **result})
    draw(result, figure)
    console = Console()
    report(result, console)
    console.print(f"Wrote {output} and {figure}", highlight=False, soft_wrap=True)


def run(
    networks: Sequence[str], batch: int, seed: int, repeats: int, done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    rows: list[Row] = []
    for name in networks:
        rows.append({"network": name, "batch": batch, **_measure(trainers(*example(name, batch, seed)), repeats)})
        done()
    return {
        "settings": {
            "repeats": repeats,
            "threads": torch.get_num_threads(),
            "training_step": "clear the gradients, forward, backward, step",
            "base": "SGD, momentum 0.9",
        },
        "rows": rows,
    }


def _measure(jobs: Mapping[str, Trainer], repeats: int) -> Row:
    begun = time.perf_counter()
    for job in jobs.values():
        job.train()
    rounds = max(repeats, min(MOST * repeats, int(PATIENCE / (time.perf_counter() - begun))))
    taken: dict[str, list[Seconds]] = {name: [] for name in jobs}
    order = list(jobs)
    for number in range(rounds):
        first = number % len(order)  # so that nobody always comes after the same one
        for name in order[first:] + order[:first]:
            taken[name].append(jobs[name].train())
    base = taken.pop(BASE)
    whole, step = (statistics.median(column) for column in zip(*base, strict=True))
    return {
        "rounds": rounds,
        "base_seconds": {"whole": whole, "step": step},
        "structures": {
            name: {
                "by_parts": 1 + (statistics.median(s.step for s in seconds) - step) / whole,
                "whole": statistics.median(s.whole / b.whole for s, b in zip(seconds, base, strict=True)),
                "step": statistics.median(s.step / b.step for s, b in zip(seconds, base, strict=True)),
                "memory_bytes": _memory(jobs[name]),
            }
            for name, seconds in taken.items()
        },
    }


def _memory(trainer: Trainer) -> int:
    assert isinstance(trainer.optimizer, PaperLLQR)
    return trainer.optimizer.memory_usage()["preconditioner"]


def report(result: dict[str, Any], console: Console) -> None:
    """One table a network."""
    for row in result["rows"]:
        seconds = row["base_seconds"]
        table = Table(
            title=f"{row['network']}, batch {row['batch']}: with LLQR, between refits, over the base alone "
            f"({1000 * seconds['whole']:.1f} ms a training step, {1000 * seconds['step']:.2f} ms of it step())",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for header in ("structure", "training step\nby parts", "training step\nas timed", "step()", "U (MiB)"):
            table.add_column(header, justify="left" if header == "structure" else "right", no_wrap=True)
        for name, found in row["structures"].items():
            ratios = [f"{found[kind]:.3f}" for kind in ("by_parts", "whole")]
            table.add_row(name, *ratios, f"{found['step']:.2f}", f"{found['memory_bytes'] / 2**20:.1f}")
        console.print(table)
