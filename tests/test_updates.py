"""Promise: around Adam and AdamW U acts on the base's update, fitted to the step that the base takes, and leaves the rest of it
alone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llqr import LLQR
from llqr.errors import LLQRError, LLQRWarning
from llqr.loop.gradients import gradients_of
from llqr.loop.refit import Source
from llqr.loop.trust import Trusted
from llqr.solvers import SGDM
from llqr.structures import Scalar

Base = Callable[[Any], torch.optim.Optimizer]
LR, BETAS, EPS = 0.02, (0.8, 0.95), 1e-6


def network(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    return model, torch.randn(12, 5, dtype=dtype), torch.randint(3, (12,))


def backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()


def train(optimizer: LLQR, model: nn.Module, inputs: Tensor, targets: Tensor, steps: int) -> None:
    for _ in range(steps):
        backward(model, inputs, targets)
        optimizer.step()


def fisher(model: nn.Module, inputs: Tensor) -> Tensor:
    """The dense Hessian of the mean KL divergence: Σ Jᵀ (diag p - p pᵀ) J / n."""
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def outputs(theta: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(theta.split([s.numel() for s in shapes]), shapes, strict=True)]
        return torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (inputs,))

    jacobian = torch.autograd.functional.jacobian(outputs, flat)
    p = outputs(flat).softmax(-1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("nia,nij,njb->ab", jacobian, middle, jacobian) / len(inputs)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_u_is_the_minimum_of_j_in_the_bases_coordinates(kind: Any, amsgrad: bool) -> None:
    """With P = √v̂ + ε of the step to come, d = P⁻¹ g cut to the tensors t, η = lr (1 - m) / (2 (1 + m)):

    J(u) = Σ -u_t g·d_t + ½ Σ u_s u_t d_s·(ηH) d_t + ½ ρ Σ u_t² g·d_t,

    whose minimum solves (D + ρ diag b) u = b; and θ ← θ (1 - lr λ) - lr u_t P⁻¹ m̂ (λ is in g for Adam). Dense, step by step."""
    decay, rho, (mean, square) = 0.1, 0.5, BETAS
    model, inputs, targets = network()
    reference = copy.deepcopy(model)
    base = kind(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=decay, amsgrad=amsgrad)
    optimizer = LLQR(base, model, structure="scalar", every=3, steps=60, ema=0.0, trust=rho, acts_on="update")
    decoupled = kind is torch.optim.AdamW
    sizes = [p.numel() for p in reference.parameters()]
    moment, average, most = (torch.zeros(sum(sizes), dtype=torch.float64) for _ in range(3))
    u = torch.ones(len(sizes), dtype=torch.float64)
    for step in range(1, 6):
        train(optimizer, model, inputs, targets, 1)
        backward(reference, inputs, targets)
        theta = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
        loss_gradient = torch.cat([p.grad.reshape(-1) for p in reference.parameters() if p.grad is not None])
        gradient = loss_gradient + (0 if decoupled else decay * theta)
        moment = mean * moment + (1 - mean) * gradient
        average = square * average + (1 - square) * gradient**2
        most = torch.maximum(most, average)
        metric = ((most if amsgrad else average) / (1 - square**step)).sqrt() + EPS
        if step in (1, 4):
            directions = torch.block_diag(*(part[:, None] for part in (loss_gradient / metric).split(sizes)))
            eta = LR * (1 - mean) / (2 * (1 + mean))
            along = directions.T @ loss_gradient
            curved = directions.T @ (eta * fisher(reference, inputs)) @ directions
            u = torch.linalg.solve(curved + rho * torch.diag(along), along)
            found = torch.stack([optimizer.preconditioner.blocks[name]["u"] for name, _ in model.named_parameters()])  # type: ignore[union-attr]
            torch.testing.assert_close(found, u, rtol=1e-6, atol=1e-8)
        adams = -LR * moment / (1 - mean**step) / metric
        lengths = torch.cat([number.expand(size) for number, size in zip(u, sizes, strict=True)])
        theta = theta * (1 - LR * decay if decoupled else 1) + lengths * adams
        for p, part in zip(reference.parameters(), theta.split(sizes), strict=True):
            p.data.copy_(part.view(p.shape))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure", ["scalar", "diagonal"])
def test_the_identity_leaves_the_base_as_it_is(structure: str) -> None:
    """To the bit: with U = I the update that is added is zero."""
    (model, inputs, targets), (other, _, _) = network(torch.float32), network(torch.float32)
    settings = {"lr": LR, "weight_decay": 0.1}
    alone = torch.optim.AdamW(other.parameters(), **settings)
    optimizer = LLQR(
        torch.optim.AdamW(model.parameters(), **settings),
        model,
        structure=structure,
        every=1000,
        acts_on="update",
        trust=1.0,
    )
    train(optimizer, model, inputs, targets, 1)
    for group in optimizer.preconditioner.groups:  # type: ignore[union-attr]
        for tensor in group.tensors.values():
            tensor.fill_(1.0)
    model.load_state_dict(other.state_dict())
    optimizer.base.state.clear()
    for _ in range(10):
        train(optimizer, model, inputs, targets, 1)
        backward(other, inputs, targets)
        alone.step()
    assert optimizer._schedule.step == 11
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_gradients_are_left_alone_and_weight_decay_is_not_scaled() -> None:
    model, inputs, targets = network()
    base = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.5)
    optimizer = LLQR(base, model, every=1000)
    train(optimizer, model, inputs, targets, 1)
    for group in optimizer.preconditioner.groups:  # type: ignore[union-attr]
        for tensor in group.tensors.values():
            tensor.fill_(3.0)
    backward(model, inputs, targets)
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    plain = copy.deepcopy(model)
    alone = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.5)
    alone.load_state_dict(copy.deepcopy(base.state_dict()))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    alone.step()
    optimizer.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        theta, gradient = before[name]
        decayed = theta * (1 - LR * 0.5)
        torch.testing.assert_close(p.detach() - decayed, 3 * (q.detach() - decayed), rtol=1e-9, atol=1e-12)
        assert torch.equal(p.grad, gradient)  # type: ignore[arg-type]


@pytest.mark.parametrize("saved_at", [0, 1, 3, 4, 5])
def test_a_stopped_run_goes_on_to_the_bit(saved_at: int) -> None:
    def made() -> tuple[nn.Module, LLQR, Tensor, Tensor]:
        model, inputs, targets = network(torch.float32)
        return model, LLQR(torch.optim.AdamW(model.parameters(), lr=LR), model, every=4, ema=0.5), inputs, targets

    model, optimizer, inputs, targets = made()
    train(optimizer, model, inputs, targets, 14)
    first, before, _, _ = made()
    train(before, first, inputs, targets, saved_at)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": before.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again, after, _, _ = made()
    again.load_state_dict(state["model"])
    after.load_state_dict(state["optimizer"])
    train(after, again, inputs, targets, 14 - saved_at)
    assert after.stats.refits == optimizer.stats.refits >= 3
    assert after._refit.trust == optimizer._refit.trust
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_trust_is_earned_down_to_a_third() -> None:
    model, inputs, targets = network()
    optimizer = LLQR(torch.optim.AdamW(model.parameters(), lr=1e-4), model, every=2, ema=0.0)
    seen = []
    for _ in range(8):
        train(optimizer, model, inputs, targets, 1)
        seen.append(optimizer.stats.trust)
    assert seen[0] == 1.0
    assert min(seen) == pytest.approx(1 / 3)  # type: ignore[type-var]
    longest = max(
        float(tensor.max()) for block in optimizer.preconditioner.blocks.values() for tensor in block.values()
    )  # type: ignore[union-attr]
    assert 2 < longest <= 3 + 1e-6  # at this rate curvature says nothing, and U is 1/ρ


class Projected(torch.optim.AdamW):
    """A user's own, with a step that LLQR knows nothing of."""


