"""Steps of a drawn training, and all that it comes to, to hold one against another."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fuzz_draws import ROWS, Draw, Trained, batch, loss_of
from llqr import LLQR

Outcome = dict[str, Tensor]


@contextmanager
def quiet() -> Iterator[None]:
    """Of refits that are left out (they are counted), and of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def advance(draw: Draw, trained: Trained, numbers: Iterable[int], rank: int = 0) -> None:
    """One step for each number, on this rank's part of its batch."""
    with quiet():
        for number in numbers:
            loss = _step(draw, trained, number, rank)
            if draw.scheduler == "plateau":
                trained.scheduler.step(loss)
            elif trained.scheduler is not None:
                trained.scheduler.step()


def _step(draw: Draw, trained: Trained, number: int, rank: int) -> float:
    """The number stands for the loss that a plateau is looked for in: ranks have the same."""
    called, optimizer, size = trained.called, trained.optimizer, len(draw.rows)
    if draw.frozen and draw.thaw:
        next(trained.model.parameters()).requires_grad_(number >= draw.thaw)

    def evaluate() -> Tensor:
        """The loss over all micro-batches, taken backward one after another."""
        if draw.clears == "optimizer":
            optimizer.zero_grad()
        else:
            trained.model.zero_grad(set_to_none=draw.clears == "model")
        losses = []
        for micro in range(draw.micro):
            x, y = (
                t.split(draw.rows)[rank] for t in batch(draw.model, draw.loss, 1000 * draw.seed + 10 * number + micro)
            )
            correction = size * len(x) / ROWS  # DDP takes the mean over ranks, whatever they have
            with synchronised(called, not draw.extra.get("no_sync") or micro == draw.micro - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=draw.autocast):
                    output = called(x.to(draw.dtype) if x.is_floating_point() else x)
                    losses.append(loss_of(output, y) * correction / draw.micro)
                with torch.autocast("cpu", torch.bfloat16, enabled=draw.autocast and number % 2 == 0):
                    losses[-1].backward()
        if draw.clip:
            nn.utils.clip_grad_norm_(trained.model.parameters(), 0.5)
        return torch.stack(losses).sum()

    if draw.closures:
        optimizer.step(evaluate)
    else:
        evaluate()
        optimizer.step()
    return 1.0 / (1 + number // 3)


def synchronised(called: nn.Module, yes: bool) -> AbstractContextManager[None]:
    """Whether a backward pass in there reduces gradients, as DDP and FSDP2 have it said."""
    if isinstance(called, FSDPModule):
        called.set_requires_gradient_sync(yes)
    elif isinstance(called, DistributedDataParallel) and not yes:
        return called.no_sync()
    return nullcontext()


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def outcome(trained: Trained) -> Outcome:
    """Parameters, buffers, the base's state and groups, U and all that it is made of, and the counts."""
    optimizer = trained.optimizer
    found = {f"model {name}": whole(tensor) for name, tensor in trained.model.state_dict().items()}
    names = {id(p): name for name, p in trained.model.named_parameters()}
    for parameter, held in optimizer.base.state.items():
        if not parameter.requires_grad:
            continue  # some bases make a state for it, and torch doesn't load that
        for key, value in held.items():
            if value is not None:
                found[f"base {names[id(parameter)]} {key}"] = whole(torch.as_tensor(value))
    for place, group in enumerate(optimizer.param_groups):
        for key in ("lr", "momentum", "betas"):
            found[f"group {place} {key}"] = torch.tensor(group.get(key, 0.0), dtype=torch.float64)
    stats = optimizer.stats
    own = optimizer.state_dict()["llqr"]
    if isinstance(optimizer, LLQR):
        blocks = {key: {**block["moments"], "times": block["refits"]} for key, block in own["blocks"].items()}
        found |= {f"average {name}": average for name, average in own["averages"].items()}
        found |= {f"lengths {n}": torch.tensor(sums, dtype=torch.float64) for n, sums in own["lengths"].items()}
        for key, block in optimizer.blocks.items():
            found |= {f"held {key} {name}": tensor.clone() for name, tensor in block.inverse.items()}
    else:
        blocks = own["preconditioner"]["blocks"] if own["preconditioner"] else {}
    found |= {f"u {k} {n}": torch.as_tensor(t) for k, block in blocks.items() for n, t in block.items()}
    found["counts"] = torch.tensor([own["step"], stats.refits, stats.rejected, stats.nonfinite])
    return found


def differences(first: Outcome, second: Outcome, tolerance: float = 0.0) -> list[str]:
    """What isn't equal, to the last bit or to a tolerance."""
    wrong = sorted(first.keys() ^ second.keys())
    for name in first.keys() & second.keys():
        a, b = first[name], second[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{name}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}")
        elif not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            wrong.append(f"{name} by {float((a - b).abs().max()):.1e}")
    return sorted(wrong)


def not_finite(found: Outcome) -> list[str]:
    return [name for name, t in found.items() if name.startswith("model") and not bool(t.isfinite().all())]
