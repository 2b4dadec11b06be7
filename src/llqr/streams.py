"""Random streams that a model can draw from: torch's on its devices, Python's, numpy's and generators of its modules."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Stream = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How its state is read and set."""


class Streams:
    """The streams of a model, to be drawn from again and again as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._streams = list(_streams(model))
        self._begun = self._states()

    @contextmanager
    def again(self) -> Iterator[None]:
        """What is drawn in there is the same each time, and afterwards the streams are where they were."""
        before = self._states()
        self._set(self._begun)
        try:
            yield
        finally:
            self._set(before)

    def drawn(self) -> bool:
        """Whether something was drawn since `again` began."""
        return not _same(self._states(), self._begun)

    def _states(self) -> list[Any]:
        return [read() for read, _ in self._streams]

    def _set(self, states: list[Any]) -> None:
        for (_, put), state in zip(self._streams, states, strict=True):
            put(state)


def _streams(model: nn.Module) -> Iterator[Stream]:
    yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    for device in accelerators(model):
        yield _of_device(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.random.get_state, numpy.random.set_state
    held = {id(one): one for module in model.modules() for value in vars(module).values() for one in _within(value)}
    for value in held.values():
        if isinstance(value, torch.Generator):
            yield value.get_state, value.set_state
        elif isinstance(value, random.Random):
            yield value.getstate, value.setstate
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            yield value.get_state, value.set_state
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            yield partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state")


SHORT = 100
"""Longer lists are data."""


def _within(value: Any) -> Collection[Any]:
    """An attribute, or what is in it where it is a short list, a tuple or a dictionary."""
    if not isinstance(value, (dict, list, tuple)) or len(value) > SHORT:
        return (value,)
    return value.values() if isinstance(value, dict) else value


def _of_device(device: torch.device) -> Stream:
    module, where = torch.get_device_module(device), () if device.type == "mps" else (device,)
    return lambda: module.get_rng_state(*where), lambda state: module.set_rng_state(state, *where)


def accelerators(model: nn.Module) -> set[torch.device]:
    """The devices, other than processors, that a model is on."""
    tensors = [*model.parameters(), *model.buffers()]
    return {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return _same(list(left.values()), list(right.values()))
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_same, left, right))
    equal = left == right
    return equal if isinstance(equal, bool) else bool(equal.all())  # an array's
