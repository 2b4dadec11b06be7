"""Promise: ranks agree on everything, also on what goes wrong: none waits for another that has given up."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.diagnostics import Monitor
from llqr.paper import PaperLLQR
from llqr.solvers import SGDM
from loops import backward, batch, blocks_of, closure_of, network, parameters_of, sgd
from ranks import on_ranks

Trial = Callable[[int], Any]


def wrapped(**options: Any) -> tuple[nn.Sequential, nn.Module, PaperLLQR]:
    model = network()
    called = DistributedDataParallel(model)
    return model, called, LLQR.paper(sgd(model), called, **{"structure": "kfac", "steps": 3, "every": 2, **options})


def raised(action: Callable[[], object]) -> str:
    """The kind of what is raised, and what it says."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def said(action: Callable[[], object]) -> list[str]:
    """The warnings that come."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(entry.message) for entry in caught]


def data(rank: int, number: int = 0) -> tuple[Tensor, Tensor]:
    return batch(number + 10 * rank)


def bad_input(rank: int) -> Any:
    """One rank's refit batch isn't finite: all reject the fit, and train on."""
    x, y = data(rank)
    if rank == 1:
        x = x.clone()
        x[0, 0] = float("nan")
    model, called, optimizer = wrapped(refit_batch=lambda: (x, y), loss_fn=functional.cross_entropy)
    backward(called, data(rank))
    words = said(optimizer.step)
    return {"words": words, "rejected": optimizer.stats.rejected, "parameters": parameters_of(model)}


def no_batch(rank: int) -> Any:
    """One rank has run out of refit batches."""

    def refit_batch() -> Any:
        if rank == 1:
            raise KeyError("no more batches")
        return data(rank)

    _, called, optimizer = wrapped(refit_batch=refit_batch, loss_fn=functional.cross_entropy)
    backward(called, data(rank))
    return {"words": [raised(optimizer.step)]}


def fails_in_a_product(rank: int) -> Any:
    """One rank raises in the middle of a solve, when products are sent."""
    products = 0

    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Cube.apply(x)

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            nonlocal products
            products += 1
            if rank == 1 and products == 6:
                raise MemoryError("out of memory, say")
            (x,) = ctx.saved_tensors
            return 3 * x**2 * slope

    model = nn.Sequential(nn.Linear(4, 5), Fragile(), nn.Linear(5, 3)).double()
    called = DistributedDataParallel(model)
    optimizer = LLQR.paper(sgd(model), called, structure="kfac", steps=20)
    backward(called, data(rank))
    words = [raised(optimizer.step)]
    products = 10
    backward(called, data(rank))
    optimizer.step()  # and all go on together
    return {"words": words, "refits": optimizer.stats.refits, "parameters": parameters_of(model)}


def no_gradient_in_a_refit(rank: int) -> Any:
    model, called, optimizer = wrapped(structure="diagonal")
    backward(called, data(rank))
    if rank == 1:
        model.zero_grad()
    return {"words": [raised(optimizer.step)]}


def rejected(rank: int) -> Any:
    """A fit that doesn't stay finite is rejected by all."""
    model, called, optimizer = wrapped(solver=SGDM(lr=1e200))
    backward(called, data(rank))
    words = said(optimizer.step)
    return {"words": words, "rejected": optimizer.stats.rejected, "parameters": parameters_of(model)}


def overflow(rank: int) -> Any:
    """A gradient that isn't finite goes to the base as it is, on all ranks."""
    model, called, optimizer = wrapped()
    backward(called, data(rank))
    optimizer.step()
    loss = functional.cross_entropy(called(data(rank)[0]), data(rank)[1]) * float("inf")
    model.zero_grad()
    loss.backward()
    words = said(optimizer.step)
    return {"words": words, "counts": [optimizer.stats.nonfinite]}


