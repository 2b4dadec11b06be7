"""Promise: a training that is saved and loaded goes on as if it hadn't stopped, and a wrong state changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from llqr import LLQR
from llqr.errors import LLQRError, LLQRWarning
from llqr.paper import PaperLLQR
from llqr.structures import Kronecker, Scalar
from loops import STRUCTURES, assert_same, backward, batch, blocks_of, network, never, parameters_of, sgd, train

EVERY, END = 4, 10
KINDS: list[Any] = [*STRUCTURES, {"0": Kronecker(), "*.bias": "diagonal", "*": Scalar()}]


def fresh(structure: Any = "ekfac", seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, PaperLLQR]:
    model = network(seed, dtype)
    return model, LLQR.paper(sgd(model), model, structure=structure, every=EVERY, steps=4, ema=0.5, damping=0.1)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("structure", KINDS, ids=str)
@pytest.mark.parametrize("stop", [0, 4, 5, 8], ids=lambda k: f"after {k} steps")
def test_going_on(structure: Any, stop: int) -> None:
    """Steps 0, 4 and 8 refit: saved before the first step, just before a refit, just after one, before the next."""
    model, optimizer = fresh(structure)
    train(model, optimizer, range(stop))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(stop, END))

    again, loaded = fresh(structure, seed=1)
    train(again, loaded, range(20, 22))  # it had a life of its own
    again.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    train(again, loaded, range(stop, END))
    assert_same(parameters_of(model), parameters_of(again))
    assert_same(blocks_of(optimizer), blocks_of(loaded))
    assert optimizer.stats.refits == loaded.stats.refits == 3


def test_what_was_saved_does_not_move_on() -> None:
    """The state is a copy of U: steps after the saving don't change it."""
    model, optimizer = fresh()
    train(model, optimizer, range(1))
    state = optimizer.state_dict()["llqr"]
    before = copy.deepcopy(state["preconditioner"]["blocks"])
    train(model, optimizer, range(1, END))
    for key, block in before.items():
        assert_same(block, state["preconditioner"]["blocks"][key])
    assert state["stats"]["refits"] == 1


def test_in_a_new_process(tmp_path: Path) -> None:
    """Here a scheduler is saved too."""
    model, optimizer = fresh()
    scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)
    for k in range(5):
        train(model, optimizer, [k])
        scheduler.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(saved, tmp_path / "saved.pt")
    for k in range(5, END):
        train(model, optimizer, [k])
        scheduler.step()
    program = f"""
import sys, torch
sys.path[:0] = {sys.path!r}
from torch.optim import lr_scheduler
from loops import train
from test_llqr_state import fresh
model, optimizer = fresh(seed=1)
scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)
saved = torch.load({str(tmp_path / "saved.pt")!r}, weights_only=True)
for part, name in [(model, "model"), (optimizer, "optimizer"), (scheduler, "scheduler")]:
    part.load_state_dict(saved[name])
for k in range(5, {END}):
    train(model, optimizer, [k])
    scheduler.step()
torch.save(model.state_dict(), {str(tmp_path / "ended.pt")!r})
"""
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    subprocess.run([sys.executable, "-W", "ignore", "-c", threads + program], check=True, timeout=100)
    assert_same(parameters_of(model), torch.load(tmp_path / "ended.pt", weights_only=True))


def test_onto_another_dtype() -> None:
    model, optimizer = fresh()
    train(model, optimizer, range(6))
    other, loaded = fresh(dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    for key, tensor in blocks_of(loaded).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, blocks_of(optimizer)[key].float())
    train(other, loaded, range(6, END))
    train(model, optimizer, range(6, END))
    for name, p in parameters_of(model).items():
        torch.testing.assert_close(parameters_of(other)[name], p.float(), rtol=1e-3, atol=1e-4)


def test_a_state_of_the_base_alone() -> None:
    """It is taken with a warning: the base goes on, U begins at the identity, and the first step refits."""
    model = network()
    base = sgd(model)
    train(model, base, range(3))
    again, loaded = fresh(seed=1)
    train(again, loaded, range(3))
    again.load_state_dict(model.state_dict())
    with pytest.warns(LLQRWarning, match="plain optimizer"):
        loaded.load_state_dict(through_a_file(base.state_dict()))
    assert loaded.preconditioner is None
    assert loaded.stats.refits == 0
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(base.state[p]["momentum_buffer"], loaded.base.state[q]["momentum_buffer"])
    train(again, loaded, range(3, 4))
    assert loaded.stats.refits == 1


