"""One training, as one process or as one of several ranks that have a part of every batch each."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.divergences import KL
from llqr.errors import LLQRWarning
from llqr.paper import PaperLLQR
from llqr.solvers import ScaleFree
from loops import Batch, batch, network, parameters_of, sgd

ROWS = 12
UNEVEN = {1: [12], 2: [5, 7], 4: [1, 5, 2, 4]}
STEPS = 5
"""With a refit every second step: three of them."""


@dataclass(frozen=True)
class Case:
    """What is trained how; `options` are LLQR's."""

    options: dict[str, Any] = field(default_factory=dict)
    closures: bool = False
    micro: int = 1
    """Batches whose gradients a step adds up."""
    no_sync: bool = False
    """All but the last of them without DDP's or FSDP2's reduction."""
    uneven: bool = False
    frozen: tuple[str, ...] = ()
    fsdp: bool = False
    """Sharded by fully_shard, in place of DDP."""
    inner: bool = False
    """LLQR is given the module inside of DDP."""
    adam: bool = False
    own_batches: bool = False
    """Refits on batches of their own, with the loss."""
    dtype: torch.dtype = torch.float64
    ddp: dict[str, Any] = field(default_factory=dict)
    """Options of DDP."""
    compiled: bool = False


def everything(structures: list[str], **more: Any) -> dict[str, Case]:
    """For each structure, KL and Newton: accumulation, no_sync, a frozen layer and uneven batches at once."""
    layers = [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    ways: dict[str, dict[str, Any]] = {"kl": {}, "newton": {"divergence": "newton", "damping": 0.5}}
    cases = {}
    for number, (structure, (name, options)) in enumerate(product(structures, ways.items())):
        cases[f"{structure} {name}, everything"] = Case(
            {"structure": structure, **options},
            closures=name == "newton",
            micro=2,
            no_sync=True,
            frozen=layers[number // 2 % 2],
            uneven=True,
            **more,
        )
    return cases


def part(data: Batch, rank: int, size: int, uneven: bool) -> Batch:
    """A rank's rows of a batch."""
    rows = UNEVEN[size] if uneven else [ROWS // size] * size
    x, y = (tensor.split(rows)[rank] for tensor in data)
    return x, y


def build(case: Case, rank: int, size: int) -> tuple[nn.Module, nn.Module, PaperLLQR]:
    """The model, what is called (DDP around it where there are several ranks), and the optimizer."""
    model = network(dtype=case.dtype)
    for name in case.frozen:
        model.get_parameter(name).requires_grad_(False)
    called: nn.Module = model
    if size > 1 and case.fsdp:
        fully_shard(model[0])
        fully_shard(model)
    elif size > 1:
        called = DistributedDataParallel(model, **case.ddp)
    if case.compiled:
        called = torch.compile(called, backend="eager")  # type: ignore[assignment]
    base = torch.optim.Adam(model.parameters(), lr=0.02) if case.adam else sgd(model)
    options: dict[str, Any] = {"divergence": KL(), "solver": ScaleFree(), "every": 2, "steps": 2, **case.options}
    if case.own_batches:
        numbers = iter(range(50, 100))
        options["refit_batch"] = lambda: part(batch(next(numbers), ROWS, case.dtype), rank, size, case.uneven)
        options["loss_fn"] = functional.cross_entropy
    return model, called, LLQR.paper(base, model if case.inner else called, **options)


def step(case: Case, number: int, called: nn.Module, optimizer: PaperLLQR, rank: int, size: int) -> None:
    """One step, on this rank's part of the batch of that number."""

    def loss_of(data: Batch) -> Tensor:
        x, y = part(data, rank, size, case.uneven)
        correction = size * len(x) / ROWS  # DDP takes the mean over ranks, whatever they have
        return functional.cross_entropy(called(x), y) * correction / case.micro

    def evaluate() -> Tensor:
        """The loss over all micro-batches, taken backward one after another."""
        optimizer.zero_grad()
        losses = []
        for micro in range(case.micro):
            with synchronised(called, not case.no_sync or micro == case.micro - 1):
                losses.append(loss_of(batch(10 * number + micro, ROWS, case.dtype)))
                losses[-1].backward()
        return torch.stack(losses).sum()

    if case.closures:
        optimizer.step(evaluate)
    else:
        evaluate()
        optimizer.step()


def synchronised(called: nn.Module, yes: bool) -> AbstractContextManager[None]:
    """Whether a backward pass in there reduces gradients, as DDP and FSDP2 have it said."""
    if isinstance(called, FSDPModule):
        called.set_requires_gradient_sync(yes)
    elif isinstance(called, DistributedDataParallel) and not yes:
        return called.no_sync()
    return nullcontext()


def trained(case: Case, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """What the training came to: parameters, all of U, J, counts, bytes."""
    model, called, optimizer = build(case, rank, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LLQRWarning)
        for number in range(STEPS):
            step(case, number, called, optimizer, rank, size)
    return outcome(model, optimizer)


def outcome(model: nn.Module, optimizer: PaperLLQR) -> dict[str, Any]:
    u, stats = optimizer.state_dict()["llqr"]["preconditioner"], optimizer.stats
    return {
        "parameters": {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters_of(model).items()},
        "u": {f"{key} {name}": t for key, block in u["blocks"].items() for name, t in block.items()},
        "objective": torch.tensor([stats.objective_before, stats.objective_after], dtype=torch.float64),
        "counts": [stats.refits, stats.rejected, stats.nonfinite],
        "bytes": optimizer.memory_usage()["preconditioner"],
    }


def trained_on_ranks(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """All the cases, one after another, on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return {name: trained(case, rank, size) for name, case in cases.items()}
