"""One optimizer on one task: the curve of its training loss by steps and by seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from llqr_lab.data.split import Split
from llqr_lab.race.tasks import Task, batches


@dataclass
class Curve:
    """Training losses at steps; seconds are of training alone, without the looks at the loss."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracy: float = float("nan")
    """On the test set, at the end."""

    def reached(self, target: float) -> int | None:
        """The place of the first look at which the loss was at most `target`."""
        return next((i for i, loss in enumerate(self.losses) if loss <= target), None)


def train(
    task: Task,
    data: Split,
    seed: int,
    make: Callable[[nn.Module], Optimizer],
    steps: int,
    done: Callable[[], None] = lambda: None,
) -> Curve:
    """Train by the optimizer that is made for the network. Seconds are the processor's: of one thread, what it takes alone."""
    model = task.start(seed)
    optimizer, draw, curve, spent = make(model), batches(data, task.batch, seed), Curve(), 0.0
    torch.manual_seed(seed)  # dropout
    for step in range(steps):
        if step % task.interval == 0:
            _look(curve, model, data, task, step, spent)
            if not math.isfinite(curve.losses[-1]):
                break
        inputs, targets = draw()
        begun = time.process_time()
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        spent += time.process_time() - begun
        done()
    else:
        _look(curve, model, data, task, steps, spent)
    curve.accuracy = _accuracy(model, data)
    return curve


def _look(curve: Curve, model: nn.Module, data: Split, task: Task, step: int, seconds: float) -> None:
    model.eval()
    with torch.no_grad():
        output = model(data.train_inputs[: task.measured])
        curve.losses.append(float(cross_entropy(output, data.train_targets[: task.measured])))
    model.train()
    curve.steps.append(step)
    curve.seconds.append(seconds)


def _accuracy(model: nn.Module, data: Split) -> float:
    model.eval()
    with torch.no_grad():
        right = model(data.test_inputs).argmax(1) == data.test_targets
    return float(right.double().mean())
