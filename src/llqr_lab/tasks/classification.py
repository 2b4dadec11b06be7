"""Classification of pictures: top-1 accuracy on the test set, after every epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.data.augment import Augmentation
from llqr_lab.data.named import WHOLE, pictures
from llqr_lab.data.pictures import imbalanced
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
        cutout_share: float = 1.0,
        reflect: bool = False,
        pixels: int = 0,
        augment: bool = True,
        imbalance: float = 1.0,
        **options: Any,
    ) -> None:
        """`imbalance`: how many times rarer the last class is than the first, in training; the test set stays as it is."""
        wanted = {"cutout": cutout, "cutout_share": cutout_share, "reflect": reflect}
        if not augment and (cutout or cutout_share != 1 or reflect):
            raise ValueError(
                f"'data.augment' is false, and {', '.join(wanted)} are of the augmentation: leave them out"
            )
        if cutout_share != 1 and not cutout:
            raise ValueError("'data.cutout_share' has no effect where 'data.cutout' is 0: leave it out")
        data, augmentation, crop = pictures(name, folder, pixels, **options)
        self.model = {"classes": data.classes, **model}
        if self.model["classes"] != data.classes:
            raise ValueError(f"the model has {self.model['classes']} classes, and {name} has {data.classes}")
        changed = Augmentation(**{**vars(augmentation), **wanted}) if augment else Augmentation(size=augmentation.size)
        if imbalance != 1:
            data = replace(data, train=imbalanced(data.train, data.classes, imbalance))
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
