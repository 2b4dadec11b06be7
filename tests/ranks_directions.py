"""One training with the default LLQR, as one process or as one of several ranks that have a part of every batch each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.base_step import Lengths
from loops import CLASSES, Batch, batch, network

ROWS = 12
UNEVEN = {1: [12], 2: [5, 7], 3: [3, 7, 2]}
STEPS = 5


class Mixed(nn.Module):
    """A convolution, an attention whose packed weight is used in two parts, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(1, 8, (2, 1))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.convolution(x.reshape(-1, 1, 2, 2)).flatten(2).mT.tanh()
        return self.head(self.attention(h, 2 * h, 2 * h)[0].mean(1))


class OwnBase(torch.optim.Optimizer):
    """A base whose momentum isn't known."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


BASES: dict[str, Any] = {
    "sgdm": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
    "own": lambda parameters: OwnBase(parameters, lr=0.1),
}


@dataclass(frozen=True)
class Case:
    """What is trained how; `options` are LLQR's."""

    options: dict[str, Any] = field(default_factory=dict)
    base: str = "sgdm"
    fsdp: bool = False
    """Sharded by fully_shard, in place of DDP."""
    mixed: bool = False
    uneven: bool = False
    micro: int = 1
    """Batches whose gradients a step adds up."""
    spike: bool = False
    """One batch has a large loss, so that a step is made shorter."""
    late: bool = False
    """LLQR is made before the model is wrapped or sharded."""


def part(data: Batch, rank: int, size: int, uneven: bool) -> Batch:
    """A rank's rows of a batch."""
    x, y = (tensor.split(UNEVEN[size] if uneven else [ROWS // size] * size)[rank] for tensor in data)
    return x, y


def build(case: Case, size: int) -> tuple[nn.Module, nn.Module, LLQR]:
    """The model, what is called, and the optimizer."""
    model: nn.Module = Mixed() if case.mixed else network()
    options = {"every": 2, **case.options}
    if case.late and not case.fsdp:
        return model, (DistributedDataParallel(model) if size > 1 else model), made(case, model, model, options)
    called = model
    if case.fsdp and dist.is_initialized():
        early = made(case, model, model, options) if case.late else None
        fully_shard(next(model.children()))
        fully_shard(model)
        if early is not None:  # as a framework does it
            early.param_groups[0]["params"] = list(model.parameters())
            return model, called, early
    elif size > 1:
        called = DistributedDataParallel(model)
    return model, called, made(case, model, called, options)


def made(case: Case, model: nn.Module, called: nn.Module, options: dict[str, Any]) -> LLQR:
    return LLQR(BASES[case.base](model.parameters()), called, **options)


def backward(case: Case, number: int, called: nn.Module, rank: int, size: int) -> None:
    """The gradients of the batch of that number, of which this rank has a part."""
    called.zero_grad()
    for micro in range(case.micro):
        x, y = part(batch(10 * number + micro, ROWS), rank, size, case.uneven)
        correction = size * len(x) / ROWS  # DDP takes the mean over ranks, whatever they have
        times = 40 if case.spike and number == STEPS - 2 else 1
        (times * functional.cross_entropy(called(x), y) * correction / case.micro).backward()


def whole(tensor: Any) -> Any:
    if isinstance(tensor, dict):
        return {name: whole(inner) for name, inner in tensor.items()}
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcome(model: nn.Module, optimizer: LLQR) -> dict[str, Any]:
    stats = optimizer.stats
    state = optimizer.state_dict()["llqr"]
    return {
        "parameters": {name: whole(p.detach()).clone() for name, p in model.named_parameters()},
        "curvature": {f"{k} {n}": t for k, block in state["blocks"].items() for n, t in block["moments"].items()},
        "u": {f"{k} {n}": t for k, block in optimizer.blocks.items() for n, t in block.inverse.items()},
        "averages": state["averages"],
        "lengths": {name: torch.tensor(sums, dtype=torch.float64) for name, sums in state["lengths"].items()},
        "counts": [stats.refits, stats.rejected, stats.nonfinite],
        "bytes": optimizer.memory_usage()["preconditioner"],
        "told": optimizer.assignments(),
    }


def trained(case: Case, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """What the training came to."""
    model, called, optimizer = build(case, size)
    with mock.patch.object(Lengths, "KNOWN", 1.5 if case.spike else Lengths.KNOWN):
        for number in range(STEPS):
            backward(case, number, called, rank, size)
            optimizer.step()
    return outcome(model, optimizer)


def trained_on_ranks(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    return {name: trained(case, dist.get_rank(), dist.get_world_size()) for name, case in cases.items()}
