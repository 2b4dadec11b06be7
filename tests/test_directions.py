"""Promise: a step goes along U m, m the base's momentum, tensor by tensor as far as the base's own; the rest is the base's."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from llqr import LLQR
from llqr.base_step import STEEPNESS, Momentum, turn
from llqr.curvature.linear_maps import Block, LinearMap, Stack, damping_after
from llqr.curvature.statistics import Sums
from llqr.minimal import steep_direction
from llqr.structures import Dense, EigenKronecker, Kronecker
from llqr.structures.base import Structure
from llqr.wrapper import LONGEST, often_at_first
from loops import STRUCTURES, assert_same, backward, batch, network, never, parameters_of, train

Parameters = Iterable[Tensor] | list[dict[str, Any]]


class Lion(Optimizer):
    """The sign of an average; decoupled weight decay. Its momentum has a name that nobody knows."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (0.9 * mean + 0.1 * p.grad).sign())
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


class Writing(Optimizer):
    """SGD with Nesterov's momentum as many write it: the gradient's memory becomes the step's, and is cleared after it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                d = p.grad
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).mul_(0.9).add_(d)
                p.sub_(group["lr"] * d.add_(mean, alpha=0.9))
                p.grad = None


BASES: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD, momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "SGD, nesterov": lambda p: SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "SGD, nesterov, foreach": lambda p: SGD(p, lr=0.1, momentum=0.8, nesterov=True, foreach=True),
    "SGD, dampening": lambda p: SGD(p, lr=0.1, momentum=0.8, dampening=0.3),
    "SGD, weight decay": lambda p: SGD(p, lr=0.1, weight_decay=0.2),
    "SGD, all": lambda p: SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.2, maximize=True),
    "SGD, maximize": lambda p: SGD(p, lr=0.1, maximize=True),
    "SGD, momentum and decay": lambda p: SGD(p, lr=0.1, momentum=0.8, weight_decay=0.2, foreach=True),
    "Adam": lambda p: Adam(p, lr=0.01),
    "Adam, short average": lambda p: Adam(p, lr=0.01, betas=(0.5, 0.99)),
    "Adam, weight decay, amsgrad": lambda p: Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "Adam, maximize": lambda p: Adam(p, lr=0.01, maximize=True),
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.5),
    "AdamW, fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.5, fused=True),
    "AdamW, learning rate in a tensor": lambda p: AdamW(p, lr=torch.tensor(0.01), weight_decay=0.5),
    "NAdam": lambda p: NAdam(p, lr=0.01, weight_decay=0.1),
    "NAdam, decoupled": lambda p: NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: RAdam(p, lr=0.01),
    "Adamax": lambda p: Adamax(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: RMSprop(p, lr=0.01),
    "RMSprop, maximize": lambda p: RMSprop(p, lr=0.01, maximize=True),
    "RMSprop, weight decay": lambda p: RMSprop(p, lr=0.01, weight_decay=0.3),
    "Adagrad": lambda p: Adagrad(p, lr=0.05, weight_decay=0.1),
    "Lion": lambda p: Lion(p, lr=0.01),
    "writes into gradients": lambda p: Writing(p, lr=0.05),
    "Lion, weight decay": lambda p: Lion(p, lr=0.01, weight_decay=0.4),
}


def copies(model: nn.Module, base: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Both as they are, gradients included, which torch doesn't copy."""
    other, optimizer = copy.deepcopy((model, base))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    return other, optimizer


