"""Which rows of a data set make up a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from llqr.errors import LLQRError
from llqr_lab.data.batches import Batch, shuffled


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
        if step < 0:
            raise IndexError(f"steps are counted from 0, and this is {step}")
        epoch, place = divmod(step, self.steps_per_epoch)
        return _order(self.count, self.seed, epoch)[place * self.size : (place + 1) * self.size]


# The steps of an epoch come one after another: without this each would shuffle the whole data set again.
_order = lru_cache(maxsize=2)(shuffled)


def in_order(count: int, size: int) -> Iterator[slice]:
    """All rows from the first to the last; the last piece may be smaller."""
    if size < 1:
        raise LLQRError(f"a batch of {size} holds nothing")
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


class TensorBatches:
    """Training batches of tensors that are in memory."""

    def __init__(self, inputs: Tensor, targets: Tensor, size: int, seed: int) -> None:
        if len(inputs) != len(targets):
            raise LLQRError(f"there are {len(inputs)} inputs and {len(targets)} targets")
        self.inputs, self.targets = inputs, targets
        self.rows = Rows(len(targets), size, seed)

    @property
    def steps_per_epoch(self) -> int:
        return self.rows.steps_per_epoch

    def __getitem__(self, step: int) -> Batch:
        rows = self.rows[step]
        return Batch((self.inputs[rows],), self.targets[rows])


def tensor_batches_in_order(inputs: Tensor, targets: Tensor, size: int) -> list[Batch]:
    """Every example once, in order."""
    return [Batch((inputs[rows],), targets[rows]) for rows in in_order(len(targets), size)]
