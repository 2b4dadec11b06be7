"""The tasks but for translation, and the one that a configuration asks for."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llqr.errors import LLQRError
from llqr_lab.data.batches import TensorBatches, tensor_batches_in_order
from llqr_lab.data.files import WHOLE
from llqr_lab.data.picture_sets import pictures
from llqr_lab.data.pictures import Augmentation, imbalanced
from llqr_lab.data.sequences import characters_of, modular_arithmetic, shakespeare, vocabulary
from llqr_lab.data.translation import made_up
from llqr_lab.errors import ConfigError, check_names, suggestion
from llqr_lab.experiments.config import Config
from llqr_lab.tasks.base import Task
from llqr_lab.tasks.translation import Translating


class Classification(Task):
    """Of pictures, by top-1 accuracy on the test set."""

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
        check_names([name], ["shakespeare", "tiny-text"], "text")
        made = "\n".join(made_up(200, 3).target)
        text = shakespeare(folder) if name == "shakespeare" else characters_of(made, "generated text")
        self.model = {"words": len(text.vocabulary), **model}
        context = int(self.model.get("length", 256))
        self.examples = len(text.train)
        self.train = text.training(batch, context, seed)
        self.tests = text.testing(64, context)


TARGET = 0.95
"""The test accuracy at which grokking has happened, as in the paper."""
LEARNED = 0.99
"""The training accuracy, over the steps since the last evaluation, from which on everything is known by heart."""


class Grokking(Task):
    """Arithmetic modulo a prime, learned by heart long before it is understood."""

    score = "steps_to_target"

    def __init__(
        self,
        model: dict[str, Any],
        batch: int,
        seed: int,
        operation: str,
        p: int = 97,
        train: float = 0.6,
        by_heart: bool = True,
    ) -> None:
        """`by_heart`: what is understood before the training set is known by heart doesn't count, as in the paper."""
        self.model = {"words": vocabulary(p), **model}
        self.by_heart = by_heart
        data = modular_arithmetic(operation, p, train, seed)
        self.examples = len(data.train_targets)
        self.train = TensorBatches(data.train_inputs, data.train_targets, batch, seed)
        self.tests = tensor_batches_in_order(data.test_inputs, data.test_targets, 2048)

    def learned(self, metrics: Mapping[str, Any]) -> bool:
        return bool(metrics["train_accuracy"] >= LEARNED)

    def over(self, metrics: Mapping[str, Any], learned: bool) -> bool:
        return (learned or not self.by_heart) and (metrics.get("test_accuracy") or 0.0) >= TARGET

    def summary(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """When everything was learned by heart, and when it was understood."""
        first = next((number for number, line in enumerate(lines) if self.learned(line)), len(lines))
        reached = next((line for number, line in enumerate(lines) if self.over(line, number >= first)), None)
        return {
            "steps_to_overfit": lines[first]["step"] if first < len(lines) else None,
            "steps_to_target": reached["step"] if reached else None,
            "seconds_to_target": reached["seconds"] if reached else None,
        }


TASKS: dict[str, Callable[..., Task]] = {
    "grokking": Grokking,
    "classification": Classification,
    "language": Language,
    "translation": Translating,
}


def task_of(config: Config, folder: Path | None) -> Task:
    """With its data read and checked; the settings of `data` are the arguments of the task."""
    check_names([config.task], TASKS, "task")
    kind = TASKS[config.task]
    own: dict[str, Any] = {"model": config.model, "batch": config.batch, "seed": config.seed, **config.data}
    known = inspect.signature(kind).parameters
    if config.task == "grokking":
        own["operation"] = own.pop("name")
    else:
        own["folder"] = folder
    if config.label_smoothing:
        if "label_smoothing" not in known:
            raise ConfigError(f"'label_smoothing' isn't known to the task {config.task}")
        own["label_smoothing"] = config.label_smoothing
    if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        for name in own:
            if name not in known:
                raise ConfigError(f"there is no setting 'data.{name}' of {config.task}{suggestion(name, known)}")
    try:
        return kind(**own)
    except (LLQRError, TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
