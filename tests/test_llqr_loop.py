"""Promise: in a training loop LLQR behaves as the torch optimizer that it wraps: closures, hooks, scalers, groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from llqr import LLQR, QuadraticModel, fit
from llqr.divergences import KL, GaussNewton, Newton
from llqr.errors import LLQRError
from llqr.paper import PaperLLQR
from llqr.preconditioner import Preconditioner
from llqr.solvers import ScaleFree
from loops import (
    Batch,
    assert_same,
    backward,
    batch,
    blocks_of,
    closure_of,
    gradients_of,
    network,
    never,
    parameters_of,
    sgd,
    spoil,
    train,
)

OPTIONS: dict[str, Any] = {
    "divergence": KL(), "structure": "kfac", "steps": 4, "damping": 0.1, "ema": 0.5, "solver": ScaleFree()
}  # fmt: skip


def wrapped(model: nn.Module, **options: Any) -> PaperLLQR:
    return LLQR.paper(sgd(model), model, **{**OPTIONS, **options})


def loss_of(model: nn.Module, data: Batch) -> Tensor:
    return functional.cross_entropy(model(data[0]), data[1])


def blended(u: Preconditioner, ema: float = 0.5) -> dict[str, Tensor]:
    """What the first refit makes of a fit: half of it, half of the identity."""
    shapes = {name: torch.empty_like(p) for name, p in network().named_parameters()}
    blocks = Preconditioner.identity(shapes, "kfac").blend(u, ema).blocks
    return {f"{key} {name}": tensor for key, block in blocks.items() for name, tensor in block.items()}


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert list(first) == list(second)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-10, atol=1e-12)


def test_the_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    """Also inside no_grad, and where U is refitted there."""
    for divergence in (KL(), Newton(), GaussNewton()):
        model, again = network(), network()
        optimizer, other = wrapped(model, divergence=divergence), wrapped(again, divergence=divergence)
        with torch.no_grad():
            loss = optimizer.step(closure_of(model, optimizer, batch()))
            assert not torch.is_grad_enabled()
        assert torch.equal(loss, functional.cross_entropy(network()(batch()[0]), batch()[1]))
        other.step(closure_of(again, other, batch()))
        assert_same(parameters_of(model), parameters_of(again))
        assert optimizer.stats.refits == 1


def test_the_base_steps_once_and_without_the_closure() -> None:
    given: list[tuple[Any, ...]] = []

    class Watched(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            given.append((args, kwargs))

    model = network()
    optimizer = LLQR.paper(Watched(model.parameters(), lr=0.1), model, every=2)
    train(model, optimizer, range(2), closures=True)
    assert given == [((), {}), ((), {})]


def test_without_a_closure_there_is_no_loss() -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model, batch())
    assert optimizer.step() is None


def test_step_hooks_are_called_once_with_the_wrapper() -> None:
    model = network()
    optimizer = wrapped(model, every=2)
    seen: list[tuple[str, bool]] = []
    before = optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o is optimizer)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o is optimizer)))
    train(model, optimizer, range(2))
    assert seen == [("pre", True), ("post", True)] * 2
    before.remove()
    train(model, optimizer, range(1))
    assert len(seen) == 5


def test_groups_state_and_defaults_are_the_bases_own() -> None:
    model = network()
    optimizer = wrapped(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.base.param_groups
    assert optimizer.state is optimizer.base.state
    assert optimizer.defaults is optimizer.base.defaults
    train(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is optimizer.base.param_groups
    assert optimizer.state is optimizer.base.state
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups = groups
    assert optimizer.base.param_groups is groups


def test_schedulers_reach_the_base() -> None:
    model = network()
    optimizer = wrapped(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for k in range(3):
        train(model, optimizer, [k])
        scheduler.step()
    assert optimizer.base.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = parameters_of(model)
    train(model, optimizer, [4])
    assert_same(before, parameters_of(model))


@pytest.mark.parametrize("structure", ["kfac", "dense", {"0": "kfac", "*": "diagonal"}], ids=str)
def test_a_group_that_is_added_is_the_identity_until_the_next_refit(structure: Any) -> None:
    model = network()
    base = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = LLQR.paper(base, model, **{**OPTIONS, "structure": structure, "every": 3})
    train(model, optimizer, range(1))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
    assert len(optimizer.param_groups) == 2
    backward(model, batch(1))
    before, g = parameters_of(model), gradients_of(model)
    assert optimizer.preconditioner is not None
    steered = optimizer.preconditioner.apply({name: g[name] for name in ("0.weight", "0.bias")})
    optimizer.step()
    for name, p in parameters_of(model).items():
        step = 0.1 * steered[name] if name in steered else 0.2 * g[name]
        torch.testing.assert_close(p, before[name] - step, rtol=1e-12, atol=1e-14)
    train(model, optimizer, range(2, 4))
    assert {"2.weight", "2.bias"} <= optimizer.preconditioner.blocks.keys()
    assert optimizer.stats.refits == 2


def test_a_group_of_strangers_is_refused_and_nothing_changes() -> None:
    model = network()
    optimizer = LLQR.paper(torch.optim.SGD(model[0].parameters(), lr=0.1), model, **OPTIONS)
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    with pytest.raises(LLQRError, match=r"aren't in the model.*shape \(7,\) in group 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": list(model[0].parameters())})
    mapped = LLQR.paper(optimizer.base, model, structure={"0": "kfac"})
    with pytest.raises(LLQRError, match=r"no pattern of the structures matches '2.weight'"):
        mapped.add_param_group({"params": list(model[2].parameters())})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, range(1, 2))


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_a_scaler_with_an_overflow_is_as_with_the_base(base: Any) -> None:
    """The step with the infinite gradient is left out, and counts for nothing: U is fitted at the next one."""

    def trained(wrap: bool) -> tuple[dict[str, Tensor], float, torch.optim.Optimizer]:
        model = network(dtype=torch.float32)
        optimizer = base(model.parameters(), lr=0.05)
        if wrap:
            optimizer = LLQR.paper(optimizer, model, every=never)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for k in range(8):
            x, y = batch(k, dtype=torch.float32)
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(model(x), y)).backward()
            if k == 4:
                spoil(model, "0.weight")
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return parameters_of(model), scaler.get_scale(), optimizer

    alone, scale, _ = trained(False)
    ours, same, optimizer = trained(True)
    assert_same(alone, ours)
    assert scale == same
    assert isinstance(optimizer, PaperLLQR)
    assert optimizer.state_dict()["llqr"]["step"] == 7


def test_a_scaler_at_a_step_that_refits() -> None:
    """Unscaled gradients are what U is fitted to; a step that the scaler leaves out leaves its refit to the next."""
    model, again = network(), network()
    optimizer, other = wrapped(model, every=2), wrapped(again, every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for k in range(5):
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(batch(k)[0]), batch(k)[1])).backward()
        if k == 2:
            spoil(model, "0.weight")
        scaler.step(optimizer)
        scaler.update()
    train(again, other, [0, 1, 3, 4])
    assert optimizer.stats.refits == 2
    assert_close(parameters_of(model), parameters_of(again))


def test_gradients_are_what_they_were() -> None:
    """The same tensors with the same numbers, whether or not U was fitted. This closure takes nothing backward."""
    for divergence in (KL(), Newton()):
        model = network()
        optimizer = wrapped(model, divergence=divergence, every=2)
        for k in range(4):
            backward(model, batch(k))
            held, copies = [p.grad for p in model.parameters()], gradients_of(model)
            optimizer.step(None if isinstance(divergence, KL) else partial(loss_of, model, batch(k)))
            assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
            assert_same(gradients_of(model), copies)
        assert optimizer.stats.refits == 2


def test_gradients_that_carry_a_graph() -> None:
    """As after backward(create_graph=True): the base sees numbers alone."""
    model = network()
    optimizer = wrapped(model, every=2)
    train(model, optimizer, range(1))
    backward(model, batch(1))
    for p in model.parameters():
        p.grad = torch.as_tensor(p.grad) * torch.ones((), requires_grad=True)
    seen: list[bool] = []
    optimizer.base.register_step_pre_hook(
        lambda *_: seen.extend(torch.as_tensor(p.grad).requires_grad for p in model.parameters())
    )
    optimizer.step()
    assert seen == [False] * 4


def test_accumulated_gradients_are_fitted_with_the_last_inputs() -> None:
    model = network()
    optimizer = wrapped(model)
    for k in range(3):
        (functional.cross_entropy(model(batch(k)[0]), batch(k)[1]) / 3).backward()
    g = gradients_of(model)
    q = QuadraticModel.build(network(), batch(2)[0], None, None, KL(), 0.1, gradient=g)
    optimizer.step()
    assert_close(blocks_of(optimizer), blended(fit(q, "kfac", steps=4)))


def test_a_callable_period_is_asked_once_a_step() -> None:
    model = network()
    asked: list[int] = []

    def every(step: int) -> bool:
        asked.append(step)
        return step in (1, 2, 5)

    optimizer = wrapped(model, every=every)
    for k in range(7):
        model(batch(k)[0])
        backward(model, batch(k))
        optimizer.step()
    assert asked == list(range(7))
    assert optimizer.stats.refits == 3


def test_refits_by_hand() -> None:
    """On a batch with its loss, on a batch with the gradients that are there, or on what a closure evaluates."""
    data = batch(1)
    cross_entropy = functional.cross_entropy
    for divergence in (KL(), Newton(), GaussNewton()):
        q = QuadraticModel.build(network(), *data, cross_entropy, divergence, 0.1)
        expected = blended(fit(q, "kfac", steps=4))
        model = network()
        before = parameters_of(model)
        optimizer = wrapped(model, divergence=divergence, every=never)
        assert optimizer.refit(*data, cross_entropy)
        assert all(p.grad is None for p in model.parameters())
        assert_close(blocks_of(optimizer), expected)

        optimizer = wrapped(model, divergence=divergence, every=never)
        assert optimizer.refit(closure=closure_of(model, optimizer, data))
        assert_close(blocks_of(optimizer), expected)

        optimizer = wrapped(model, divergence=divergence, every=never, refit_batch=lambda: data, loss_fn=cross_entropy)
        assert optimizer.refit()
        assert_close(blocks_of(optimizer), expected)
        assert_same(before, parameters_of(model))
    model = network()
    optimizer = wrapped(model, every=never)
    backward(model, data)
    assert optimizer.refit(data[0])
    assert_close(
        blocks_of(optimizer),
        blended(fit(QuadraticModel.build(model, *data, cross_entropy, KL(), 0.1), "kfac", steps=4)),
    )
    with pytest.raises(LLQRError, match="not both"):
        optimizer.refit(*data, closure=closure_of(model, optimizer, data))
    assert optimizer.state_dict()["llqr"]["step"] == 0


def test_a_refit_by_hand_leaves_the_inputs_of_the_step() -> None:
    """Between a backward pass and a step that refits; also where the model's first parameter isn't ours."""
    expected: list[dict[str, Tensor]] = []
    for by_hand in (False, True):
        model = network()
        optimizer = LLQR.paper(torch.optim.SGD(model[2].parameters(), lr=0.1), model, **{**OPTIONS, "ema": 0.0})
        backward(model, batch(0))
        if by_hand:
            optimizer.refit(*batch(5, size=9), functional.cross_entropy)
            optimizer.refit(closure=partial(loss_of, model, batch(6)))
        optimizer.step()
        expected.append(blocks_of(optimizer))
    assert_same(*expected)


@pytest.mark.parametrize("size", [2, 11])
def test_a_batch_of_its_own(size: int) -> None:
    """With a loss, the gradient is that of the refit's batch; without, that of the step."""
    fresh = batch(9, size=size)
    cross_entropy = functional.cross_entropy
    for loss_fn in (None, cross_entropy):
        model = network()
        optimizer = wrapped(model, refit_batch=lambda: fresh, loss_fn=loss_fn)
        backward(model, batch())
        g = gradients_of(model)
        optimizer.step()
        gradient = None if loss_fn else g
        q = QuadraticModel.build(network(), *fresh, cross_entropy, KL(), 0.1, gradient=gradient)
        assert_close(blocks_of(optimizer), blended(fit(q, "kfac", steps=4)))


