"""Promise: gradients that are drawn from a divergence have its Hessian for second moment, at the output and in every block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR, QuadraticModel
from llqr.curvature import statistics
from llqr.curvature.linear_maps import damping_after
from llqr.divergences import (
    KL,
    L2,
    ActivationTerm,
    BasePoint,
    Bernoulli,
    Categorical,
    Divergence,
    Gaussian,
    GaussNewton,
    Intermediate,
    Newton,
    OutputTerm,
    Renyi,
    ReverseKL,
)
from loops import backward, batch, closure_of, network, sgd
from networks import relative

COPIES = 20_000
NEAR = 0.04


def cubed(output: Tensor) -> Tensor:
    """A mean loss that isn't a distribution's: Σ (x³/3 + x⁴), convex for x > 0."""
    return (output**3 / 3 + output**4).flatten(1).sum(1).mean()


def residual(output: Tensor) -> Tensor:
    return torch.cat((output.sin(), output[:, :1] * output[:, 1:2]), 1) / len(output) ** 0.5


OUTPUTS: dict[str, tuple[OutputTerm, Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "KL": (KL(), cubed, (4,)),
    "KL, added up": (KL(reduction="sum"), cubed, (4,)),
    "KL of several variables": (KL(), cubed, (2, 3)),
    "KL along another dim": (KL(Categorical(dim=1)), cubed, (3, 2)),
    "KL, Bernoulli": (KL(Bernoulli()), cubed, (3,)),
    "KL, Gaussian": (KL(Gaussian(0.3)), cubed, (3,)),
    "Renyi": (Renyi(0.7), cubed, (4,)),
    "Renyi, Gaussian": (Renyi(2.0, Gaussian(0.5)), cubed, (2,)),
    "reverse KL": (ReverseKL(), cubed, (4,)),
    "Gauss-Newton": (GaussNewton(), cubed, (3,)),
    "Gauss-Newton, own residual": (GaussNewton(residual), cubed, (3,)),
    "Newton": (Newton(), cubed, (3,)),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_slopes_at_the_output(case: str) -> None:
    """E[s sᵀ] = Q_N = ∇²ψ_N(x_N), example by example; slopes of different examples have nothing to do with each other."""
    term, loss, shape = OUTPUTS[case]
    one = torch.rand(1, *shape).double() + 0.2
    psi = loss if case == "Gauss-Newton" else lambda x: term.psi(x, BasePoint(one, loss))
    truth = torch.func.hessian(psi)(one).reshape(one.numel(), -1)
    many = one.repeat(COPIES, *(1 for _ in shape))
    drawn = term.draw(BasePoint(many, loss), torch.Generator().manual_seed(0)).reshape(COPIES, -1)
    size = 1 / COPIES if term.additive else 1.0
    assert relative(drawn.T @ drawn * size, truth) < NEAR
    assert (drawn[1:].T @ drawn[:-1] * size).norm() < NEAR * truth.norm()


@pytest.mark.parametrize(
    "metric",
    [
        0.4,
        torch.tensor([0.3, 1.0, 2.0]),
        torch.tensor([[2.0, 1, 0], [1, 2, 0.5], [0, 0.5, 1]]),
        lambda x: x.exp(),
        lambda x: x[:, None] * x[..., None],
        KL(),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_slopes_at_activations(metric: Any, reduction: str) -> None:
    """E[s sᵀ] = W: a weight, a diagonal, a matrix; functions of the activation; a divergence."""
    metric = (
        metric.double() if isinstance(metric, Tensor) else KL(reduction=reduction) if isinstance(metric, KL) else metric
    )  # type: ignore[arg-type]
    ((_, term),) = Intermediate({"0": metric}, reduction).terms()  # type: ignore[arg-type]
    assert isinstance(term, ActivationTerm)
    one = torch.randn(1, 3).double()
    truth = torch.func.hessian(lambda x: term.psi(x, BasePoint(one, cubed)))(one).reshape(3, 3)
    many = BasePoint(one.repeat(COPIES, 1), cubed, examples=COPIES)
    drawn = term.inner.draw(many, torch.Generator().manual_seed(0))
    assert relative(drawn.T @ drawn * (1 if reduction == "mean" else 1 / COPIES), truth) < NEAR


def test_variables_that_do_not_count() -> None:
    """Weights of the variables multiply the second moment; those with none have no slope."""
    weights = torch.tensor([1.0, 0.0, 3.0]).double()
    one = torch.randn(1, 3, 4).double()
    base = BasePoint(one, cubed, weights[None])
    truth = torch.func.hessian(lambda x: KL().psi(x, base))(one).reshape(12, 12)
    total = torch.zeros(12, 12).double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(4000):
        slope = KL().draw(base, generator)
        assert (slope[:, 1] == 0).all()
        total += slope.reshape(-1, 1) * slope.reshape(1, -1) / 4000
    assert relative(total, truth) < 2 * NEAR


DIVERGENCES: dict[str, Divergence] = {
    "KL": KL(),
    "Renyi": Renyi(0.5),
    "reverse KL": ReverseKL(),
    "Bernoulli": KL("bernoulli"),
    "Gaussian": KL("gaussian"),
    "Gauss-Newton": GaussNewton(),
    "Newton": Newton(),
    "intermediate": Intermediate({"0": 0.5, "2": torch.tensor([1.0, 2.0, 0.5]).double()}),
    "sum": 0.3 * KL() + 2.0 * KL("gaussian"),
    "sum with a place": KL() + 0.1 * Intermediate({1: 1.0}),
}


def block_of_hessian(quadratic: QuadraticModel, optimizer: LLQR, key: str) -> Tensor:
    """The block of H of a linear map, column by column, its numbers in the order of the map's matrix."""
    map_ = optimizer.blocks[key].map
    parameters = dict(optimizer.model.named_parameters())
    sizes = {name: parameters[name].numel() for name in map_.members}
    columns, order = [], []
    for name, size in sizes.items():
        for place in range(size):
            unit = {other: torch.zeros_like(p) for other, p in parameters.items()}
            unit[name].view(-1)[place] = 1
            columns.append(map_.read(quadratic.curvature(unit)).reshape(-1))
            order.append(int(map_.read(unit).reshape(-1).argmax()))
    matrix = torch.stack(columns, 1)
    return matrix[:, torch.tensor(order).argsort()]


