"""The task that a configuration asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llqr.errors import LLQRError
from llqr_lab.errors import ConfigError, check_names, suggestion
from llqr_lab.experiments.config import Config
from llqr_lab.tasks.base import Task
from llqr_lab.tasks.classification import Classification, Language
from llqr_lab.tasks.grokking import Grokking
from llqr_lab.tasks.translation import Translating

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
