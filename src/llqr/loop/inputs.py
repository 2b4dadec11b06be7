"""InputHook: the inputs that a model was last called with, where a refit will want them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import Inputs
from llqr.errors import LLQRError
from llqr.loop.schedule import Schedule


class InputHook:
    """A forward pre-hook that holds the arguments of the model's last call with gradients, if the coming step refits.

    It knows the schedule, not the optimizer, so that neither keeps the other alive. A copy of it, as in a copy or a pickle of
    the model, does nothing.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        self._schedule = schedule
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._schedule is not None and torch.is_grad_enabled() and _is_own_call(module) and self._schedule.due():
            self._call = (_detached(args), _detached(kwargs))

    def inputs(self, module: nn.Module) -> Inputs | None:
        """What the module was called with: a tuple, or a dict where there were keywords."""
        if self._call is None:
            return None
        args, kwargs = self._call
        return args if not kwargs else {**_named(module.forward, args), **kwargs} if args else kwargs

    def forget(self) -> None:
        self._call = None

    def __reduce__(self) -> tuple[type[InputHook], tuple[()]]:
        return InputHook, ()


def _is_own_call(module: nn.Module) -> bool:
    """Not one of a refit, which puts plain tensors in the place of parameters."""
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
            "the model was called with keywords and with arguments that have no name: call it with one kind, or give LLQR a "
            "refit_batch"
        )
    return by_name


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) is dict or (isinstance(value, Mapping) and not hasattr(value, "to")):
        return {name: _detached(part) for name, part in value.items()}
    return type(value)(_detached(part) for part in value) if type(value) in (tuple, list) else value