@pytest.mark.parametrize(
    ("base", "options", "acts_on"),
    [
        (torch.optim.AdamW, {}, "update"),
        (torch.optim.Adam, {"structure": "scalar"}, "update"),
        (torch.optim.AdamW, {"structure": Scalar()}, "update"),
        (torch.optim.AdamW, {"structure": "kfac"}, "gradient"),
        (torch.optim.AdamW, {"structure": "scalar", "solver": SGDM(lr=0.01)}, "gradient"),
        (torch.optim.AdamW, {"trust": 0.1}, "update"),
        (torch.optim.AdamW, {"trust": 0}, "gradient"),
        (torch.optim.AdamW, {"structure": {"0": "scalar", "*": Scalar()}}, "update"),
        (torch.optim.AdamW, {"structure": {"0": "scalar", "*": "diagonal"}}, "gradient"),
        (Projected, {}, "gradient"),
        (torch.optim.AdamW, {"acts_on": "gradient"}, "gradient"),
        (torch.optim.SGD, {}, "gradient"),
        (torch.optim.NAdam, {}, "gradient"),
    ],
)
def test_what_u_acts_on_unless_it_is_said(base: Any, options: dict[str, Any], acts_on: str) -> None:
    model, _, _ = network()
    optimizer = LLQR(base(model.parameters(), lr=LR), model, **options)
    assert f"acts_on={acts_on!r}" in repr(optimizer)
    factors = options.get("structure") == "kfac" or ("structure" not in options and acts_on == "gradient")
    if base is not torch.optim.SGD:
        assert ("structure='kfac'" in repr(optimizer)) is factors


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        (torch.optim.AdamW, {"acts_on": "updates"}, "did you mean 'update'"),
        (torch.optim.SGD, {"acts_on": "update"}, "Adam and AdamW.*is a SGD"),
        (Projected, {"acts_on": "update"}, "themselves.*is a Projected"),
        (torch.optim.AdamW, {"acts_on": "update", "structure": "kfac"}, '"scalar" and "diagonal".*Kronecker'),
        (torch.optim.AdamW, {"acts_on": "update", "trust": 0}, "give a positive trust"),
        (torch.optim.AdamW, {"acts_on": "update", "solver": SGDM(lr=0.01)}, "leave out the solver"),
    ],
)
def test_what_cannot_be_is_said_at_once(base: Any, options: dict[str, Any], message: str) -> None:
    model, _, _ = network()
    with pytest.raises(LLQRError, match=message):
        LLQR(base(model.parameters(), lr=LR), model, **options)


