"""Spectra of U against its dense blocks, and staleness against J written out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llqr import LLQR, Preconditioner, QuadraticModel, fit
from llqr.diagnostics import QUANTILES, comparison, spectra, staleness
from llqr.divergences import KL
from llqr.errors import LLQRError
from llqr.solvers import SGDM, ScaleFree
from llqr.structures import EigenKronecker, Kronecker

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "b.weight": (4, 3, 2, 2), "c": ()}


def learned(structure: Any, shapes: dict[str, tuple[int, ...]] | None = None, spread: float = 0.3) -> Preconditioner:
    """U moved away from the identity at random, as a fit would."""
    u = Preconditioner.identity({n: torch.zeros(s).double() for n, s in (shapes or SHAPES).items()}, structure)
    return u.moved([torch.randn_like(tensor) for tensor in u.tensors], spread)


def matrix(u: Preconditioner, names: list[str], shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """A block of U as a matrix: U e_j column by column."""
    sizes = [torch.Size(shapes[n]).numel() for n in names]
    columns = []
    for unit in torch.eye(sum(sizes)).double():
        given = {n: part.reshape(shapes[n]) for n, part in zip(names, unit.split(sizes), strict=True)}
        columns.append(torch.cat([part.reshape(-1) for part in u.apply(given).values()]))
    return torch.stack(columns, 1)


STRUCTURES = ["scalar", "diagonal", "kfac", "ekfac", "dense", Kronecker(max_dim=3), EigenKronecker(max_dim=3)]


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_small_blocks_have_their_exact_spectra(structure: Any) -> None:
    u = learned(structure)
    found = spectra(u)
    assert list(found) == list(u.blocks)
    for name, values in found.items():
        dense = matrix(u, [name], SHAPES)
        symmetric = torch.allclose(dense, dense.T)
        truth = torch.linalg.eigvalsh(dense) if symmetric else torch.linalg.svdvals(dense).sort().values
        assert torch.allclose(values.expand_as(truth), truth, atol=1e-9)  # of a scalar one number stands for all


def test_factors_with_diagonal_sides_and_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """max_dim makes the long side a vector; beyond MOST values some are chosen, the ends among them."""
    shapes = {"w": (5, 40)}
    u = learned(Kronecker(max_dim=8), shapes)
    whole = spectra(u)["w"]
    assert torch.allclose(whole, torch.linalg.svdvals(matrix(u, ["w"], shapes)).sort().values)
    monkeypatch.setattr(comparison, "MOST", 100)
    some = spectra(u)["w"]
    assert 1 < len(some) <= 100
    assert some[[0, -1]].tolist() == pytest.approx(whole[[0, -1]].tolist())


def test_what_has_no_spectrum() -> None:
    with pytest.raises(LLQRError, match=r"optimizer\.preconditioner"):
        spectra(None)  # type: ignore[arg-type]
    assert set(spectra(learned("ekfac", {"w": (24, 30), "b": (24,)}))) == {"b"}  # 720 × 720 isn't formed
    u = learned("diagonal")
    u.groups[0].tensors["d"].fill_(float("nan"))
    with pytest.raises(LLQRError, match="U isn't finite"):
        spectra(u)


# --- staleness ---


def setting() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, torch.randn(12, 4).double(), torch.randint(3, (12,))


def test_staleness_is_what_is_lost_of_a_fresh_fits_gain() -> None:
    """(J(U) - J(fresh)) / (J(I) - J(fresh)), with J(U) = g·δ + ½ δ·Hδ at δ = -U g."""
    model, inputs, targets = setting()
    base = torch.optim.SGD(model.parameters(), lr=2.0)
    optimizer = LLQR.paper(base, model, structure="kfac", every=100, steps=25, damping=0.01)
    cross_entropy(model(inputs), targets).backward()
    assert optimizer.refit(inputs[:4], targets[:4], cross_entropy)
    q = QuadraticModel.build(model, inputs, targets, cross_entropy, KL(reduction="sum"), 0.01)
    assert optimizer.preconditioner is not None

    def j(u: Preconditioner | None) -> float:
        step = {n: -v for n, v in (q.gradient if u is None else u.apply(q.gradient)).items()}
        curved = q.curvature(step)
        return float(sum((q.gradient[n] * v + 0.5 * curved[n] * v).sum() for n, v in step.items()))

    found = staleness(optimizer, inputs, targets, cross_entropy)
    truth = [j(None), j(optimizer.preconditioner), j(fit(q, "kfac", optimizer.solver, steps=25))]
    assert [found.identity, found.current, found.fresh] == pytest.approx(truth, rel=1e-9)
    assert found.staleness == pytest.approx((truth[1] - truth[2]) / (truth[0] - truth[2]), rel=1e-6)
    assert found.staleness > 1e-3
    optimizer.preconditioner = Preconditioner.identity(q.gradient, "kfac")
    assert staleness(optimizer, inputs, targets, cross_entropy).staleness == pytest.approx(1)


@pytest.mark.parametrize("solver", [None, ScaleFree(), SGDM(lr=0.5)], ids=str)
def test_staleness_of_an_optimizer_is_by_its_own_objective(solver: Any) -> None:
    """With ema=0 and on the batch of its last refit, U is the fresh fit itself: 0; elsewhere it isn't."""
    model, inputs, targets = setting()
    base = torch.optim.SGD(model.parameters(), lr=2.0)
    optimizer = LLQR.paper(base, model, structure="kfac", every=100, steps=6, ema=0.0, solver=solver, damping=0.01)
    cross_entropy(model(inputs), targets).backward()
    assert optimizer.refit(inputs, targets, cross_entropy)
    before = copy.deepcopy(optimizer.state_dict())
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found = staleness(optimizer, inputs, targets, cross_entropy)
    assert found.staleness == pytest.approx(0, abs=1e-6)
    assert found.fresh < found.identity
    assert staleness(optimizer, inputs[:5], targets[:5], cross_entropy).staleness > 1e-3
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    after = optimizer.state_dict()
    assert after["llqr"]["stats"] == before["llqr"]["stats"]
    blocks = [state["llqr"]["preconditioner"]["blocks"] for state in (before, after)]
    assert all(torch.equal(t, blocks[1][b][n]) for b, tensors in blocks[0].items() for n, t in tensors.items())


