"""Classification: of pictures, by top-1 accuracy on the test set; and of the next character of a text, by its loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from llqr_lab.data.catalogue import WHOLE, characters, pictures
from llqr_lab.data.pictures import Augmentation, imbalanced
from llqr_lab.tasks.base import Task


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
            raise ValueError(f"'data.augment' is false: leave out {', '.join(wanted)}, which are of the augmentation")
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


class Language(Task):
    """A language model of characters: the loss of the next one, on the last tenth of a text."""

    score = "test_loss"

    def __init__(self, model: dict[str, Any], batch: int, seed: int, folder: Path | None, name: str) -> None:
        text = characters(name, folder)
        self.model = {"words": len(text.vocabulary), **model}
        context = int(self.model.get("length", 256))
        self.examples = len(text.train)
        self.train = text.training(batch, context, seed)
        self.tests = text.testing(64, context)
