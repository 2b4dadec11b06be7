"""Promise: ranks with a part of every batch each step as one process does on the whole, by DDP and by FSDP2."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import on_ranks
from ranks_directions import Case, trained, trained_on_ranks

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
        for kind in ("parameters", "curvature", "averages"):
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
