"""Promise: LLQR.paper is Algorithm 1 of the paper, number for number.

The reference is written out here: dense H, U's action as in `llqr.minimal`, ∇_U J by autograd, the paper's inner solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Optimizer

from llqr import LLQR
from llqr.divergences import KL, Divergence, Newton
from llqr.minimal import apply, identity
from llqr.solvers import SGDM
from loops import CLASSES, SIZE, STRUCTURES, batch, closure_of, network, parameters_of

EVERY, REFITS = 3, 3
MOMENTUM = 0.9


class Inner(NamedTuple):
    """Of a fit: its steps, their size, and what they are clipped to."""

    steps: int = 6
    lr: float = 0.05
    clip: float = math.inf


INNER = Inner()

Tensors = dict[str, Tensor]
Bases = dict[str, Callable[[Any], Optimizer]]

BASES: Bases = {
    "sgdm": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}
DIVERGENCES: dict[str, Divergence] = {
    "mean": KL(reduction="mean"),
    "sum": KL(reduction="sum"),
    "newton": Newton(),
}


def dense_curvature(model: nn.Module, x: Tensor, y: Tensor, divergence: str) -> Tensor:
    """H as a matrix: the Hessian of the mean loss, or Σ_b J_bᵀ (diag p - p pᵀ) J_b, averaged or not."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    point = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def outputs(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        named = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return torch.as_tensor(functional_call(model, named, (x,)))

    if divergence == "newton":
        hessian = torch.autograd.functional.hessian(lambda flat: functional.cross_entropy(outputs(flat), y), point)
        return torch.as_tensor(hessian)
    jacobian = torch.as_tensor(torch.autograd.functional.jacobian(outputs, point))
    p = outputs(point).softmax(-1)
    fisher = torch.einsum("bip,bij,bjq->pq", jacobian, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], jacobian)
    return fisher * {"mean": 1 / len(x), "sum": 1.0, "half": 0.5}[divergence]


def scaled(number: int, scale: float) -> tuple[Tensor, Tensor]:
    """A batch with inputs that are so many times as large."""
    x, y = batch(number)
    return scale * x, y


def fitted(start: dict[str, Tensors], g: Tensors, curvature: Tensor, inner: Inner) -> dict[str, Tensors]:
    """T steps of gradient descent with momentum on J(U) = g·δ + ½ δ·Hδ, δ = -U g, each tensor's slope clipped."""
    u = {name: {n: t.clone() for n, t in tensors.items()} for name, tensors in start.items()}
    velocity: dict[tuple[str, str], Tensor] = {}
    flat = torch.cat([value.reshape(-1) for value in g.values()])
    for _ in range(inner.steps):
        leaves = {(name, n): t.clone().requires_grad_() for name, tensors in u.items() for n, t in tensors.items()}
        of = {name: {n: leaf for (owner, n), leaf in leaves.items() if owner == name} for name in u}
        delta = torch.cat([-apply(of[name], g[name]).reshape(-1) for name in g])
        slopes = torch.autograd.grad(flat @ delta + 0.5 * delta @ curvature @ delta, list(leaves.values()))
        for (name, n), slope in zip(leaves, slopes, strict=True):
            kept = slope * min(1.0, inner.clip / float(slope.norm()))
            velocity[name, n] = MOMENTUM * velocity.get((name, n), torch.zeros_like(slope)) + kept
            u[name][n] = u[name][n] - inner.lr * velocity[name, n]
    return u


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
    """Of the mean loss, by name."""
    slopes = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    return {name: slope for (name, _), slope in zip(model.named_parameters(), slopes, strict=True)}


def noisy_network() -> nn.Sequential:
    """With BatchNorm and dropout."""
    torch.manual_seed(0)
    layers = [nn.Linear(SIZE, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, CLASSES)]
    return nn.Sequential(*layers).double()


