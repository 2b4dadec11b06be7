"""Promise: a rank that dies, or doesn't come, makes the others fail with a message, and what was saved can be gone on from."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.curvature.quadratic import QuadraticModel
from llqr.distributed import checkpoint
from llqr.distributed.shards import Shards
from llqr.divergences import KL
from llqr.errors import RankError
from llqr.paper import PaperLLQR
from llqr.solvers import ScaleFree
from loops import backward, batch, network, parameters_of, sgd
from ranks import on_ranks

DIES_AT, LAST = 3, 5


def build(dies: bool = False) -> tuple[torch.nn.Sequential, torch.nn.Module, PaperLLQR]:
    model = network()
    called = DistributedDataParallel(model) if dist.is_initialized() else model
    refits = 0

    def refit_batch() -> Any:
        nonlocal refits
        refits += 1
        if dies and refits == DIES_AT + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(50)

    options: dict[str, Any] = {"divergence": KL(), "every": 1, "steps": 3, "solver": ScaleFree()}
    options |= {"structure": "kfac", "refit_batch": refit_batch, "loss_fn": functional.cross_entropy}
    return model, called, LLQR.paper(sgd(model), called, **options)


def dying(folder: str) -> dict[str, Any]:
    """The second rank dies in a refit; the first has saved after every step."""
    rank = dist.get_rank()
    model, called, optimizer = build(dies=rank == 1)
    for number in range(LAST):
        backward(called, batch(number))
        before = parameters_of(model)
        try:
            optimizer.step()
        except RankError as error:
            same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
            kept = optimizer.state_dict()["llqr"]["step"]
            return {"words": str(error), "same": same, "kept": kept, "number": number}
        checkpoint.save(f"{folder}/{number}", optimizer)
    return {}


def dying_at_work(way: str) -> dict[str, Any]:
    """The second rank dies in the middle of a refit, or (FSDP2) before a step gathers gradients."""
    model = network()
    called = DistributedDataParallel(model) if way == "ddp" else fully_shard(model)
    optimizer = LLQR.paper(sgd(model), called, structure="kfac", every=2, steps=3)
    for number in range(1 if way == "step" else 2):
        backward(called, batch(number))
        optimizer.step()
    backward(called, batch(2))
    before = parameters_of(model)
    deadly = (Shards, "whole") if way == "step" else (QuadraticModel, "product")
    with mock.patch.object(*deadly, side_effect=die) if dist.get_rank() == 1 else nullcontext():
        try:
            optimizer.step()
        except RankError as error:
            now = parameters_of(model)
            same = all(torch.equal(whole_or_local(now[name]), whole_or_local(p)) for name, p in before.items())
            return {"words": str(error), "same": same}
    return {}


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def whole_or_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def absent() -> str:
    """The second rank doesn't come to a refit."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = network()
    optimizer = LLQR.paper(sgd(model), model, process_group=group)
    backward(model, batch())
    words = ""
    if dist.get_rank() == 0:
        try:
            optimizer.step()
        except RankError as error:
            words = str(error)
    dist.barrier()
    return words


def test_a_rank_dies(tmp_path: Path) -> None:
    found, nothing = on_ranks(2, tmp_path / "ranks", dying, str(tmp_path), may_die=True)
    assert nothing is None
    assert found["words"].startswith("rank 0 lost the others: one has died")
    assert found["same"], "the step that failed has moved parameters"
    assert found["number"] == found["kept"] == DIES_AT
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0", "1", "2", "ranks"]
    model, called, optimizer = build()
    checkpoint.load(tmp_path / "2", optimizer)
    for number in range(DIES_AT, LAST):
        backward(called, batch(number))
        optimizer.step()
    whole, called, other = build()
    for number in range(LAST):
        backward(called, batch(number))
        other.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "step"])
def test_a_rank_dies_at_work(way: str, tmp_path: Path) -> None:
    found, nothing = on_ranks(2, tmp_path, dying_at_work, way, may_die=True)
    assert nothing is None
    assert found["words"].startswith("rank 0 lost the others: one has died")
    assert found["same"]


def test_a_rank_doesnt_come(tmp_path: Path) -> None:
    words, _ = on_ranks(2, tmp_path, absent)
    assert words.startswith("rank 0 lost the others")
    assert "timeout" in words
