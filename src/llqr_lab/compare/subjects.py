"""What is trained while optimizers are compared: a network, batches by the step's number, a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llqr_lab.data.batches import mixed, own_randomness
from llqr_lab.data.split import Split
from llqr_lab.models.named import NETWORKS
from llqr_lab.race.tasks import TASKS
from llqr_lab.tasks.language import Language

Batch = tuple[Tensor, Tensor]
GPT: dict[str, Any] = {"name": "gpt", "width": 64, "layers": 2, "heads": 4, "length": 64, "dropout": 0.0}
"""The one that `llqr train shakespeare-gpt-sgdm --scale cpu` trains."""


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    draw: Callable[[int], Batch]
    """The batch of a step; the same one whenever it is asked for."""
    loss: Callable[[Tensor, Tensor], Tensor]


def subject(name: str, batch: int, seed: int, data: Path | None) -> Subject:
    """A network on data: digits or Fashion-MNIST, a GPT on tinyshakespeare, or one of `llqr plan`'s on random batches."""
    if name in TASKS:
        task = TASKS[name]
        return Subject(task.start(seed), _rows(task.load(data), batch, seed), cross_entropy)
    if name == "shakespeare":
        language = Language(GPT, batch, seed, data, name)

        def windows(step: int) -> Batch:
            (inputs,), targets = language.train[step]
            return inputs, targets

        with own_randomness("weights", seed):
            return Subject(language.network(), windows, language.loss)
    return _random(name, batch, seed)


def _rows(data: Split, size: int, seed: int) -> Callable[[int], Batch]:
    def draw(step: int) -> Batch:
        generator = torch.Generator().manual_seed(mixed("rows", seed, step))
        rows = torch.randint(len(data.train_targets), (size,), generator=generator)
        return data.train_inputs[rows], data.train_targets[rows]

    return draw


def _random(name: str, size: int, seed: int) -> Subject:
    with own_randomness("weights", seed):
        model, _, _ = NETWORKS[name](2)

    def draw(step: int) -> Batch:
        with own_randomness("batch", seed, step):
            _, inputs, targets = NETWORKS[name](size)
        return inputs, targets

    return Subject(model, draw, cross_entropy)
