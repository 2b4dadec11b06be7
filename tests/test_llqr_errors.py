"""Promise: what can't work is said before any work is lost, with what to write instead; the parameters stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR
from llqr.divergences import KL, GaussNewton, Intermediate, Newton
from llqr.errors import LLQRError
from llqr.paper import PaperLLQR
from llqr.solvers import SGDM
from llqr.structures import Diagonal
from loops import assert_same, backward, batch, network, never, parameters_of, sgd

OPTIONS: list[tuple[dict[str, Any], str]] = [
    *[({"every": every}, "every is a positive number of steps.*or a function") for every in (0, -1, True, 2.0, "500", None)],
    ({"divergence": "kl"}, "unknown divergence 'kl'.*'ngd'"),
    ({"divergence": "newtom"}, "did you mean 'newton'"),
    ({"divergence": Newton}, r"write Newton\(\)"),
    ({"divergence": 3}, "unknown divergence 3"),
    ({"structure": "ekafc"}, "did you mean 'ekfac'"),
    ({"structure": "blocks"}, "unknown structure 'blocks'.*'kfac'"),
    ({"structure": Diagonal}, r"write Diagonal\(\)"),
    ({"structure": {"0": "kfac"}}, r"no pattern.*'2.weight'.*last \"\*\""),
    ({"structure": {"0.wieght": "kfac", "*": "diagonal"}}, "did you mean '0.weight'"),
    *[({"ema": ema}, "ema is at least 0.*below 1") for ema in (1.0, -0.1, True, "0.9", float("nan"))],
    *[({"steps": steps}, "steps is a positive integer") for steps in (0, -3, 2.5, True)],
    *[({"solver": solver}, r"ScaleFree\(\) or SGDM") for solver in ("sgdm", SGDM, torch.optim.SGD)],
    *[({"chunk_size": size}, "chunk_size is a positive number of examples") for size in (0, -1, 1.5, True)],
    *[({"damping": damping}, "damping is a finite number") for damping in (-1.0, float("inf"), "0.1", None, True)],
    ({"damping": {"1.weight": 0.1}}, "unknown module or parameter in damping '1.weight'.*did you mean '2.weight'"),
    ({"damping": {"9": 0.1}}, "unknown module or parameter in damping '9'"),
    ({"damping": {"0": -1.0}}, "damping of '0' is a finite number"),
    ({"divergence": KL() + Intermediate({"7": 1.0})}, "unknown module in Intermediate '7'"),
    ({"loss_fn": "mse"}, "loss_fn is a function, not a str"),
    ({"output": 0}, "output is a function, not a int"),
    ({"weights": torch.ones(3)}, "weights is a function, not a Tensor"),
    ({"refit_batch": batch()}, "refit_batch is a function, not a tuple"),
    ({"warm_start": "yes"}, "warm_start is True or False, not 'yes'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda value: str(value)[:40])
def test_options(options: dict[str, Any], message: str) -> None:
    """At once, not at the first refit; the model is left without a hook."""
    model = network()
    with pytest.raises(LLQRError, match=message):
        LLQR.paper(sgd(model), model, **options)
    assert not model._forward_pre_hooks


def test_bases() -> None:
    model = network()
    refused: list[tuple[Any, str]] = [
        (torch.optim.LBFGS(model.parameters()), "LBFGS evaluates its closure several times.*wrap another optimizer"),
        (LLQR.paper(sgd(model), model), "the base is an LLQR already: wrap the optimizer inside it"),
        (
            model.parameters(),
            r"as in LLQR\.paper\(torch.optim.SGD\(model.parameters\(\), lr=0.1\), model\); got generator",
        ),
        (torch.optim.SGD, "LLQR.paper wraps an optimizer.*got type"),
        (model, "LLQR.paper wraps an optimizer.*got Sequential"),
    ]
    for base, message in refused:
        with pytest.raises(LLQRError, match=message):
            LLQR.paper(base, model)
    with pytest.raises(LLQRError, match=r"the second argument is the model, an nn.Module; got generator"):
        LLQR.paper(sgd(model), model.parameters())  # type: ignore[arg-type]


def test_parameters_of_another_model() -> None:
    """All of them, as after a copy; or one, as from a loss with parameters of its own."""
    model, other = network(), network(1)
    with pytest.raises(
        LLQRError, match=r"4 of the optimizer's 4 parameters aren't in the model.*shape \(5, 4\) in group 0"
    ):
        LLQR.paper(sgd(other), model)
    margin = nn.Parameter(torch.ones(2, 7))
    groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": [margin]}]
    with pytest.raises(
        LLQRError, match=r"1 of the optimizer's 5.*\(2, 7\) in group 1: make the optimizer from model.param"
    ):
        LLQR.paper(torch.optim.SGD(groups, lr=0.1), model)


def test_parameters_that_are_replaced_in_mid_training() -> None:
    """As by a new head after the optimizer was made: the base would step what is no longer there."""
    model = network()
    optimizer = LLQR.paper(sgd(model), model)
    model[2] = nn.Linear(5, 3).double()
    backward(model, batch())
    with pytest.raises(LLQRError, match=r"2 of the optimizer's 4 parameters aren't in the model.*new layers"):
        optimizer.step()


def test_complex_and_shapeless_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self, value: Tensor) -> None:
            super().__init__()
            self.linear, self.odd = nn.Linear(2, 2), nn.Parameter(value)

    model: nn.Module = Odd(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(LLQRError, match="'odd' is complex"):
        LLQR.paper(sgd(model), model)
    model = Odd(torch.ones(3))
    model.odd = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    with pytest.raises(LLQRError, match=r"'odd' is torch.int64"):
        LLQR.paper(sgd(model), model)
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(LLQRError, match=r"'0.weight' has no shape yet: call the model once first"):
        LLQR.paper(sgd(model), model)
    model = Odd(torch.ones(3, dtype=torch.complex64))
    optimizer = LLQR.paper(sgd(model.linear), model)
    with pytest.raises(LLQRError, match="'odd' is complex"):
        optimizer.add_param_group({"params": [model.odd]})
    assert len(optimizer.param_groups) == 1


Wrong = Callable[[nn.Module, PaperLLQR], Any]


def _refused(make: Callable[[nn.Module], PaperLLQR], step: Wrong, message: str, model: nn.Module | None = None) -> None:
    """The step raises, parameters and counts stay, and the optimizer can go on when it is done right."""
    model = network() if model is None else model
    optimizer = make(model)
    before = parameters_of(model)
    with pytest.raises(LLQRError, match=message):
        step(model, optimizer)
    assert_same(before, parameters_of(model))
    assert optimizer.state_dict()["llqr"]["step"] == 0
    assert optimizer.stats.refits == optimizer.stats.rejected == 0
    assert optimizer.preconditioner is None


def plain(model: nn.Module, **options: Any) -> PaperLLQR:
    return LLQR.paper(sgd(model), model, **{"damping": 0.1, "steps": 2, **options})


@pytest.mark.parametrize("divergence", ["ngd", "newton", "gauss-newton"])
@pytest.mark.parametrize(
    ("value", "got"),
    [(None, "NoneType"), (1.5, "float"), (torch.ones(2), r"a tensor of shape \(2,\)"), ((torch.ones(()), 1), "tuple")],
    ids=str,
)
def test_closures_that_return_no_loss(divergence: str, value: Any, got: str) -> None:
    def step(model: nn.Module, optimizer: PaperLLQR) -> None:
        def closure() -> Any:
            backward(model, batch())
            return value

        optimizer.step(closure)

    _refused(
        lambda model: plain(model, divergence=divergence), step, f"the closure returned {got}: it must return the loss"
    )


@pytest.mark.parametrize("divergence", ["newton", "gauss-newton"])
def test_closures_that_go_backward_by_another_door(divergence: str) -> None:
    def step(model: nn.Module, optimizer: PaperLLQR) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch()[0]), batch()[1])
            torch.autograd.backward(loss)
            return loss

        optimizer.step(closure)

    _refused(
        lambda model: plain(model, divergence=divergence), step, r"torch.autograd.backward.*write loss.backward\(\)"
    )


def test_steps_without_a_forward_or_a_backward_pass() -> None:
    def never_called(model: nn.Module, optimizer: PaperLLQR) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    def without_gradients(model: nn.Module, optimizer: PaperLLQR) -> None:
        with torch.no_grad():
            model(batch()[0])
        never_called(model, optimizer)

    def by_its_forward(model: nn.Module, optimizer: PaperLLQR) -> None:
        functional.cross_entropy(model.forward(batch()[0]), batch()[1]).backward()
        optimizer.step()

    def without_backward(model: nn.Module, optimizer: PaperLLQR) -> None:
        model(batch()[0])
        optimizer.step()

    no_inputs = r"no inputs to refit on: the model wasn't called \(by model\(...\), with gradients on\).*refit_batch"
    for step in (never_called, without_gradients, by_its_forward):
        _refused(plain, step, no_inputs)
    _refused(plain, without_backward, r"no parameter has a gradient: call loss.backward\(\) before optimizer.step\(\)")
    _refused(plain, lambda model, optimizer: optimizer.refit(), "no parameter has a gradient")


def test_a_step_that_failed_can_be_done_again() -> None:
    """The refit that was due is still due."""
    model = network()
    optimizer = plain(model)
    with pytest.raises(LLQRError):
        optimizer.step()
    backward(model, batch())
    optimizer.step()
    assert optimizer.stats.refits == 1


def test_divergences_that_need_the_loss() -> None:
    """Newton and Gauss–Newton by step() alone, and with a batch but no loss."""

    def step(model: nn.Module, optimizer: PaperLLQR) -> None:
        backward(model, batch())
        optimizer.step()

    for divergence in (Newton(), GaussNewton(), KL() + 0.1 * Newton()):
        for options in (dict[str, Any](), {"refit_batch": batch}):
            _refused(
                partial(plain, divergence=divergence, **options),
                step,
                r"needs the loss: call optimizer.step\(closure\) .*or give LLQR.paper a loss_fn and a refit_batch",
            )


def test_sparse_gradients() -> None:
    """At any step, also where U is the identity: the base alone would take them, U never will."""
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))

    def step(model: nn.Module, optimizer: PaperLLQR) -> None:
        functional.cross_entropy(model(torch.randint(5, (6, 2))), batch()[1]).backward()
        optimizer.step()

    for every in (1, never):
        model.zero_grad()
        _refused(
            partial(plain, every=every),
            step,
            "gradient of '0.weight' is sparse.*sparse=False, or step it by an optimizer of its own",
            model,
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"refit_batch returns a pair \(inputs, targets\).*got NoneType"),
        (batch()[0], "got Tensor of 6"),
        ((batch()[0],), "got tuple of 1"),
        ((*batch(), 1), "got tuple of 3"),
        ("xy", "got str of 2"),
        ({"inputs": 1, "targets": 2}, "got dict of 2"),
        ((None, None), "inputs are a tensor"),
        ((3, None), "inputs are a tensor"),
        ((batch()[0][:0], None), "the inputs are empty"),
    ],
    ids=lambda value: str(value)[:20].replace("\n", ""),
)
def test_batches_that_are_none(given: Any, message: str) -> None:
    def step(model: nn.Module, optimizer: PaperLLQR) -> None:
        backward(model, batch())
        optimizer.step()

    cross_entropy = functional.cross_entropy
    for divergence, loss_fn in (("ngd", None), ("ngd", cross_entropy), ("gauss-newton", cross_entropy)):
        _refused(
            partial(plain, divergence=divergence, loss_fn=loss_fn, refit_batch=lambda: given),
            step,
            message,
        )


def test_inference_mode() -> None:
    def step(model: nn.Module, optimizer: PaperLLQR) -> None:
        backward(model, batch())
        with torch.inference_mode():
            optimizer.step()

    _refused(plain, step, r"inference_mode\(\) is on")
