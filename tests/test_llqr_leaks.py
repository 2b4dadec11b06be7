"""Promise: nothing is kept alive: no graph, no inputs, no closure, no model, no hook; memory is flat."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR, Exact, QuadraticModel
from llqr.errors import LLQRError
from llqr.paper import PaperLLQR
from loops import backward, batch, closure_of, network, sgd, train

SIZE = 13  # of a batch, to be found by


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """What has to wait for the cycle collector has leaked: a GPU can be full before it runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def wrapped(model: nn.Module, **options: Any) -> PaperLLQR:
    return LLQR.paper(sgd(model), model, **{"structure": "kfac", "steps": 3, "damping": 0.1, **options})


def tensors() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]


def held_inputs() -> int:
    return sum(tensor.shape == (SIZE, 4) for tensor in tensors())


@pytest.mark.filterwarnings("ignore::llqr.errors.LLQRWarning")
@pytest.mark.parametrize(("divergence", "closures"), [("ngd", False), ("newton", True), ("gauss-newton", True)])
def test_memory_is_flat(divergence: str, closures: bool) -> None:
    """Over 2,000 steps for KL (400 with closures), with a refit every 50: as many tensors and Python objects as before."""
    model = network()
    optimizer = wrapped(model, divergence=divergence, every=50)
    half = 200 if closures else 1000
    train(model, optimizer, range(half), closures)
    gc.collect()
    live, blocks = len(tensors()), sys.getallocatedblocks()
    train(model, optimizer, range(half), closures)
    assert len(tensors()) == live
    assert gc.collect() < 100  # no circles that wait for the collector
    assert sys.getallocatedblocks() - blocks < 500
    assert optimizer.stats.refits + optimizer.stats.rejected == 2 * half // 50


@pytest.mark.parametrize("divergence", ["ngd", "newton", "gauss-newton"])
@pytest.mark.parametrize("structure", ["diagonal", "ekfac"])
def test_a_refit_leaves_no_graph(divergence: str, structure: str) -> None:
    """Outputs that the model returned in the refit are gone after the step, and nothing has a grad_fn."""
    model = network()
    optimizer = wrapped(model, divergence=divergence, structure=structure)
    outputs: list[weakref.ref[Tensor]] = []
    model.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
    train(model, optimizer, range(1), closures=True)
    assert len(outputs) >= 2
    assert [ref for ref in outputs if ref() is not None] == []
    assert [tensor.shape for tensor in tensors() if tensor.grad_fn is not None] == []


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
def test_a_quadratic_model_in_segments_leaves_no_graph(divergence: str) -> None:
    """A segment is a node of the graph, and what it keeps must not lead back to that graph: no collector sees such a circle."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs, targets = torch.randn(SIZE, 4), torch.randint(3, (SIZE,))
    q = QuadraticModel.build(model, inputs, targets, functional.cross_entropy, divergence, segments=["0", "2"])
    q.curvature(q.gradient)
    del q
    gc.collect()
    assert [tensor.shape for tensor in tensors() if tensor.grad_fn is not None] == []


@pytest.mark.parametrize(("divergence", "method"), [("newton", "auto"), ("gauss-newton", "cg"), ("ngd", "primal")])
def test_a_step_of_exact_leaves_no_graph(divergence: str, method: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs, targets = torch.randn(SIZE, 4), torch.randint(3, (SIZE,))
    optimizer = Exact(model, functional.cross_entropy, divergence, method)
    optimizer.step(lambda: (model(inputs), targets))
    assert [tensor.shape for tensor in tensors() if tensor.grad_fn is not None] == []


def test_blocks_of_before_are_gone_after_a_refit() -> None:
    model = network()
    optimizer = LLQR(sgd(model), model, every=1)
    train(model, optimizer, range(2))
    before = [weakref.ref(moment) for block in optimizer.blocks.values() for moment in block.moments.values()]
    assert before
    train(model, optimizer, range(2, 4))
    assert [ref for ref in before if ref() is not None] == []


def test_inputs_are_held_only_until_the_step_that_refits() -> None:
    model = network()
    optimizer = wrapped(model, every=2)
    for number in range(4):
        backward(model, batch(number, size=SIZE))
        assert held_inputs() == (number % 2 == 0)
        optimizer.step()
        assert held_inputs() == 0
    with torch.no_grad():
        model(batch(size=SIZE)[0])
    assert held_inputs() == 0
    backward(model, batch(size=SIZE))
    assert held_inputs() == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert held_inputs() == 0


def test_inputs_are_not_held_where_refits_have_a_batch_of_their_own() -> None:
    model = network()
    optimizer = wrapped(model, refit_batch=batch)
    backward(model, batch(size=SIZE))
    assert held_inputs() == 0
    optimizer.step()
    assert optimizer.stats.refits == 1


def test_a_refit_by_hand_holds_nothing() -> None:
    """Not even where the coming step refits too, or where it raises."""
    model = network()
    optimizer = LLQR.paper(torch.optim.SGD(model[2].parameters(), lr=0.1), model, steps=2, damping=0.1)
    optimizer.refit(*batch(size=SIZE), functional.cross_entropy)
    optimizer.refit(closure=closure_of(model, optimizer, batch(size=SIZE)))
    with pytest.raises(ZeroDivisionError):
        optimizer.refit(*batch(size=SIZE), lambda out, targets: out.mean() * (1 / 0))
    assert held_inputs() == 0


def test_closures_are_released() -> None:
    model = network()
    optimizer = wrapped(model, divergence="newton")
    closure = closure_of(model, optimizer, batch())
    ref = weakref.ref(closure)
    optimizer.step(closure)
    del closure
    assert ref() is None


def test_the_hook_goes_with_close() -> None:
    """U stays and is applied; a refit on the step's inputs is refused from then on."""
    model = network()
    optimizer = wrapped(model, every=2)
    train(model, optimizer, range(1))
    assert len(model._forward_pre_hooks) == 1
    optimizer.close()
    optimizer.close()
    assert len(model._forward_pre_hooks) == 0
    train(model, optimizer, range(1, 2))
    backward(model, batch())
    with pytest.raises(LLQRError, match="refit_batch"):
        optimizer.step()
    assert optimizer.refit(batch()[0])


def test_the_hook_goes_with_the_optimizer() -> None:
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, range(2))
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    assert len(model._forward_pre_hooks) == 0
    assert len(model._forward_pre_hooks_with_kwargs) == 0


def test_an_optimizer_that_could_not_be_made_leaves_no_hook() -> None:
    model = network()
    for wrong in ({"every": 0}, {"ema": 2.0}, {"divergence": "kl"}, {"structure": "kron"}, {"steps": 0}):
        with pytest.raises(LLQRError):
            wrapped(model, **wrong)
    assert len(model._forward_pre_hooks) == 0


def test_a_scheduler_does_not_keep_the_optimizer_alive_by_the_model() -> None:
    model = network()
    optimizer = wrapped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, range(1))
    scheduler.step()
    gone = weakref.ref(optimizer)
    del scheduler, optimizer
    gc.collect()  # torch's scheduler holds itself in a circle
    assert gone() is None
    assert len(model._forward_pre_hooks) == 0


def test_the_model_goes_with_its_last_user() -> None:
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, range(2))
    gone = weakref.ref(model)
    del model
    assert gone() is not None  # the optimizer's
    del optimizer
    assert gone() is None
