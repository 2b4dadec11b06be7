"""proposed_step: what an optimizer is about to do, and nothing else happens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from llqr import LLQR
from llqr.diagnostics import proposed_step
from llqr.errors import LLQRError, NonFiniteError


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Flatten(), nn.Linear(18, 3)
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 1, 4, 4), torch.randint(3, (8,))) for _ in range(count)]


class WithOwnAttribute(torch.optim.SGD):
    """Keeps a number beside groups and state, as many optimizers outside of torch do; copy.deepcopy loses it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.sign = -1.0

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=self.sign * group["lr"])
        return loss


Maker = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2),
    "own attribute": lambda m: WithOwnAttribute(m.parameters(), lr=0.1),
    "llqr": lambda m: LLQR.paper(
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), m, structure="kfac", every=2, steps=3, ema=0.5
    ),
    "llqr newton": lambda m: LLQR.paper(
        torch.optim.AdamW(m.parameters(), lr=0.01), m, "newton", "diagonal", 3, steps=3, damping=1.0
    ),
    "llqr around own": lambda m: LLQR.paper(
        WithOwnAttribute(m.parameters(), lr=0.1), m, structure="scalar", every=3, steps=2
    ),
}


def one_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def state(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    return [
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(optimizer.state_dict()),
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [module.training for module in model.modules()],
        torch.get_rng_state(),
        [p._version for p in model.parameters()],
    ]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_proposal_is_what_the_step_then_does(name: str) -> None:
    """At every step of a training, refits among them: bit for bit the change that follows, with dropout and BatchNorm."""
    model = network()
    optimizer = OPTIMIZERS[name](model)
    for inputs, targets in batches(5):
        before = state(model, optimizer)
        proposal = proposed_step(optimizer, model, inputs, targets, cross_entropy)
        assert same(state(model, optimizer), before)
        old = {n: p.detach().clone() for n, p in model.named_parameters()}
        one_step(model, optimizer, inputs, targets)
        for n, p in model.named_parameters():
            assert torch.equal(proposal[n], p.detach() - old[n]), n


def test_a_training_that_is_looked_at_is_the_same_training() -> None:
    runs = []
    for looked in (False, True):
        torch.manual_seed(5)
        model = network()
        optimizer = OPTIMIZERS["llqr"](model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)  # wraps optimizer.step
        for inputs, targets in batches(6):
            if looked:
                proposed_step(optimizer, model, inputs, targets, cross_entropy)
            one_step(model, optimizer, inputs, targets)
            scheduler.step()
        runs.append(state(model, optimizer))
    seconds = [run[1]["llqr"]["stats"].pop("seconds") for run in runs]
    assert len(seconds) == 2
    assert same(*runs)


def test_several_optimizers_share_the_parameters() -> None:
    model, (inputs, targets) = (
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        (
            torch.randn(6, 4),
            torch.randint(3, (6,)),
        ),
    )
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon, adam = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)
    both = proposed_step([muon, adam], model, inputs, targets, cross_entropy)
    first = proposed_step(muon, model, inputs, targets, cross_entropy)
    assert torch.equal(both["0.weight"], first["0.weight"])
    assert both["0.bias"].norm() > 0
    assert first["0.bias"].norm() == 0  # it isn't stepped
    with pytest.raises(LLQRError, match=r"two of the optimizers step '0\.weight'"):
        proposed_step([muon, muon], model, inputs, targets, cross_entropy)


def test_several_optimizers_see_the_gradient_of_the_same_point() -> None:
    """The second one's step isn't taken where the first one's has led."""
    model, (inputs, targets) = (
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        (
            torch.randn(6, 4),
            torch.randint(3, (6,)),
        ),
    )
    first, second = (torch.optim.SGD(model[i].parameters(), lr=2.0) for i in (0, 2))
    whole = torch.optim.SGD(model.parameters(), lr=2.0)
    one, other = (proposed_step(each, model, inputs, targets, cross_entropy) for each in ([first, second], whole))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_can_be_prepared() -> None:
    model, (inputs, targets) = network().eval(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clipped = proposed_step(
        optimizer,
        model,
        inputs,
        targets,
        cross_entropy,
        prepare=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    )
    assert float(torch.cat([v.reshape(-1) for v in clipped.values()]).norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_refit_batch_is_not_drawn_from() -> None:
    """The loop's own stream of batches has to be there for the loop."""
    model, (inputs, targets) = network(), batches(1)[0]
    drawn: list[int] = []

    def draw() -> tuple[Tensor, Tensor]:
        drawn.append(1)
        return inputs, targets

    optimizer = LLQR.paper(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        structure="diagonal",
        refit_batch=draw,
        loss_fn=cross_entropy,
    )
    proposed_step(optimizer, model, inputs, targets, cross_entropy)
    assert not drawn


def test_frozen_parameters_are_no_part_of_a_step() -> None:
    model, (inputs, targets) = network(), batches(1)[0]
    model[0].requires_grad_(False)
    step = proposed_step(torch.optim.SGD(model.parameters(), lr=0.1), model, inputs, targets, cross_entropy)
    assert list(step) == ["1.weight", "1.bias", "5.weight", "5.bias"]


def test_what_can_not_be_proposed() -> None:
    model, other, (inputs, targets) = network(), network(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LLQRError, match=r"6 of the optimizer's 6 parameters aren't in the model"):
        proposed_step(optimizer, other, inputs, targets, cross_entropy)
    with pytest.raises(LLQRError, match="a torch optimizer of the model's parameters, or a list of such"):
        proposed_step("sgd", model, inputs, targets, cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match="a torch optimizer of the model's parameters, or a list of such"):
        proposed_step([], model, inputs, targets, cross_entropy)
    with pytest.raises(NonFiniteError, match="the inputs"):
        proposed_step(optimizer, model, inputs / 0, targets, cross_entropy)
    with pytest.raises(NonFiniteError, match="the loss"):
        proposed_step(optimizer, model, inputs, targets, lambda out, y: cross_entropy(out, y) / 0)
    model.broken = nn.Linear(1, 1).weight * 2
    with pytest.raises(LLQRError, match="the model can't be copied"):
        proposed_step(optimizer, model, inputs, targets, cross_entropy)