@pytest.mark.parametrize("case", DIVERGENCES)
def test_blocks_of_the_hessian(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ_n v_n v_nᵀ of a batch with many copies of each example is near H's own blocks; Newton's are Gauss–Newton's."""
    monkeypatch.setattr(statistics, "PLACES", 10**9)
    divergence = DIVERGENCES[case]
    model = network()
    x, y = batch(size=4)
    truth_of = GaussNewton() if case == "Newton" else divergence
    quadratic = QuadraticModel.build(copy.deepcopy(model), x, y, functional.cross_entropy, truth_of)
    optimizer = LLQR(sgd(model, 0.0), model, divergence, "dense")
    many = x.repeat(3000, 1), y.repeat(3000)
    if case in ("Bernoulli", "Gaussian"):  # of which a cross-entropy isn't
        model(many[0]).square().mean().backward()
        optimizer.step()
    else:
        optimizer.step(closure_of(model, optimizer, many))
    assert set(optimizer.blocks) == {"0.weight", "2.weight"}
    for key, block in optimizer.blocks.items():
        truth = block_of_hessian(quadratic, optimizer, key)
        assert relative(block.moments["whole"][0], truth) < 2 * NEAR, key


@pytest.mark.parametrize("name", ["ngd", "renyi", "reverse-kl"])
def test_names(name: str) -> None:
    """As strings, with `step()` alone."""
    model = network()
    optimizer = LLQR(sgd(model), model, name)
    backward(model, batch())
    optimizer.step()
    assert optimizer.stats.refits == 1
    assert set(optimizer.blocks) == {"0.weight", "2.weight"}


def test_ignored_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that the loss doesn't look at (ignore_index) don't count: H is that of the others alone."""
    monkeypatch.setattr(statistics, "PLACES", 10**9)
    model = nn.Linear(2, 3).double()
    x = torch.randn(2, 3, 2).double()
    counts = torch.tensor([[True, True, False], [True, False, False]])
    quadratic = QuadraticModel.build(
        copy.deepcopy(model), x[counts], torch.zeros(3).long(), functional.cross_entropy, KL()
    )
    many, labels = x.repeat(4000, 1, 1), torch.where(counts, 1, -100).repeat(4000, 1)
    optimizer = LLQR(sgd(model, 0.0), model, "ngd", "dense")
    functional.cross_entropy(model(many).flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
    truth = block_of_hessian(quadratic, optimizer, "weight")
    assert relative(optimizer.blocks["weight"].moments["whole"][0], truth) < 2 * NEAR


def test_draws_are_those_of_the_step() -> None:
    """The same step draws the same, another step others; the streams of the training are left alone."""
    found = []
    for later in (False, False, True):
        model = network()
        optimizer = LLQR(sgd(model, 0.0), model, "ngd", every=1)
        for _ in range(1 + later):
            optimizer.blocks = {}
            backward(model, batch())
            state = torch.get_rng_state()
            optimizer.step()
            assert torch.equal(state, torch.get_rng_state())
        found.append(optimizer.blocks["2.weight"].moments["rows"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("structure", ["scalar", "diagonal", "kfac", "ekfac", "dense"])
def test_l2_is_added_to_the_damping(structure: str) -> None:
    """λ = damping · mean + w: a U that is fitted with L2 is the closed form at that damping; also after a load."""
    model = network()
    weight = {"0": 0.3, "2.bias": 5.0}
    optimizer = LLQR(sgd(model, 0.0), model, KL() + 2.0 * L2(weight), structure)
    plain = LLQR(sgd(model, 0.0), model, KL(), structure)
    backward(model, batch())
    optimizer.step()
    plain.step()
    for key, added in [("0.weight", 0.6), ("2.weight", 0.0)]:
        block, other = optimizer.blocks[key], plain.blocks[key]
        mean = float(block.structure.mean_curvature(block.moments)[0])
        whole = dense_curvature(block.moments)
        assert mean == pytest.approx(float(whole.diagonal().mean()), rel=1e-9)
        truth = block.structure.closed_form(block.moments, damping_after(block.refits) + added / mean)
        for name, tensor in truth.items():
            torch.testing.assert_close(block.inverse[name], tensor, rtol=1e-10, atol=1e-12)
        unchanged = all(torch.equal(other.inverse[name], tensor) for name, tensor in truth.items())
        assert unchanged == (added == 0)
    again = LLQR(sgd(model, 0.0), model, KL() + 2.0 * L2(weight), structure)
    again.load_state_dict(optimizer.state_dict())
    for name, tensor in optimizer.blocks["0.weight"].inverse.items():
        assert torch.equal(again.blocks["0.weight"].inverse[name], tensor)


def dense_curvature(moments: dict[str, Tensor]) -> Tensor:
    """H as a matrix, its numbers in the order of the matrix's rows."""
    if "whole" in moments:
        return moments["whole"][0]
    if "squares" in moments:
        return moments["squares"][0].reshape(-1).diag()
    return torch.kron(moments["rows"][0], moments["columns"][0])


def test_l2_of_what_there_is_not() -> None:
    """Said when the optimizer is made."""
    model = network()
    with pytest.raises(ValueError, match=r"unknown module or parameter in L2 weights 'lost'"):
        LLQR(sgd(model), model, KL() + L2({"lost": 1.0}))
