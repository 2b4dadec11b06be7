"""Promise: what the length of a step decides, all ranks decide alike, whatever their layout, whoever has gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.errors import LLQRError
from ranks import on_ranks


def channels_last() -> tuple[float | None, int]:
    """The length that U g had, after refits in which ranks compare what they have."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 5), nn.ReLU(), nn.Conv2d(32, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    called = DistributedDataParallel(model)
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = LLQR(base, called, structure="kfac", every=3, steps=3, shard=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        inputs = torch.randn(4, 3, 10, 10, generator=generator).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        cross_entropy(called(inputs), torch.randint(5, (4,), generator=generator)).backward()
        optimizer.step()
    trust = optimizer._refit.trust
    assert trust is not None
    return trust.length, optimizer.stats.refits


def small(sharded: bool, **settings: Any) -> tuple[nn.Module, LLQR, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    called = fully_shard(model) if sharded else DistributedDataParallel(model)
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = LLQR(base, called, structure="diagonal", every=100, steps=3, **settings)
    return called, optimizer, torch.randn(6, 4).double(), torch.randint(3, (6,))


def missing() -> tuple[list[float], int]:
    """A step that is made shorter, where one rank lacks a gradient that the owner of its block has."""
    called, optimizer, inputs, targets = small(False, shard=True)

    def step(scale: float, without: str | None = None) -> None:
        optimizer.zero_grad()
        (scale * cross_entropy(called(inputs), targets)).backward()
        division = optimizer._division
        if without is not None and division is not None and division.owners[without] != dist.get_rank():
            optimizer.model.get_parameter(without).grad = None
        optimizer.step()

    step(1.0)
    assert optimizer.preconditioner is not None
    for block in optimizer.preconditioner.blocks.values():
        for tensor in block.values():
            tensor.mul_(4.0)
    assert optimizer._refit.trust is not None
    optimizer._refit.trust.length = None
    step(1.0)
    step(4.0, without="0.weight")
    return [float(p.detach().sum()) for p in optimizer.model.parameters()], optimizer.stats.bounded


def shortened() -> list[list[float]]:
    """Parameters after a step that is made as long as g, each way; U g is 1.2 g, and g twice as long as when U was fitted."""
    found = []
    for sharded, shard in ((False, False), (False, True), (True, None)):
        called, optimizer, inputs, targets = small(sharded, shard=shard)
        for number, scale in enumerate((1.0, 1.0, 2.0)):
            optimizer.zero_grad()
            (scale * cross_entropy(called(inputs), targets)).backward()
            optimizer.step()
            if number == 0:
                assert optimizer.preconditioner is not None
                for block in optimizer.preconditioner.blocks.values():
                    for tensor in block.values():
                        tensor.fill_(1.2)
                assert optimizer._refit.trust is not None
                optimizer._refit.trust.length = None
        assert optimizer.stats.bounded == 1
        found.append([float(full(p).sum()) for p in optimizer.model.parameters()])
    return found


def full(parameter: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach()


def raising() -> str:
    """What each rank hears when one of them fails while the length is taken."""
    called, optimizer, inputs, targets = small(True)
    for step in range(2):
        optimizer.zero_grad()
        cross_entropy(called(inputs), targets).backward()
        if step == 0:
            optimizer.step()
    if dist.get_rank() == 1:
        with mock.patch("llqr.loop.trust.norm_of", side_effect=MemoryError("no room")), pytest.raises(MemoryError):
            optimizer.step()
        return "raised"
    with pytest.raises(LLQRError) as told:
        optimizer.step()
    return str(told.value)


def test_the_layout_of_parameters_makes_no_difference(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, channels_last)
    assert first == second
    assert first[1] == 3


def test_a_step_is_as_long_as_the_owners_gradients_say(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, missing)
    assert first == second
    assert first[1] == 1


def test_sharded_steps_are_as_long_as_those_of_ranks_that_hold_all_of_u(tmp_path: Path) -> None:
    for replicated, divided, sharded in on_ranks(2, tmp_path, shortened):
        assert divided == pytest.approx(replicated, rel=1e-12)
        assert sharded == pytest.approx(replicated, rel=1e-12)


def test_a_rank_that_fails_at_the_length_isnt_waited_for(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, raising)
    assert second == "raised"
    assert "rank 1" in first
