"""Promise: a rank that dies, or doesn't come, makes the others fail with a message, and what was saved can be gone on from."""

from __future__ import annotations

import os
import signal
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.distributed import checkpoint
from llqr.errors import RankError
from loops import backward, batch, network, parameters_of, sgd
from ranks import on_ranks

DIES_AT, LAST = 3, 5


def build(shard: bool, dies: bool = False) -> tuple[torch.nn.Sequential, torch.nn.Module, LLQR]:
    model = network()
    called = DistributedDataParallel(model) if dist.is_initialized() else model
    refits = 0

    def refit_batch() -> Any:
        nonlocal refits
        refits += 1
        if dies and refits == DIES_AT + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(50)

    options: dict[str, Any] = {"every": 1, "steps": 3, "structure": "kfac", "shard": shard}
    return model, called, LLQR(sgd(model), called, refit_batch=refit_batch, loss_fn=functional.cross_entropy, **options)


def dying(folder: str, shard: bool) -> dict[str, Any]:
    """The second rank dies in a refit; the first has saved after every step."""
    rank = dist.get_rank()
    model, called, optimizer = build(shard, dies=rank == 1)
    for number in range(LAST):
        backward(called, batch(number))
        before = parameters_of(model)
        try:
            optimizer.step()
        except RankError as error:
            same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
            kept = None if shard else optimizer.state_dict()["llqr"]["step"]
            return {"words": str(error), "same": same, "kept": kept, "number": number}
        checkpoint.save(f"{folder}/{number}", optimizer)
    return {}


def absent() -> str:
    """The second rank doesn't come to a refit."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = network()
    optimizer = LLQR(sgd(model), model, process_group=group)
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
    for shard in (False, True):
        folder = tmp_path / f"{shard}"
        found, nothing = on_ranks(2, folder / "ranks", dying, str(folder), shard, may_die=True)
        assert nothing is None
        assert found["words"].startswith("rank 0 lost the others: one has died")
        assert found["same"], "the step that failed has moved parameters"
        assert found["number"] == DIES_AT
        assert found["kept"] == (None if shard else DIES_AT)
        assert sorted(entry.name for entry in folder.iterdir()) == ["0", "1", "2", "ranks"]
        model, called, optimizer = build(shard)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.load(folder / "2", optimizer)
        for number in range(DIES_AT, LAST):
            backward(called, batch(number))
            optimizer.step()
        whole, called, other = build(shard)
        for number in range(LAST):
            backward(called, batch(number))
            other.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=1e-9, atol=1e-9)


def test_a_rank_doesnt_come(tmp_path: Path) -> None:
    words, _ = on_ranks(2, tmp_path, absent)
    assert words.startswith("rank 0 lost the others")
    assert "timeout" in words
