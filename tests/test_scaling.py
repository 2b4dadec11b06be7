"""Promise: what `llqr scaling` counts without numbers is what trainings really hold, compute and send."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.distributed import ranks
from llqr_lab.models.convolutional import ResNet50
from llqr_lab.models.transformers import GPT
from llqr_lab.results import END, page_mark
from llqr_lab.scaling import COMMAND, ITEM, Census, at, census, count, counted, llama, operations, table
from pages import ROOT
from ranks import on_ranks
from test_distributed_bytes import counted as counted_messages
from test_distributed_memory import Peak

SMALL: dict[str, Any] = {
    "gpt": (lambda: GPT(40, 12, 68, 2, 2), (2, 12)),
    "llama": (lambda: llama(40, 16, 200, 2, 2), (3, 8)),
    "resnet": (lambda: ResNet50(classes=5, width=8, blocks=(1, 1, 1, 1)), (2, 3, 64, 64)),
    "a side beyond max_dim": (lambda: nn.Sequential(nn.Linear(6, 8200), nn.Tanh(), nn.Linear(8200, 3)), (4, 6)),
}
"""Sides of at most 192, longer ones, and one that is kept by its diagonal."""


def batch(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) if len(shape) == 4 or shape[1] == 6 else torch.randint(32, shape)


def without_numbers(build: Callable[[], nn.Module], inputs: Tensor) -> Census:
    with torch.device("meta"):
        model = build()
    return census(model, inputs.to("meta"))


def train(model: nn.Module, inputs: Tensor) -> None:
    model(inputs).log_softmax(-1)[..., 0].mean().backward()


def wrapped(model: nn.Module, called: nn.Module, every: int = 2) -> LLQR:
    return LLQR(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), called, every=every)


def held(optimizer: LLQR) -> int:
    """Bytes of curvature, U and the copy of the parameters."""
    copied = sum(ITEM * tensor.numel() for tensor in optimizer._base_step._before.values())
    return optimizer.memory_usage()["preconditioner"] + copied


@pytest.mark.parametrize("name", SMALL)
def test_operations_and_memory_are_those_of_a_training(name: str) -> None:
    """A step with a refit and one without, by torch's counter; bytes by what the optimizer holds."""
    build, shape = SMALL[name]
    torch.manual_seed(0)
    model, inputs = build(), batch(shape)
    found = without_numbers(build, inputs)
    optimizer = wrapped(model, model)
    spent = []
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(2):
            spent.append([operations(lambda: train(model, inputs))[1], operations(optimizer.step)[1]])
            optimizer.zero_grad()
    (heard, refitted), (training, stepped) = spent
    alone = count(found)
    assert training == found.training == alone.training
    assert heard - training == found.statistics > 0
    assert stepped == alone.apply > 0
    assert heard - training + refitted - stepped == alone.refit
    assert held(optimizer) == alone.held
    assert len(found.blocks) == len(optimizer.blocks)


def test_operations_by_hand() -> None:
    """docs/cost.md, in additions and multiplications: 2mn(m + n) of U m for short sides, 4mn·r for a long one; 2mn of its
    cosine."""
    inputs = torch.empty(50, 20, device="meta")
    (block,) = census(nn.Linear(20, 30, device="meta"), inputs).blocks
    assert block.apply == 2 * 30 * 21 * (30 + 21 + 1)
    assert block.invert == pytest.approx(30**3 + 21**3, abs=4)
    found = census(nn.Linear(20, 600, bias=False, device="meta"), inputs)
    turned = census(nn.Linear(600, 20, bias=False, device="meta"), torch.empty(50, 600, device="meta"))
    assert found.blocks[0].apply == turned.blocks[0].apply == 4 * 600 * 20 * 64 + 2 * 600 * 20 * (20 + 1)
    r, n = 64, 600
    divided = r**3 / 3 + n * r * r  # a factor, and what is divided by it
    thin = 2 * 2 * n * n * r + 3 * (2 * n * r * r + divided)
    assert found.blocks[0].invert == pytest.approx(thin + 20**3, abs=4)
    assert found.statistics == 2 * 50 * (600**2 + 20**2)
    assert found.training == 2 * 2 * 50 * 600 * 20, "data ask for no gradient"


def test_networks_have_the_sizes_that_they_are_known_by() -> None:
    sizes = {"ResNet-50": 25_557_032, "GPT-2": 124_439_808, "GPT-2 XL": 1_557_611_200, "LLaMA": 6_738_415_616}
    for name, size in sizes.items():
        assert sum(shape.numel() for shape in counted(name).parameters) == size


