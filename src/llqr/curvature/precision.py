"""Precision: curvature is computed in float32 at least, whatever the training runs in.

Half precision serves a training step, which averages its rounding away. A product with H is asked for the difference between
directions, and a fit takes dozens of them: they are taken of the same model in float32, with its half-precision numbers
(parameters, buffers, inputs) converted and autocast switched off, also where the model's own forward switches it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llqr.checks import mapped

LOWEST = torch.bfloat16
"""Of the dtypes that models are trained in, the one that rounds most."""


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """The same, but float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def is_low(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and at_least_single(tensor.dtype) != tensor.dtype


def raised(value: Any) -> Any:
    """The same, with every half-precision tensor in it in float32."""
    if isinstance(value, Tensor):
        return value.to(at_least_single(value.dtype)) if is_low(value) else value
    return mapped(dict(value.items()) if isinstance(value, Mapping) else value, raised)


@contextmanager
def no_autocast(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Everything in its own precision, for tensors on these devices."""
    with ExitStack() as stack:
        if torch._C._is_any_autocast_enabled():  # entering autocast isn't free, and most steps aren't under it
            for kind in {tensor.device.type for tensor in tensors.values()}:
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class AutocastOff(TorchFunctionMode):
    """While in force, autocast does nothing, also where code in between enters it; `met` tells whether some did."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.met = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not torch.is_autocast_enabled(self._device):
            return func(*args, **(kwargs or {}))
        self.met = True
        with torch.autocast(self._device, enabled=False):
            return func(*args, **(kwargs or {}))