def reference(
    base: str,
    divergence: str,
    structure: str,
    ema: float,
    warm_start: bool,
    inner: Inner = INNER,
    scale: float = 1.0,
    model: nn.Module | None = None,
    fresh: int = 0,
) -> Tensors:
    """Algorithm 1. A refit's g and H are of the evaluated network (running BatchNorm statistics, no dropout), on the batch of
    the step, or on one whose number is `fresh` more."""
    model = model or network()
    optimizer = BASES[base](model.parameters())
    one = {name: identity(structure, p.detach()) for name, p in model.named_parameters()}
    u = one
    for k in range(EVERY * REFITS):
        torch.manual_seed(k)  # the dropout masks
        g = gradient(model, *scaled(k, scale))
        if k % EVERY == 0:
            model.eval()
            x, y = scaled(k + fresh, scale)
            curvature = dense_curvature(model, x, y, divergence)
            new = fitted(u if warm_start else one, gradient(model, x, y), curvature, inner)
            model.train()
            u = {name: {n: ema * t + (1 - ema) * new[name][n] for n, t in own.items()} for name, own in u.items()}
        for name, p in model.named_parameters():
            p.grad = apply(u[name], g[name])
        optimizer.step()
    return parameters_of(model)


def ours(base: str, divergence: str, structure: str, ema: float, warm_start: bool) -> Tensors:
    model = network()
    optimizer = LLQR.paper(
        BASES[base](model.parameters()),
        model,
        DIVERGENCES[divergence],
        structure,
        EVERY,
        steps=INNER.steps,
        solver=SGDM(INNER.lr, MOMENTUM),
        ema=ema,
        warm_start=warm_start,
    )
    for k in range(EVERY * REFITS):
        closure = closure_of(model, optimizer, batch(k))
        if divergence == "newton":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (REFITS, 0)
    return parameters_of(model)


def alone(base: str) -> Tensors:
    model = network()
    optimizer = BASES[base](model.parameters())
    for k in range(EVERY * REFITS):
        optimizer.step(closure_of(model, optimizer, batch(k)))
    return parameters_of(model)


def distance(first: Tensors, second: Tensors) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("base", BASES)
def test_algorithm_1(base: str, divergence: str, structure: str) -> None:
    got = ours(base, divergence, structure, 0.6, False)
    assert distance(got, reference(base, divergence, structure, 0.6, False)) < 1e-9
    assert distance(got, alone(base)) > 1e-6


@pytest.mark.parametrize(("name", "fisher"), [("ngd", "sum"), ("reverse-kl", "sum"), ("renyi", "half")])
def test_divergences_between_outputs_are_sums_by_name(name: str, fisher: str) -> None:
    """H = a Σ_b J_bᵀ (diag p - p pᵀ) J_b, the joint distribution's of the batch; a = 1, and ½ for Rényi's of order ½."""
    model = network()
    optimizer = LLQR.paper(BASES["sgdm"](model.parameters()), model, name, every=EVERY)
    for k in range(EVERY * REFITS):
        closure_of(model, optimizer, batch(k))()
        optimizer.step()
    expected = reference("sgdm", fisher, "ekfac", 0.95, False, Inner(25, 0.005, 5.0))
    assert distance(parameters_of(model), expected) < 1e-9


