"""Promise: ranks send what docs/scaling.md counts on paper, and the memory of U falls with their number.

`llqr_lab.scaling.count` is that paper; what ranks send is counted by wrapping torch's collectives.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

from llqr.distributed.processes import deal
from llqr.solvers import SGDM, ScaleFree, Solver
from llqr.structures import Diagonal, EigenKronecker, Kronecker
from llqr_lab.cli import app
from llqr_lab.scaling import STRUCTURES, Way, count, multiplications, seven_billion
from loops import network
from ranks import on_ranks
from ranks_training import Case, build, step

INNER = 3
WAYS: dict[Way, Case] = {
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


@pytest.mark.parametrize(("size", "solver"), [(2, SGDM(lr=1e-3)), (4, SGDM(lr=1e-3)), (4, ScaleFree())], ids=repr)
def test_ranks_send_what_is_counted_on_paper(size: int, solver: Solver, tmp_path: Path) -> None:
    structures = list(STRUCTURES) if size == 2 else ["kfac"]
    found = on_ranks(size, tmp_path, messages, structures, solver)
    shapes = {name: tuple(p.shape) for name, p in network().named_parameters()}
    words = 8 * 2 * len(shapes)  # what owners note about parameters and blocks travels with U g
    for structure in structures:
        for way in WAYS:
            paper = count(shapes, STRUCTURES[structure], size, way, INNER + 1, item=8)
            ranks = [rank[f"{structure} {way}"] for rank in found]
            assert max(rank["held"] for rank in ranks) == paper.held
            for rank in ranks:
                refit, after = rank["refit"], rank["step"]
                gathered = {"ddp": paper.u, "ddp, shard": 0, "fsdp": paper.parameters}[way]
                assert refit["broadcast"] + refit["reduce"] == (INNER + 1) * paper.product + gathered
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


def test_memory_falls_with_ranks() -> None:
    """For 6.7 billion parameters, evenly until there are more ranks than blocks; then the largest block is what is left."""
    shapes = seven_billion()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 6_738_415_616
    for structure in STRUCTURES.values():
        largest = max(structure.memory(shape) for shape in shapes.values())
        for ranks in (2, 8, 64, 1024):
            paper = count(shapes, structure, ranks, "fsdp", 26)
            assert max(largest, paper.u / ranks) <= paper.held <= max(largest, paper.u / ranks + largest)


def test_the_page_has_what_the_command_counts() -> None:
    """Row by row of the table in docs/scaling.md, to its digits."""
    printed = CliRunner().invoke(app, ["scaling"], catch_exceptions=False).output
    rows = [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]
    counted = {tuple(row[:3]): [row[i] for i in (4, 5, 6, 7, 9, 10, 11)] for row in rows if len(row) == 12}
    page = (Path(__file__).parent.parent / "docs" / "scaling.md").read_text(encoding="utf-8")
    told = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    told = [row for row in told if len(row) == 10 and row[0].isdigit()]
    assert len(told) == 10
    for row in told:
        for figure, exact in zip(row[3:], counted[tuple(row[:3])], strict=True):
            written, unit = re.fullmatch(r"([\d.]+) ?(\S+)", figure).groups()
            value, own_unit = re.fullmatch(r"([\d.]+) ?(\S+)", exact).groups()
            last_digit = 10.0 ** -len(written.partition(".")[2])
            assert unit == own_unit, row
            assert abs(float(written) - float(value)) <= 0.51 * last_digit, (row, exact)


def test_blocks_are_dealt_out_by_size() -> None:
    """The largest first, each to who has least; what has an owner keeps it."""
    sizes = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 1}
    assert deal(sizes, 2) == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}
    assert deal(sizes, 2, {"a": 1, "c": 1}) == {"a": 1, "c": 1, "b": 0, "d": 0, "e": 0}
    assert set(deal(sizes, 9).values()) == {0, 1, 2, 3, 4}


def test_multiplications_of_u_x() -> None:
    assert multiplications(Kronecker(), (20, 10)) == 200 * 30
    assert multiplications(Kronecker(max_dim=15), (20, 10)) == 200 * 10
    assert multiplications(EigenKronecker(modes="all"), (20, 10, 3, 3)) == 2 * 1800 * 39
    assert multiplications(Kronecker(), (20,)) == multiplications(Diagonal(), (20, 10)) == 0
