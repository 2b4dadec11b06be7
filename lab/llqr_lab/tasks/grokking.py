"""Grokking: arithmetic modulo a prime, learned by heart long before it is understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llqr_lab.data.batches import TensorBatches, tensor_batches_in_order
from llqr_lab.data.sequences import modular_arithmetic, vocabulary
from llqr_lab.tasks.base import Task

TARGET = 0.95
"""The test accuracy at which grokking has happened, as in the paper."""
LEARNED = 0.99
"""The training accuracy, over the steps since the last evaluation, from which on everything is known by heart."""


class Grokking(Task):
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