class Reference:
    """The momenta of all bases, from their papers, as Nesterov's step has them: of the gradient with its coupled weight decay,
    the sign of a descent."""

    DECOUPLED = (AdamW, Lion)

    def __init__(self, base: Optimizer) -> None:
        self.base, self.m = base, {}
        self.kind, self.group = type(base), base.param_groups[0]
        self.decoupled = self.kind in self.DECOUPLED or self.group.get("decoupled_weight_decay", False)

    def momentum(self, name: str, p: Tensor) -> Tensor:
        assert p.grad is not None
        g = -p.grad if self.group.get("maximize") else p.grad.clone()
        if self.group["weight_decay"] and not self.decoupled:
            g = g + self.group["weight_decay"] * p.detach()
        if self.kind is SGD:
            mu = self.group["momentum"]
            self.m[name] = mu * self.m[name] + (1 - self.group["dampening"]) * g if name in self.m else g
            return (1 - self.group["dampening"]) * g + mu * self.m[name]
        beta = self.group["betas"][0] if "betas" in self.group else 0.9
        self.m[name] = beta * self.m.get(name, torch.zeros_like(g)) + (1 - beta) * g
        return beta * self.m[name] + (1 - beta) * g

    def decay(self) -> float:
        return 1 - float(self.group["lr"]) * self.group["weight_decay"] if self.decoupled else 1.0


def directions(optimizer: LLQR, key: str, momenta: dict[str, Tensor]) -> dict[str, Tensor]:
    """C M D of a Kronecker block by dense inverses; M is the weight's momentum with the bias's as a last column.

    The damping of A is the same for all inputs, √λ mean A_ii, but for those of the data: √λ √A_jj mean √A_ii.
    """
    block = optimizer.blocks[key]
    bias = key.replace("weight", "bias")
    joined = torch.cat((momenta[key], momenta[bias][:, None]), 1)
    g, a = (block.moments[side][0] for side in ("rows", "columns"))
    root = damping_after(block.refits) ** 0.5
    sizes = a.diagonal().sqrt()
    data = sizes * sizes.mean() if key == "0.weight" else a.diagonal().mean().expand(len(a))
    c = torch.linalg.inv(g + root * g.diagonal().mean() * torch.eye(len(g)).double())
    d = torch.linalg.inv(a + root * torch.diag(data))
    turned = c @ joined @ d
    return {key: turned[:, :-1], bias: turned[:, -1]}


