"""A batch in chunks: who gets what, what it weighs, and which models can't be cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss, batch_size_of, check_weights, frozen_rng, tensors_in
from llqr.divergences import BasePoint
from llqr.errors import LLQRError, unknown

Rows = slice | list[int]


@dataclass(frozen=True)
class Piece:
    """One chunk: `share` is its share of the mean over variables, `examples` of the mean over the `count` examples it has."""

    inputs: Inputs
    targets: Any
    weights: Tensor | None
    share: float
    examples: float
    count: int


class Batch:
    """The inputs of a model, and how they are cut.

    A tensor whose first dimension is the number of examples is cut. Those named in `shared` (by keyword or position) go to
    every chunk whole, whatever their size.
    """

    def __init__(self, inputs: Inputs, shared: Collection[str | int] = ()) -> None:
        named = _named(inputs)
        if isinstance(shared, (str, int)) or not isinstance(shared, Collection):
            raise LLQRError(
                f"shared is a list of the inputs' names or positions, as in shared=['mask']; not {shared!r}"
            )
        for name in shared:
            if name not in named:
                raise unknown("input in shared", name, named)
        self.inputs, self._shared = inputs, set(shared)
        cut = tuple(value for name, value in named.items() if name not in self._shared)
        if named and not tensors_in(cut):
            raise LLQRError("all the inputs are shared, and nothing is left that has examples")
        self.count = batch_size_of(cut) if named else 1  # none: a closure has them

    def rows(self, rows: Rows) -> Inputs:
        """The examples of these rows."""
        chosen = {
            name: value if name in self._shared else _rows(value, rows, self.count)
            for name, value in _named(self.inputs).items()
        }
        if isinstance(self.inputs, Mapping):
            return chosen  # type: ignore[return-value]
        return tuple(chosen.values()) if isinstance(self.inputs, (tuple, list)) else chosen[0]

    def cut(self) -> list[str | int]:
        """The inputs that are cut."""
        named = {name: value for name, value in _named(self.inputs).items() if name not in self._shared}
        return [name for name, value in named.items() if _is_cut(value, self.count)]


def pieces(
    model: nn.Module,
    batch: Batch,
    targets: Any,
    weights: Tensor | None,
    size: int | None,
    training: bool | None,
    metrics: bool,
) -> Iterator[Piece]:
    """The batch in chunks, with each one's share of the mean over variables and over examples."""
    count = batch.count
    if weights is not None:
        check_weights(weights, tensors_in(batch.inputs)[0].device)
    if size is None:
        yield Piece(batch.inputs, targets, weights, 1.0, 1.0, count)
        return
    check_chunk_size(size)
    refuse_coupled(model, training)
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
            yield Piece(batch.rows(rows), _rows(targets, rows, count), own, share, examples, rows.stop - rows.start)


def check_chunk_size(size: int | None) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise LLQRError(f"chunk_size is a positive number of examples, or None for the whole batch; not {size!r}")


def check_independence(
    run: Callable[[Inputs], Tensor], batch: Batch, size: int, coarse: Callable[[], Collection[torch.dtype]]
) -> None:
    """Raise unless an example's output is the same in any company. `coarse` are the dtypes that it was rounded to on its way.

    Examples of the first and of the last chunk are run together, one more than a chunk holds: what a chunk sees of an input
    that was cut by mistake, or of the other examples, is other than before then.
    """
    count = batch.count
    if count <= size:
        return
    first, last = range(size), range((count - 1) // size * size, count)
    late = last[: (size + 1) // 2]
    early = first[: size + 1 - len(late)]
    try:
        of_first, of_last, mixed = (_each(run(batch.rows(list(rows))), rows) for rows in (first, last, [*late, *early]))
    except LLQRError:
        raise
    except Exception as error:
        if len(batch.cut()) < 2:
            raise
        raise LLQRError(f"the model can't take a part of the batch ({error}): {_remedy(batch)}") from error
    before = torch.cat((of_last[: len(late)], of_first[: len(early)]))
    tolerance = _rounding(before, coarse()) ** 0.4
    if before.shape != mixed.shape or (before - mixed).norm() > tolerance * before.norm():
        raise LLQRError(f"the output of an example depends on the other examples of its chunk: {_remedy(batch)}")


def check_losses(loss_fn: Loss, seen: Sequence[tuple[float, BasePoint]], targets: Any) -> None:
    """The losses of the chunks have to add up to the loss of the batch."""
    outputs = torch.cat([base.output for _, base in seen])
    with torch.no_grad(), frozen_rng():
        whole = float(loss_fn(outputs, targets))
        pieces = sum(share * float(base.loss(base.output)) for share, base in seen)
    if abs(whole - pieces) > max(1e-3, 2 * torch.finfo(outputs.dtype).eps) * abs(whole):
        raise LLQRError(
            f"the losses of the chunks add up to {pieces:.6g}, and the loss of the batch is {whole:.6g}: it isn't a mean over "
            "examples (class weights, ignored targets?). Give `weights` that say how much each variable counts, or the batch "
            "whole"
        )


def _remedy(batch: Batch) -> str:
    cut = batch.cut()
    if len(cut) < 2:
        return "give the batch whole"
    return (
        "give the batch whole or, if it is an input that belongs to all the examples and has as many rows as there are "
        f"examples by chance, name it in shared=[...]; cut were {', '.join(map(repr, cut))}"
    )


def _each(output: Tensor, rows: Sequence[int]) -> Tensor:
    """An output with one row an example."""
    if output.dim() == 0 or len(output) % len(rows):
        raise LLQRError(
            f"the first dimension of the output, {tuple(output.shape)}, isn't that of the {len(rows)} examples of a chunk: "
            "give the batch whole"
        )
    return output.detach().reshape(len(rows), -1)


def _rounding(output: Tensor, dtypes: Collection[torch.dtype]) -> float:
    """Of the coarsest numbers on the way to the output."""
    kind = output.device.type
    used = {output.dtype, *dtypes}
    single = [2.0**-10] if kind == "cuda" else []  # which may multiply in TF32
    return max(*(torch.finfo(dtype).eps for dtype in used), *single, 0.0)


def _named(inputs: Inputs) -> dict[str | int, Any]:
    if isinstance(inputs, Mapping):
        return {name: inputs[name] for name in inputs}
    return dict(enumerate(inputs)) if isinstance(inputs, (tuple, list)) else {0: inputs}


def _is_cut(value: Any, count: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) == count
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return any(_is_cut(part, count) for part in inner)


def _rows(value: Any, rows: Rows, count: int) -> Any:
    if isinstance(value, Tensor):
        return value[rows] if _is_cut(value, count) else value
    if isinstance(value, Mapping):
        return {name: _rows(inner, rows, count) for name, inner in value.items()}
    if not isinstance(value, (tuple, list)):
        return value
    parts = [_rows(inner, rows, count) for inner in value]
    return (
        type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    )  # a namedtuple takes them one by one


def refuse_coupled(model: nn.Module, training: bool | None) -> None:
    for name, module in model.named_modules():
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if not (module.training if training is None else training) and not (batch_norm and module.running_mean is None):
            continue
        if batch_norm:
            raise LLQRError(
                f"{name!r} normalises with the statistics of the batch, which a part of it doesn't know: give the batch whole, "
                "or use running statistics (training=False, or model.eval())"
            )
