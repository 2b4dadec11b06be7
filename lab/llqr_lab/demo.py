"""`llqr demo`: one training loop on digits, with SGD and momentum and with AdamW, alone and with LLQR around them."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from llqr import LLQR
from llqr_lab.bench.measure import one_thread
from llqr_lab.data.batches import Split
from llqr_lab.data.picture_sets import digits
from llqr_lab.figures.style import GREEN, GREY, ORANGE, drawing
from llqr_lab.models.convolutional import picture_net
from llqr_lab.results import bar, say, show_table, simple_table

SGDM_RATE, ADAMW_RATE = 0.1, 0.01
"""The best of 0.03, 0.1, 0.3 and of 0.001, 0.003, 0.01 for each of the two alone."""
BATCH, INTERVAL, TARGET = 128, 10, 0.02
"""Examples in a batch, steps between looks at the training loss, and the loss to reach."""


def sgdm(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=SGDM_RATE, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=ADAMW_RATE)


Make = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGDM": sgdm,
    "LLQR(SGDM)": lambda model: LLQR(sgdm(model), model),
    "AdamW": adamw,
    "LLQR(AdamW)": lambda model: LLQR(adamw(model), model),
}


@dataclass
class Curve:
    """Training losses at steps; seconds are of training alone, without the looks at the loss."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracy: float = math.nan

    @property
    def reached(self) -> tuple[str, str]:
        """The steps and seconds of the first look at which the loss was at most `TARGET`."""
        for step, seconds, loss in zip(self.steps, self.seconds, self.losses, strict=True):
            if loss <= TARGET:
                return str(step), f"{seconds:.1f}"
        return f"> {self.steps[-1]}", "–"


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return picture_net(8, (1, 2))


def train(data: Split, seed: int, make: Make, steps: int, done: Callable[[], None] = lambda: None) -> Curve:
    """Train by the optimizer that is made for the network. Seconds are the processor's: of one thread, what it takes alone."""
    model, generator = network(seed), torch.Generator().manual_seed(seed)
    optimizer, curve, spent = make(model), Curve(), 0.0
    for step in range(steps + 1):
        if step % INTERVAL == 0 or step == steps:
            with torch.no_grad():
                curve.losses.append(float(cross_entropy(model(data.train_inputs), data.train_targets)))
            curve.steps.append(step)
            curve.seconds.append(spent)
            if step == steps or not math.isfinite(curve.losses[-1]):
                break
        rows = torch.randint(len(data.train_targets), (BATCH,), generator=generator)
        inputs, targets = data.train_inputs[rows], data.train_targets[rows]
        begun = time.process_time()
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        spent += time.process_time() - begun
        done()
    with torch.no_grad():
        curve.accuracy = float((model(data.test_inputs).argmax(1) == data.test_targets).double().mean())
    return curve


def show(output: Path, seed: int, steps: int) -> None:
    data = digits()
    with one_thread(), bar(len(OPTIMIZERS) * steps, "training") as done:
        for make in OPTIMIZERS.values():
            train(data, seed, make, 1)  # so that what torch loads at first isn't timed
        curves = {name: train(data, seed, make, steps, done) for name, make in OPTIMIZERS.items()}
    console = Console()
    size = sum(parameter.numel() for parameter in network(seed).parameters())
    console.print(
        f"{len(data.train_targets)} digits to train on, {len(data.test_targets)} to test on; a convolutional network of "
        f"{size:,} parameters, batches of {BATCH}, seed {seed}. SGDM has learning rate {SGDM_RATE:g} and AdamW "
        f"{ADAMW_RATE:g}, with LLQR around them and without: nothing else is set. "
        "Seconds are processor time of the training steps, on one thread.",
        highlight=False,
    )
    headers = [f"loss after\n{steps} steps", "test\naccuracy", "seconds"]
    table = simple_table(None, "optimizer", *headers, *(f"{what} to\nloss {TARGET:g}" for what in ("steps", "seconds")))
    for name, curve in curves.items():
        ends = (f"{curve.losses[-1]:.2g}", f"{curve.accuracy:.1%}", f"{curve.seconds[-1]:.1f}")
        table.add_row(name, *ends, *curve.reached)
    show_table(console, table)
    draw(curves, output)
    say(console, f"Wrote {output}")


LINES = ((ORANGE, "--", "s"), (ORANGE, "-", "o"), (GREEN, "--", "^"), (GREEN, "-", "D"))


def draw(curves: Mapping[str, Curve], path: Path) -> None:
    with drawing(path, 10, 4.5) as figure:
        by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
        for (name, curve), (colour, style, marker) in zip(curves.items(), LINES, strict=True):
            how = {"color": colour, "linestyle": style, "marker": marker, "markersize": 5, "label": name}
            for axes, at in ((by_steps, curve.steps), (by_seconds, curve.seconds)):
                axes.plot(at, curve.losses, markevery=max(1, len(curve.steps) // 10), **how)
        for axes, label in ((by_steps, "training steps"), (by_seconds, "seconds of training")):
            axes.set(yscale="log", xlabel=label)
            axes.axhline(TARGET, color=GREY, linestyle=":", linewidth=1.2)
        by_steps.set_ylabel("training loss")
        by_steps.legend(loc="lower left")
