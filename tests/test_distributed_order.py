"""Promise: ranks may meet, and models be wrapped or sharded, before LLQR is made or after it; and be evaluated between steps.

Frameworks make the process group and shard the model after the optimizer; FSDP2 leaves whole parameters in a model that was
evaluated. Each trial is the training of one process on the joined batch, to 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.distributed import checkpoint
from llqr.paper import PaperLLQR
from loops import Batch, backward, batch, network, sgd
from ranks import on_ranks

ROWS, STEPS = 12, 4


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


def part(number: int, dtype: torch.dtype = torch.float64) -> Batch:
    """This rank's rows, or all of them where there is one process."""
    data = batch(number, ROWS, dtype)
    if not dist.is_initialized():
        return data
    x, y = (tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in data)
    return x, y


def wrapped(model: nn.Module) -> PaperLLQR:
    return LLQR.paper(sgd(model), model, structure="kfac", every=2, steps=3)


def trained(model: nn.Module, called: nn.Module, optimizer: PaperLLQR, between: Callable[[], object] = list) -> Any:
    """The parameters after some steps, with something done before each and after it."""
    for number in range(STEPS):
        optimizer.zero_grad()  # the sharded parameters' own, where the model holds whole ones
        backward(called, part(number))
        between()
        optimizer.step()
        between()
    assert optimizer.refit(part(9)[0])
    return values(model)


def values(model: nn.Module) -> dict[str, Tensor]:
    named = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in named.items()}


def shard_with(model: nn.Module, optimizer: PaperLLQR) -> None:
    """As accelerate does it: the parameters of the optimizer that there is are exchanged for the sharded ones."""
    names = [name for name, _ in model.named_parameters()]
    fully_shard(model)
    optimizer.param_groups[0]["params"] = [model.get_parameter(name) for name in names]


def met_later() -> Any:
    """Trainer makes the process group with its arguments, and wraps the model when it trains."""
    model = network()
    with mock.patch.object(dist, "is_initialized", return_value=False):
        optimizer = wrapped(model)
    return trained(model, DistributedDataParallel(model), optimizer)


def sharded_later() -> Any:
    model = network()
    optimizer = wrapped(model)
    shard_with(model, optimizer)
    return trained(model, model, optimizer)


def evaluated_between() -> Any:
    model = network()
    fully_shard(model[0])
    fully_shard(model)
    base = sgd(model)

    def evaluate() -> None:
        with torch.no_grad():
            model(part(20)[0])

    evaluate()
    return trained(model, model, LLQR.paper(base, model, structure="kfac", every=2, steps=3), evaluate)


def left_whole() -> Any:
    """Backward passes that leave the parameters whole, which saves an all-gather where gradients are accumulated."""
    model = network()
    fully_shard(model)
    model.set_reshard_after_backward(False)
    return trained(model, model, wrapped(model))


def tied() -> Any:
    model = Tied()
    fully_shard(model.last)
    fully_shard(model)
    return trained(model, model, wrapped(model))


def loaded_before_a_step(folder: str) -> Any:
    """A checkpoint is loaded into an optimizer that has not seen yet that its parameters were sharded."""
    saved, model = network(), network(seed=1)
    fully_shard(saved)
    first, second = wrapped(saved), wrapped(model)
    for number in range(3):
        backward(saved, part(number))
        first.step()
    checkpoint.save(folder, first)
    shard_with(model, second)
    checkpoint.load(folder, second)
    backward(model, part(3))
    second.step()
    assert second.refit(part(9)[0])
    return values(model)


def in_half_precision() -> Any:
    """fully_shard's own mixed precision, bf16 in a training step: U is fitted in float32, on the inputs as bf16 has them."""
    model = network(dtype=torch.float32)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    start = values(model)
    optimizer = LLQR.paper(sgd(model), model, structure="kfac", steps=3, ema=0.0)
    x, y = part(0, torch.float32)
    functional.cross_entropy(model(x).float(), y).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    optimizer.step()
    u = optimizer.state_dict()["llqr"]["preconditioner"]["blocks"]
    return {"start": start, "gradients": gradients, "u": {f"{k} {n}": t for k, b in u.items() for n, t in b.items()}}


def trials(folder: str) -> dict[str, Any]:
    found = {trial.__name__: trial() for trial in (met_later, sharded_later, evaluated_between, left_whole, tied)}
    return {**found, "loaded": loaded_before_a_step(folder), "half": in_half_precision()}


def test_any_order(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path / "ranks", trials, str(tmp_path / "checkpoint"))
    for name in found[0].keys() - {"half"}:
        model: nn.Module = Tied() if name == "tied" else network()
        expected = trained(model, model, wrapped(model))
        for rank in found:
            for key, tensor in expected.items():
                torch.testing.assert_close(rank[name][key], tensor, rtol=1e-9, atol=1e-9, msg=f"{name} {key}")
    half = found[0]["half"]
    model = network(dtype=torch.float32)
    model.load_state_dict(half["start"])
    optimizer = LLQR.paper(sgd(model), model, structure="kfac", steps=3, ema=0.0)
    for name, p in model.named_parameters():
        p.grad = half["gradients"][name]
    optimizer.refit(batch(0, ROWS, torch.float32)[0].bfloat16().float())
    for key, block in optimizer.state_dict()["llqr"]["preconditioner"]["blocks"].items():
        for name, tensor in block.items():
            torch.testing.assert_close(half["u"][f"{key} {name}"], tensor, rtol=1e-4, atol=1e-5)