def test_staleness_of_what_has_no_u() -> None:
    model, inputs, targets = setting()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LLQRError, match=r"that of the U of LLQR\.paper; this is a SGD"):
        staleness(base, inputs, targets, cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match="there is no U yet"):
        staleness(LLQR.paper(base, model, structure="diagonal"), inputs, targets, cross_entropy)


def test_quantiles_that_are_logged_include_the_ends() -> None:
    assert (QUANTILES[0], QUANTILES[-1]) == (0.0, 1.0)


def test_the_objective_of_an_optimizer_is_that_of_its_refits() -> None:
    """g and H·v of optimizer.objective(batch) are those of QuadraticModel.build with the paper's KL, evaluated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))
    inputs, targets = torch.randn(8, 4), torch.randint(3, (8,))
    optimizer = LLQR.paper(torch.optim.SGD(model.parameters(), lr=0.1), model, damping=0.1)
    truth = QuadraticModel.build(model, inputs, targets, cross_entropy, KL(reduction="sum"), 0.1, training=False)
    q = optimizer.objective(inputs, targets, cross_entropy)
    v = {name: torch.randn_like(g) for name, g in truth.gradient.items()}
    expected, found = truth.curvature(v), q.curvature(v)
    for name, g in truth.gradient.items():
        torch.testing.assert_close(q.gradient[name], g)
        torch.testing.assert_close(found[name], expected[name])
    assert optimizer.preconditioner is None
    assert optimizer.stats.refits == 0