def other_parameters(rank: int) -> Any:
    """A layer is frozen on one rank alone."""
    model, called, optimizer = wrapped()
    backward(called, data(rank))
    if rank == 1:
        model[0].requires_grad_(False)
    return {"words": [raised(optimizer.step)]}


def other_settings(rank: int) -> Any:
    _, called, optimizer = wrapped(steps=3 + rank)
    backward(called, data(rank))
    return {"words": [raised(optimizer.step)]}


def other_schedule(rank: int) -> Any:
    _, called, optimizer = wrapped(every=lambda step: step == rank)
    backward(called, data(rank))
    return {"words": [raised(optimizer.step)]}


def no_schedule(rank: int) -> Any:
    """`every` raises on one rank, asked in a forward pass: all go through the backward pass, and raise in the step."""

    def every(number: int) -> bool:
        if rank == 1 and number == 1:
            raise KeyError("no such step")
        return number == 0

    model, called, optimizer = wrapped(every=every)
    backward(called, data(rank))
    optimizer.step()
    backward(called, data(rank, 1))
    return {"words": [raised(optimizer.step)], "parameters": parameters_of(model)}


def fails_in_a_step(rank: int) -> Any:
    """One rank raises while it applies U, in a step without a refit (FSDP2); the parameters stay, and all can go on."""
    model = network()
    called = fully_shard(model)
    optimizer = LLQR.paper(sgd(model), called, structure="kfac", steps=3, every=3)
    backward(called, data(rank))
    optimizer.step()
    backward(called, data(rank, 1))
    before = parameters_of(model)
    no_memory = mock.patch.object(
        optimizer.preconditioner, "precondition", side_effect=MemoryError("out of memory, say")
    )
    with no_memory if rank == 1 else nullcontext():
        words = [raised(optimizer.step)]
    now = parameters_of(model)
    still = all(bool((now[name] == p).all()) for name, p in before.items())
    for number in range(1, 4):
        backward(called, data(rank, number))
        optimizer.step()
    return {"words": words, "still": still, "refits": optimizer.stats.refits}


def frozen_later(rank: int) -> Any:
    """Blocks come and go between refits."""
    model, called, optimizer = wrapped(every=1)
    called = model  # DDP doesn't allow for it; gradients are averaged by hand
    for number, names in enumerate([[], ["0.weight"], [], ["2.weight", "2.bias"]]):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in names)
        backward(called, data(rank, number))
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        optimizer.step()
    return {"parameters": parameters_of(model), "refits": optimizer.stats.refits}


def buffers(rank: int) -> Any:
    """A closure calls DDP, which would send its buffers: not in a refit, and as ever after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    called = DistributedDataParallel(model)
    optimizer = LLQR.paper(sgd(model), called, "newton", "diagonal", every=2, steps=2, damping=1.0)
    for number in range(4):
        optimizer.step(closure_of(called, optimizer, data(rank, number)))
    synced = called.require_backward_grad_sync, called.require_forward_param_sync
    return {"parameters": parameters_of(model), "refits": optimizer.stats.refits, "synced": synced}


class Branches(nn.Module):
    """Each rank uses one of two layers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers, self.rank = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), rank

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.rank](x)


def unused(rank: int) -> Any:
    """DDP fills in the gradients of a layer that a rank doesn't use; the curvature of the other ranks is there too."""
    torch.manual_seed(0)
    model = Branches(rank).double()
    called = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = LLQR.paper(sgd(model), called, structure="kfac", every=2, steps=3)
    for number in range(4):
        backward(called, data(rank, number))
        optimizer.step()
    return {"parameters": parameters_of(model), "refits": optimizer.stats.refits}


def apart(rank: int) -> Any:
    """A group of one: each rank refits on its own, and need not wait for the other."""
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    model = network()
    optimizer = LLQR.paper(sgd(model), model, process_group=groups[rank], structure="kfac", steps=3)
    for number in range(1 + rank):
        backward(model, data(rank, number))
        optimizer.step()
    return {"counts": [optimizer.stats.refits], "u": blocks_of(optimizer)}


