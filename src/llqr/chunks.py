"""A batch in chunks: who gets what, what it weighs, and which models can't be cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss, batch_size_of, check_weights, frozen_rng, tensors_in
from llqr.divergences import BasePoint
from llqr.errors import LLQRError

Piece = tuple[Inputs, Any, Tensor | None, float, float]


def pieces(
    model: nn.Module,
    inputs: Inputs,
    targets: Any,
    weights: Tensor | None,
    size: int | None,
    training: bool | None,
    metrics: bool,
) -> Iterator[Piece]:
    """The batch in chunks, with each one's share of the mean over variables and over examples."""
    if weights is not None:
        check_weights(weights, tensors_in(inputs)[0].device)
    if size is None:
        yield inputs, targets, weights, 1.0, 1.0
        return
    check_chunk_size(size)
    _refuse_coupled(model, training)
    count = batch_size_of(inputs)
    if weights is not None and weights.shape[:1] != (count,):
        raise LLQRError(
            f"the weights have shape {tuple(weights.shape)}, and the batch {count} examples: their first dimension is that of "
            "the batch"
        )
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        own = None if weights is None else weights[rows]
        examples = (rows.stop - rows.start) / count
        share = examples if weights is None or own is None else float(own.sum() / weights.sum())
        if share == 0 and metrics:
            raise LLQRError(
                "a chunk holds padding only, and the intermediate metrics count it: use a larger chunk_size"
            )
        if share > 0:
            yield _rows(inputs, rows, count), _rows(targets, rows, count), own, share, examples


def check_chunk_size(size: int | None) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise LLQRError(f"chunk_size is a positive number of examples, or None for the whole batch; not {size!r}")


def _rows(value: Any, rows: slice, count: int) -> Any:
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and len(value) == count else value
    if isinstance(value, Mapping):
        return {name: _rows(inner, rows, count) for name, inner in value.items()}
    return type(value)(_rows(inner, rows, count) for inner in value) if isinstance(value, (tuple, list)) else value


def _refuse_coupled(model: nn.Module, training: bool | None) -> None:
    for name, module in model.named_modules():
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if not (module.training if training is None else training) and not (batch_norm and module.running_mean is None):
            continue
        if batch_norm:
            raise LLQRError(
                f"{name!r} normalises with the statistics of the batch, which a chunk doesn't know: give the batch whole, or "
                "use running statistics (training=False, or model.eval())"
            )


def check_losses(loss_fn: Loss, seen: list[tuple[float, BasePoint]], targets: Any) -> None:
    """The losses of the chunks have to add up to the loss of the batch."""
    outputs = torch.cat([base.output for _, base in seen])
    with torch.no_grad(), frozen_rng():
        whole = float(loss_fn(outputs, targets))
        pieces = sum(share * float(base.loss(base.output)) for share, base in seen)
    if abs(whole - pieces) > 1e-3 * abs(whole):
        raise LLQRError(
            f"the losses of the chunks add up to {pieces:.6g}, and the loss of the batch is {whole:.6g}: it isn't a mean over "
            "examples (class weights, ignored targets?). Give `weights` that say how much each variable counts, or the batch "
            "whole"
        )