def test_validation_between_backward_and_step_is_not_what_u_is_fitted_on() -> None:
    trained = []
    for validates in (False, True):
        model = network()
        optimizer = wrapped(model, every=2)
        for k in range(4):
            backward(model, batch(k))
            if validates:
                with torch.no_grad():
                    model(batch(50, size=31)[0])
                with torch.inference_mode():
                    model(batch(51, size=3)[0])
                others = {name: p.detach() * 0 for name, p in model.named_parameters()}
                torch.func.functional_call(model, others, (batch(52, size=2)[0],))
            optimizer.step()
        trained.append(parameters_of(model))
    assert_same(*trained)


def test_inputs_that_are_overwritten_after_the_forward_pass() -> None:
    """As by a loader that fills one buffer again and again."""
    trained = []
    for overwrites in (False, True):
        model = network()
        optimizer = wrapped(model)
        x, y = batch()
        functional.cross_entropy(model(x), y).backward()
        if overwrites:
            x.zero_()
        optimizer.step()
        trained.append(parameters_of(model))
    assert_same(*trained)


def test_memory_and_repr() -> None:
    model = network()
    optimizer = wrapped(model, structure="diagonal", every=2)
    assert optimizer.memory_usage() == {"preconditioner": 0, "base": 0, "total": 0}
    train(model, optimizer, range(3))
    size = 8 * sum(p.numel() for p in model.parameters())
    assert optimizer.memory_usage() == {"preconditioner": size, "base": size, "total": 2 * size}
    assert optimizer.stats.memory == size
    for part in ("LLQR.paper(", "KL()", "'diagonal'", "every=2", "at step 3: 2 refits", "SGD (", "momentum: 0.9"):
        assert part in repr(optimizer)


class Counting(nn.Module):
    """Counts its runs in a buffer, in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x)


def test_a_closure_that_a_refit_evaluates_leaves_buffers_as_they_were() -> None:
    """A step with a refit counts one run, as a step without."""
    model = Counting()
    optimizer = LLQR.paper(sgd(model), model, every=1, steps=1)
    for number in range(3):
        optimizer.step(closure_of(model, optimizer, batch()))
        assert int(model.runs) == number + 1
    assert optimizer.stats.refits == 3
