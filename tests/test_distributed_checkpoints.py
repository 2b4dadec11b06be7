"""Promise: a training that was saved by so many ranks goes on with any other number of them as if nothing had been."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks_directions
from fuzz_draws import TORCH
from fuzz_ranks import PLAIN
from fuzz_ranks import on_ranks as on_drawn_ranks
from llqr import LLQR
from llqr.distributed import checkpoint
from llqr.divergences import KL, L2
from llqr.errors import LLQRError
from llqr.paper import PaperLLQR
from loops import assert_same, backward, batch, network, parameters_of, sgd, train
from ranks import on_ranks
from ranks_training import Case, build, outcome, step, trained

SAVED_AT, LAST = 3, 5
"""After a refit, and one step after it: momentum and U count."""

CASES = {
    "replicated": Case({"structure": "kfac"}),
    "ekfac": Case({"structure": "ekfac"}),
    "fsdp": Case({"structure": "kfac"}, fsdp=True),
    "adam": Case({"structure": "diagonal"}, adam=True, frozen=("2.bias",)),
}


def save(folder: str, rank: int, size: int) -> None:
    """Train and save, by llqr.distributed.checkpoint and, where a rank has all parameters, by torch.save on the first rank."""
    for name, case in CASES.items():
        model, called, optimizer = build(case, rank, size)
        for number in range(SAVED_AT):
            step(case, number, called, optimizer, rank, size)
        checkpoint.save(f"{folder}/{name}", optimizer)
        if not case.fsdp and rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{name}.pt")


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
    """To 1e-9 the training that one process does without a stop."""
    folder = str(tmp_path)
    on_ranks(2, tmp_path / "saving", save_on_rank, folder)
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
                assert all(rank[way]["bytes"] == expected["bytes"] for rank in ranks), (size, way)


def test_what_cant_be_loaded(tmp_path: Path) -> None:
    model = network()
    optimizer = LLQR.paper(sgd(model), model)
    with pytest.raises(LLQRError, match="no complete checkpoint"):
        checkpoint.load(tmp_path / "none", optimizer)
    (tmp_path / "there").mkdir()
    with pytest.raises(LLQRError, match="there already"):
        checkpoint.save(tmp_path / "there", optimizer)


class Told(nn.Linear):
    """A layer that has more than tensors to save."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": [1, 2]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.told = state


class Counting(torch.optim.SGD):
    """A base that keeps a number of its own, in its state and beside it."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict.pop("seen")
        super().load_state_dict(state_dict)


def test_what_modules_and_bases_add_comes_back(tmp_path: Path) -> None:
    model = nn.Sequential(Told(4, 3))
    optimizer = LLQR(Counting(model.parameters(), 0.1, momentum=0.9), model)
    optimizer.base.state["mine"] = 1  # type: ignore[index]
    checkpoint.save(tmp_path / "there", optimizer)
    other = nn.Sequential(Told(4, 3))
    loaded = LLQR(Counting(other.parameters(), 0.1, momentum=0.9), other)
    checkpoint.load(tmp_path / "there", loaded)
    assert other[0].told == {"calls": [1, 2]}
    assert (loaded.base.seen, loaded.base.state["mine"]) == (3, 1)  # type: ignore[attr-defined,index]


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    """Nothing but tensors and builtins is read, so a number of numpy's is refused while there still is a training."""
    model = network()
    optimizer = LLQR(sgd(model), model)
    optimizer.param_groups[0]["lr"] = np.float64(0.1)
    with pytest.raises(LLQRError, match="no numbers of numpy's"):
        checkpoint.save(tmp_path / "there", optimizer)
    assert not (tmp_path / "there").exists()


def fail_on_one_rank(folder: str) -> tuple[bool, bool]:
    """Whether a rank of two fails, and has another model than before, where the second can't read the checkpoint."""
    case = CASES["replicated"]
    model, called, optimizer = build(case, dist.get_rank(), 2)
    step(case, 0, called, optimizer, dist.get_rank(), 2)
    checkpoint.save(folder, optimizer)
    step(case, 1, called, optimizer, dist.get_rank(), 2)
    before = parameters_of(model)
    if dist.get_rank() == 1:
        checkpoint._read_file = lambda path: (_ for _ in ()).throw(LLQRError("a disk that fails"))  # type: ignore[assignment]
    try:
        checkpoint.load(folder, optimizer)
    except LLQRError:
        return True, all(torch.equal(tensor, before[name]) for name, tensor in parameters_of(model).items())
    return False, False


