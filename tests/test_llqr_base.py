"""Promise: with U = I, LLQR is its base bit for bit, whatever the base, the scheduler and the loop; with any U, bases take U g
as they would take g."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer, lr_scheduler

from llqr import LLQR
from llqr.paper import PaperLLQR
from loops import STRUCTURES, assert_same, batch, closure_of, network, never, parameters_of, train

STEPS = 50
Base = Callable[[list[dict[str, Any]]], Optimizer]
Loop = Callable[[nn.Module, Optimizer, Any], None]

BASES: dict[str, Base] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "fused adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 10, 0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.2, 0.1], total_steps=STEPS, cycle_momentum=False),
    "cycled momentum": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=STEPS),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda k: 0.9**k, lambda k: 0.8**k]),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
}


def tower(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.01}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}]


def wrap(base: Optimizer, model: nn.Module) -> PaperLLQR:
    return LLQR.paper(base, model, every=never)


def run(base: Base, wrapped: bool, loop: Loop, scheduler: Callable[[Optimizer], Any] | None = None) -> dict[str, Any]:
    """Everything that a training leaves behind."""
    model = tower()
    optimizer: Optimizer = base(groups_of(model))
    if wrapped:
        optimizer = wrap(optimizer, model)
    loop(model, optimizer, None if scheduler is None else scheduler(optimizer))
    inner = optimizer.base if isinstance(optimizer, PaperLLQR) else optimizer
    state = {f"{i} {k}": torch.as_tensor(v) for i, s in inner.state_dict()["state"].items() for k, v in s.items()
             if v is not None}  # fmt: skip
    rates = {f"lr {i}": torch.tensor(group["lr"]) for i, group in enumerate(inner.param_groups)}
    return {**{n: t.clone() for n, t in model.state_dict().items()}, **state, **rates}


def plain(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()


def clipping(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad(set_to_none=False)
        functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def accumulating(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    for number in range(STEPS):
        x, y = batch(number)
        (functional.cross_entropy(model(x), y) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def with_closures(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    for number in range(STEPS):
        optimizer.step(closure_of(model, optimizer, batch(number)))


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("loop", [plain, clipping, accumulating, with_closures])
def test_every_base_in_every_loop(base: Base, loop: Loop) -> None:
    alone = run(base, False, loop)
    assert_same(alone, run(base, True, loop))
    assert not torch.equal(alone["0.weight"], tower().state_dict()["0.weight"])


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize(("base", "rate"), [("momentum", 0.1), ("adamw", 0.01)])
def test_every_scheduler(base: str, rate: float, scheduler: Callable[[Optimizer], Any]) -> None:
    alone, wrapped = (run(BASES[base], wrapped, plain, scheduler) for wrapped in (False, True))
    assert_same(alone, wrapped)
    assert float(alone["lr 0"]) != pytest.approx(rate)


def test_muon_on_matrices_beside_another_optimizer() -> None:
    """Muon takes matrices alone: the vectors are another optimizer's, and LLQR leaves them to it."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")

    def trained(wrapped: bool) -> dict[str, Tensor]:
        model = tower().float()
        muon: Optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)
        rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.01)
        if wrapped:
            muon = wrap(muon, model)
        for number in range(STEPS):
            x, y = batch(number, dtype=torch.float32)
            muon.zero_grad()
            rest.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            muon.step()
            rest.step()
        return parameters_of(model)

    assert_same(trained(False), trained(True))


def test_a_custom_optimizer_that_knows_nothing_of_llqr() -> None:
    """Signs of gradients, written as in torch's tutorials, with a closure that it evaluates itself."""

    class Signs(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None if closure is None else torch.enable_grad()(closure)()
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.sign(), alpha=group["lr"])
            return loss

    for loop in (plain, with_closures):
        assert_same(run(Signs, False, loop), run(Signs, True, loop))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_bases_and_parameters_in_another_memory_format(base: Any, structure: str) -> None:
    """Fused kernels read memory in its order: U g has the strides of the parameter."""

    def trained(laid_out: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Flatten(), nn.Linear(27, 3))
        model.double()
        if laid_out:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            model[3].weight.data = model[3].weight.data.t().contiguous().t()
        optimizer = LLQR.paper(
            base(model.parameters(), lr=0.1, fused=True), model, structure=structure, every=2, steps=2
        )
        train(model, optimizer, range(3))
        return parameters_of(model)

    plain, other = trained(False), trained(True)
    for name, p in plain.items():
        torch.testing.assert_close(other[name], p, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_base_that_keeps_its_gradients(structure: str) -> None:
    """What it was given at one step is the same after the next."""

    class Keeping(torch.optim.SGD):
        kept: list[tuple[Tensor, Tensor]] = []  # noqa: RUF012

        def step(self, closure: Any = None) -> Any:
            self.kept += [(p.grad, p.grad.clone()) for group in self.param_groups for p in group["params"]]
            return super().step(closure)

    model = network()
    base = Keeping(model.parameters(), lr=0.1)
    train(model, LLQR.paper(base, model, structure=structure, every=10, steps=2), range(4))
    assert len(base.kept) == 4 * 4
    assert all(torch.equal(held, then) for held, then in base.kept)
