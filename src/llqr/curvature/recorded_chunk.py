"""One chunk of a batch: run, recorded, and asked for its share of g and of H·v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llqr.checks import Inputs, Loss, bound, check_finite, check_mean, check_weights_fit, loss_gradient
from llqr.curvature.chunks import Examples, Piece, Rows, check_part
from llqr.curvature.engine import HessianProducts, JacobianProducts, Recording
from llqr.curvature.handwritten import check_handwritten, handwritten
from llqr.curvature.locations import Locations
from llqr.curvature.recorder import Parameters, Recorder
from llqr.divergences import L2, ActivationTerm, BasePoint, OutputTerm, Term
from llqr.divergences.base import slope as slope_of
from llqr.divergences.families import Categorical
from llqr.errors import LLQRError


@dataclass(frozen=True)
class Portion:
    """How much a batch counts, where it is a part of a larger one: in means over variables, and in means over examples."""

    variables: float = 1.0
    examples: float = 1.0

    def of(self, term: Term) -> float:
        if not isinstance(term, (OutputTerm, ActivationTerm)) or term.additive:
            return 1.0
        return self.variables if isinstance(term, OutputTerm) else self.examples


@dataclass
class ChunkContext:
    """What the chunks of one batch have in common."""

    recorder: Recorder
    parameters: Parameters
    loss_fn: Loss | None
    terms: list[tuple[float, Term]]
    locations: Locations
    loss_terms: Sequence[tuple[float, Term]] = ()
    portion: Portion = Portion()
    examined: bool = False
    """Whether the formulas in model and loss were looked at."""

    def values(self, inputs: Inputs) -> list[Tensor]:
        """The output, and the activations at the locations; nothing is recorded."""
        with torch.no_grad():
            return self.recorder.run(self.parameters, inputs)

    def check_parts(self, batch: Examples, parts: Sequence[Rows]) -> Tensor:
        """The output of a batch; an error unless that of these parts of it is the same by themselves."""
        whole = self.values(batch.inputs)[0]
        check_finite(whole, "the output")
        for rows in parts:
            check_part(lambda inputs: self.values(inputs)[0], batch, whole, rows, lambda: self.recorder.coarse)
        return whole

    def index(self, term: OutputTerm | ActivationTerm) -> int:
        """Which of the recorded values a term is about."""
        return 0 if isinstance(term, OutputTerm) else 1 + list(self.locations).index(term.key)

    def has_flat(self) -> bool:
        """Whether a term takes a push and a pull."""
        return any(term.flat and not isinstance(term, L2) for _, term in self.terms)


class RecordedChunk:
    """One chunk of the batch, as one piece of it with what was recorded there."""

    def __init__(self, context: ChunkContext, piece: Piece, keep: bool) -> None:
        self._context, self._piece, self._keep = context, piece, keep
        self._loss = piece.loss * context.portion.variables
        self._factors = [
            weight * factor * context.portion.of(term)
            for (weight, term), factor in zip(context.terms, piece.terms or [1.0] * len(context.terms), strict=True)
        ]
        self._recorded: _Recorded | None = None
        self._trusted = self._forward = False
        self._length: float | None = None

    def gradient(self) -> Parameters:
        """This chunk's share of g."""
        recorded = self._record()
        if recorded.slope is None:
            raise LLQRError("there is no loss to take the gradient of")
        if recorded.gradient is not None:
            return self._named(recorded.gradient)
        assert recorded.second is not None
        return self._named(recorded.second.pull(self._cotangents(recorded.second, recorded.bases, recorded.slope)))

    def _cotangents(self, run: Recording, bases: list[BasePoint], slope: Tensor) -> list[Tensor]:
        """The loss's slopes at the output and at each location."""
        cotangents = [slope * self._loss, *(torch.zeros_like(value) for value in run.values[1:])]
        for _, term in self._context.loss_terms:
            assert isinstance(term, ActivationTerm)
            index = self._context.index(term)
            cotangents[index] += slope_of(partial(term.psi, base=bases[index]), run.values[index])
        return cotangents

    def curvature(self, direction: Mapping[str, Tensor]) -> Parameters:
        context, recorded = self._context, self._record()
        tangents = [direction[name].detach() for name in context.parameters]
        product: list[Tensor] | None = None
        if recorded.linear is not None:
            product = recorded.linear.pull(self._curve(recorded, self._push(recorded.linear, tangents)))
        if recorded.second is not None:
            steep = recorded.second.product(tangents)
            product = steep if product is None else [a + b for a, b in zip(product, steep, strict=True)]
        return self._named([torch.zeros_like(v) for v in tangents] if product is None else product)

    def curvature_along(self, direction: Mapping[str, Tensor]) -> float:
        """v·Hv: Jv·WJv for the flat terms."""
        recorded = self._record()
        if recorded.linear is None or recorded.second is not None:
            product = self.curvature(direction)
            return _dot([direction[name] for name in product], list(product.values()))
        pushed = self._push(recorded.linear, [direction[name].detach() for name in self._context.parameters])
        return _dot(pushed, self._curve(recorded, pushed))

    def _push(self, linear: JacobianProducts, tangents: list[Tensor]) -> list[Tensor]:
        """Jv, of a J that was looked at; a chunk that has to be run forward is so when it is recorded again, too."""
        if not self._trusted:
            self._trusted = True
            dtypes = {*(value.dtype for value in linear.values), *self._context.recorder.coarse}
            linear.examine(max(torch.finfo(dtype).eps for dtype in dtypes))
        pushed = linear.push(tangents)
        self._forward = linear.forward_mode
        return pushed

    def _curve(self, recorded: _Recorded, tangents: list[Tensor]) -> list[Tensor]:
        """W J v: the output-space products of the flat terms."""
        curved = [torch.zeros_like(tangent) for tangent in tangents]
        for factor, term in self._counted():
            if not isinstance(term, L2) and term.flat:
                index = self._context.index(term)
                curved[index] += term.hessian_product(tangents[index], recorded.bases[index]) * factor
        return curved

    def _counted(self) -> list[tuple[float, Term]]:
        """The terms that count something here, with what they are multiplied by."""
        terms = (term for _, term in self._context.terms)
        return [(factor, term) for factor, term in zip(self._factors, terms, strict=True) if factor]

    def _record(self) -> _Recorded:
        """Run the chunk and record what its products need; kept if the whole batch is one chunk."""
        if self._recorded is not None:
            return self._recorded
        context = self._context
        counted = [(factor, term) for factor, term in self._counted() if not isinstance(term, L2)]
        steep = [(factor, context.index(term), term) for factor, term in counted if not term.flat]
        arguments = (context.recorder, context.parameters, self._piece.inputs)
        second = HessianProducts(*arguments) if steep else None
        linear = self._linearized(*arguments) if context.has_flat() or second is None else None
        run = linear or second
        assert run is not None
        bases, slope = self._bases(run.values)
        gradient: list[Tensor] | None = None
        self._examine(bases[0], slope, second)
        if second is not None:
            second.of(lambda x: torch.stack([weight * term.psi(x[i], bases[i]) for weight, i, term in steep]).sum())
        if slope is not None and linear is not None:
            gradient = linear.pull_first(self._cotangents(linear, bases, slope))
        recorded = _Recorded(linear, second, bases, slope, gradient)
        if self._keep:
            self._recorded = recorded
        return recorded

    def _linearized(self, recorder: Recorder, parameters: Parameters, inputs: Inputs) -> JacobianProducts:
        return JacobianProducts(recorder, parameters, inputs, self._forward)

    def _examine(self, base: BasePoint, slope: Tensor | None, second: HessianProducts | None) -> None:
        """Once a batch: raise for formulas written by hand that aren't what they say, or give wrong second derivatives."""
        context = self._context
        if context.examined or (slope is not None and not slope.any()):
            return
        context.examined = True
        for _, term in context.terms:
            if isinstance(term, OutputTerm):
                term.hessian_product(torch.zeros_like(base.output), base)  # raises where there is none
        if slope is None:
            return
        if any(isinstance(term, OutputTerm) and term.needs_loss for _, term in context.terms):
            leaf = base.output.detach().requires_grad_()
            with torch.enable_grad():
                names = handwritten([base.loss(leaf)])
            check_handwritten(names, lambda: base.loss(leaf), "the loss", "use KL, which doesn't need the loss's")
        if second is not None:
            second.examine()

    def _bases(self, values: list[Tensor]) -> tuple[list[BasePoint], Tensor | None]:
        """The points that the ψ are expanded around, checked, and ∇ℓ(x_N)."""
        context, output = self._context, values[0]
        check_finite(output, "the output")
        self._check_again(output)
        slope: Tensor | None = None
        loss = bound(context.loss_fn, self._piece.targets)
        if context.loss_fn is not None and not self._piece.loss:  # where it may have no value at all
            slope = torch.zeros_like(output)
        elif context.loss_fn is not None:
            loss, slope = loss_gradient(context.loss_fn, output, self._piece.targets)
            check_mean(context.loss_fn, output, self._piece.targets)
        weights = self._piece.weights
        if weights is not None:
            check_weights_fit(weights, output)
            weights = weights.to(output.dtype)
        inside = [
            location.base(value, self._piece.count)
            for location, value in zip(context.locations.values(), values[1:], strict=True)
        ]
        bases = [BasePoint(output, loss, weights), *inside]
        for _, term in (*context.terms, *context.loss_terms):
            if isinstance(term, OutputTerm):
                term.check(output, weights)
                _check_classes(term, output, self._piece.count)
            elif isinstance(term, ActivationTerm):
                term.check(bases[context.index(term)])
        return bases, slope

    def _check_again(self, output: Tensor) -> None:
        """Raise where a chunk that is run again has another output than before."""
        length, before = float(output.norm()), self._length
        tolerance = max(torch.finfo(dtype).eps for dtype in {output.dtype, *self._context.recorder.coarse}) ** 0.5
        if before is not None and abs(length - before) > tolerance * before:
            raise LLQRError(
                "the model has another output each time that it is run: does it draw from a random generator of its own, or "
                "count its calls? Give the batch whole, or training=False"
            )
        self._length = length

    def _named(self, tensors: list[Tensor]) -> Parameters:
        return dict(zip(self._context.parameters, tensors, strict=True))


@dataclass
class _Recorded:
    """What one run of a chunk left behind."""

    linear: JacobianProducts | None
    second: HessianProducts | None
    bases: list[BasePoint]
    """Of the output, and of each location."""
    slope: Tensor | None
    """∇ℓ(x_N), where there is a loss."""
    gradient: list[Tensor] | None
    """Jᵀ∇ℓ(x_N), where it came with the recording."""


def _dot(left: list[Tensor], right: list[Tensor]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(left, right, strict=True))


def _check_classes(term: OutputTerm, output: Tensor, examples: int) -> None:
    """One number an example isn't a vector of logits, though a batch of them looks like one."""
    if examples > 1 and output.dim() == 1 and isinstance(getattr(term, "family", None), Categorical):
        raise LLQRError(
            f"the output has one number for each of the {examples} examples, and {term!r} wants logits of classes: write "
            "KL(family='bernoulli') for single logits, KL(family='gaussian') for regression"
        )
