"""What a training loop evaluates: the inputs that its model was last called with, and the losses of its closures.

A closure clears the gradients, calls the model, takes the loss backward and returns it. While one is re-evaluated here,
`backward()` does nothing and the gradients that are there stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llqr.checks import Inputs, mapped, tensors_in
from llqr.curvature.recorder import Streams, forward_replaced, in_modes, unfused
from llqr.errors import LLQRError
from llqr.wrapper import Schedule, gradients_of


class Called(NamedTuple):
    """How a model was when it was called: what it drew from, the modes of its modules, and what autocast ran it in."""

    streams: Streams
    modes: list[tuple[nn.Module, bool]]
    autocast: torch.dtype | None = None


class InputHook:
    """A forward pre-hook that holds the arguments of the model's last call with gradients, if the coming step refits.

    It knows the schedule, not the optimizer, so that neither keeps the other alive. A copy of it, as in a copy or a pickle of
    the model, does nothing; nor does one without a schedule. Without `inputs` it holds only how the model was.
    """

    def __init__(self, schedule: Schedule | None = None, inputs: bool = True) -> None:
        self._schedule, self._inputs = schedule, inputs
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._listens: bool | None = None
        self.called: Called | None = None
        """How the model was, in that call."""
        self.slopes: list[tuple[Tensor, Tensor]] = []
        """What it returned in that call, with the gradients that came back to it."""

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Listen to the calls of a model. Returns what takes the hooks off again."""
        hooks = ExitStack()
        hooks.callback(model.register_forward_pre_hook(partial(_listen, self), with_kwargs=True).remove)
        hooks.callback(model.register_forward_hook(partial(_await, self)).remove)
        return hooks.close

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any], called: Called | None = None) -> None:
        self._call = (copied(args), copied(kwargs)) if self._inputs or self._listens else None
        self.called, self.slopes = called, []

    def await_slopes(self, output: Any) -> None:
        """Hear what comes back to what the model has returned."""
        for tensor in tensors_in(output) if self._call is not None else ():
            if tensor.grad_fn is not None and tensor.is_floating_point() and tensor.dim() > 1:
                tensor.grad_fn.register_prehook(partial(_keep, self.slopes, tensor.detach(), tensor.output_nr))

    def has_schedule(self) -> bool:
        return self._schedule is not None

    def wanted(self) -> bool:
        if self._listens is not None:
            return self._listens
        return self._schedule is not None and self._schedule.may_be_due()

    @contextmanager
    def listening(self, listens: bool) -> Iterator[None]:
        """For a while hold any call, or none (a refit calls the model itself); then hold what was held before."""
        before, self._listens = (self._call, self.called, self.slopes), listens
        try:
            yield
        finally:
            (self._call, self.called, self.slopes), self._listens = before, None

    def inputs(self, module: nn.Module) -> Inputs | None:
        """What the module was called with: a tensor, a tuple, or a dict where there were keywords."""
        if self._call is None:
            return None
        return as_inputs(module, *self._call)

    def forget(self) -> None:
        self._call, self.called, self.slopes = None, None, []

    def __reduce__(self) -> tuple[type[InputHook], tuple[()]]:
        return InputHook, ()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _listen(hook: InputHook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.is_grad_enabled() and is_own_call(module) and hook.wanted():
        device = next(module.parameters()).device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        modes = [(each, each.training) for each in module.modules()]
        hook.hold(args, kwargs, Called(Streams(module), modes, autocast))


def _keep(slopes: list[tuple[Tensor, Tensor]], output: Tensor, place: int, gradients: Sequence[Tensor | None]) -> None:
    slope = gradients[place]
    if slope is not None:
        slopes.append((output, slope.detach()))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _await(hook: InputHook, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.is_grad_enabled() and is_own_call(module) and hook.wanted():
        hook.await_slopes(output)


@torch.compiler.substitute_in_graph(_await, skip_signature_check=True)
def _traced_await(hook: InputHook, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """What stands for it inside of a compiled graph."""


@torch.compiler.substitute_in_graph(_listen, skip_signature_check=True)
def _traced(hook: InputHook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What stands for it where it is compiled into a graph, as when the model is a part of what is compiled.

    There a question that breaks off the graph, or an answer that changes, costs more than copies of the inputs that nobody
    asks for: so every call is held.
    """
    if torch.is_grad_enabled() and hook.has_schedule():
        hook.hold(args, kwargs)


def as_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """What the module was called with: a tensor, a tuple, or a dict where there were keywords."""
    if kwargs:
        return {**_named(module.forward, args), **kwargs} if args else kwargs
    return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args


def is_own_call(module: nn.Module) -> bool:
    """Not one by `torch.func.functional_call`, which puts other tensors in the place of parameters."""
    return isinstance(next(module.parameters(), None), nn.Parameter)


def _named(forward: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    bound = inspect.signature(forward).bind_partial(*args)
    by_name = {
        name: value
        for name, value in bound.arguments.items()
        if bound.signature.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    if len(by_name) != len(args):
        raise LLQRError(
            "the model was called with keywords and with arguments that have no name: call it with one kind, "
            "positions or keywords (or give LLQR.paper a refit_batch)"
        )
    return by_name


def copied(value: Any) -> Any:
    """Copies, without their graphs: the model, or the loop after it, may write into its inputs."""
    return mapped(value, lambda tensor: tensor.detach().clone())


Closure = Callable[[], Any]


def evaluated(closure: Closure) -> Any:
    with torch.enable_grad():
        return closure()


def whole_loss(closure: Closure, model: nn.Module) -> Callable[[], Tensor]:
    """The loss as a function of the parameters that the model holds when it is called."""
    evaluate = _evaluation(closure, model)

    def differentiable() -> Tensor:
        loss = evaluate()
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise LLQRError(
                "the closure returns a loss that is detached (as Lightning's do), and this divergence needs its derivatives: "
                "return the loss that was taken backward, or give LLQR.paper a loss_fn and a refit_batch"
            )
        return loss

    return differentiable


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


def _evaluation(closure: Closure, model: nn.Module) -> Callable[[], Tensor]:
    held = list(model.parameters())

    def evaluate() -> Tensor:
        with _gradients_kept(held), _NoBackward():
            loss = checked_loss(closure())
            _refuse_backward(model.parameters())
            return loss

    return evaluate


def loss_of_output(model: nn.Module, closure: Closure) -> Callable[[Tensor, Any], Tensor]:
    """ℓ(x): what the closure returns when the model returns x."""
    evaluate = _evaluation(closure, model)

    def loss(output: Tensor, targets: Any) -> Tensor:
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return output

        with forward_replaced(model, forward):
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
