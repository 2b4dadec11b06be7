"""Classification of pictures: top-1 accuracy on the test set, after every epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.data.augment import Augmentation
from llqr_lab.data.named import WHOLE, pictures
from llqr_lab.models.zoo import build
from llqr_lab.tasks.base import Metrics, Task, scores


class Classification(Task):
    score = "test_accuracy"

    def __init__(
        self,
        model: dict[str, Any],
        batch: int,
        seed: int,
        folder: Path | None,
        name: str,
        label_smoothing: float = 0.0,
        cutout: int = 0,
        pixels: int = 0,
        augment: bool = True,
        **options: Any,
    ) -> None:
        if cutout and not augment:
            raise ValueError("'data.cutout' has no effect where 'data.augment' is false: leave it out")
        data, augmentation, crop = pictures(name, folder, pixels, **options)
        self.model = {"classes": data.classes, **model}
        if self.model["classes"] != data.classes:
            raise ValueError(f"the model has {self.model['classes']} classes, and {name} has {data.classes}")
        changed = (
            Augmentation(**{**vars(augmentation), "cutout": cutout})
            if augment
            else Augmentation(size=augmentation.size)
        )
        self.examples, self.whole = len(data.train.labels), WHOLE.get(name)
        self.train = data.training(batch, seed, changed)
        self.tests = data.testing(500, crop)
        self.label_smoothing = label_smoothing

    def network(self) -> nn.Module:
        return build(**self.model)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, targets, label_smoothing=self.label_smoothing)

    def evaluate(self, model: nn.Module, device: torch.device) -> Metrics:
        return scores(model, self.tests, device)
