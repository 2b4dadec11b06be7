"""Small networks on pictures, for the demonstration and for `llqr compare`: data, batches, and a training loss to reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from llqr_lab.data.digits import digits
from llqr_lab.data.fashion import fashion_mnist
from llqr_lab.data.split import Split
from llqr_lab.models.small import picture_net


@dataclass(frozen=True)
class Task:
    load: Callable[[Path | None], Split]
    network: Callable[[], nn.Module]
    target: float = 0.02
    """Training loss, of the first `measured` training pictures, looked at every `interval` steps."""
    batch: int = 128
    interval: int = 10
    measured: int = 10_000

    def start(self, seed: int) -> nn.Module:
        """The network of this seed: the same start for every optimizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()


def batches(data: Split, size: int, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Random batches, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(data.train_targets), (size,), generator=generator)
        return data.train_inputs[rows], data.train_targets[rows]

    return draw


TASKS = {
    "digits": Task(lambda folder: digits(), partial(picture_net, 8, (1, 2))),
    "digits-batchnorm": Task(lambda folder: digits(), partial(picture_net, 8, (1, 2), norm=True)),
    "digits-dropout": Task(lambda folder: digits(), partial(picture_net, 8, (1, 2), dropout=0.3)),
    "fashion": Task(fashion_mnist, partial(picture_net, 28, (2, 2, 2))),
}
