"""Who races in `llqr bench race`, on what, and at which learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

STEPS_OF_SGD = (0.03, 0.1, 0.3)
STEPS_OF_ADAM = (1e-3, 3e-3, 1e-2)
WIDEN = 3.0
"""The factor between rates; where the best is the first or the last of a grid, one more is tried beyond it, and so on."""
WIDEST = 3
"""How often."""


@dataclass(frozen=True)
class Entry:
    """An optimizer in the race."""

    name: str
    base: str
    rates: tuple[float, ...]
    method: str = "base"

    def changes(self, rate: float) -> dict[str, Any]:
        averaging = {"base.beta2": 0.99} if self.base in ("adamw", "muon", "singd") else {}
        return {"base.name": self.base, "base.lr": rate, **averaging}


ENTRIES = (
    Entry("SGDM", "sgdm", STEPS_OF_SGD),
    Entry("AdamW", "adamw", STEPS_OF_ADAM),
    Entry("Muon", "muon", STEPS_OF_ADAM),
    Entry("SOAP", "soap", STEPS_OF_ADAM),
    Entry("Shampoo", "shampoo", STEPS_OF_SGD),
    Entry("SINGD", "singd", STEPS_OF_ADAM),
    Entry("LLQR on SGDM", "sgdm", STEPS_OF_SGD, "default"),
    Entry("LLQR on AdamW", "adamw", STEPS_OF_ADAM, "default"),
    Entry("LLQR on Muon", "muon", STEPS_OF_ADAM, "default"),
)


def course_of(steps: int) -> dict[str, Any]:
    """So many steps, evaluated at the end; the training loss is recorded after every fiftieth part."""
    return {"epochs": 0, "steps": steps, "evaluate_every": steps, "record_every": steps // 50}


@dataclass(frozen=True)
class Course:
    """A task of the race: a preset, and what is changed of it for everybody."""

    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    cpu: Mapping[str, Any] = field(default_factory=dict)
    """What is changed at the scale `cpu` only, so that a race takes some hours."""
    without: tuple[str, ...] = ()
    """Bases that can't run here: torch's Muon is for matrices, and a ResNet has none inside."""
    reached: str = "train_loss"
    """What is to be reached: the training loss of the plain bases, or the test accuracy at which a task says it is over."""

    target: float | None = None
    """A training loss at which the task is over: who is there in the fewest steps is best."""

    def of_length(self, steps: int | None) -> Course:
        """The same over so many steps; one that says itself when it is over may take as many."""
        if steps is None:
            return self
        longer = course_of(steps) if self.reached == "train_loss" else {"steps": steps}
        return replace(self, cpu={**self.cpu, **longer})

    @property
    def runners(self) -> list[Entry]:
        return [entry for entry in ENTRIES if entry.base not in self.without]


PLAIN = {"base.weight_decay": 0.0}
COURSES = {
    "fashion-mlp": Course("fashion-mlp", cpu=course_of(600)),
    "fashion-convnet": Course("fashion-convnet", cpu=course_of(600)),
    # one block in each of ResNet-20's three stages: ResNet-8
    "cifar10": Course(
        "cifar10-resnet18-sgdm", PLAIN, {"model.blocks": [1, 1, 1], "batch": 64, **course_of(400)}, without=("muon",)
    ),
    "shakespeare": Course("shakespeare-gpt-sgdm", cpu=course_of(600)),
    "modular-addition": Course(
        "grokking-add", {"data.by_heart": False}, {"steps": 500, "evaluate_every": 10}, reached="test_accuracy"
    ),
    "multi30k": Course(
        "multi30k-transformer-adamw",
        {**PLAIN, "data.beam": 0},
        {"batch": 1024, "schedule.warmup": 60, **course_of(400)},
    ),
}