def test_the_base_takes_the_state_too() -> None:
    """To go on without LLQR: a base ignores what it doesn't know."""
    model, optimizer = fresh()
    train(model, optimizer, range(3))
    base = sgd(model)
    base.load_state_dict(through_a_file(optimizer.state_dict()))
    for p in model.parameters():
        assert torch.equal(base.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


def test_frozen_parameters_in_a_state() -> None:
    """U has blocks of what was trained; it comes back where the same is frozen."""
    for structure in ("dense", "kfac"):
        trained = []
        for restart in (False, True):
            model, optimizer = fresh(structure)
            model.get_parameter("0.bias").requires_grad_(False)
            train(model, optimizer, range(5))
            if restart:
                saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
                model, optimizer = fresh(structure, seed=1)
                model.get_parameter("0.bias").requires_grad_(False)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            train(model, optimizer, range(5, END))
            trained.append(parameters_of(model))
        assert_same(*trained)


def _wrong_states(good: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    own = good["llqr"]
    blocks = own["preconditioner"]["blocks"]
    less = {**blocks, "0.weight": {"d": torch.ones(5, 4)}}
    other = {**blocks, "stranger": {"d": torch.ones(3)}}
    unknown = "unknown block in the state 'stranger': known are '0.weight', '0.bias'"
    return {
        "nothing": (None, "isn't the state_dict"),
        "a list": ([], "isn't the state_dict"),
        "empty": ({}, "'state' and 'param_groups'"),
        "of a model": (network().state_dict(), "that of the model"),
        "no groups": ({"state": {}}, "'state' and 'param_groups'"),
        "own is a number": ({**good, "llqr": 3}, "under 'llqr'"),
        "own is empty": ({**good, "llqr": {}}, "under 'llqr'"),
        "no step": ({**good, "llqr": {**own, "step": "four"}}, "under 'llqr'"),
        "no blocks": ({**good, "llqr": {**own, "preconditioner": {}}}, "under 'llqr'"),
        "other tensors": ({**good, "llqr": {**own, "preconditioner": {"blocks": less, "history": []}}}, "'0.weight'"),
        "other names": ({**good, "llqr": {**own, "preconditioner": {"blocks": other, "history": []}}}, unknown),
        "other groups": ({**good, "param_groups": good["param_groups"] * 2}, "parameter groups"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "wrong", _wrong_states({"state": {}, "param_groups": [], "llqr": {"preconditioner": {"blocks": {}}}})
)
def test_a_wrong_state_changes_nothing(wrong: str) -> None:
    model, optimizer = fresh("ekfac")
    train(model, optimizer, range(6))
    other_model, other = fresh("ekfac", seed=2)
    train(other_model, other, range(3))
    state, message = _wrong_states(other.state_dict())[wrong]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["llqr"]["step"] == 6
    assert after["llqr"]["stats"] == before["llqr"]["stats"]
    for number, entry in before["state"].items():
        assert torch.equal(entry["momentum_buffer"], after["state"][number]["momentum_buffer"])
    for key, block in before["llqr"]["preconditioner"]["blocks"].items():
        assert_same(block, after["llqr"]["preconditioner"]["blocks"][key])


def test_another_structure_is_refused() -> None:
    model, optimizer = fresh("diagonal")
    train(model, optimizer, range(1))
    _, other = fresh("kfac")
    with pytest.raises(LLQRError, match=r"the state's block for '0.weight' has tensors"):
        other.load_state_dict(optimizer.state_dict())
    assert other.preconditioner is None


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch"])
@pytest.mark.parametrize("stop", [0, 3, 4])
def test_copies_of_the_pair(way: str, stop: int) -> None:
    """The copy goes on by itself, hook and all, and the original doesn't notice."""
    model, optimizer = fresh()
    lr_scheduler.StepLR(optimizer, 100)  # wraps optimizer.step
    train(model, optimizer, range(stop))
    if way == "deepcopy":
        other_model, other = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        other_model, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        other_model, other = torch.load(file, weights_only=False)
    assert other.model is other_model
    assert {id(p) for group in other.param_groups for p in group["params"]} == {id(p) for p in other_model.parameters()}
    before = parameters_of(model)
    train(other_model, other, range(stop, END))
    assert_same(before, parameters_of(model))
    train(model, optimizer, range(stop, END))
    assert_same(parameters_of(model), parameters_of(other_model))
    assert optimizer.stats.refits == other.stats.refits == 3


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_the_model_alone(way: str) -> None:
    """As for an average of weights: the copy holds no inputs and tells the optimizer nothing."""
    data = batch(0, size=2000)
    model, optimizer = fresh()
    backward(model, data)  # the first step refits: the hook holds this batch
    assert len(pickle.dumps(model)) < 20_000 < data[0].nbytes
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    other(torch.full((2, 4), torch.nan, dtype=torch.float64))
    optimizer.step()
    assert optimizer.stats.refits == 1
    again, alone = fresh()
    backward(again, data)
    alone.step()
    assert_same(parameters_of(again), parameters_of(model))


def test_state_dict_hooks() -> None:
    """torch's four kinds, called with LLQR itself, once each."""
    model, optimizer = fresh()
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(type(o).__name__))
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert calls == ["saving", "loading", "PaperLLQR"]


def test_a_period_that_is_a_function_is_asked_again_after_loading() -> None:
    model = network()
    asked: list[int] = []

    def every(step: int) -> bool:
        asked.append(step)
        return False

    optimizer = LLQR.paper(sgd(model), model, every=every)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    backward(model, batch(2))
    optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 3))
    assert asked == [0, 1, 2, 2]
    assert LLQR.paper(sgd(model), model, every=never).state_dict()["llqr"]["preconditioner"] is None
