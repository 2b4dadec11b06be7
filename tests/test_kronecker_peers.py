"""Promises: our K-FAC and AdaFisher do what their formulas say, layer by layer, and go on after a stop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.experiments.peers import KFAC, AdaFisher, sides


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4))
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randint(4, (5,))


def loss_of(model: nn.Module) -> Tensor:
    inputs, targets = batch()
    return functional.cross_entropy(model(inputs), targets)


def observed(model: nn.Sequential) -> dict[int, tuple[Tensor, Tensor]]:
    """What layers 0 and 4 are given, and the gradients of the mean loss at what they return."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    x, targets = batch()
    outputs = {}
    for number, layer in enumerate(model):
        given, x = x, layer(x)
        outputs[number] = (given.detach(), x)
    slopes = torch.autograd.grad(functional.cross_entropy(x, targets), [outputs[n][1] for n in (0, 1, 4)])
    for number, slope in zip((0, 1, 4), slopes, strict=True):
        seen[number] = (outputs[number][0], slope)
    return seen


def test_the_sides_of_a_layer_make_its_gradient() -> None:
    """∂L/∂[W b] = Σ g aᵀ over examples and places."""
    model = network()
    loss_of(model).backward()
    for number in (0, 4):
        layer: Any = model[number]
        a, g = sides(layer, *observed(model)[number])
        whole = torch.cat((layer.weight.grad.flatten(1), layer.bias.grad[:, None]), 1)
        torch.testing.assert_close(torch.einsum("bti,btj->ij", g, a), whole)


def test_kfac_is_its_formula() -> None:
    """vec Δ = ((A + π√λ) ⊗ (G + √λ/π))⁻¹ vec ∇, by dense algebra; A = E Σ a aᵀ and G = E Σ g gᵀ / T of each example's loss."""
    model = network()
    before = copy.deepcopy(model)
    slopes = torch.autograd.grad(loss_of(before), list(before.parameters()))
    by_name = dict(zip((name for name, _ in before.named_parameters()), slopes, strict=True))
    seen, damping = observed(before), 0.01
    optimizer = KFAC(model, lr=1.0, momentum=0.0, weight_decay=0.1)
    optimizer.damping, optimizer.clip = damping, 1e9
    optimizer.step(lambda: loss_of(model).backward())
    moved = {name: before.get_parameter(name) - p for name, p in model.named_parameters()}
    slopes_of = {name: slope + 0.1 * before.get_parameter(name) for name, slope in by_name.items()}
    for number in (0, 4):
        a, g = sides(before[number], *seen[number])
        examples, places = a.shape[:2]
        large = sum(torch.outer(a[b, t], a[b, t]) for b in range(examples) for t in range(places)) / examples
        g = examples * g
        other = sum(torch.outer(g[b, t], g[b, t]) for b in range(examples) for t in range(places)) / (examples * places)
        assert isinstance(large, Tensor)
        assert isinstance(other, Tensor)
        balance = (large.trace() / len(large) / (other.trace() / len(other))).sqrt()
        eye = [torch.eye(len(each), dtype=torch.float64) for each in (large, other)]
        dense = torch.kron(other + damping**0.5 / balance * eye[1], large + balance * damping**0.5 * eye[0])
        names = (f"{number}.weight", f"{number}.bias")
        joined, step = (
            torch.cat((found[names[0]].flatten(1), found[names[1]][:, None]), 1) for found in (slopes_of, moved)
        )
        torch.testing.assert_close(torch.linalg.solve(dense, joined.reshape(-1)), step.reshape(-1))
    torch.testing.assert_close(moved["1.weight"], slopes_of["1.weight"])  # no layer that it knows


def test_kfac_shortens_all_gradients_together() -> None:
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = KFAC(model, lr=1.0, momentum=0.0)
    optimizer.clip = 0.5
    optimizer.step(lambda: loss_of(model).backward())
    steps = [(p.detach() - old).norm() for p, old in zip(model.parameters(), before, strict=True)]
    assert float(torch.stack(steps).norm()) == pytest.approx(0.5)


def test_adafisher_is_its_formula() -> None:
    """Two looks: θ ← θ - lr m̂/F̃, F̃ = diag(A)' ⊗ diag(G)' + λ, both averaged with γ; BatchNorm's is diag(G)' + λ."""
    model = network()
    optimizer = AdaFisher(model, lr=0.01, momentum=0.9)
    optimizer.damping, optimizer.every, optimizer.memory = 0.02, 1, 0.7
    means = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    kept: dict[str, Tensor] = {}
    for count in (1, 2):
        before = copy.deepcopy(model)
        slopes = torch.autograd.grad(loss_of(before), list(before.parameters()))
        for (name, _), slope in zip(before.named_parameters(), slopes, strict=True):
            means[name] = 0.9 * means[name] + 0.1 * slope
        fisher: dict[str, Tensor] = {}
        for number, (given, slope) in observed(before).items():
            if number == 1:
                squares = {"G1": slope.square().mean((0, 2, 3)) * 25}
            else:
                a, g = sides(before[number], given, 5 * slope)
                squares = {f"A{number}": a.square().mean((0, 1)), f"G{number}": g.square().mean((0, 1))}
            for name, new in squares.items():
                kept[name] = new if name not in kept else 0.7 * kept[name] + 0.3 * new
            one = {k: (v - v.min()) / (v.max() - v.min()) for k, v in kept.items() if k.endswith(str(number))}
            if number == 1:
                fisher |= dict.fromkeys(("1.weight", "1.bias"), one["G1"] + 0.02)
            else:
                whole = torch.outer(one[f"G{number}"], one[f"A{number}"]) + 0.02
                shape = before.get_parameter(f"{number}.weight").shape
                fisher |= {f"{number}.weight": whole[:, :-1].reshape(shape), f"{number}.bias": whole[:, -1]}
        optimizer.zero_grad()
        optimizer.step(lambda: loss_of(model).backward())
        for name, p in model.named_parameters():
            wanted = before.get_parameter(name) - 0.01 * means[name] / (1 - 0.9**count) / fisher[name]
            torch.testing.assert_close(p, wanted, msg=name)


@pytest.mark.parametrize("kind", [KFAC, AdaFisher])
def test_a_run_goes_on_where_it_was(kind: type[KFAC] | type[AdaFisher]) -> None:
    def step(model: nn.Module, optimizer: KFAC | AdaFisher) -> None:
        optimizer.zero_grad()
        optimizer.step(lambda: loss_of(model).backward())

    model = network()
    optimizer = kind(model, lr=0.01)
    step(model, optimizer)
    other = network()
    other.load_state_dict(model.state_dict())
    resumed = kind(other, lr=0.01)
    optimizer.every = resumed.every = 2
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        step(model, optimizer)
        step(other, resumed)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