def test_parameters_without_gradients_and_those_that_are_not_finite_are_the_bases() -> None:
    model, inputs, targets = network(torch.float32)
    base = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    optimizer = LLQR(base, model, every=1000)
    train(optimizer, model, inputs, targets, 2)
    backward(model, inputs, targets)
    first = model[0].weight  # type: ignore[index]
    first.grad = None
    before = first.detach().clone()
    optimizer.step()
    assert torch.equal(first, before)
    backward(model, inputs, targets)
    model[2].bias.grad[0] = float("nan")  # type: ignore[index,union-attr,operator]
    with pytest.warns(match="not finite"):
        optimizer.step()
    assert optimizer.stats.nonfinite == 1
    assert torch.isfinite(first).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_updates_away(dtype: torch.dtype) -> None:
    """θ_after - θ_before has few digits left of what the base wanted: U acts on the gradients there, and says so if asked."""
    model, inputs, targets = network(dtype)
    base = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4)
    with pytest.raises(LLQRError, match="half precision"):
        LLQR(base, model, acts_on="update")
    optimizer = LLQR(base, model, every=2)
    assert "acts_on='gradient'" in repr(optimizer)
    train(optimizer, model, inputs, targets, 3)
    assert optimizer.stats.refits == 2


def test_a_u_that_acts_on_something_else_is_not_loaded() -> None:
    model, inputs, targets = network()

    def made(acts_on: str) -> LLQR:
        return LLQR(torch.optim.AdamW(model.parameters(), lr=LR), model, structure="scalar", every=2, acts_on=acts_on)

    for here, there in (("update", "gradient"), ("gradient", "update")):
        before = made(there)
        train(before, model, inputs, targets, 4)
        state = before.state_dict()
        if there == "gradient":
            del state["llqr"]["acts_on"]  # as it was before there was a choice
        after = made(here)
        with pytest.warns(LLQRWarning, match=f'acts on the {there}, and here.*acts_on="{there}"'):
            after.load_state_dict(state)
        assert after.preconditioner is None
        assert after._refit.trust == made(here)._refit.trust
        same = made(there)
        same.load_state_dict(state)
        assert same.preconditioner is not None


