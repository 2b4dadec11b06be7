"""Promise: under DistributedDataParallel, ranks with a part of every batch each learn what one process does on the whole.

g and H of the joined batch are means of the ranks' own, weighted by what they hold: g = Σ (n_r/n) g_r, H v = Σ (n_r/n) H_r v.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz_ranks import PLAIN
from fuzz_ranks import on_ranks as on_drawn_ranks
from llqr.divergences import KL, Intermediate
from llqr.solvers import SGDM, Adam, ConjugateGradient
from llqr.structures import Dense, Scalar
from loops import STRUCTURES
from ranks import on_ranks
from ranks_training import Case, everything, trained, trained_on_ranks


def weights(inputs: Tensor) -> Tensor:
    """Half of the examples count less."""
    return torch.where(inputs[:, 0] > 0, 1.0, 0.25).to(inputs)


CASES: dict[str, Case] = {
    **{f"{s} kl": Case({"structure": s}, inner=i % 2 == 0) for i, s in enumerate(STRUCTURES)},
    **{
        f"{s} newton": Case({"structure": s, "divergence": "newton", "damping": 0.5}, closures=True) for s in STRUCTURES
    },
    "gauss-newton": Case({"divergence": "gauss-newton"}, closures=True),
    "accumulation": Case({"structure": "kfac"}, micro=2),
    "no_sync": Case({"structure": "kfac"}, micro=3, no_sync=True),
    "frozen layer": Case({"structure": "ekfac"}, frozen=("0.weight", "0.bias")),
    "one block": Case({"structure": "diagonal"}, frozen=("0.weight", "0.bias", "2.bias")),
    "dense and scalar": Case({"structure": {"0": Dense(), "*": Scalar()}}),
    "uneven": Case({"structure": "ekfac"}, uneven=True),
    "uneven newton": Case(
        {"structure": "diagonal", "divergence": "newton", "damping": 0.5}, uneven=True, closures=True
    ),
    "uneven batches of their own": Case({"structure": "kfac", "divergence": "newton"}, uneven=True, own_batches=True),
    "weights": Case({"weights": weights}, uneven=True),
    "sums": Case({"steps": 6, "divergence": KL(reduction="sum") + Intermediate({"0": 0.1}), "ema": 0.5}, uneven=True),
    "chunks": Case({"structure": "kfac", "chunk_size": 2}, uneven=True, own_batches=True),
    "newton in chunks and segments": Case(
        {"structure": "kfac", "divergence": "newton", "damping": 0.5, "chunk_size": 2, "segments": ["0", "2"]},
        closures=True,
    ),
    "warm start, damped by layer": Case({"structure": "kfac", "warm_start": True, "damping": {"2": 0.3}}),
    "sgdm": Case({"structure": "ekfac", "solver": SGDM(clip=0.1, lr=0.05)}),
    "adam": Case({"structure": "kfac", "solver": Adam()}),
    "conjugate gradients": Case({"steps": 4, "structure": "kfac", "solver": ConjugateGradient()}),
    "around adam": Case({"structure": "kfac", "steps": 6}, adam=True),
    "the paper's": Case({"divergence": "ngd", "solver": None, "steps": 25}, uneven=True),
    **everything(STRUCTURES),
    "static graph": Case({"structure": "kfac"}, ddp={"static_graph": True}),
    "static graph, newton": Case(
        {"structure": "kfac", "divergence": "newton", "damping": 0.5}, closures=True, ddp={"static_graph": True}
    ),
    "gradients in buckets": Case({"structure": "kfac"}, ddp={"gradient_as_bucket_view": True}, micro=2, no_sync=True),
    "compiled": Case({"structure": "kfac"}, compiled=True),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What one process comes to on the joined batches."""
    return {name: trained(case) for name, case in CASES.items()}


ON_FOUR = ["everything", "kfac kl", "ekfac newton", "one block", "blocks of layers", "weights"]
"""Some words of the cases that four ranks train."""


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_learn_what_one_process_does(size: int, tmp_path: Path, alone: dict[str, dict[str, Any]]) -> None:
    """Parameters, U and J after three refits to 1e-9, and on all ranks to the last bit."""
    cases = {name: case for name, case in CASES.items() if size == 2 or any(word in name for word in ON_FOUR)}
    found = on_ranks(size, tmp_path, trained_on_ranks, cases)
    for name in cases:
        expected, first = alone[name], found[0][name]
        assert all(rank[name]["counts"] == expected["counts"] for rank in found), name
        assert expected["counts"][0] == 3, name
        for kind in ("parameters", "u"):
            for key, tensor in expected[kind].items():
                torch.testing.assert_close(first[kind][key], tensor, rtol=1e-9, atol=1e-9, msg=f"{name} {kind} {key}")
                assert all(torch.equal(rank[name][kind][key], first[kind][key]) for rank in found), (name, kind, key)
        torch.testing.assert_close(first["objective"], expected["objective"], rtol=1e-9, atol=1e-12)
        assert all(rank[name]["bytes"] == expected["bytes"] for rank in found), name


def test_in_single_precision(tmp_path: Path) -> None:
    """float32 sums in another order: 1e-4 of a parameter's size after three refits."""
    cases = everything(STRUCTURES, dtype=torch.float32)
    found = on_ranks(2, tmp_path, trained_on_ranks, cases)
    for name, case in cases.items():
        for key, tensor in trained(case)["parameters"].items():
            torch.testing.assert_close(found[0][name]["parameters"][key], tensor, rtol=1e-4, atol=1e-4)
            assert torch.equal(found[0][name]["parameters"][key], found[1][name]["parameters"][key])


def test_the_loss_of_a_closure_counts_alike_on_uneven_ranks() -> None:
    """As its gradients do, with the default LLQR too; it counted by the examples of a rank."""
    draws = [
        replace(PLAIN, llqr={"divergence": divergence, "every": 2}, closures=True, rows=[10, 2])
        for divergence in ("gauss-newton", "newton")
    ]
    assert [line["wrong"] for line in on_drawn_ranks("ddp", draws)] == [[], []]
