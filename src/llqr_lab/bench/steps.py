"""What `llqr bench step` runs: training steps of one network under a base optimizer, alone and inside LLQR."""

from __future__ import annotations

import copy
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from llqr import LLQR, Preconditioner
from llqr.paper import PaperLLQR
from llqr.structures import EigenKronecker, Kronecker
from llqr.structures.assign import StructureSpec

STRUCTURES: dict[str, StructureSpec] = {
    "scalar": "scalar",
    "diagonal": "diagonal",
    "kfac": "kfac",
    "ekfac": "ekfac",
    'kfac, modes="all"': Kronecker(modes="all"),
    'ekfac, modes="all"': EigenKronecker(modes="all"),
}
BASE = "base"


class Seconds(NamedTuple):
    whole: float
    step: float


class Trainer:
    """A copy of a network under an optimizer of its own, so that no two share hooks, gradients or momentum."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor, structure: StructureSpec | None) -> None:
        self.model, self.inputs, self.targets = copy.deepcopy(model), inputs, targets
        base = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.optimizer: Optimizer = base
        if structure is not None:
            wrapped = LLQR.paper(base, self.model, structure=structure, every=_never)
            self.optimizer = _with_random_u(wrapped, self.model, structure)
        self.train()  # momentum is there from now on

    def train(self) -> Seconds:
        """One training step: clear, forward, backward, step."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(self.inputs), self.targets).backward()  # type: ignore[no-untyped-call]
        before = time.perf_counter()
        self.optimizer.step()
        after = time.perf_counter()
        return Seconds(after - begun, after - before)


def trainers(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Trainer]:
    """The base alone, and LLQR around it with each structure."""
    alone: dict[str, StructureSpec | None] = {BASE: None}
    return {name: Trainer(model, inputs, targets, structure) for name, structure in {**alone, **STRUCTURES}.items()}


def _with_random_u(optimizer: PaperLLQR, model: nn.Module, structure: StructureSpec) -> PaperLLQR:
    """U near the identity in every tensor, and positive, so that each block is applied as a fitted one would be."""
    u = Preconditioner.identity(dict(model.named_parameters()), structure)
    for group in u.groups:
        for tensor in group.tensors.values():
            tensor.mul_(0.5 + torch.rand_like(tensor))
            if tensor.dim() == 3:
                tensor.add_(torch.randn_like(tensor), alpha=0.1 / tensor.shape[-1])
    optimizer.preconditioner = u
    return optimizer


def _never(step: int) -> bool:
    return False
