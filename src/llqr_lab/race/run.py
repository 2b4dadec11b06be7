"""One optimizer on one task: the curve of its training loss by steps and by seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from llqr import LLQR
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
    stats: dict[str, Any] = field(default_factory=dict)
    """LLQR's own counts."""

    def reached(self, target: float) -> int | None:
        """The place of the first look at which the loss was at most `target`, and stayed finite."""
        return next((i for i, loss in enumerate(self.losses) if loss <= target), None)


def train(
    task: Task,
    data: Split,
    seed: int,
    base: Callable[[nn.Module], Optimizer],
    settings: Mapping[str, Any] | None = None,
    steps: int | None = None,
    until: float | None = None,
    done: Callable[[], None] = lambda: None,
) -> Curve:
    """Train by `base` alone, or by LLQR around it with these settings, for `steps` steps or until the loss is reached."""
    model = task.start(seed)
    optimizer = base(model) if settings is None else LLQR(base(model), model, **settings)
    draw, curve, spent = batches(data, task.batch, seed), Curve(), 0.0
    torch.manual_seed(seed)  # dropout
    for step in range(task.steps if steps is None else steps):
        if step % task.interval == 0:
            _look(curve, model, data, task, step, spent)
            if curve.losses[-1] <= (until or 0.0) or not math.isfinite(curve.losses[-1]):
                break
        inputs, targets = draw()
        begun = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        spent += time.perf_counter() - begun
        done()
    else:
        _look(curve, model, data, task, step + 1, spent)
    curve.accuracy = _accuracy(model, data)
    if isinstance(optimizer, LLQR):
        curve.stats = vars(optimizer.stats)
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
