"""A language model of characters: the loss of the next one, on the last tenth of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.data.named import characters
from llqr_lab.models.zoo import build
from llqr_lab.tasks.base import Metrics, Task, scores


class Language(Task):
    score = "test_loss"

    def __init__(self, model: dict[str, Any], batch: int, seed: int, folder: Path | None, name: str) -> None:
        text = characters(name, folder)
        self.model = {"words": len(text.vocabulary), **model}
        context = int(self.model.get("length", 256))
        self.examples = len(text.train)
        self.train = text.training(batch, context, seed)
        self.tests = text.testing(64, context)

    def network(self) -> nn.Module:
        return build(**self.model)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, device: torch.device) -> Metrics:
        return scores(model, self.tests, device)