@pytest.mark.parametrize("case", BASES)
def test_steps(case: str) -> None:
    """θ ← decay · θ - ‖Δ‖ U m / ‖U m‖ for weights and biases, Δ what the base alone steps from the same place."""
    model = network()
    optimizer = LLQR(BASES[case](model.parameters()), model)
    reference = Reference(optimizer.base)
    for number in range(4):
        backward(model, batch(number))
        before = parameters_of(model)
        momenta = {name: reference.momentum(name, p) for name, p in model.named_parameters()}
        alone, base = copies(model, optimizer.base)
        base.step()
        optimizer.step()
        decay = reference.decay()
        for key in ("0.weight", "2.weight"):
            for name, direction in directions(optimizer, key, momenta).items():
                length = (alone.get_parameter(name).detach() - decay * before[name]).norm()
                expected = decay * before[name] - length * steep_direction(direction, momenta[name])
                torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=1e-8, atol=1e-10)
    assert (optimizer.stats.refits, optimizer.stats.nonfinite) == (4, 0)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon(nesterov: bool) -> None:
    """Its momentum is an average, its weight decay is decoupled."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)
    model = nn.Sequential(nn.PReLU(), *layers).double()
    base = torch.optim.Muon(model[1:].parameters(), lr=0.02, weight_decay=0.3, momentum=0.9, nesterov=nesterov)
    optimizer = LLQR(base, model)
    means: dict[str, Tensor] = {}
    for number in range(3):
        backward(model, batch(number))
        before = parameters_of(model)
        alone, other = copies(model, base)
        other.step()
        optimizer.step()
        for name, block in optimizer.blocks.items():
            g = model.get_parameter(name).grad
            assert g is not None
            means[name] = 0.9 * means.get(name, torch.zeros_like(g)) + 0.1 * g
            m = 0.1 * g + 0.9 * means[name]
            c, d = (
                torch.linalg.inv(
                    f[0] + damping_after(block.refits) ** 0.5 * f[0].diagonal().mean() * torch.eye(f.shape[1]).double()
                )
                for f in block.moments.values()
            )
            decayed = (1 - 0.02 * 0.3) * before[name]
            length = (alone.get_parameter(name).detach() - decayed).norm()
            expected = decayed - length * (c @ m @ d) / (c @ m @ d).norm()
            torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_lengths(structure: str) -> None:
    """Whatever the structure, each tensor moves as far as the base would move it; only a scalar U does not turn it."""
    model = network()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, structure=structure)
    for number in range(3):
        backward(model, batch(number))
        before = parameters_of(model)
        optimizer.step()
        for name, p in model.named_parameters():
            assert p.grad is not None
            step = p.detach() - before[name]
            assert float(step.norm()) == pytest.approx(0.1 * float(p.grad.norm()), rel=1e-9)
            cosine = float(-(step * p.grad).sum() / (step.norm() * p.grad.norm()))
            assert (cosine > 1 - 1e-9) == (structure == "scalar")


def test_no_step_is_suddenly_long() -> None:
    """ℓ = ‖Δ‖/lr is at most 2 √(Σ β^i ℓ_i² / Σ β^i) over the steps before, β = 0.95, once Σ β^i > 10; those below
    a tenth of the root don't count."""
    model = network()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, every=10)
    seen: dict[str, list[float]] = {name: [] for name, _ in model.named_parameters()}
    shortened, idle = set(), set()
    for number, times in enumerate([*[1.0] * 5, 7.0, *[1.0] * 14, 40.0, 1.0, 1e-3, 1.0, 300.0, 300.0, 1.0]):
        optimizer.param_groups[0]["lr"] = lr = 0.1 if number < 22 else 1e-3
        backward(model, batch(number % 3))
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= times
        before = parameters_of(model)
        optimizer.step()
        for name, p in model.named_parameters():
            assert p.grad is not None
            length = float(p.grad.norm())
            weights = [0.95**i for i in range(len(seen[name]))][::-1]
            squares = sum(w * one**2 for w, one in zip(weights, seen[name], strict=True))
            usual = math.sqrt(squares / sum(weights)) if weights else length
            if sum(weights) > 10 and length > 2 * usual:
                shortened.add(number)
                length = 2 * usual
            if length > 0.1 * usual:
                seen[name].append(length)
            else:
                idle.add(number)
            assert float((p.detach() - before[name]).norm()) == pytest.approx(lr * length, rel=1e-9), (number, name)
    assert {20, 24, 25} <= shortened
    assert 5 not in shortened
    assert 22 in idle


class Mixed(nn.Module):
    """With an embedding, a norm and a loose scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x))) * self.scale


@pytest.mark.parametrize("case", ["SGD, all", "AdamW", "RMSprop", "Lion, weight decay"])
def test_what_is_no_linear_map(case: str) -> None:
    """Bit for bit the base's step from the same place, while the linear layer turns."""
    torch.manual_seed(0)
    model = Mixed().double()
    optimizer = LLQR(BASES[case](model.parameters()), model)
    for number in range(4):
        y = batch(number)[1]
        model.zero_grad()
        functional.cross_entropy(model(y + 2), y).backward()
        alone, base = copies(model, optimizer.base)
        base.step()
        optimizer.step()
        for name, p in model.named_parameters():
            assert torch.equal(p, alone.get_parameter(name)) == (not name.startswith("head")), name
    assert optimizer.assignments()["embedding.weight"] == "by the base: used by an embedding"
    assert optimizer.assignments()["norm.weight"] == "by the base: used by a layer norm"
    assert optimizer.assignments()["scale"] == "by the base: used by a product number by number"


