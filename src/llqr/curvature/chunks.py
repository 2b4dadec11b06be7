"""A batch in chunks: which inputs are cut, and which models can't be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, batch_size_of, checked_integer, mapped, tensors_in
from llqr.curvature.recorder import EVALUATED
from llqr.divergences import Term
from llqr.errors import LLQRError, unknown


@dataclass(frozen=True)
class Portion:
    """How much a part of a batch counts in means over variables, and in means over examples."""

    variables: float = 1.0
    examples: float = 1.0

    def of(self, term: Term) -> float:
        if term.additive:
            return 1.0
        return self.variables if term.key is None else self.examples


@dataclass
class Piece:
    """One chunk of a batch, or all of it: these rows of its inputs, targets and weights, of `count` examples."""

    inputs: Inputs
    targets: Any
    weights: Tensor | None
    rows: slice
    count: int
    share: Portion = Portion()
    trusted: bool = False
    """Whether its Jacobian was looked at."""


class Examples:
    """The inputs of a model, and how they are cut.

    A tensor whose first dimension is the number of examples is cut. Those named in `shared` (by keyword or position) go to
    every chunk whole, whatever their size.
    """

    def __init__(self, inputs: Inputs, shared: Collection[str | int] = ()) -> None:
        self.inputs, self._named = inputs, _named(inputs)
        if isinstance(shared, (str, int)) or not isinstance(shared, Collection):
            raise LLQRError(f"shared is a list of inputs' names or positions, as in shared=['mask']; not {shared!r}")
        for name in shared:
            if name not in self._named:
                raise unknown("input in shared", name, self._named)
        self._cut = {name: value for name, value in self._named.items() if name not in shared}
        cut = tuple(self._cut.values())
        if self._named and not tensors_in(cut):
            raise LLQRError("all the inputs are shared, and nothing is left that has examples")
        self.count = batch_size_of(cut) if self._named else 1  # none: a closure has them

    def rows(self, rows: slice) -> Inputs:
        """The examples of these rows."""
        chosen = self._named | {name: _rows(value, rows, self.count) for name, value in self._cut.items()}
        if isinstance(self.inputs, Mapping):
            return chosen  # type: ignore[return-value]
        return tuple(chosen.values()) if isinstance(self.inputs, (tuple, list)) else chosen[0]

    def remedy(self) -> str:
        """What to do where chunks have other outputs than the batch."""
        cut = [name for name, value in self._cut.items() if any(_is_cut(t, self.count) for t in tensors_in(value))]
        if len(cut) < 2:
            return "give the batch whole"
        return (
            "give the batch whole or, if it is an input that belongs to all the examples and has as many rows as there are "
            f"examples by chance, name it in shared=[...]; cut were {', '.join(map(repr, cut))}"
        )


def pieces(model: nn.Module, batch: Examples, whole: Piece, size: int, training: bool | None) -> Iterator[Piece]:
    """The batch in chunks."""
    count, weights = batch.count, whole.weights
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
        variables = examples if weights is None or own is None else total(own) / total(weights)
        targets = _rows(whole.targets, rows, count)
        yield Piece(batch.rows(rows), targets, own, rows, rows.stop - rows.start, Portion(variables, examples))


def total(weights: Tensor) -> float:
    """Their sum; in double precision, whatever they are."""
    return float(weights.sum(dtype=torch.float64))


def check_chunk_size(size: int | None) -> None:
    if size is not None:
        checked_integer("chunk_size", size, "a positive number of examples, or None for the whole batch")


def check_part(run: Callable[[], Tensor], expected: Tensor, rounding: float, batch: Examples) -> None:
    """Raise unless the examples of a chunk have the outputs by themselves that they have in the whole batch.

    Whatever an example has seen of the others, or of an input that was cut by mistake, it doesn't see now.
    """
    try:
        own = run()
    except LLQRError:
        raise
    except Exception as error:
        raise LLQRError(f"the model can't take a part of the batch ({error}): {batch.remedy()}") from error
    if own.shape != expected.shape or (own - expected).norm() > rounding**0.5 * expected.norm():
        raise LLQRError(f"the output of an example depends on the other examples of the batch: {batch.remedy()}")


def of_rows(output: Tensor, rows: slice, count: int) -> Tensor:
    """What an output has for these of the `count` examples."""
    if output.dim() == 0 or len(output) % count:
        raise LLQRError(
            f"the first dimension of the output, {tuple(output.shape)}, isn't that of the {count} examples: give the batch "
            "whole"
        )
    return output.reshape(count, -1, *output.shape[1:])[rows].flatten(0, 1)


def _named(inputs: Inputs) -> dict[str | int, Any]:
    if isinstance(inputs, Mapping):
        return {name: inputs[name] for name in inputs}
    return dict(enumerate(inputs)) if isinstance(inputs, (tuple, list)) else {0: inputs}


def _is_cut(tensor: Tensor, count: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == count


def _rows(value: Any, rows: slice, count: int) -> Any:
    return mapped(value, lambda tensor: tensor[rows] if _is_cut(tensor, count) else tensor)


def refuse_coupled(model: nn.Module, training: bool | None) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.running_mean is None or (module.training if training is None else training):
            raise LLQRError(
                f"{name!r} normalises with the statistics of the batch, which a part of it doesn't know: give the batch whole, "
                f"or {EVALUATED}"
            )
