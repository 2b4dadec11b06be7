"""A batch in chunks: who gets what, what it weighs, and which models can't be cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import (
    Inputs,
    Loss,
    batch_size_of,
    bound,
    check_weights,
    checked_integer,
    frozen_rng,
    loss_gradient,
    mapped,
    tensors_in,
)
from llqr.curvature.recorder import EVALUATED
from llqr.divergences import L2, BasePoint, OutputTerm, Term
from llqr.divergences.base import slope
from llqr.errors import LLQRError, NotTwiceDifferentiableError, unknown

Rows = slice | list[int]


@dataclass(frozen=True)
class Piece:
    """One chunk, and what it counts of the batch.

    `variables` is its share of a mean over variables, `examples` of a mean over the `count` examples it has. What `loss` and
    the `terms` are multiplied by is 1 for the whole batch, and measured for a chunk (`weighed`).
    """

    inputs: Inputs
    targets: Any
    weights: Tensor | None
    rows: slice
    variables: float
    examples: float
    count: int
    loss: float = 1.0
    terms: Sequence[float] | None = None


class Examples:
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
        return [name for name, value in named.items() if any(_is_cut(t, self.count) for t in tensors_in(value))]


def pieces(
    model: nn.Module, batch: Examples, targets: Any, weights: Tensor | None, size: int | None, training: bool | None
) -> Iterator[Piece]:
    """The batch in chunks, with each one's share of the mean over variables and over examples."""
    count = batch.count
    if weights is not None:
        check_weights(weights, tensors_in(batch.inputs)[0].device)
    if size is None:
        yield Piece(batch.inputs, targets, weights, slice(0, count), 1.0, 1.0, count)
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
        variables = examples if weights is None or own is None else total(own) / total(weights)
        yield Piece(
            batch.rows(rows), _rows(targets, rows, count), own, rows, variables, examples, rows.stop - rows.start
        )


def total(weights: Tensor) -> float:
    """Their sum; in double precision, whatever they are."""
    return float(weights.sum(dtype=torch.float64))


def check_chunk_size(size: int | None) -> None:
    if size is not None:
        checked_integer("chunk_size", size, "a positive number of examples, or None for the whole batch")


def check_part(
    run: Callable[[Inputs], Tensor],
    batch: Examples,
    whole: Tensor,
    rows: Rows,
    coarse: Callable[[], Collection[torch.dtype]],
) -> None:
    """Raise unless these examples have the outputs by themselves that they have in the `whole` batch's output.

    Whatever an example has seen of the others, or of an input that was cut by mistake, it doesn't see now. `coarse` are the
    dtypes that numbers were rounded to on their way.
    """
    expected = _of_rows(whole, rows, batch.count)
    try:
        own = run(batch.rows(rows))
    except LLQRError:
        raise
    except Exception as error:
        raise LLQRError(f"the model can't take a part of the batch ({error}): {_remedy(batch)}") from error
    tolerance = _rounding(whole, coarse()) ** 0.5
    if own.shape != expected.shape or (own - expected).norm() > tolerance * expected.norm():
        raise LLQRError(f"the output of an example depends on the other examples of the batch: {_remedy(batch)}")


def weighed(
    cut: Sequence[Piece],
    whole: Tensor,
    count: int,
    loss_fn: Loss | None,
    targets: Any,
    weights: Tensor | None,
    terms: Sequence[Term],
) -> list[Piece]:
    """The pieces with what their loss, and each term, has to be multiplied by to be its part of the whole batch's.

    What isn't a plain mean over variables is measured at the `whole` output, because a loss may count examples as it likes: by
    class weights, or without those whose target is ignored. The batch's slope is a multiple of the piece's own there, and so
    is its product with a second derivative; or they can't be cut.
    """
    tangent = torch.linspace(-40, 40, whole.numel()).sin().to(whole).reshape(whole.shape)
    if loss_fn is not None:
        loss_gradient(loss_fn, whole, targets)  # raises for what is no loss
    with frozen_rng():
        try:
            expected = _traits(loss_fn, terms, BasePoint(whole, bound(loss_fn, targets), weights), tangent)
        except RuntimeError as error:
            raise NotTwiceDifferentiableError(
                f"the loss or the divergence can't be differentiated twice by the output: {error}"
            ) from error
        result = []
        for piece in cut:
            base = BasePoint(_of_rows(whole, piece.rows, count), bound(loss_fn, piece.targets), piece.weights)
            try:
                own = _traits(loss_fn, terms, base, _of_rows(tangent, piece.rows, count))
            except Exception as error:
                raise LLQRError(
                    f"the loss can't be taken of a part of the batch ({error}): give the batch whole"
                ) from error
            here = [[_of_rows(trait, piece.rows, count) for trait in traits] for traits in expected]
            loss, *measured = map(_multiple, here, own)
            factors = [_factor(piece, *pair) for pair in zip(terms, measured, strict=True)]
            result.append(replace(piece, loss=loss, terms=factors))
    return result


