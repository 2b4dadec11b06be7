"""`llqr bench engine`: what curvature products and fits cost, in units of one training step of the same network.

A training step is forward, backward and AdamW. All jobs of a network take turns; a ratio is the median over the rounds of the
job's seconds over the mean of the training steps before and after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from llqr_lab.bench.measure import growth_exponent, peak_memory
from llqr_lab.bench.refits import Bench, Size, prepare_memory
from llqr_lab.figures.engine import draw
from llqr_lab.progress import bar
from llqr_lab.results import provenance, write_json
from llqr_lab.tables import show_table

Row = dict[str, Any]
Done = Callable[[], None]

NETWORKS = [Size(), Size("convnet", 128), Size("mlp", 256)]
QUICK = [Size(batch=16, width=16, depth=1), Size("mlp", 16)]
FITS = {
    "K-FAC, SGDM × 25": ("kfac", "sgdm", 25),
    "E-KFAC, SGDM × 25": ("ekfac", "sgdm", 25),
    "K-FAC, ScaleFree × 5": ("kfac", "scale-free", 5),
    "E-KFAC, ScaleFree × 5": ("ekfac", "scale-free", 5),
    "diagonal, ScaleFree × 5": ("diagonal", "scale-free", 5),
}
BETWEEN = 7
"""Training steps between two jobs, whose median counts: a single one is off by a tenth."""
PATIENCE, MOST = 20.0, 10
"""Seconds that products of a network with short steps may take for rounds beyond those that were asked for, and how many times
as many at most: a few rounds of ten milliseconds are over before the machine is another one."""
GROWTH = {
    "width": (64, 128, 256, 512),
    "depth": (1, 2, 4, 8),
    "batch": (128, 256, 512, 1024),
    "words": (100, 1000, 10_000),
}


def main(output: Path, figure: Path, seed: int, repeats: int, quick: bool) -> None:
    """Run, write the results and the figure, and print the tables."""
    networks = QUICK if quick else NETWORKS
    sweeps = {} if quick else GROWTH
    total = 2 * len(networks) + 1 + sum(map(len, sweeps.values()))
    with bar(total, "measuring") as done:
        result = run(networks, sweeps, seed, repeats, done)
    command = f"llqr bench engine --seed {seed} --repeats {repeats}{' --quick' if quick else ''}"
    write_json(output, {**provenance(command, seed), **result})
    draw(result, figure)
    console = Console()
    report(result, console)
    console.print(f"Wrote {output} and {figure}", highlight=False, soft_wrap=True)


def run(
    networks: list[Size], sweeps: Mapping[str, tuple[int, ...]], seed: int, repeats: int, done: Done = lambda: None
) -> dict[str, Any]:
    rows = [_products(size, seed, repeats, done) for size in networks]
    fits = _fits(networks[0], seed, repeats)
    done()
    memory: list[Row] = []
    for size in networks:
        peaks = peak_memory({kind: (prepare_memory, (kind, size, seed)) for kind in ("train", "refit", "chunked")})
        memory.append({"model": size.model, "peak_bytes": peaks})
        done()
    return {
        "settings": {
            "repeats": repeats,
            "threads": torch.get_num_threads(),
            "training_step": "forward, backward, AdamW",
        },
        "products": rows,
        "fits": fits,
        "memory": memory,
        "growth": {name: _growth(networks[0], name, values, seed, repeats, done) for name, values in sweeps.items()},
    }


def _products(size: Size, seed: int, repeats: int, done: Done) -> Row:
    bench = Bench(size, seed)
    cold = {divergence: _seconds(partial(_first_product, bench, divergence)) for divergence in ("kl", "newton")}
    jobs: dict[str, Callable[[], object]] = {
        "kl": bench.product("kl"),
        "newton": bench.product("newton"),
        "record kl": partial(_first_product, bench, "kl"),
        "record newton": partial(_first_product, bench, "newton"),
    }
    ratios, train = in_training_steps(bench, jobs, repeats, PATIENCE if repeats > 1 else 0.0)
    done()
    return {
        **asdict(size),
        "train_seconds": train,
        "ratios": ratios,
        "first_refit_ratio": {d: s / train for d, s in cold.items()},
    }


def _first_product(bench: Bench, divergence: str) -> None:
    """What a refit pays before its first inner step: recording, the gradient, and one product."""
    q = bench.build(divergence)
    q.curvature(q.gradient)


def _fits(size: Size, seed: int, repeats: int) -> Row:
    bench = Bench(size, seed)
    objective: dict[str, float] = {}

    def job(name: str) -> Callable[[], object]:
        def refit() -> None:
            objective[name] = bench.refit(*FITS[name])

        return refit

    ratios, train = in_training_steps(bench, {name: job(name) for name in FITS}, repeats)
    return {**asdict(size), "train_seconds": train, "ratios": ratios, "objective": objective}


def _growth(base: Size, name: str, values: tuple[int, ...], seed: int, repeats: int, done: Done) -> Row:
    points: list[Row] = []
    for value in values:
        bench = Bench(_resized(base, name, value), seed)
        job = partial(bench.refit, "kfac", "scale-free", 4)
        ratios, train = in_training_steps(bench, {"fit": job}, max(1, repeats // 2))
        points.append({name: value, "train_seconds": train, "fit_over_train": ratios["fit"]})
        done()
    seconds = [point["train_seconds"] * point["fit_over_train"] for point in points]
    last = slice(-3, None)
    return {
        "points": points,
        "exponent_fit": growth_exponent(list(values)[last], seconds[last]),
        "exponent_train": growth_exponent(list(values)[last], [point["train_seconds"] for point in points][last]),
    }


def _resized(base: Size, name: str, value: int) -> Size:
    smaller = replace(base, batch=128)
    sizes = {
        "width": smaller.width,
        "depth": smaller.depth,
        "batch": smaller.batch,
        "words": smaller.words,
        name: value,
    }
    return replace(smaller, width=sizes["width"], depth=sizes["depth"], batch=sizes["batch"], words=sizes["words"])


def in_training_steps(
    bench: Bench, jobs: Mapping[str, Callable[[], object]], repeats: int, patience: float = 0.0
) -> tuple[dict[str, float], float]:
    """The median of each job's seconds over those of the training steps around it, and the median training step.

    In `repeats` rounds, or as many more as fit into so many seconds.
    """
    ratios: dict[str, list[float]] = {name: [] for name in jobs}
    steps: list[float] = [_seconds(bench.train)]
    begun, rounds = time.perf_counter(), 0
    while rounds < repeats or (rounds < MOST * repeats and time.perf_counter() - begun < patience):
        for name, job in jobs.items():
            spent = _seconds(job)
            steps.append(statistics.median(_seconds(bench.train) for _ in range(BETWEEN)))
            ratios[name].append(2 * spent / (steps[-2] + steps[-1]))
        rounds += 1
    return {name: statistics.median(values) for name, values in ratios.items()}, statistics.median(steps)


def _seconds(job: Callable[[], object]) -> float:
    before = time.perf_counter()
    job()
    return time.perf_counter() - before


def report(result: dict[str, Any], console: Console) -> None:
    """Products, fits, memory and growth, as tables."""
    title = "Curvature products in training steps of the same network; first: recorded anew, with the gradient"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for header in ("network", "training\nstep (ms)", "KL", "Newton", "first\nKL", "first\nNewton"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in result["products"]:
        ratios = [f"{row['ratios'][name]:.2f}" for name in ("kl", "newton", "record kl", "record newton")]
        table.add_row(row["model"], f"{1000 * row['train_seconds']:.1f}", *ratios)
    show_table(console, table)
    fits = Table(title=f"A refit of the {result['fits']['model']}", title_justify="left", box=box.SIMPLE_HEAD)
    for header in ("fit", "training steps", "objective J"):
        fits.add_column(header, justify="right", no_wrap=True)
    for name, value in result["fits"]["ratios"].items():
        fits.add_row(name, f"{value:.1f}", f"{result['fits']['objective'][name]:.6g}")
    show_table(console, fits)
    memory = Table(title="Peak memory of a refit over a training step's", title_justify="left", box=box.SIMPLE_HEAD)
    for header in ("network", "train (MiB)", "refit", "in eighths of the batch"):
        memory.add_column(header, justify="right", no_wrap=True)
    for row in result["memory"]:
        peaks = row["peak_bytes"]
        if peaks["train"]:
            parts = [f"{peaks[kind] / peaks['train']:.2f}" for kind in ("refit", "chunked")]
            memory.add_row(row["model"], f"{peaks['train'] / 2**20:.1f}", *parts)
    show_table(console, memory)
    for name, found in result["growth"].items():
        if found["exponent_fit"] is not None:
            console.print(
                f"Seconds of a fit grow as {name}^{found['exponent_fit']:.2f}, of a training step as "
                f"{name}^{found['exponent_train']:.2f}",
                highlight=False,
            )
