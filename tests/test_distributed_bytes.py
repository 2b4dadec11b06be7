"""Promise: ranks that refit `LLQR.paper` send 2P for each curvature product, and hold U as docs/processes.md says.

What they send is counted by wrapping torch's collectives.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llqr.distributed.block_owners import deal
from llqr.solvers import SGDM, ScaleFree, Solver
from llqr.structures import Diagonal, EigenKronecker, Kronecker, Structure
from loops import network
from ranks import on_ranks
from ranks_training import Case, build, step

INNER = 3
STRUCTURES: dict[str, Structure] = {"diagonal": Diagonal(), "kfac": Kronecker(), "ekfac": EigenKronecker()}
WAYS: dict[str, Case] = {
    "ddp": Case({"shard": False}),
    "ddp, shard": Case({"shard": True}),
    "fsdp": Case(fsdp=True),
}
PULSE = 64
"""Bytes of a message that carries numbers: eight doubles."""


def counted(action: Any) -> dict[str, int]:
    """Bytes of the messages that an action sends and gets on this rank, by operation."""
    found: Counter[str] = Counter()
    plain = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "reduce", "all_to_all_single")}

    def counting(name: str) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            found[name] += tensor.numel() * tensor.element_size()
            found[f"{name} messages"] += 1
            if name == "all_to_all_single":
                found[name] += args[0].numel() * args[0].element_size()
            return plain[name](tensor, *args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: counting(name) for name in plain}):
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


class Paper(NamedTuple):
    """Bytes: of the parameters, of all of U, of U on the rank that holds most, and through a rank in a step."""

    parameters: int
    u: int
    held: int
    step: int


def on_paper(shapes: dict[str, torch.Size], structure: Structure, ranks: int, way: str, item: int) -> Paper:
    """With P the parameters: sharded under DDP, U g goes from the owners to all, P. Under FSDP2 a rank sends its shards of g,
    P/R, gets the whole gradients of its own blocks, and the same back."""
    sizes = {name: structure.memory(shape, item) for name, shape in shapes.items()}
    parameters = {name: item * shape.numel() for name, shape in shapes.items()}
    owners = deal(sizes, ranks)
    held, own = (
        [sum(of[n] for n in owners if owners[n] == rank) for rank in range(ranks)] for of in (sizes, parameters)
    )
    p, u = sum(parameters.values()), sum(sizes.values())
    step = {"ddp": 0, "ddp, shard": p, "fsdp": 2 * (p // ranks + max(own))}[way]
    return Paper(p, u, u if way == "ddp" else max(held), step)


@pytest.mark.parametrize(("size", "solver"), [(2, SGDM(lr=1e-3)), (4, SGDM(lr=1e-3)), (4, ScaleFree())], ids=repr)
def test_ranks_send_what_is_counted_on_paper(size: int, solver: Solver, tmp_path: Path) -> None:
    structures = list(STRUCTURES) if size == 2 else ["kfac"]
    found = on_ranks(size, tmp_path, messages, structures, solver)
    shapes = {name: p.shape for name, p in network().named_parameters()}
    words = 8 * 2 * len(shapes)  # what owners note about parameters and blocks travels with U g
    for structure in structures:
        for way in WAYS:
            paper = on_paper(shapes, STRUCTURES[structure], size, way, item=8)
            ranks = [rank[f"{structure} {way}"] for rank in found]
            assert max(rank["held"] for rank in ranks) == paper.held
            for rank in ranks:
                refit, after = rank["refit"], rank["step"]
                gathered = {"ddp": paper.u, "ddp, shard": 0, "fsdp": paper.parameters}[way]
                assert refit["broadcast"] + refit["reduce"] == (INNER + 1) * 2 * paper.parameters + gathered
                assert refit["all_reduce"] <= PULSE * refit["all_reduce messages"]
                assert refit["all_reduce messages"] <= 12 * (INNER + 2) + 10
                assert after.get("all_reduce messages", 0) == {"ddp": 0, "ddp, shard": 2, "fsdp": 3}[way]
                if way == "ddp":
                    assert after == {}
                elif way == "ddp, shard":
                    assert after["broadcast"] == paper.step + words
            if way == "fsdp":
                most = max(rank["step"]["all_to_all_single"] for rank in ranks)
                slack = 2 * (words + 8 * 8) * size  # shards of unequal size, and the notes
                assert abs(most - paper.step) <= slack
                assert sum(rank["step"]["all_to_all_single"] for rank in ranks) <= 4 * paper.parameters + size * slack


def test_blocks_are_dealt_out_by_size() -> None:
    """The largest first, each to who has least; what has an owner keeps it."""
    sizes = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 1}
    assert deal(sizes, 2) == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}
    assert deal(sizes, 2, {"a": 1, "c": 1}) == {"a": 1, "c": 1, "b": 0, "d": 0, "e": 0}
    assert set(deal(sizes, 9).values()) == {0, 1, 2, 3, 4}
