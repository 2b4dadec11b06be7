"""Promise: ranks that refit `LLQR.paper` hold U whole, and send P for a gradient and for each curvature product.

What they send is counted by wrapping torch's collectives.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llqr.distributed.processes import deal
from llqr.solvers import SGDM, ScaleFree, Solver
from llqr.structures import Diagonal, EigenKronecker, Kronecker, Structure
from loops import network
from ranks import on_ranks
from ranks_training import Case, build, step

INNER = 3
STRUCTURES: dict[str, Structure] = {"diagonal": Diagonal(), "kfac": Kronecker(), "ekfac": EigenKronecker()}
WAYS: dict[str, Case] = {
    "ddp": Case(),
    "fsdp": Case(fsdp=True),
}
PULSE = 64
"""Bytes of a message that carries numbers: eight doubles."""


def counted(action: Any) -> dict[str, int]:
    """Bytes of the messages that an action sends and gets on this rank, by operation, and their number."""
    found: Counter[str] = Counter()
    plain = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_to_all_single")}
    gather = DTensor.full_tensor

    def counting(name: str) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            kind = "pulse" if name == "all_reduce" and tensor.nbytes <= PULSE else name
            found[kind] += tensor.nbytes + (args[0].nbytes if name == "all_to_all_single" else 0)
            found["messages"] += 1
            return plain[name](tensor, *args, **kwargs)

        return call

    def gathering(tensor: DTensor) -> Tensor:
        whole = gather(tensor)
        found["gathered"] += whole.nbytes
        found["messages"] += 1
        return whole

    with (
        mock.patch.multiple(dist, **{name: counting(name) for name in plain}),
        mock.patch.object(DTensor, "full_tensor", gathering),
    ):
        action()
    return dict(found)


def messages(structures: list[str], solver: Solver) -> dict[str, Any]:
    """For each structure and way: the bytes of a refit, of a step after it, and of U on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for structure in structures:
        for way, case in WAYS.items():
            options = {**case.options, "structure": structure, "solver": solver, "steps": INNER, "every": 100}
            _, called, optimizer = build(Case(options, fsdp=case.fsdp), rank, size)
            step(case, 0, called, optimizer, rank, size)
            x = torch.randn(6, 4, dtype=torch.float64)
            refit = counted(lambda optimizer=optimizer, x=x: optimizer.refit(x))
            parameters = dict(optimizer._stepped())
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            after = counted(lambda o=optimizer, p=parameters, g=gradients: o._preconditioned(p, g))
            found[f"{structure} {way}"] = {
                "refit": refit,
                "step": after,
                "held": optimizer.memory_usage()["preconditioner"],
            }
    return found


@pytest.mark.parametrize(("size", "solver"), [(2, SGDM(lr=1e-3)), (4, SGDM(lr=1e-3)), (4, ScaleFree())], ids=repr)
def test_ranks_send_what_is_counted_on_paper(size: int, solver: Solver, tmp_path: Path) -> None:
    structures = list(STRUCTURES) if size == 2 else ["kfac"]
    found = on_ranks(size, tmp_path, messages, structures, solver)
    shapes = {name: p.shape for name, p in network().named_parameters()}
    p = sum(8 * shape.numel() for shape in shapes.values())
    for structure in structures:
        for way in WAYS:
            u = sum(STRUCTURES[structure].memory(shape, 8) for shape in shapes.values())
            gathered = p if way == "fsdp" else 0  # the gradients in a step; in a refit the parameters too
            for rank in (rank[f"{structure} {way}"] for rank in found):
                refit, after = rank["refit"], rank["step"]
                assert rank["held"] == u
                assert (
                    refit["broadcast"] + refit["all_reduce"] + refit.get("gathered", 0)
                    == (INNER + 2) * p + 2 * gathered
                )
                assert refit["pulse"] <= PULSE * (3 * (INNER + 2) + 10)
                assert after.get("gathered", 0) == gathered
                assert after.get("pulse", 0) <= (0 if way == "ddp" else 4 * PULSE)
                assert after.keys() <= {"gathered", "pulse", "messages"}


def test_blocks_are_dealt_out_by_size() -> None:
    """The largest first, each to who has least; what has an owner keeps it."""
    sizes = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 1}
    assert deal(sizes, 2) == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}
    assert deal(sizes, 2, {"a": 1, "c": 1}) == {"a": 1, "c": 1, "b": 0, "d": 0, "e": 0}
    assert set(deal(sizes, 9).values()) == {0, 1, 2, 3, 4}
