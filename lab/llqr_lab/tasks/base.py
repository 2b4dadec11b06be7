"""What a task is: a model, batches by number, a loss, and a score."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.data.batches import Batch, Batches
from llqr_lab.models.zoo import build

Metrics = dict[str, float]


class Task:
    """`train` is what it learns from; everything random comes from its seed."""

    model: dict[str, Any]
    """The network's name and options."""
    train: Batches
    tests: Iterable[Batch]
    score: str
    """The metric that results are compared by."""
    examples: int
    """To learn from, and"""
    whole: int | None = None
    """how many there would be in the data set as it is published, where the one at hand may be a part of it."""
    label_smoothing = 0.0
    ignored = -100
    """The target of places that don't count."""
    weights: Callable[[Any], Tensor] | None = None
    """From the inputs of a refit to one weight a variable, for models with padding."""

    def network(self) -> nn.Module:
        """The untrained model."""
        return build(**self.model)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over all places, classes along the last dimension; smoothed, ε is spread over all classes."""
        how: dict[str, Any] = {"ignore_index": self.ignored, "label_smoothing": self.label_smoothing}
        return functional.cross_entropy(output.flatten(0, -2), targets.flatten(), **how)

    def evaluate(self, model: nn.Module, device: torch.device) -> Metrics:
        """Scores on what wasn't trained on; the model is in eval mode."""
        return scores(model, self.tests, device, self.ignored)

    def counts(self, output: Tensor, targets: Tensor) -> tuple[int, int]:
        """How many are right, of how many, in a batch of training."""
        return right_answers(output, targets, self.ignored)

    def learned(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the training set is known by heart."""
        return False

    def over(self, metrics: Mapping[str, Any], learned: bool) -> bool:
        """Whether to end before the last step; `learned`: the training set is known by heart, or has been before."""
        return False

    def finals(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """What is measured once, at the end."""
        return {}

    def summary(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """What a result says of a whole run, from the lines of its metrics."""
        return {}


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(tuple(each.to(device, non_blocking=True) for each in batch.inputs), batch.targets.to(device))


def right_answers(output: Tensor, targets: Tensor, ignored: int) -> tuple[int, int]:
    """How many, of how many."""
    asked = targets != ignored
    return int(((output.argmax(-1) == targets) & asked).sum()), int(asked.sum())


@torch.no_grad()
def scores(model: nn.Module, batches: Iterable[Batch], device: torch.device, ignored: int = -100) -> Metrics:
    """The mean cross-entropy and the share of right answers, of all that is asked for in these batches."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    right = seen = 0
    for batch in batches:
        inputs, targets = to_device(batch, device)
        output, flat = model(*inputs).flatten(0, -2), targets.flatten()
        total += functional.cross_entropy(output, flat, reduction="sum", ignore_index=ignored).double()
        counts = right_answers(output, flat, ignored)
        right, seen = right + counts[0], seen + counts[1]
    return {"test_loss": float(total) / seen, "test_accuracy": right / seen}
