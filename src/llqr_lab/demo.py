"""`llqr demo`: one training loop on digits, with SGD and momentum alone and with LLQR around it."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from llqr_lab.bench.measure import one_thread
from llqr_lab.figures.curves import draw
from llqr_lab.progress import bar
from llqr_lab.race.methods import BASE, OFTEN, llqr_methods, sgdm
from llqr_lab.race.run import Curve, train
from llqr_lab.race.tasks import TASKS, Task


def show(output: Path, seed: int, steps: int, lr: float) -> None:
    """Train, print the table, draw the picture."""
    task = TASKS["digits"]
    data = task.load(None)
    methods = {BASE: None, **llqr_methods()}
    with one_thread(), bar(len(methods) * steps, "training") as done:
        train(
            task, data, seed, sgdm(lr), llqr_methods()["LLQR ekfac"], 1
        )  # so that what torch loads at first isn't timed
        curves = {name: train(task, data, seed, sgdm(lr), own, steps, done=done) for name, own in methods.items()}
    console = Console()
    size = sum(parameter.numel() for parameter in task.start(seed).parameters())
    console.print(
        f"{len(data.train_targets)} digits to train on, {len(data.test_targets)} to test on; a convolutional network of "
        f"{size:,} parameters, batches of {task.batch}, seed {seed}. The loop and SGDM's settings (learning rate {lr:g}, "
        f"momentum 0.9) are the same in all rows; LLQR learns U from the KL divergence every {OFTEN['every']} steps.",
        highlight=False,
    )
    console.print(table(curves, task, steps))
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
