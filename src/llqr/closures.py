"""Closures: what a training loop's own evaluation of its loss tells.

A closure clears the gradients, calls the model, takes the loss backward and returns it. While one is re-evaluated here,
`backward()` does nothing and the gradients that are there stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llqr.checks import replaced
from llqr.curvature.recorder import Streams, in_modes, unfused
from llqr.errors import LLQRError
from llqr.wrapper import gradients_of

Closure = Callable[[], Any]


def evaluated(closure: Closure) -> Any:
    with torch.enable_grad():
        return closure()


def whole_loss(closure: Closure, model: nn.Module, differentiable: bool = True) -> Callable[[], Tensor]:
    """The loss as a function of the parameters that the model holds when it is called."""
    held = list(model.parameters())

    def evaluate() -> Tensor:
        with _gradients_kept(held), _NoBackward():
            loss = checked_loss(closure())
            _refuse_backward(model.parameters())
        if differentiable and torch.is_grad_enabled() and not loss.requires_grad:
            raise LLQRError(
                "the closure returns a loss that is detached (as Lightning's do), and this divergence needs its derivatives: "
                "return the loss that was taken backward, or give LLQR.paper a loss_fn and a refit_batch"
            )
        return loss

    return evaluate


def evaluated_gradients(
    closure: Closure, model: nn.Module, parameters: Mapping[str, Tensor], streams: Streams
) -> dict[str, Tensor] | None:
    """The gradients that a closure leaves with the modules in evaluation mode; None where it trains them.

    What is there stays: gradients (in their own memory, which a DDP may write to), buffers, random streams. `streams` are as
    they were before the closure was evaluated for the step.
    """
    modules = list(model.modules())
    if not any(module.training for module in modules):
        return gradients_of(parameters)
    held = [(tensor, tensor.detach().clone()) for tensor in [*gradients_of(parameters).values(), *model.buffers()]]
    modes = [(module, False) for module in modules]
    try:
        with (
            _gradients_kept(parameters.values()),
            in_modes(modes),
            streams.again(),
            unfused(model),
            torch.enable_grad(),
        ):
            closure()
            found = {name: gradient.detach().clone() for name, gradient in gradients_of(parameters).items()}
            return None if any(module.training for module in modules) else found
    finally:
        with torch.no_grad():
            for tensor, value in held:
                tensor.copy_(value)


def loss_of_output(model: nn.Module, closure: Closure) -> Callable[[Tensor, Any], Tensor]:
    """ℓ(x): what the closure returns when the model returns x."""
    evaluate = whole_loss(closure, model, differentiable=False)

    def loss(output: Tensor, targets: Any) -> Tensor:
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return output

        with replaced(model, forward=forward):
            value = evaluate()
            _refuse_backward([output])
        if calls != 1:
            raise LLQRError(
                f"the closure calls the model {calls} times; this divergence needs the loss as a function of one output: give "
                "LLQR.paper a loss_fn and a refit_batch"
            )
        return value

    return loss


def tensor_alone(output: Any) -> Tensor:
    """The output of a model that a closure calls; what picks a part of it would hide the rest from the closure."""
    if isinstance(output, Tensor):
        return output
    raise LLQRError(
        f"the model returned a {type(output).__name__}, and this divergence needs the loss as a function of one tensor in it, "
        "which a closure doesn't tell: give LLQR.paper a loss_fn and a refit_batch"
    )


def checked_loss(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise LLQRError(
            f"the closure returned {got}: it must return the loss, a tensor with one number, as in "
            "`def closure(): optimizer.zero_grad(); loss = loss_fn(model(x), y); loss.backward(); return loss`"
        )
    return value.reshape(())


def _refuse_backward(leaves: Iterable[Tensor]) -> None:
    """Raise where a gradient has come through all the same, since its graph is gone then."""
    if any(leaf.is_leaf and leaf.grad is not None for leaf in leaves):
        raise LLQRError(
            "the closure takes the loss backward by torch.autograd.backward, which can't be put off while it is evaluated "
            "again: write loss.backward()"
        )


class _NoBackward(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return None if func is torch.Tensor.backward else func(*args, **(kwargs or {}))


@contextmanager
def _gradients_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A closure's `zero_grad` and clipping find nothing to change."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