def test_larger_batches_cost_training_and_no_statistics() -> None:
    """Once every map acts at as many places as a refit looks at."""
    build = partial(GPT, 40, 12, 16, 2, 1)
    with mock.patch("llqr.curvature.statistics.PLACES", 12):
        one, three = (without_numbers(build, batch((size, 12))) for size in (1, 3))
    assert (three.training, three.second_run) == (3 * one.training, 3 * one.second_run)
    assert three.statistics == one.statistics
    assert count(one, 4, True, times=3) == count(three, 4, True)


# --- several processes ---

WAYS = {"ddp": False, "fsdp": True}
NUMBERS = {"ddp": 8 * 64 + 3 * 16, "fsdp": 7 * 64 + 3 * 16}
"""Bytes of a refit's messages that carry no tensors: pulses, and whether all ranks have the same."""


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return llama(32, 16, 24, 2, 2)


def messages() -> dict[str, Any]:
    """What a step with a refit and one without send, and what is held."""
    found: dict[str, Any] = {}
    for way, sharded in WAYS.items():
        model = decoder()
        called = fully_shard(model) if sharded else DistributedDataParallel(model)
        optimizer, sent = wrapped(model, called, 100), []
        for _ in range(2):
            train(called, batch((2, 8)))
            with sdpa_kernel(SDPBackend.MATH):
                sent.append(operations(partial(counted_messages, optimizer.step)))
        (refit, both), (step, apply) = sent
        found[way] = {"refit": refit, "step": step, "held": held(optimizer), "operations": [apply, both - apply]}
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_messages_and_memory_are_those_of_processes(size: int, tmp_path: Path) -> None:
    """To the byte. Operations of the rank that has most."""
    found = without_numbers(decoder, batch((2, 8)))
    real = on_ranks(size, tmp_path, messages)
    for way, sharded in WAYS.items():
        cost, each = count(found, size, sharded), [rank[way] for rank in real]
        assert max(rank["held"] for rank in each) == cost.held
        heard = 0 if sharded else found.statistics  # in the backward pass
        assert [max(rank["operations"][k] for rank in each) for k in (0, 1)] == [cost.apply, cost.refit - heard]
        assert max(rank["step"].get("all_to_all_single", 0) for rank in each) == cost.step_bytes
        for rank in each:
            step, refit = rank["step"], rank["refit"]
            sent = sum(refit[kind] - step.get(kind, 0) for kind in ("all_reduce", "pulse"))
            sent += refit["gathered" if sharded else "broadcast"]
            assert sent - cost.refit_bytes == NUMBERS[way]


SIDE, LAYERS = 48, 8


def equal_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(SIDE, SIDE, False), nn.Tanh())))


def peaks() -> dict[str, int]:
    """What a refit holds at a time, beside what was there before; messages are sent one tensor at a time, and don't count."""
    found = {}
    for way, sharded in WAYS.items():
        model = equal_layers()
        called = fully_shard(model) if sharded else DistributedDataParallel(model)
        optimizer, most = wrapped(model, called, 1), []
        refit = optimizer._refit

        def measured(*args: Any, model: nn.Module = model, refit: Any = refit, most: list[int] = most) -> None:
            with mock.patch.object(ranks, "LIMIT", 1), Peak(model) as peak:
                refit(*args)
            most.append(peak.bytes)

        with mock.patch.object(optimizer, "_refit", measured):
            for _ in range(4):
                train(called, torch.randn(2, SIDE))
                optimizer.step()
        found[way] = min(most[1:])
    return found


def test_a_refit_holds_what_is_counted(tmp_path: Path) -> None:
    """Up to what the inverse of a layer works with and, under DDP, a rank's own U in the layout in which it is sent."""
    size, found = 2, without_numbers(equal_layers, torch.empty(2, SIDE))
    real, matrix = on_ranks(size, tmp_path, peaks), ITEM * SIDE**2
    for way, sharded in WAYS.items():
        slack = 3 * matrix + (0 if sharded else sum(block.u for block in found.blocks) // size)
        assert all(0 <= rank[way] - count(found, size, sharded).in_refit <= slack for rank in real), way


# --- the page ---


def test_memory_falls_with_devices_until_a_block_is_left() -> None:
    blocks = counted("LLaMA").blocks
    largest = max(block.curvature + block.u for block in blocks)
    held = {devices: at("LLaMA", devices, True).held for devices in (16, 64, 256, 1024, 2048)}
    copies = {devices: ITEM * sum(s.numel() for b in blocks for s in b.members) / devices for devices in held}
    assert held[16] > 3.9 * held[64] > 10 * held[256]
    assert all(held[devices] - copies[devices] >= largest for devices in held)
    assert held[2048] - copies[2048] == pytest.approx(largest, rel=0.01)


def test_the_page_has_what_is_counted() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert f"{page_mark(COMMAND)}\n\n{table()}\n{END}" in page
