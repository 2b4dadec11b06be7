"""Promise: a training that was saved by so many ranks goes on with any other number of them as if nothing had been."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llqr import LLQR
from llqr.distributed import checkpoint
from llqr.errors import LLQRError
from loops import network, sgd
from ranks import on_ranks
from ranks_training import Case, build, outcome, step, trained

SAVED_AT, LAST = 3, 5
"""After a refit, and one step after it: momentum and U count."""

CASES = {
    "replicated": Case({"structure": "kfac"}),
    "sharded": Case({"structure": "ekfac", "shard": True}),
    "fsdp": Case({"structure": "kfac"}, fsdp=True),
    "adam": Case({"structure": "diagonal", "shard": True}, adam=True, frozen=("2.bias",)),
}


def save(folder: str, rank: int, size: int) -> None:
    """Train and save, by torch.distributed.checkpoint and, where a rank has all parameters, by torch.save on the first rank."""
    for name, case in CASES.items():
        model, called, optimizer = build(case, rank, size)
        for number in range(SAVED_AT):
            step(case, number, called, optimizer, rank, size)
        checkpoint.save(f"{folder}/{name}", optimizer)
        if not case.fsdp and (rank == 0 or case.options.get("shard")):  # a sharded U is gathered by all
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if rank == 0:
                torch.save(state, f"{folder}/{name}.pt")


def resume(folder: str, rank: int, size: int) -> dict[str, Any]:
    """Load and train to the end, both ways."""
    found = {}
    for name, case in CASES.items():
        model, called, optimizer = build(case, rank, size)
        checkpoint.load(f"{folder}/{name}", optimizer)
        for number in range(SAVED_AT, LAST):
            step(case, number, called, optimizer, rank, size)
        found[name] = outcome(model, optimizer)
        if not case.fsdp:
            model, called, optimizer = build(case, rank, size)
            state = torch.load(f"{folder}/{name}.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            for number in range(SAVED_AT, LAST):
                step(case, number, called, optimizer, rank, size)
            found[f"{name}, plain"] = outcome(model, optimizer)
    return found


def save_on_rank(folder: str) -> None:
    save(folder, dist.get_rank(), dist.get_world_size())


def resume_on_rank(folder: str) -> dict[str, Any]:
    return resume(folder, dist.get_rank(), dist.get_world_size())


def test_saved_by_two_loaded_by_one_and_by_four(tmp_path: Path) -> None:
    """To 1e-9 the training that one process does without a stop; U's memory is divided anew."""
    folder = str(tmp_path)
    on_ranks(2, tmp_path / "saving", save_on_rank, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed.checkpoint wonders that there is one process
        found = {1: [resume(folder, 0, 1)]}
    found[4] = on_ranks(4, tmp_path / "four", resume_on_rank, folder)
    for name, case in CASES.items():
        expected = trained(case)
        for size, ranks in found.items():
            for way in [name] if case.fsdp else [name, f"{name}, plain"]:
                for kind in ("parameters", "u"):
                    for key, tensor in expected[kind].items():
                        for rank in ranks:
                            close = torch.allclose(rank[way][kind][key], tensor, rtol=1e-9, atol=1e-9)
                            assert close, (size, way, kind, key)
                assert all(rank[way]["counts"] == expected["counts"] for rank in ranks), (size, way)
                held = sum(rank[way]["bytes"] for rank in ranks)
                whole = expected["bytes"]
                assert held == (whole if case.fsdp or case.options.get("shard") else size * whole), (size, way)


def test_what_cant_be_loaded(tmp_path: Path) -> None:
    model = network()
    optimizer = LLQR.paper(sgd(model), model)
    with pytest.raises(LLQRError, match="no complete checkpoint"):
        checkpoint.load(tmp_path / "none", optimizer)
    (tmp_path / "there").mkdir()
    with pytest.raises(LLQRError, match="there already"):
        checkpoint.save(tmp_path / "there", optimizer)
