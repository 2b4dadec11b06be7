"""proposed_step: what an optimizer would do to the parameters at a batch, found out on copies."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr import sites
from llqr.checks import Inputs, Loss, as_arguments, check_finite, check_model, frozen_rng
from llqr.errors import LLQRError, LLQRWarning
from llqr.loop.closures import checked_loss
from llqr.loop.gradients import stepped_parameters
from llqr.loop.wrapping import Wrapping
from llqr.recorder import Recorder, Selector


def proposed_step(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss,
    *,
    output: Selector | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
) -> dict[str, Tensor]:
    """θ after one step of the optimizer on this batch, less θ before, by parameter name; zeros for what it doesn't step.

    The step is taken by copies of the model and of the optimizer with its state, and both are left as they were, buffers,
    `.grad` and random numbers included. Step hooks aren't copied.

    Args:
        optimizer: any torch optimizer of the model's parameters, `LLQR` among them; or several, each for some of them (Muon for
            the matrices, AdamW for the rest). An LLQR whose step begins with a refit refits, on this batch.
        output: picks the tensor that the loss is about out of what the model returns.
        prepare: called with the copy of the model between the backward pass and the step, for clipping and the like.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    _check(optimizers, model, inputs)
    before = sites.trainable(model)
    step = {name: torch.zeros_like(p) for name, p in before.items()}
    for each in optimizers:  # each on copies of its own, so that all of them begin at θ
        memo: dict[int, Any] = {}
        twin = _copy(model, "model", memo)
        _take(_twin(each, memo, (inputs, targets)), twin, inputs, targets, loss_fn, output, prepare)
        after = dict(twin.named_parameters())
        stepped = stepped_parameters(each, model)
        step.update({name: after[name].detach() - p for name, p in before.items() if name in stepped})
    return step


def _take(
    optimizer: Optimizer,
    model: nn.Module,
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss,
    output: Selector | None,
    prepare: Callable[[nn.Module], object] | None,
) -> None:
    """One step, in silence: what there is to warn of will be said when it is taken in earnest."""
    select = Recorder(model, (), output).selected

    def closure() -> Tensor:
        optimizer.zero_grad()
        args, kwargs = as_arguments(inputs)
        loss = checked_loss(loss_fn(select(model(*args, **kwargs)), targets))
        check_finite(loss.detach(), "the loss")
        loss.backward()  # type: ignore[no-untyped-call]
        if prepare is not None:
            prepare(model)
        return loss

    with torch.enable_grad(), frozen_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", LLQRWarning)
        optimizer.step(closure)  # type: ignore[arg-type]


def _check(optimizers: list[Optimizer], model: nn.Module, inputs: Inputs) -> None:
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise LLQRError("optimizer is a torch optimizer of the model's parameters, or a list of such")
    check_model(model, inputs)
    names = [name for each in optimizers for name in stepped_parameters(each, model)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise LLQRError(f"two of the optimizers step {twice!r}: give each the parameters that are its own")


def _copy(value: Any, what: str, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise LLQRError(f"the {what} can't be copied, and steps are tried out on a copy ({error})") from error


def _twin(optimizer: Optimizer, memo: dict[int, Any], batch: tuple[Inputs, Any]) -> Optimizer:
    """A copy of the optimizer for the parameters of the model's copy.

    `Optimizer.__getstate__` leaves out what a class keeps beside its groups and state, and copy.deepcopy would lose it; so
    everything is copied but hooks, and `step` where a scheduler has wrapped it.
    """
    if isinstance(optimizer, Wrapping):
        memo[id(optimizer.base)] = _twin(optimizer.base, memo, batch)
    own = type(optimizer).__getstate__ is not Optimizer.__getstate__
    content = dict(optimizer.__getstate__() if own else vars(optimizer))
    if content.get("refit_batch") is not None:
        content["refit_batch"] = lambda: batch  # the loop's own would be drawn from a stream that training goes on with
    kept = {name: value for name, value in content.items() if name != "step" and not name.startswith("_optimizer_")}
    twin: Optimizer = object.__new__(type(optimizer))
    state = {name: _copy(value, type(optimizer).__name__, memo) for name, value in kept.items()}
    twin.__setstate__(state)
    return twin