@pytest.mark.parametrize("case", BASES)
def test_without_refits_it_is_the_base(case: str) -> None:
    """Bit for bit, parameters and state."""
    model, other = network(), network()
    optimizer, base = LLQR(BASES[case](model.parameters()), model, every=never), BASES[case](other.parameters())
    train(model, optimizer, range(5))
    train(other, base, range(5))
    assert_same(parameters_of(model), parameters_of(other))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in base.state[q].items():
            assert torch.equal(torch.as_tensor(value if value is not None else 0), torch.as_tensor(optimizer.state[p][name] if value is not None else 0))  # fmt: skip # noqa: E501


def test_groups_have_their_own_settings() -> None:
    """Lengths by each group's learning rate, and decay by each group's."""
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.5, "weight_decay": 0.0}, {"params": model[2].parameters()}]
    optimizer = LLQR(AdamW(groups, lr=0.01, weight_decay=0.7), model)
    backward(model, batch())
    before = parameters_of(model)
    alone, base = copies(model, optimizer.base)
    base.step()
    optimizer.step()
    for name, p in model.named_parameters():
        start = before[name] * (1.0 if name.startswith("0") else 1 - 0.01 * 0.7)
        assert float((p.detach() - start).norm()) == pytest.approx(
            float((alone.get_parameter(name).detach() - start).norm())
        )


def test_a_number_of_steps() -> None:
    """`every=3`: refits at steps 0, 3, 6."""
    model = network()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, every=3)
    refits = []
    for number in range(8):
        train(model, optimizer, [number])
        refits.append(optimizer.stats.refits)
    assert refits == [1, 1, 1, 2, 2, 2, 3, 3]


def test_a_function_of_the_step() -> None:
    """It is asked once for each step, and its answer is taken."""
    asked: list[int] = []

    def every(step: int) -> bool:
        asked.append(step)
        return step in (1, 4)

    model = network()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, every=every)
    refits = []
    for number in range(6):
        train(model, optimizer, [number])
        refits.append(optimizer.stats.refits)
    assert refits == [0, 1, 1, 1, 2, 2]
    assert asked == list(range(6))


def test_the_default_schedule() -> None:
    """Each of the first ten steps, gaps that only grow, to 40 and no more; as fast to ask at step 10⁶."""
    steps = [step for step in range(5000) if often_at_first(step)]
    assert steps[:11] == list(range(11))
    gaps = [after - before for before, after in pairwise(steps)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST == 40
    begun = time.perf_counter()
    assert sum(often_at_first(10**6 + step) for step in range(1000)) == 25
    assert time.perf_counter() - begun < 0.5
    model = network()
    optimizer = LLQR(SGD(model.parameters(), lr=0.01), model)
    train(model, optimizer, range(40))
    assert optimizer.stats.refits == sum(map(often_at_first, range(40)))


@pytest.mark.parametrize("case", ["SGD, momentum", "AdamW"])
@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_it_pays(case: str, divergence: str | None) -> None:
    """200 steps on correlated inputs, with nothing set: the loss is far below the base's own."""

    def last_loss(wrapped: bool) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 4))
        teacher = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 4))
        mixing = torch.linalg.qr(torch.randn(10, 10)).Q * torch.logspace(-1, 1, 10)
        base = BASES[case](model.parameters())
        optimizer = LLQR(base, model, divergence) if wrapped else base
        losses = []
        for _ in range(200):
            x = torch.randn(64, 10)
            y = teacher(3 * x).argmax(1)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x @ mixing.T), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses[-20:]) / 20

    assert last_loss(True) < 0.9 * last_loss(False)


