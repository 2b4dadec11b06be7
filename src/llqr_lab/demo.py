"""`llqr demo`: one training loop on digits, with SGD and momentum and with AdamW, alone and with LLQR around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from llqr import LLQR
from llqr_lab.bench.measure import one_thread
from llqr_lab.figures.curves import draw
from llqr_lab.progress import bar
from llqr_lab.race.run import Curve, train
from llqr_lab.race.tasks import TASKS, Task
from llqr_lab.tables import show_table

SGDM_RATE, ADAMW_RATE = 0.1, 0.01
"""The best of 0.03, 0.1, 0.3 and of 0.001, 0.003, 0.01 for each of the two alone."""


def optimizers() -> dict[str, Callable[[nn.Module], Optimizer]]:
    """By name: what makes each for a network."""

    def sgdm(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=SGDM_RATE, momentum=0.9)

    def adamw(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=ADAMW_RATE)

    return {
        "SGDM": sgdm,
        "LLQR(SGDM)": lambda model: LLQR(sgdm(model), model),
        "AdamW": adamw,
        "LLQR(AdamW)": lambda model: LLQR(adamw(model), model),
    }


def show(output: Path, seed: int, steps: int) -> None:
    """Train, print the table, draw the picture."""
    task, made = TASKS["digits"], optimizers()
    data = task.load(None)
    with one_thread(), bar(len(made) * steps, "training") as done:
        for make in made.values():
            train(task, data, seed, make, 1)  # so that what torch loads at first isn't timed
        curves = {name: train(task, data, seed, make, steps, done) for name, make in made.items()}
    console = Console()
    size = sum(parameter.numel() for parameter in task.start(seed).parameters())
    console.print(
        f"{len(data.train_targets)} digits to train on, {len(data.test_targets)} to test on; a convolutional network of "
        f"{size:,} parameters, batches of {task.batch}, seed {seed}. SGDM has learning rate {SGDM_RATE:g} and AdamW "
        f"{ADAMW_RATE:g}, with LLQR around them and without: nothing else is set. "
        "Seconds are processor time of the training steps, on one thread.",
        highlight=False,
    )
    show_table(console, table(curves, task, steps))
    draw(curves, task.target, output)
    console.print(f"Wrote {output}", highlight=False, soft_wrap=True)


def table(curves: dict[str, Curve], task: Task, steps: int) -> Table:
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("optimizer", no_wrap=True)
    headers = [f"loss after\n{steps} steps", "test\naccuracy", "seconds"]
    for header in [*headers, f"steps to\nloss {task.target:g}", f"seconds to\nloss {task.target:g}"]:
        made.add_column(header, justify="right")
    for name, curve in curves.items():
        place = curve.reached(task.target)
        made.add_row(
            name,
            f"{curve.losses[-1]:.2g}",
            f"{curve.accuracy:.1%}",
            f"{curve.seconds[-1]:.1f}",
            f"> {curve.steps[-1]}" if place is None else str(curve.steps[place]),
            "–" if place is None else f"{curve.seconds[place]:.1f}",
        )
    return made
