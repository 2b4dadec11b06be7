"""The options of LLQR that are looked at when it is made."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llqr.errors import LLQRError
from llqr.loop.refit import Batch


def check_base(base: Optimizer, model: nn.Module, name: str = "LLQR") -> None:
    """`name` is what the user wrote."""
    if not isinstance(base, Optimizer):
        raise LLQRError(
            f"{name} wraps an optimizer, as in {name}(torch.optim.SGD(model.parameters(), lr=0.1), model); got "
            f"{type(base).__name__}"
        )
    if isinstance(getattr(base, "optimizer", None), Optimizer):
        raise LLQRError(
            f"the base is a {type(base).__name__}, a framework's wrapper around an optimizer: give {name} the optimizer "
            f"inside, and what it returns to the framework, as in accelerator.prepare({name}(optimizer, model))"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise LLQRError(
            "LBFGS evaluates its closure several times a step, and U can't come between: wrap another optimizer"
        )
    if not isinstance(model, nn.Module):
        raise LLQRError(f"the second argument is the model, an nn.Module; got {type(model).__name__}")


def checked_ema(ema: float) -> float:
    if isinstance(ema, bool) or not isinstance(ema, (int, float)) or not 0 <= ema < 1:
        raise LLQRError(f"ema is at least 0 (U is the last fit) and below 1, not {ema!r}")
    return float(ema)


def checked_batch(batch: Any) -> Batch:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise LLQRError(
            "refit_batch returns a pair (inputs, targets), with None for targets where the divergence needs none; got "
            f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, Collection) else "")
        )
    return batch[0], batch[1]