@pytest.mark.parametrize("cosine", [0.5, 0.1, 0.05, 0.0, -0.3, -1.0])
def test_no_step_is_almost_level(cosine: float) -> None:
    """d = U m + μ m with cos(d, m) = STEEPNESS where U m has less, also where it points uphill; as long as the base's step."""
    torch.manual_seed(0)
    m, other = torch.randn(12).double(), torch.randn(12).double()
    other -= (other @ m) / (m @ m) * m
    wanted = cosine * m / m.norm() + (1 - cosine**2) ** 0.5 * other / other.norm()
    u = torch.outer(wanted, m) / (m @ m)  # U m = wanted
    block = Block(LinearMap("w", (1, 3, 4)), Dense(), inverse={"U": u[None]})
    step = torch.randn(3, 4).double()
    turned = turn([block], {"w": m.reshape(3, 4)}, {"w": step})
    found = -turned.steps["w"].reshape(-1)
    assert not turned.left
    assert float(found.norm()) == pytest.approx(float(step.norm()), rel=1e-9)
    expected = max(cosine, STEEPNESS) if cosine > -1 else 1.0
    assert float(found @ m / (found.norm() * m.norm())) == pytest.approx(expected, rel=1e-9)
    if cosine > -1:  # it stays in the plane of m and U m, on the side of U m
        across = found / found.norm() - expected * m / m.norm()
        assert float(across @ other / (across.norm() * other.norm())) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("structure", [Kronecker(), Kronecker(max_dim=3), EigenKronecker()], ids=repr)
def test_units_of_the_data(structure: Structure, side: str) -> None:
    """U = S U' S, U' the closed form for S A S, s_j = (mean A_ii / A_jj)^¼; an input that is never there has s = 1."""
    torch.manual_seed(0)
    a = torch.randn(1, 50, 6).double() * torch.logspace(-2, 2, 6).double()
    a[..., :2] = 0
    b = torch.randn(1, 50, 4).double()
    shape = (1, 6, 4) if side == "rows" else (1, 4, 6)
    map_ = LinearMap("w", shape, inputs_on_rows=side == "rows", reads_data=True)
    sums = Sums(map_, structure)
    sums.add((a, b, 1.0) if side == "rows" else (b, a, 1.0))
    block = Block(map_, structure)
    block.take(sums.moments())
    block.invert()
    moments = sums.moments()
    moment = moments[side][0]
    sizes = moment if moment.dim() == 1 else moment.diagonal()
    s = torch.where(sizes > 0, sizes.mean() / sizes.clamp_min(1e-30), 1) ** 0.25
    moments[side] = (moment * s * s if moment.dim() == 1 else torch.diag(s) @ moment @ torch.diag(s))[None]
    inner = structure.closed_form(moments, damping_after(1))
    x = torch.randn(shape).double()
    along = s[:, None] if side == "rows" else s
    expected = along * structure.apply(inner, along * x)
    torch.testing.assert_close(Stack([block]).apply(x), expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def test_inputs_in_any_units() -> None:
    """Sixteen inputs, the largest a thousand times the smallest, which Adam learns all: so does LLQR around it."""

    def last_loss(wrapped: bool) -> float:
        torch.manual_seed(0)
        model, teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)), torch.randn(16, 4)
        base = AdamW(model.parameters(), lr=0.03, weight_decay=0)
        optimizer = LLQR(base, model) if wrapped else base
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
        losses = []
        for _ in range(300):
            x = torch.randn(64, 16)
            optimizer.zero_grad()
            loss = (model(x * torch.logspace(-1.5, 1.5, 16)) - (x @ teacher / 2).tanh()).square().mean()
            loss.backward()
            optimizer.step()
            decay.step()
            losses.append(float(loss.detach()))
        return sum(losses[-30:]) / 30

    assert last_loss(True) < last_loss(False)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_u_can_be_seen(structure: str) -> None:
    """`dense()` is the matrix that the step is along, of linear layers and of grouped convolutions, with their biases."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    model = nn.Sequential(*layers).double()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, structure=structure)
    functional.cross_entropy(model(torch.randn(6, 2, 3, 3).double()), torch.randint(3, (6,))).backward()
    optimizer.step()
    assert optimizer.blocks.keys() == {"0.weight", "3.weight"}
    for block in optimizer.blocks.values():
        stack = Stack([block])
        m = torch.randn(block.map.joined, dtype=torch.float64)
        u = block.dense().reshape(len(m), m[0].numel(), -1)
        torch.testing.assert_close(u @ m.flatten(1)[..., None], stack.apply(m).flatten(1)[..., None])
        torch.testing.assert_close(u, u.mT)
        assert float(torch.linalg.eigvalsh(u).min()) > 0


def test_maps_of_one_shape_are_stepped_together() -> None:
    """As each by itself would be; their U is held once; and a step without some of them takes the others."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(4)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())], nn.Linear(6, 3)).double()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1, momentum=0.9), model, every=2)
    x, y = torch.randn(8, 6).double(), torch.randint(3, (8,))
    for number in range(4):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if number == 3:
            model[2].weight.grad = None
        optimizer.step()
        blocks = [optimizer.blocks[f"{place}.weight"] for place in (2, 0, 4, 6)]
        together = blocks[1:] if number == 3 else blocks
        assert len({block.stack for block in together}) == 1
        assert blocks[-1].stack is not None
        assert set(blocks[-1].stack.blocks) == set(together)
        assert optimizer.blocks["8.weight"].stack is not blocks[-1].stack
        storages = {tensor.untyped_storage().data_ptr() for block in together for tensor in block.inverse.values()}
        assert len(storages) == 2
        momenta = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        steps = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        apart = {}
        for block in together:
            alone = replace(block)
            alone.invert()
            apart |= turn([alone], momenta, steps).steps
            for name, tensor in block.inverse.items():
                torch.testing.assert_close(tensor, alone.inverse[name], rtol=1e-12, atol=1e-14)
        found = turn(blocks[-1].stack.blocks, momenta, steps).steps
        assert found.keys() == apart.keys()
        for name, step in found.items():
            torch.testing.assert_close(step, apart[name], rtol=1e-12, atol=1e-14)


