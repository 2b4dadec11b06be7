"""Batches as functions of the step's number: a run that goes on at step k needs to know nothing but k.

Whoever asks, in whichever process and order, batch number k of a seed is the same, its augmentation included.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from llqr.errors import LLQRError


class Batch(NamedTuple):
    inputs: tuple[Tensor, ...]
    targets: Tensor


class Batches(Protocol):
    """Training batches by the step's number, from 0 on, without end."""

    steps_per_epoch: int

    def __getitem__(self, step: int) -> Batch: ...


@dataclass(frozen=True)
class Split:
    """A small data set for classification, as tensors."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def mixed(*parts: int | str) -> int:
    """One seed from several: near ones give streams that have nothing to do with each other."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=2)  # the steps of an epoch come one after another
def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """The order of `count` examples in this epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed("order", seed, epoch)))


@contextmanager
def own_randomness(*parts: int | str) -> Iterator[None]:
    """Torch's random numbers from a seed of their own; the stream outside goes on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed(*parts))
        yield


@dataclass(frozen=True)
class Rows:
    """Rows of `count` examples in batches of `size`: a new order each epoch, its last incomplete batch left out."""

    count: int
    size: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.count:
            raise LLQRError(f"a batch of {self.size} can't be taken from {self.count} examples without repetition")

    @property
    def steps_per_epoch(self) -> int:
        return self.count // self.size

    def __getitem__(self, step: int) -> Tensor:
        epoch, place = divmod(step, self.steps_per_epoch)
        return shuffled(self.count, self.seed, epoch)[place * self.size : (place + 1) * self.size]


class TensorBatches:
    """Training batches of tensors that are in memory."""

    def __init__(self, inputs: Tensor, targets: Tensor, size: int, seed: int) -> None:
        self.inputs, self.targets = inputs, targets
        self.rows = Rows(len(targets), size, seed)
        self.steps_per_epoch = self.rows.steps_per_epoch

    def __getitem__(self, step: int) -> Batch:
        rows = self.rows[step]
        return Batch((self.inputs[rows],), self.targets[rows])


def tensor_batches_in_order(inputs: Tensor, targets: Tensor, size: int) -> list[Batch]:
    """Every example once, in order; the last batch may be smaller."""
    return [
        Batch((some,), labels)
        for some, labels in zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
    ]


def _ignore_signals(worker: int) -> None:
    """What asks a run to stop often reaches the processes that make batches too, and the run needs them until it has saved."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def stream(batches: Batches, steps: range, workers: int = 0) -> Iterator[Batch]:
    """The batches of these steps, made ahead of time by so many processes."""
    if not workers:
        return (batches[step] for step in steps)
    # a generator of its own: the loader would draw a seed from the global one, which a resumed run would feel
    own = torch.Generator()
    how: dict[str, Any] = {"num_workers": workers, "generator": own, "worker_init_fn": _ignore_signals}
    loader = DataLoader(batches, batch_size=None, sampler=steps, **how)  # type: ignore[arg-type, var-annotated]
    return (Batch(*batch) for batch in loader)
