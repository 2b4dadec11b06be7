"""Plainly: a model run so that all of its graph can be read and differentiated, whatever it is recorded by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint


class _Plainly:
    """What a reentrant checkpoint calls, without one: its own backward pass works with loss.backward() alone."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _no_hook(frame: Any) -> AbstractContextManager[None]:
    """What another one keeps the saved tensors by."""
    return nullcontext()


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Checkpointed blocks keep what they save. To run them again in the backward pass they would need all that the model was
    run with: its parameters, buffers, modes and precision, and the rules that recorded it."""
    before = checkpoint.CheckpointFunction, checkpoint._checkpoint_hook
    checkpoint.CheckpointFunction = _Plainly  # type: ignore[misc, assignment]
    checkpoint._checkpoint_hook = _no_hook  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction, checkpoint._checkpoint_hook = before  # type: ignore[misc]


class CheckpointedError(Exception):
    """A tensor was asked for that a checkpointed block would have to be run again for."""


@contextmanager
def refusing_checkpoints() -> Iterator[None]:
    """No block is run again in there."""
    before = checkpoint._recomputation_hook
    checkpoint._recomputation_hook = _refuse  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpoint._recomputation_hook = before  # type: ignore[misc]


def _refuse(frame: Any, graph: Any) -> AbstractContextManager[None]:
    raise CheckpointedError


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Recurrent layers step by step: back ends run them as one node, and cuDNN's has no derivative in eval mode."""
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield
        return
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another function that a call of a module runs, between its hooks."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
