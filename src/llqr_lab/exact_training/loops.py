"""Full-batch training loops: gradient descent, and exact second-order steps with a damping that finds its own size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llqr import exact_step
from llqr.divergences import Divergence
from llqr.errors import DegenerateProblemError
from llqr_lab.data.batches import Split

START, LEAST, MOST = 1.0, 1e-9, 1e6
"""Damping at first, and its bounds."""
RAISE, LOWER = 4.0, 2.0


@dataclass
class Run:
    """What came of a training: the loss and the seconds so far, at the start and after each step."""

    losses: list[float]
    seconds: list[float] = field(default_factory=lambda: [0.0])
    refused: int = 0
    """Steps that weren't taken because they didn't lower the loss, or because their model had no minimum."""
    accuracy: float = float("nan")

    def reached(self, target: float) -> int | None:
        """The first step after which the loss is at most `target`."""
        return next((step for step, loss in enumerate(self.losses) if loss <= target), None)


def descend(model: nn.Module, data: Split, rate: float, steps: int, until: float | None = None, most: int = 0) -> Run:
    """Gradient descent for `steps` steps, where the accuracy is taken; then on to the loss `until`, `most` steps in all."""
    parameters = list(model.parameters())
    loss = cross_entropy(model(data.train_inputs), data.train_targets)
    run, begun = Run([loss.item()]), time.perf_counter()
    for step in range(max(steps, most)):
        if step >= steps and (until is None or run.losses[-1] <= until):
            break
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(rate * gradient)
        loss = cross_entropy(model(data.train_inputs), data.train_targets)
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - begun)
        if step + 1 == steps:
            run.accuracy = accuracy(model, data)
    return run


def exact_descend(
    model: nn.Sequential, data: Split, divergence: Divergence, steps: int, done: Callable[[], None] = lambda: None
) -> Run:
    """Levenberg and Marquardt's rule: a step that lowers the loss is taken and lowers the damping, any other raises it.

    A step whose quadratic model has no minimum (Newton's, where the loss is concave along some direction) counts as one
    that failed. Refused steps count as steps.
    """
    damping = START
    run, begun = Run([_loss(model, data)]), time.perf_counter()
    for _ in range(steps):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        loss = run.losses[-1]
        try:
            step = exact_step(model, data.train_inputs, data.train_targets, cross_entropy, divergence, damping)
            move(model, step)
            loss = _loss(model, data)
        except DegenerateProblemError:
            pass
        if loss < run.losses[-1]:
            damping = max(damping / LOWER, LEAST)
        else:
            model.load_state_dict(before)
            damping, loss = min(damping * RAISE, MOST), run.losses[-1]
            run.refused += 1
        run.losses.append(loss)
        run.seconds.append(time.perf_counter() - begun)
        done()
    run.accuracy = accuracy(model, data)
    return run


def move(model: nn.Module, step: dict[str, Tensor]) -> None:
    """θ ← θ + δθ."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(step[name])


def accuracy(model: nn.Module, data: Split) -> float:
    """The share of the test set that is classified right."""
    with torch.no_grad():
        return float((model(data.test_inputs).argmax(1) == data.test_targets).double().mean())


def _loss(model: nn.Module, data: Split) -> float:
    with torch.no_grad():
        return cross_entropy(model(data.train_inputs), data.train_targets).item()