def _factor(piece: Piece, term: Term, measured: float) -> float:
    if isinstance(term, OutputTerm) and not term.by_variable:
        return measured
    if isinstance(term, L2) or term.additive:
        return 1.0
    return piece.variables if isinstance(term, OutputTerm) else piece.examples


def _traits(loss_fn: Loss | None, terms: Sequence[Term], base: BasePoint, tangent: Tensor) -> list[list[Tensor]]:
    """What the loss and each term is known by at the output: a slope, a product with its second derivative, or both."""
    traits = [[] if loss_fn is None else [slope(base.loss, base.output)]]
    for term in terms:
        traits.append([])
        if isinstance(term, OutputTerm) and not term.by_variable:
            traits[-1].append(term.hessian_product(tangent, base))
            if not term.flat:
                traits[-1].append(slope(partial(term.psi, base=base), base.output))
    return traits


def _multiple(expected: Sequence[Tensor], own: Sequence[Tensor]) -> float:
    """What `own` is multiplied by to be as expected. Nothing is (and own may be anything) where nothing counts."""
    if not any(bool(x.any()) for x in expected):
        return 0.0
    size = max(float(x.abs().max()) for x in own) or 1.0
    unit = [x / size for x in own]
    product = sum(float((a * b).sum()) for a, b in zip(expected, unit, strict=True))
    factor = product / (sum(float(x.square().sum()) for x in unit) or 1.0)
    for a, b in zip(expected, unit, strict=True):
        if not (a - factor * b).norm() <= torch.finfo(a.dtype).eps ** 0.5 * a.norm():
            raise LLQRError(
                "the loss or the divergence of a chunk isn't a part of that of the batch, whatever it is multiplied by: it "
                "compares examples with each other, or isn't linear in what it says of each. Give the batch whole"
            )
    return factor / size


def _remedy(batch: Examples) -> str:
    cut = batch.cut()
    if len(cut) < 2:
        return "give the batch whole"
    return (
        "give the batch whole or, if it is an input that belongs to all the examples and has as many rows as there are "
        f"examples by chance, name it in shared=[...]; cut were {', '.join(map(repr, cut))}"
    )


def _of_rows(output: Tensor, rows: Rows, count: int) -> Tensor:
    """What an output has for these of the examples."""
    if output.dim() == 0 or len(output) % count:
        raise LLQRError(
            f"the first dimension of the output, {tuple(output.shape)}, isn't that of the {count} examples: give the batch "
            "whole"
        )
    return output.reshape(count, -1, *output.shape[1:])[rows].flatten(0, 1)


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


def _is_cut(tensor: Tensor, count: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == count


def _rows(value: Any, rows: Rows, count: int) -> Any:
    return mapped(value, lambda tensor: tensor[rows] if _is_cut(tensor, count) else tensor)


def refuse_coupled(model: nn.Module, training: bool | None) -> None:
    for name, module in model.named_modules():
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if not (module.training if training is None else training) and not (batch_norm and module.running_mean is None):
            continue
        if batch_norm:
            raise LLQRError(
                f"{name!r} normalises with the statistics of the batch, which a part of it doesn't know: give the batch whole, "
                f"or {EVALUATED}"
            )