def test_a_rank_that_fails_leaves_none_loaded(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, fail_on_one_rank, str(tmp_path / "there")) == [(True, True)] * 2


def sizes_after_load(folder: str) -> list[tuple[int, int]]:
    """Of the base's momenta in shards: the numbers that a rank has, and those that it keeps in memory."""
    case = CASES["fsdp"]
    _, called, optimizer = build(case, dist.get_rank(), 2)
    step(case, 0, called, optimizer, dist.get_rank(), 2)
    checkpoint.save(folder, optimizer)
    checkpoint.load(folder, optimizer)
    held = [v.to_local() for entry in optimizer.base.state.values() for v in entry.values() if hasattr(v, "to_local")]
    return [(each.numel(), each.untyped_storage().nbytes() // each.element_size()) for each in held]


def test_a_rank_keeps_its_shards_alone(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, sizes_after_load, str(tmp_path / "there")):
        assert found
        assert all(numbers == kept for numbers, kept in found)


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


def test_a_crafted_folder_runs_nothing(tmp_path: Path) -> None:
    """Nor is one loaded whose files were cut, are missing, or hold something else; the model is as it was."""
    folder, ran = tmp_path / "saved", tmp_path / "ran"
    optimizer = saved(folder)
    good = (folder / "0.pt").read_bytes()
    content = torch.load(io.BytesIO(good), weights_only=True)
    before = parameters_of(optimizer.model)

    def pickled(value: Any) -> bytes:
        stored = io.BytesIO()
        torch.save(value, stored)
        return stored.getvalue()

    def with_rate(value: Any) -> dict[str, Any]:
        base = content["state"]["base"]
        groups = [{**group, "lr": value} for group in base["param_groups"]]
        return {**content, "state": {**content["state"], "base": {**base, "param_groups": groups}}}

    hidden = pickled(with_rate(Evil(ran)))
    crafted = {
        r"can't be loaded": [pickle.dumps(Evil(ran)), pickled(Evil(ran)), hidden, good[: len(good) // 2], b""],
        r"1\.pt' can't be loaded": [pickled({**content, "files": 2})],
        r"isn't as it was written": [
            pickled({"files": 1}),
            pickled([1]),
            pickled({**content, "files": "two"}),
            pickled({**content, "dims": content["dims"][1:]}),
            pickled({**content, "dims": [0, *content["dims"][1:]]} | {"state": 3}),
            pickled({**content, "state": {**content["state"], "base": {"state": {7: {"a": 1}}, "param_groups": []}}}),
            pickled({**content, "state": {**content["state"], "model": [1]}}),
        ],
        r"other parameters": [pickled({**content, "state": {**content["state"], "names": ["0.weight"] * 4}})],
    }
    for message, files in crafted.items():
        for file in files:
            (folder / "0.pt").write_bytes(file)
            with pytest.raises(LLQRError, match=message) as raised:
                checkpoint.load(folder, optimizer)
            assert "Traceback" not in str(raised.value)
            assert not ran.exists()
    assert_same(parameters_of(optimizer.model), before)
    (folder / "0.pt").write_bytes(good)
    checkpoint.load(folder, optimizer)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    """And nothing is changed by it, nor by a checkpoint of another structure."""
    model = network()
    kinds = {"paper": LLQR.paper(sgd(model), model), "kfac": LLQR(sgd(model), model)}
    kinds["diagonal"] = LLQR(sgd(model), model, structure="diagonal")
    for name in ("paper", "kfac"):
        backward(model, batch(0))
        kinds[name].step()
        checkpoint.save(tmp_path / name, kinds[name])
    before = parameters_of(model)
    with pytest.raises(LLQRError, match=r"is of LLQR.paper: load it into an optimizer of the same kind"):
        checkpoint.load(tmp_path / "paper", kinds["kfac"])
    with pytest.raises(LLQRError, match=r"is of LLQR: load it into"):
        checkpoint.load(tmp_path / "kfac", kinds["paper"])
    train(model, kinds["diagonal"], range(1))
    after = parameters_of(model)
    with pytest.raises(LLQRError, match="give the same structure"):
        checkpoint.load(tmp_path / "kfac", kinds["diagonal"])
    assert_same(parameters_of(model), after)
    assert before.keys() == after.keys()


# --- the default ---

DEFAULTS = {
    "ddp": ranks_directions.Case({"structure": "ekfac"}, "adamw"),
    "fsdp": ranks_directions.Case({"structure": "kfac"}, "adamw", fsdp=True),
    "mixed fsdp": ranks_directions.Case(mixed=True, fsdp=True),
    "own average fsdp": ranks_directions.Case(base="own", fsdp=True),
}


def save_default(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, case in DEFAULTS.items():
        _, called, optimizer = ranks_directions.build(case, size)
        for number in range(SAVED_AT):
            ranks_directions.backward(case, number, called, rank, size)
            optimizer.step()
        checkpoint.save(f"{folder}/{name}", optimizer)


def resume_default(folder: str, rank: int = 0, size: int = 1) -> dict[str, Any]:
    found = {}
    for name, case in DEFAULTS.items():
        model, called, optimizer = ranks_directions.build(case, size)
        checkpoint.load(f"{folder}/{name}", optimizer)
        for number in range(SAVED_AT, LAST):
            ranks_directions.backward(case, number, called, rank, size)
            optimizer.step()
        found[name] = ranks_directions.outcome(model, optimizer)
    return found


def resume_default_on_rank(folder: str) -> dict[str, Any]:
    return resume_default(folder, dist.get_rank(), dist.get_world_size())


def test_the_default_saved_by_two_loaded_by_one_and_by_three(tmp_path: Path) -> None:
    """To 1e-9 the training that one process does without a stop; under FSDP2 a block is on one rank again."""
    folder = str(tmp_path)
    on_ranks(2, tmp_path / "saving", save_default, folder)
    found = {1: [resume_default(folder)]}
    found[3] = on_ranks(3, tmp_path / "three", resume_default_on_rank, folder)
    for name, case in DEFAULTS.items():
        expected = ranks_directions.trained(case)
        for size, ranks in found.items():
            for kind in ("parameters", "curvature", "averages"):
                for key, tensor in expected[kind].items():
                    for rank in ranks:
                        close = torch.allclose(rank[name][kind][key], tensor, rtol=1e-9, atol=1e-9)
                        assert close, (size, name, kind, key)
            assert all(rank[name]["counts"] == expected["counts"] for rank in ranks), (size, name)
            assert sum(len(rank[name]["u"]) for rank in ranks) == len(expected["u"]) * (1 if case.fsdp else size)


def test_what_the_divergence_adds_stays_through_two_checkpoints() -> None:
    """The ranks that don't hold a block forgot its diagonal when it was loaded, and the first of them saved that."""
    llqr = {"divergence": KL() + L2(0.5), "every": 4}
    draws = [
        replace(PLAIN, seed=seed, llqr=llqr, extra={**PLAIN.extra, "save": way, "at": 1, "again": True})
        for seed, way in enumerate(("state", "checkpoint"))
    ]
    assert [line["wrong"] for line in on_drawn_ranks("fsdp", draws)] == [[], []]


# --- the base's state, of one process here ---


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("name", ["sgdm", "adamw", "adagrad", "sgd"])
def test_whatever_the_base_has_done_so_far(name: str, paper: bool, tmp_path: Path) -> None:
    """Saved before its first step, and again; a frozen parameter, which some bases have a state of, and one that isn't used.

    By a step of torch's own the base would begin one step later, and a state that isn't there couldn't be loaded.
    """

    def made() -> tuple[nn.Module, Any]:
        model = network()
        model.add_module("unused", nn.Linear(2, 2).double())
        model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
        model.get_parameter("0.bias").requires_grad_(False)
        kind, options = TORCH[name]
        base = kind(model.parameters(), **options)
        return model, (LLQR.paper if paper else LLQR)(base, model, every=2)

    straight, optimizer = made()
    train(straight, optimizer, range(4))
    model, stopped = made()
    for stop in range(4):
        checkpoint.save(tmp_path / str(stop), stopped)
        train(model, stopped, range(stop, stop + 1))  # what was saved doesn't move on
        model, stopped = made()
        stopped.param_groups[0]["lr"] = 0.7
        checkpoint.load(tmp_path / str(stop), stopped)
        train(model, stopped, range(stop, stop + 1))
    assert_same(parameters_of(straight), parameters_of(model))
    assert stopped.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