def test_what_was_earned_elsewhere_is_not_more_than_can_be_earned_here() -> None:
    model, inputs, targets = network()
    optimizer = LLQR(torch.optim.AdamW(model.parameters(), lr=LR), model, every=2)
    train(optimizer, model, inputs, targets, 3)
    state = optimizer.state_dict()
    state["llqr"]["trust"].update(rho=0.05, least=0.05)
    optimizer.load_state_dict(state)
    assert optimizer._refit.trust is not None
    assert optimizer._refit.trust.rho == optimizer._refit.trust.least == 1 / 3


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_what_is_loaded_does_not_depend_on_what_was_there(base: Any) -> None:
    """An optimizer that has lost trust and loads the state of one that hasn't is as trusting as that one."""
    model, _, _ = network()
    fresh = LLQR(base(model.parameters(), lr=LR), model).state_dict()
    optimizer = LLQR(base(model.parameters(), lr=LR), model)
    before = copy.copy(optimizer._refit.trust)
    optimizer._refit.trust.rho = optimizer._refit.trust.least = 0.9  # type: ignore[union-attr]
    optimizer.load_state_dict(fresh)
    assert optimizer._refit.trust == before


def test_a_refit_on_other_examples_measures_by_their_gradient() -> None:
    """An embedding's rows that aren't in the step's batch have v = 0 and no gradient there: P = ε by that one, and P⁻¹ g of the
    refit's batch a hundred million times too long. By its own gradient g/P is 1/√(1 - β₂) at most."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 3))
    targets = torch.randint(3, (8,))
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = LLQR(
        base,
        model,
        every=4,
        ema=0.0,
        refit_batch=lambda: (torch.arange(20, 28), targets),
        loss_fn=nn.functional.cross_entropy,
    )
    train(optimizer, model, torch.arange(8), targets, 13)
    numbers = {name: float(block["u"]) for name, block in optimizer.preconditioner.blocks.items()}  # type: ignore[union-attr]
    assert optimizer.stats.trust == pytest.approx(1 / 3)
    assert numbers["0.weight"] == pytest.approx(3, rel=0.1)


def test_adam_that_ascends_is_measured_by_what_it_averages() -> None:
    """Adam with weight decay averages (λθ - g)² where it maximises."""
    found = []
    for maximize in (False, True):
        model, inputs, targets = network()
        base = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=0.5, maximize=maximize)
        optimizer = LLQR(base, model, every=1, acts_on="update", steps=30, ema=0.0, trust=0.5)
        sign = -1 if maximize else 1
        for _ in range(3):
            model.zero_grad()
            (sign * nn.functional.cross_entropy(model(inputs), targets)).backward()
            optimizer.step()
        found.append([float(block["u"]) for block in optimizer.preconditioner.blocks.values()])  # type: ignore[union-attr]
    assert found[1] == pytest.approx(found[0])


def test_the_edge_is_that_of_the_least_momentum_that_a_schedule_tells_of() -> None:
    """OneCycleLR lowers β₁ where it raises the rate: both ends of it count, as lr (1 - m) / (2 (1 + m))."""
    model, inputs, targets = network()
    optimizer = LLQR(torch.optim.AdamW(model.parameters(), lr=LR), model)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, base_momentum=0.8, max_momentum=0.95)
    assert optimizer.param_groups[0]["betas"][0] == 0.95
    backward(model, inputs, targets)
    seen = optimizer._refit.objective(
        optimizer.base, dict(model.named_parameters()), Source(gradients_of(dict(model.named_parameters())), (inputs,))
    )
    assert isinstance(seen, Trusted)
    assert list(seen._roots.values()) == pytest.approx([(0.1 * 0.2 / 3.6) ** 0.5] * 4)


def test_an_error_after_the_base_has_stepped_leaves_a_whole_step() -> None:
    """As where warnings are errors: the base has stepped, so the step is counted, and is the base's own."""
    model, inputs, targets = network()
    optimizer = LLQR(torch.optim.AdamW(model.parameters(), lr=LR), model, every=1000)
    train(optimizer, model, inputs, targets, 1)
    optimizer.preconditioner.groups[0].tensors["u"].fill_(-1.0)  # type: ignore[union-attr]
    backward(model, inputs, targets)
    with pytest.raises(LLQRWarning):
        optimizer.step()
    assert optimizer._schedule.step == 2
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
