"""Promise: a training that was saved by so many ranks goes on with any other number of them as if nothing had been."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from llqr import LLQR
from llqr.distributed import checkpoint
from llqr.errors import LLQRError
from llqr.paper import PaperLLQR
from loops import assert_same, backward, batch, network, parameters_of, sgd
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


class Evil:
    """What a crafted folder would have unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def saved(folder: Path) -> PaperLLQR:
    model = network()
    optimizer = LLQR.paper(sgd(model), model)
    backward(model, batch(0))
    optimizer.step()
    checkpoint.save(folder, optimizer)
    return optimizer


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_a_crafted_folder_runs_nothing(tmp_path: Path) -> None:
    """Neither its metadata nor what isn't a tensor; the error says what was met, and the model is as it was."""
    folder, ran = tmp_path / "saved", tmp_path / "ran"
    optimizer = saved(folder)
    good = (folder / ".metadata").read_bytes()
    before = parameters_of(optimizer.model)
    metadata = pickle.loads(good)
    hidden = replace(metadata, planner_data=Evil(ran))
    patched = pickle.dumps(Metadata)[:-1] + pickle.dumps((None, {"version": "mine"}), 2)[2:-1] + b"b."
    crafted = {
        r"posix\.mkdir": pickle.dumps(Evil(ran)),
        r"nt\.mkdir|posix\.mkdir": pickle.dumps(hidden),
        "would change a class": patched,
        "isn't that of a checkpoint": pickle.dumps({"words": 1}),
        "isn't what torch.distributed.checkpoint writes": good[: len(good) // 2],
    }
    for message, content in crafted.items():
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(LLQRError, match=message):
            checkpoint.load(folder, optimizer)
        assert not ran.exists()
    assert Metadata.version is None
    (folder / ".metadata").write_bytes(good)

    # the learning rate is pickled by itself, at a place that the metadata name
    stored = io.BytesIO()
    torch.save(Evil(ran), stored)
    place, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn.endswith("param_groups.0.lr"))
    (folder / "evil.distcp").write_bytes(stored.getvalue())
    metadata.storage_data[place] = replace(info, relative_path="evil.distcp", offset=0, length=stored.tell())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(LLQRError, match="can't be loaded"):
        checkpoint.load(folder, optimizer)
    assert not ran.exists()
    assert_same(parameters_of(optimizer.model), before)


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_the_default_is_told_what_to_use(tmp_path: Path) -> None:
    model = network()
    with pytest.raises(LLQRError, match=r"for LLQR.paper: save and load the state_dict\(\) of an LLQR"):
        checkpoint.save(tmp_path / "saved", LLQR(sgd(model), model))  # type: ignore[arg-type]
