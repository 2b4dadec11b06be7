"""InputHook: the inputs that a model was last called with, where a refit will want them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, tensors_in
from llqr.curvature.recorder import Streams
from llqr.errors import LLQRError
from llqr.loop.schedule import Schedule


class Called(NamedTuple):
    """How a model was when it was called: what it drew from, the modes of its modules, and what autocast ran it in."""

    streams: Streams
    modes: list[tuple[nn.Module, bool]]
    autocast: torch.dtype | None = None


class InputHook:
    """A forward pre-hook that holds the arguments of the model's last call with gradients, if the coming step refits.

    It knows the schedule, not the optimizer, so that neither keeps the other alive. A copy of it, as in a copy or a pickle of
    the model, does nothing; nor does one without a schedule.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        self._schedule = schedule
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
        self._call, self.called, self.slopes = (copied(args), copied(kwargs)), called, []

    def await_slopes(self, output: Any) -> None:
        """Hear what comes back to what the model has returned."""
        for tensor in tensors_in(output):
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
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict or (isinstance(value, Mapping) and not hasattr(value, "to")):
        return {name: copied(part) for name, part in value.items()}
    return type(value)(copied(part) for part in value) if type(value) in (tuple, list) else value
