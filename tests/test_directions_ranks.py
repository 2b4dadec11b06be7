"""Promise: ranks with a part of every batch each step as one process does on the whole, by DDP and by FSDP2."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.curvature.statistics import Sums
from llqr.divergences import KL
from llqr.errors import LLQRWarning
from loops import network, sgd
from ranks import on_ranks
from ranks_directions import STEPS, Case, backward, build, outcome, trained, trained_on_ranks, whole
from test_distributed_bytes import PULSE, counted

STRUCTURES = ["kfac", "ekfac", "diagonal"]
CASES: dict[str, Case] = {
    **{
        f"{structure} {base}{' fsdp' if fsdp else ''}": Case({"structure": structure}, base, fsdp)
        for structure, base, fsdp in product(STRUCTURES, ["sgdm", "adamw"], [False, True])
    },
    "mixed": Case(mixed=True, base="nesterov"),
    "mixed fsdp": Case({"structure": {"convolution*": "ekfac", "*": "kfac"}}, mixed=True, base="nesterov", fsdp=True),
    "uneven": Case({"structure": "kfac"}, uneven=True),
    "uneven fsdp": Case({"structure": "kfac"}, uneven=True, fsdp=True),
    "accumulated": Case({"structure": "ekfac"}, micro=2),
    "own average": Case(base="own"),
    "own average fsdp": Case(base="own", fsdp=True),
    "dense": Case({"structure": "dense", "every": 1}),
    "spike": Case({"structure": "kfac"}, spike=True),
    "spike fsdp": Case({"structure": "kfac"}, spike=True, fsdp=True),
    "late": Case({"every": None}, late=True),
    "late fsdp": Case({"every": None}, late=True, fsdp=True),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What one process comes to on the joined batches."""
    return {name: trained(case) for name, case in CASES.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_step_as_one_process_does(size: int, tmp_path: Path, alone: dict[str, dict[str, Any]]) -> None:
    """Parameters, curvature and averages to 1e-9; on all ranks the same to the last bit, U too."""
    found = on_ranks(size, tmp_path, trained_on_ranks, CASES)
    for name, case in CASES.items():
        expected, first = alone[name], found[0][name]
        assert expected["counts"][0] >= 3, name
        assert all(rank[name]["counts"] == expected["counts"] for rank in found), name
        assert all(rank[name]["told"] == expected["told"] for rank in found), name
        for kind in ("parameters", "curvature", "averages", "lengths"):
            assert first[kind].keys() == expected[kind].keys()
            for key, tensor in expected[kind].items():
                torch.testing.assert_close(first[kind][key], tensor, rtol=1e-9, atol=1e-9, msg=f"{name} {kind} {key}")
                assert all(torch.equal(rank[name][kind][key], first[kind][key]) for rank in found), (name, kind, key)
        us = [rank[name]["u"] for rank in found]
        if case.fsdp:
            assert sum(len(u) for u in us) == len(expected["u"]), "each block is on one rank"
            assert all(len(u) < len(expected["u"]) for u in us), "and they are divided"
        else:
            assert all(torch.equal(u[key], tensor) for u in us for key, tensor in us[0].items()), name
            assert us[0].keys() == expected["u"].keys()


def test_sharded_on_one_rank(tmp_path: Path, alone: dict[str, dict[str, Any]]) -> None:
    name = "kfac adamw fsdp"
    (found,) = on_ranks(1, tmp_path, trained_on_ranks, {name: CASES[name]})
    for key, tensor in alone[name]["parameters"].items():
        torch.testing.assert_close(found[name]["parameters"][key], tensor, rtol=1e-9, atol=1e-9)


# --- drawn gradients ---

DRAWN = {
    f"{name}{' fsdp' if fsdp else ''}": Case(
        {"divergence": divergence, "structure": "ekfac"}, "adamw", fsdp, uneven=True
    )
    for name, divergence in {"ngd": "ngd", "summed": KL(reduction="sum")}.items()
    for fsdp in (False, True)
}


def drawn_on_ranks() -> dict[str, Any]:
    """Trained as it is, and with draws that don't depend on the rank or on anything: the mean over all examples is exact."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return {"drawn": trained_on_ranks(DRAWN), "fixed": {name: fixed(case, rank, size) for name, case in DRAWN.items()}}


def fixed(case: Case, rank: int = 0, size: int = 1) -> dict[str, Any]:
    with mock.patch(
        "llqr.divergences.families.Categorical.draw", lambda self, output, generator: output.detach().sin()
    ):
        return trained(case, rank, size)


def test_drawn_gradients_keep_the_ranks_in_step(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, drawn_on_ranks)
    for name, case in DRAWN.items():
        first, second = (rank["drawn"][name] for rank in found)
        assert first["counts"] == second["counts"] == [3, 0, 0]
        for kind in ("parameters", "curvature"):
            assert all(torch.equal(second[kind][key], tensor) for key, tensor in first[kind].items()), (name, kind)
        expected = fixed(case)
        for kind in ("parameters", "curvature"):
            for key, tensor in expected[kind].items():
                torch.testing.assert_close(found[0]["fixed"][name][kind][key], tensor, rtol=1e-9, atol=1e-9)


# --- checkpoints ---

SAVED_AT = 3
SAVED = {
    "ddp": Case({"structure": "ekfac"}, "adamw"),
    "fsdp": Case({"structure": "ekfac"}, "adamw", fsdp=True),
    "mixed fsdp": Case(mixed=True, fsdp=True),
    "own average fsdp": Case(base="own", fsdp=True),
}
FULL = StateDictOptions(full_state_dict=True)


def save(folder: str) -> dict[str, Any]:
    """Train, save on the way, and go on to the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, case in SAVED.items():
        model, called, optimizer = build(case, size)
        for number in range(STEPS):
            if number == SAVED_AT:
                state = {
                    "model": whole(dict(model.state_dict())),
                    "llqr": optimizer.state_dict()["llqr"],
                    "base": get_optimizer_state_dict(model, optimizer.base, options=FULL),
                }
                if rank == 0:
                    torch.save(state, f"{folder}/{name}.pt")
            backward(case, number, called, rank, size)
            optimizer.step()
        found[name] = outcome(model, optimizer)
    dist.barrier()
    return found


def resume(folder: str, rank: int = 0, size: int = 1) -> dict[str, Any]:
    found = {}
    for name, case in SAVED.items():
        model, called, optimizer = build(case, size)
        state = torch.load(f"{folder}/{name}.pt", weights_only=True)
        for key, parameter in model.state_dict().items():
            there = state["model"][key]
            is_sharded = isinstance(parameter, DTensor)
            parameter.copy_(distribute_tensor(there, parameter.device_mesh) if is_sharded else there)
        if state["base"]["state"]:  # torch doesn't load an empty one
            set_optimizer_state_dict(model, optimizer.base, state["base"], options=FULL)
        optimizer.load_state_dict({**optimizer.base.state_dict(), "llqr": state["llqr"]})
        for number in range(SAVED_AT, STEPS):
            backward(case, number, called, rank, size)
            optimizer.step()
        found[name] = outcome(model, optimizer)
    return found


def resume_on_ranks(folder: str) -> dict[str, Any]:
    return resume(folder, dist.get_rank(), dist.get_world_size())


def test_saved_by_two_and_resumed_by_any(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = on_ranks(2, tmp_path / "saving", save, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of one process
        resumed = {1: [resume(folder)]}
    resumed |= {size: on_ranks(size, tmp_path / str(size), resume_on_ranks, folder) for size in (2, 3)}
    for name, (size, ranks) in product(SAVED, resumed.items()):
        for rank, found in enumerate(ranks):
            for kind in ("parameters", "curvature"):
                for key, tensor in saved[0][name][kind].items():
                    if size == 2:
                        assert torch.equal(found[name][kind][key], tensor), (name, kind, key)
                    torch.testing.assert_close(found[name][kind][key], tensor, rtol=1e-9, atol=1e-9)
            assert found[name]["counts"] == saved[0][name]["counts"]
            if size == 2:
                assert found[name]["bytes"] == saved[rank][name]["bytes"]


# --- what goes wrong ---


def said(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if issubclass(warning.category, LLQRWarning)]


def raised(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def not_finite(rank: int, fsdp: bool) -> dict[str, Any]:
    """One rank's loss is; the gradients are repaired, as a scaler or clipping would leave them out."""
    case = Case(fsdp=fsdp)
    model, called, optimizer = build(case, 2)
    for number in range(3):
        backward(case, number, called, rank, 2)
        if number == 2:
            kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            x = torch.full((2, 4), float("inf") if rank == 1 else 1.0, dtype=torch.float64)
            called(x).sum().backward()
            for name, gradient in kept.items():
                model.get_parameter(name).grad = gradient
        words = said(optimizer.step)
    return {"words": words, **outcome(model, optimizer)}


def overflow(rank: int, fsdp: bool) -> dict[str, Any]:
    """The reduced gradients aren't finite: the base's own steps, counted on all ranks."""
    case = Case(fsdp=fsdp)
    model, called, optimizer = build(case, 2)
    backward(case, 0, called, rank, 2)
    optimizer.step()
    backward(case, 1, called, rank, 2)
    if not fsdp or rank == 0:
        gradient = model.get_parameter("0.weight").grad
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = float("inf")
    words = said(optimizer.step)
    return {"words": words, **outcome(model, optimizer)}


def fails_in_a_refit(rank: int, fsdp: bool) -> dict[str, Any]:
    """Nothing is changed on any rank, and all can go on."""
    case = Case({"every": 1}, fsdp=fsdp)
    model, called, optimizer = build(case, 2)
    words = []
    for number in range(3):
        backward(case, number, called, rank, 2)
        if number == 1:
            before = outcome(model, optimizer)
            no_memory = mock.patch.object(Sums, "moments", side_effect=MemoryError("out of memory, say"))
            with no_memory if rank == 1 else nullcontext():
                words.append(raised(optimizer.step))
            after = outcome(model, optimizer)
            same = all(
                torch.equal(after[kind][k], t) for kind in ("parameters", "curvature") for k, t in before[kind].items()
            )
            words.append(f"still {same}")
        optimizer.step()
    return {"words": words, **outcome(model, optimizer)}


def three_steps() -> dict[str, Any]:
    model, called, optimizer = build(Case({"every": 1}), 1)
    for number in range(3):
        backward(Case(), number, called, 0, 1)
        optimizer.step()
    return outcome(model, optimizer)


def fails_in_a_step(rank: int, fsdp: bool) -> dict[str, Any]:
    case = Case({"every": 10}, fsdp=True)
    _, called, optimizer = build(case, 2)
    backward(case, 0, called, rank, 2)
    optimizer.step()
    backward(case, 1, called, rank, 2)
    no_memory = mock.patch("llqr.distributed.shards.turn", side_effect=MemoryError("out of memory, say"))
    with no_memory if rank == 1 else nullcontext():
        words = [raised(optimizer.step)]
    optimizer.step()
    return {"words": words}


def apart(rank: int, fsdp: bool) -> dict[str, Any]:
    """Ranks that differ in settings, parameters or schedule."""
    words = []
    for number in range(4):
        options: dict[str, Any] = [
            {"structure": ["kfac", "diagonal"][rank]},
            {},
            {"every": lambda step: step == rank},
            {},
        ][number]
        model, called, optimizer = build(Case(options, fsdp=fsdp), 2)
        backward(Case(), 0, called, rank, 2)
        if number == 1 and rank == 1:
            model.get_submodule("0").requires_grad_(False)
        if number == 3:
            words.append(raised(lambda optimizer=optimizer: copy.deepcopy(optimizer)))
        else:
            words.append(raised(optimizer.step))
    return {"words": words}


def met_too_late(rank: int, fsdp: bool) -> dict[str, Any]:
    model = network()
    with mock.patch.object(dist, "is_initialized", return_value=False):
        optimizer = LLQR(sgd(model), model)
        backward(Case(), 0, model, rank, 2)
        optimizer.step()
    return {"words": [raised(optimizer.step)]}


class Branches(nn.Module):
    """Each rank uses one of two layers, and one process half of each batch in either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).double()

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized():
            return self.layers[dist.get_rank()](x)
        return torch.cat([layer(half) for layer, half in zip(self.layers, x.chunk(2), strict=True)])


def unused(rank: int = 0, fsdp: bool = False, size: int = 2) -> dict[str, Any]:
    """A layer that only one rank uses has the curvature that it has there."""
    model = Branches()
    called = DistributedDataParallel(model, find_unused_parameters=True) if size > 1 else model
    optimizer = LLQR(sgd(model), called, every=2)
    for number in range(4):
        backward(Case(), number, called, rank, size)
        optimizer.step()
    return outcome(model, optimizer)


TRIALS = [not_finite, overflow, fails_in_a_refit, fails_in_a_step, apart, met_too_late, unused]


def trials() -> dict[str, Any]:
    return {f"{t.__name__} {fsdp}": t(dist.get_rank(), fsdp) for t, fsdp in product(TRIALS, (False, True))}


def test_ranks_agree_on_what_goes_wrong(tmp_path: Path) -> None:
    """Each trial on two ranks, one after another in the same processes: none leaves them out of step."""
    ranks = on_ranks(2, tmp_path, trials)
    for name, found in ranks[0].items():
        for kind in ("parameters", "curvature"):
            for key, tensor in found.get(kind, {}).items():
                torch.testing.assert_close(ranks[1][name][kind][key], tensor, rtol=0, atol=0, equal_nan=True)
    for fsdp, rank in product((False, True), (0, 1)):
        found = {name.split()[0]: result for name, result in ranks[rank].items() if name.endswith(str(fsdp))}
        assert found["not_finite"]["counts"] == [1, 1, 0]
        assert "a refit was rejected" in found["not_finite"]["words"][0]
        assert found["overflow"]["counts"][2] > 0
        assert "the base's own step was taken" in found["overflow"]["words"][0]
        where = "" if rank == 1 else "RankError: on rank 1: "
        assert found["fails_in_a_refit"]["words"] == [f"{where}MemoryError: out of memory, say", "still True"]
        assert found["fails_in_a_refit"]["counts"] == [3, 0, 0]
        assert found["fails_in_a_step"]["words"] == [f"{where}MemoryError: out of memory, say"]
        settings, parameters, schedule, copied = found["apart"]["words"]
        assert "same settings of LLQR" in settings
        assert "'0.bias' (and 1 more) is trained on ranks [0] alone" in parameters
        assert "same answer of `every`" in schedule
        assert "use state_dict()" in copied
        assert "after U was made" in found["met_too_late"]["words"][0]
        for name, expected in {"unused": unused(size=1), "fails_in_a_refit": three_steps()}.items():
            for kind in ("parameters", "curvature"):
                for key, tensor in expected[kind].items():
                    torch.testing.assert_close(found[name][kind][key], tensor, rtol=1e-9, atol=1e-9)


# --- what is sent ---


def messages() -> dict[str, Any]:
    """Bytes of a step with a refit and of one without, and what is held."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, case in BYTES.items():
        _, called, optimizer = build(case, size)
        sent = []
        for number in range(2):
            backward(case, number, called, rank, size)
            sent.append(counted(optimizer.step))
        found[name] = {"refit": sent[0], "step": sent[1], "bytes": optimizer.memory_usage()["preconditioner"]}
    return found


BYTES = {
    f"{structure}{' fsdp' if fsdp else ''}": Case({"structure": structure, "every": 100}, fsdp=fsdp)
    for structure, fsdp in product(["kfac", "ekfac", "diagonal"], (False, True))
}
SIDES = [(5, 5), (3, 6)]
"""Of the two layers, with their biases."""


def test_ranks_send_curvature_and_u_and_nothing_else(tmp_path: Path) -> None:
    """r² + c² of each for K-FAC, rc for a diagonal; test_scaling.py has the default on larger networks."""
    size, item = 2, 8
    ranks = on_ranks(size, tmp_path, messages)
    squares, products = sum(r * r + c * c for r, c in SIDES), sum(r * c for r, c in SIDES)
    curvature = {"kfac": squares, "ekfac": squares, "diagonal": products}
    inverse = {"kfac": squares, "ekfac": squares + products, "diagonal": products}
    for name in BYTES:
        structure, *fsdp = name.split()
        held = item * (curvature[structure] + inverse[structure])
        for rank in ranks:
            refit, step = rank[name]["refit"], rank[name]["step"]
            sums = item * (curvature[structure] + len(SIDES))
            numbers = refit["all_reduce"] + refit["pulse"] - sums
            assert 0 < numbers <= 16 * PULSE
            if fsdp:
                assert refit["gathered"] == item * products, "the parameters, whole"
                assert step["pulse"] == 4 * PULSE + item * 4, "and the lengths of four tensors"
            else:
                assert refit["broadcast"] == item * inverse[structure]
                assert step == {}
                assert rank[name]["bytes"] == held
        if fsdp:
            assert sum(rank[name]["bytes"] for rank in ranks) == held
            words = item * size * size * (4 + 2)  # of four parameters and two blocks
            sent = sum(rank[name]["step"]["all_to_all_single"] for rank in ranks)
            assert sent == 2 * 3 * item * products + words, "sent and got: momentum, step, new step"