def refused(rank: int) -> Any:
    model, called, optimizer = wrapped()
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    late = network()
    with mock.patch.object(dist, "is_initialized", return_value=False):
        latecomer = LLQR.paper(sgd(late), late, every=1, steps=2)
        early = raised(lambda: LLQR.paper(sgd(late), late, process_group=groups[rank]))
        backward(late, data(rank))
        latecomer.step()
    words = [
        raised(latecomer.step),
        early,
        raised(lambda: copy.deepcopy(optimizer)),
        raised(lambda: LLQR.paper(sgd(model), called, process_group=groups[1 - rank])),
        raised(lambda: Monitor(model, optimizer, functional.cross_entropy)),
    ]
    return {"words": words}


TRIALS: list[Trial] = [
    buffers,
    unused,
    apart,
    refused,
    bad_input,
    no_batch,
    fails_in_a_product,
    no_gradient_in_a_refit,
    rejected,
    overflow,
    other_parameters,
    other_settings,
    other_schedule,
    no_schedule,
    fails_in_a_step,
    frozen_later,
]


def trials() -> dict[str, Any]:
    return {trial.__name__: trial(dist.get_rank()) for trial in TRIALS}


def test_ranks_agree_on_what_goes_wrong(tmp_path: Path) -> None:
    """Each trial on two ranks, one after another in the same processes: none leaves them out of step."""
    first, second = on_ranks(2, tmp_path, trials)
    for name in first:
        for key, tensor in first[name].get("parameters", {}).items():
            assert torch.equal(tensor, second[name]["parameters"][key]), (name, key)

    for found in (first, second):
        assert found["bad_input"]["rejected"] == 1
        assert "rejected" in found["bad_input"]["words"][0]
        assert found["rejected"]["rejected"] == 1
        assert "rejected" in found["rejected"]["words"][0]
        assert found["overflow"]["counts"] == [4]
        assert found["fails_in_a_product"]["refits"] == 1
        assert found["frozen_later"]["refits"] == 4
        assert "train the same parameters" in found["other_parameters"]["words"][0]
        assert "same settings" in found["other_settings"]["words"][0]
        assert "same answer of `every`" in found["other_schedule"]["words"][0]
        assert found["buffers"]["refits"] == found["unused"]["refits"] == 2
        assert found["buffers"]["synced"] == (True, True)
        late, early, copied, foreign, monitor = found["refused"]["words"]
        assert "not yet among several" in monitor
        assert "after U was made" in late
        assert found["fails_in_a_step"]["still"]
        assert found["fails_in_a_step"]["refits"] == 2
        assert "isn't initialised" in early
        assert "use state_dict()" in copied
        assert "a member of" in foreign
    assert first["bad_input"]["words"][0].count("on rank 1: NonFiniteError") == 1
    assert first["no_batch"]["words"] == ["RankError: on rank 1: KeyError: 'no more batches'"]
    assert second["no_batch"]["words"] == ["KeyError: 'no more batches'"]
    assert first["no_schedule"]["words"] == ["RankError: on rank 1: KeyError: 'no such step'"]
    assert second["no_schedule"]["words"] == ["KeyError: 'no such step'"]
    assert first["fails_in_a_step"]["words"] == ["RankError: on rank 1: MemoryError: out of memory, say"]
    assert first["fails_in_a_product"]["words"] == ["RankError: on rank 1: MemoryError: out of memory, say"]
    assert second["fails_in_a_product"]["words"] == ["MemoryError: out of memory, say"]
    assert first["no_gradient_in_a_refit"]["words"][0].startswith("RankError: on rank 1: LLQRError: no parameter has")
    for block, tensor in first["apart"]["u"].items():
        assert not torch.equal(tensor, second["apart"]["u"][block]), "each rank has a U of its own"