@pytest.mark.parametrize("fresh", [0, 50], ids=["the step's batch", "a fresh batch"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("divergence", ["ngd", "newton"])
def test_algorithm_1_under_batchnorm_and_dropout(divergence: str, structure: str, fresh: int) -> None:
    """With nothing set but the period: the loss by a closure, or a batch of the refit's own."""
    model = noisy_network()
    now = [0]
    own = {"loss_fn": functional.cross_entropy, "refit_batch": lambda: batch(now[0] + fresh)}
    base = BASES["sgdm"](model.parameters())
    optimizer = LLQR.paper(base, model, divergence, structure, EVERY, **(own if fresh else {}))
    for k in range(EVERY * REFITS):
        now[0] = k
        torch.manual_seed(k)
        closure = closure_of(model, optimizer, batch(k))
        if fresh:
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (REFITS, 0)
    kind, ema = ("newton", 0.9) if divergence == "newton" else ("sum", 0.95)
    paper, other = Inner(25, 0.005, 5.0), noisy_network()
    expected = reference("sgdm", kind, structure, ema, False, paper, model=other, fresh=fresh)
    assert distance(parameters_of(model), expected) < 1e-9
    assert distance(dict(model.named_buffers()), dict(other.named_buffers())) < 1e-9
    elsewhere = reference("sgdm", kind, structure, ema, False, paper, model=noisy_network(), fresh=50 - fresh)
    assert distance(expected, elsewhere) > 1e-6


def test_a_batch_without_a_loss_meets_the_masks_of_the_step() -> None:
    """With the step's own examples as the refit's batch, H is that of a refit on the step."""
    trained = []
    for own in (True, False):
        model, now = noisy_network(), [0]
        options: dict[str, Any] = {"refit_batch": lambda now=now: (batch(now[0])[0], None)} if own else {}
        optimizer = LLQR.paper(BASES["sgdm"](model.parameters()), model, every=EVERY, **options)
        for now[0] in range(EVERY * REFITS):
            torch.manual_seed(now[0])
            closure_of(model, optimizer, batch(now[0]))()
            optimizer.step()
        assert optimizer.stats.refits == REFITS
        trained.append(parameters_of(model))
    assert distance(*trained) < 1e-12


def test_a_finite_fit_is_taken_whatever_its_objective() -> None:
    """Six steps at a rate that raises J: Algorithm 1 has no test of it."""
    model = network()
    solver = SGDM(lr=20.0, momentum=MOMENTUM)
    optimizer = LLQR.paper(
        BASES["sgdm"](model.parameters()), model, "ngd", "diagonal", EVERY, steps=INNER.steps, solver=solver, ema=0.999
    )
    for k in range(EVERY * REFITS):
        closure_of(model, optimizer, batch(k))()
        optimizer.step()
    before, after = optimizer.stats.objective_before, optimizer.stats.objective_after
    assert before is not None
    assert after is not None
    assert after > before
    expected = reference("sgdm", "sum", "diagonal", 0.999, False, INNER._replace(lr=20.0))
    assert distance(parameters_of(model), expected) < 1e-9
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (REFITS, 0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("divergence", "ema"), [("mean", 0.0), ("newton", 0.5)])
def test_warm_start(divergence: str, structure: str, ema: float) -> None:
    """The fit begins at U, and is blended with it all the same."""
    got = ours("sgdm", divergence, structure, ema, True)
    assert distance(got, reference("sgdm", divergence, structure, ema, True)) < 1e-9
    assert distance(got, ours("sgdm", divergence, structure, ema, False)) > 1e-6


@pytest.mark.parametrize(("scale", "clips"), [(1.0, False), (10.0, True)])
def test_the_papers_hyperparameters_are_the_defaults(scale: float, clips: bool) -> None:
    """25 steps of SGDM at 0.005, clipped to 5 where inputs are large, on the KL divergence summed over the batch."""
    model = network()
    optimizer = LLQR.paper(BASES["sgdm"](model.parameters()), model, every=EVERY)
    for k in range(EVERY * REFITS):
        closure_of(model, optimizer, scaled(k, scale))()
        optimizer.step()
    assert optimizer.stats.refits == REFITS
    paper = Inner(25, 0.005, 5.0)
    expected = reference("sgdm", "sum", "ekfac", 0.95, False, paper, scale)
    assert distance(parameters_of(model), expected) < 1e-9
    unclipped = reference("sgdm", "sum", "ekfac", 0.95, False, paper._replace(clip=math.inf), scale)
    assert (distance(unclipped, expected) <= 1e-6) != clips  # without it these diverge
    assert "every=500" in repr(LLQR.paper(optimizer.base, model))
    base = BASES["sgdm"](model.parameters())
    for divergence, ema in [("ngd", 0.95), ("renyi", 0.95), ("gauss-newton", 0.95), ("newton", 0.9)]:
        assert LLQR.paper(base, model, divergence).ema == ema
    assert LLQR.paper(base, model, KL() + Newton(), ema=None).ema == 0.9
    assert LLQR.paper(base, model, ema=0.0).ema == 0.0
