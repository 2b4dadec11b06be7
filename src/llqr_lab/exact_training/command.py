"""`llqr exact`: a network so small that every training step can be the exact second-order one, next to gradient descent.

On a cross-entropy the natural gradient and the generalised Gauss–Newton step are the same, so the two exact optimizers
are the natural gradient and Newton.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

from llqr import dense_step, exact_step
from llqr.divergences import KL, Divergence, Newton
from llqr_lab.bench.measure import one_thread, relative_error
from llqr_lab.data.batches import Split
from llqr_lab.data.picture_sets import CLASSES, INPUTS, small_digits
from llqr_lab.demo import Curve, draw
from llqr_lab.exact_training.loops import START, Run, descend, exact_descend
from llqr_lab.results import bar, show_table

TRAIN, WIDTH = 100, 8
RATES = (0.3, 1.0, 3.0, 10.0)
TARGET, MOST = 0.01, 5000
"""The loss that steps are counted to, and when gradient descent gives up on it."""
EXACT: dict[str, Divergence] = {"natural gradient": KL(), "damped Newton": Newton()}


def show(output: Path, seed: int, steps: int) -> None:
    """Train, print the table, draw the picture."""
    data = small_digits(TRAIN, seed)
    with one_thread(), bar(len(RATES) + len(EXACT) * steps, "training") as done:
        error = disagreement(data, seed)  # first, so that what torch loads at its first derivatives isn't timed
        runs, rate = train(data, seed, steps, done)
    console = Console()
    size = sum(parameter.numel() for parameter in network(seed).parameters())
    console.print(
        f"{TRAIN} digits to train on, {len(data.test_targets)} to test on, 4 × 4 pixels; a tanh network of {size} "
        f"parameters; full batches, seed {seed}. Natural gradient and Newton take exact steps. Gradient descent has the "
        f"best learning rate of {', '.join(f'{tried:g}' for tried in RATES)}: {rate:g}; it may go on to step {MOST} to "
        f"reach the target.",
        highlight=False,
    )
    show_table(console, table(runs, steps))
    refused = ", ".join(f"{name}: {run.refused}" for name, run in runs.items() if run.refused)
    if refused:
        console.print(f"Steps refused, which raised the damping: {refused}.", highlight=False)
    console.print(f"Riccati against dense, the same step: relative error {error:.1e}", highlight=False)
    drawn = {n: Curve(list(range(steps + 1)), r.seconds[: steps + 1], r.losses[: steps + 1]) for n, r in runs.items()}
    draw(drawn, TARGET, output, log_seconds=True)
    console.print(f"Wrote {output}", highlight=False, soft_wrap=True)


def network(seed: int) -> nn.Sequential:
    """The same start for everyone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second, last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).double()


def train(data: Split, seed: int, steps: int, done: Callable[[], None]) -> tuple[dict[str, Run], float]:
    """The runs by name, and the learning rate that gradient descent did best with after `steps` steps."""
    finals: dict[float, float] = {}
    for rate in RATES:
        finals[rate] = descend(network(seed), data, rate, steps).losses[-1]
        done()
    best = min(RATES, key=lambda rate: finals[rate])
    runs = {"gradient descent": descend(network(seed), data, best, steps, TARGET, MOST)}
    for name, divergence in EXACT.items():
        runs[name] = exact_descend(network(seed), data, divergence, steps, done)
    return runs, best


def disagreement(data: Split, seed: int) -> float:
    """The largest relative error of the Riccati step, held against the dense one at the start."""
    model = network(seed)
    problem = (model, data.train_inputs, data.train_targets, cross_entropy)
    return max(
        relative_error(exact_step(*problem, divergence, START), dense_step(*problem, divergence, START))
        for divergence in EXACT.values()
    )


def table(runs: dict[str, Run], steps: int) -> Table:
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("optimizer", no_wrap=True)
    headers = [f"loss after\n{steps} steps", "test\naccuracy", f"seconds,\n{steps} steps"]
    for header in [*headers, f"steps\nto {TARGET:g}", f"seconds\nto {TARGET:g}"]:
        made.add_column(header, justify="right")
    for name, run in runs.items():
        reached = run.reached(TARGET)
        made.add_row(
            name,
            f"{run.losses[steps]:.2g}",
            f"{run.accuracy:.1%}",
            f"{run.seconds[steps]:.2f}",
            f"> {len(run.losses) - 1}" if reached is None else str(reached),
            "–" if reached is None else f"{run.seconds[reached]:.2f}",
        )
    return made
