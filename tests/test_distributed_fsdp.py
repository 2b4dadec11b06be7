"""Promise: with fully_shard (FSDP2) ranks learn what one process does, and what isn't supported says so."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fuzz_ranks import PLAIN
from fuzz_ranks import on_ranks as on_drawn_ranks
from llqr import LLQR
from llqr.errors import LLQRError
from loops import STRUCTURES, batch, network, parameters_of, sgd
from ranks import on_ranks
from ranks_training import Case, build, everything, step, trained, trained_on_ranks

CASES: dict[str, Case] = {
    **{f"{s} kl": Case({"structure": s}, fsdp=True) for s in STRUCTURES},
    "newton": Case({"structure": "kfac", "divergence": "newton", "damping": 0.5}, fsdp=True, closures=True),
    "gauss-newton": Case({"structure": "diagonal", "divergence": "gauss-newton"}, fsdp=True, closures=True),
    "segments": Case({"structure": "kfac", "segments": ["0", "2"]}, fsdp=True),
    "accumulation": Case({"structure": "ekfac"}, fsdp=True, micro=2),
    "the paper's": Case({"divergence": "ngd", "solver": None, "steps": 25}, fsdp=True, adam=True, uneven=True),
    **everything(STRUCTURES, fsdp=True),
    "uneven": Case({"structure": "kfac", "warm_start": True}, fsdp=True, uneven=True, own_batches=True),
}


def together(cases: dict[str, Case]) -> dict[str, Any]:
    return {**trained_on_ranks(cases), "left": left_as_it_was(), "refused": refusals(), "closures": closures()}


def left_as_it_was() -> dict[str, Any]:
    """A refit shows in nothing but U: the parameters are the same sharded objects, and the hooks are where they were."""
    case = Case({"structure": "kfac", "every": 100}, fsdp=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    model, called, optimizer = build(case, rank, size)
    step(case, 0, called, optimizer, rank, size)
    objects, values = list(model.parameters()), parameters_of(model)
    hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    taken = optimizer.refit(torch.randn(4, 4, dtype=torch.float64))
    return {
        "taken": taken,
        "objects": all(a is b for a, b in zip(objects, model.parameters(), strict=True)),
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "values": all(torch.equal(p.to_local(), values[n].to_local()) for n, p in model.named_parameters()),
        "hooks": hooks == [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()],
        "gradients": all(p.grad is gradients[name] for name, p in model.named_parameters()),
    }


def closures() -> dict[str, bool]:
    """A closure clears gradients, also where a refit evaluates it: those of the step are there after it, and it was taken."""
    found = {}
    for kind, divergence, to_none in product((LLQR, LLQR.paper), ("newton", "gauss-newton"), (True, False)):
        model = network()
        fully_shard(model)
        own, others = sgd(model[0]), sgd(model[2])  # of two optimizers, one is LLQR's base
        optimizer = kind(own, model, divergence, "diagonal", every=1)
        x, y = batch(dist.get_rank())

        def closure(
            bases: Any = (own, others), model: Any = model, none: bool = to_none, x: Any = x, y: Any = y
        ) -> Any:
            for base in bases:
                base.zero_grad(none)
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        closure()
        gradients = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
        before = [p.full_tensor() for p in model[0].parameters()]
        optimizer.step(closure)
        kept = [
            torch.equal(p.grad.to_local(), gradients[name])
            for name, p in model.named_parameters()
            if p.grad is not None
        ]
        moved = [not torch.equal(p.full_tensor(), old) for p, old in zip(model[0].parameters(), before, strict=True)]
        done = optimizer.stats.refits + optimizer.stats.rejected == 1
        found[f"{kind.__name__} {divergence} {to_none}"] = done and len(kept) == 4 and all([*kept, *moved])
    return found


def refusals() -> dict[str, str]:
    """What LLQR says to models that are distributed otherwise."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    hybrid = network()
    fully_shard(hybrid, mesh=init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard")))
    tensor_parallel = network()
    for placement, name in ((Replicate(), "weight"), (Shard(0), "bias")):
        held = getattr(tensor_parallel[0], name)
        setattr(tensor_parallel[0], name, nn.Parameter(distribute_tensor(held.detach(), mesh, [placement])))
    in_part = network()
    fully_shard(in_part[0])
    old = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    mixed = network()
    mixed[0].float()
    for layer in mixed:
        fully_shard(layer)
    models = {"hybrid": hybrid, "tensor parallel": tensor_parallel, "in part": in_part, "old": old}
    models |= {"mixed": mixed}
    words = {}
    for name, model in models.items():
        try:
            LLQR.paper(sgd(model), model)
        except LLQRError as error:
            words[name] = str(error)
    return words


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_parameters(size: int, tmp_path: Path) -> None:
    """Parameters and U after three refits to 1e-9, U on all ranks to the last bit."""
    on_four = [*list(everything(STRUCTURES))[::3], "kfac newton, everything"]  # every structure, KL and Newton
    cases = {name: case for name, case in CASES.items() if size == 2 or name in on_four}
    found = on_ranks(size, tmp_path, together, cases)
    for name, case in cases.items():
        expected = trained(case)
        for rank in found:
            assert rank[name]["counts"] == expected["counts"], name
            for kind in ("parameters", "u"):
                for key, tensor in expected[kind].items():
                    assert torch.allclose(rank[name][kind][key], tensor, rtol=1e-9, atol=1e-9), (name, kind, key)
                    assert torch.equal(rank[name][kind][key], found[0][name][kind][key]), (name, kind, key)
        assert all(rank[name]["bytes"] == expected["bytes"] for rank in found), name
    for rank in found:
        assert all(rank["left"].values()), rank["left"]
        assert all(rank["closures"].values()), rank["closures"]
        assert "hybrid sharding" in rank["refused"]["hybrid"]
        assert "tensor parallelism" in rank["refused"]["tensor parallel"]
        assert "call fully_shard on the whole model" in rank["refused"]["in part"]
        assert "FSDP1" in rank["refused"]["old"]
        assert "several dtypes" in rank["refused"]["mixed"]


def test_gradients_that_wait_to_be_reduced_count() -> None:
    """Those of micro-batches before the last: the default LLQR took them for thrown away, since they aren't in `.grad`."""
    draws = [
        replace(PLAIN, llqr={"every": 2}, micro=3, extra={**PLAIN.extra, "no_sync": True, "parts": parts})
        for parts in (True, False)
    ]
    assert [line["wrong"] for line in on_drawn_ranks("fsdp", draws)] == [[], []]