class _TwoBiases(nn.Module):
    def __init__(self, second: bool) -> None:
        super().__init__()
        self.w, self.b1 = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.zeros(2))
        self.b2 = nn.Parameter(torch.zeros(2)) if second else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.w, self.b1) + nn.functional.linear(x.sin(), self.w, self.b2)


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("structure", ["diagonal", "dense", "kfac"])
def test_uses_of_a_weight_whose_moments_are_not_arranged_alike_are_not_added_up(structure: str, second: bool) -> None:
    """A moment of all numbers of (W, b) has no place for those of (W, b') or of W alone: the base steps W. By sides it has."""
    model = _TwoBiases(second)
    optimizer = LLQR(torch.optim.SGD(model.parameters(), lr=0.01), model, structure=structure)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(20, 3)).square().mean().backward()
        optimizer.step()
    assert bool(optimizer.blocks) == (structure == "kfac")


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("maximize", [False, True])
def test_the_momentum_of_sgd_is_what_nesterov_steps_along(mu: float, nesterov: bool, maximize: bool) -> None:
    """θ_{k+1} = θ_k - lr m by SGD with nesterov=True, whether the base has it or not; weight decay is of θ_k."""
    if nesterov and not mu:
        return
    weight, other = (nn.Parameter(torch.ones(3, 4, dtype=torch.float64)) for _ in range(2))
    how: dict[str, Any] = {"lr": 0.1, "momentum": mu, "maximize": maximize, "weight_decay": 0.5}
    base, steps = SGD([weight], nesterov=nesterov, **how), SGD([other], nesterov=mu > 0, **how)
    momentum, group = Momentum(base, {}), base.param_groups[0]
    for _ in range(3):
        weight.grad, before = torch.randn_like(weight), weight.detach().clone()
        with torch.no_grad():
            other.copy_(weight)
        other.grad = weight.grad.clone()
        slopes = momentum.gather({"weight": weight.grad}, {"weight": weight}, {"weight": group})
        base.step()
        steps.step()
        found = momentum.of("weight", weight, slopes.get("weight"), before, group, lambda tensor: tensor)
        torch.testing.assert_close(before - 0.1 * found, other.detach(), rtol=1e-12, atol=1e-12)
