"""One chunk of a batch: run, recorded, and asked for its share of g and of H·v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from llqr.checks import Inputs, Loss, bound, check_finite, check_mean, check_weights_fit, frozen_rng, loss_gradient
from llqr.curvature.chunks import Examples, Piece, check_part, of_rows
from llqr.curvature.engine import HessianProducts, JacobianProducts, Recording
from llqr.curvature.graph import check_handwritten, handwritten
from llqr.curvature.locations import Locations
from llqr.curvature.recorder import Parameters, Recorder
from llqr.divergences import BasePoint, Term
from llqr.divergences.base import slope as slope_of
from llqr.divergences.base import waves
from llqr.divergences.families import Categorical
from llqr.errors import LLQRError, NotTwiceDifferentiableError


@dataclass(frozen=True)
class Portion:
    """How much a part of a batch counts in means over variables, and in means over examples."""

    variables: float = 1.0
    examples: float = 1.0

    def of(self, term: Term) -> float:
        if term.additive:
            return 1.0
        return self.variables if term.key is None else self.examples


@dataclass(frozen=True)
class WholeBatch:
    """A batch that is cut in chunks: its output, and the loss's slope there."""

    base: BasePoint
    slope: Tensor | None
    count: int


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
    """Of a larger batch, that this one is."""
    whole: WholeBatch | None = None
    counts: dict[tuple[int, int], float] = field(default_factory=dict)
    """By a term's id and a chunk's first row: how many times the term of the chunk alone counts in that of the batch."""
    examined: bool = False
    """Whether the formulas in model and loss were looked at."""

    def values(self, inputs: Inputs) -> list[Tensor]:
        """The output, and the activations at the locations; nothing is recorded."""
        with torch.no_grad():
            return self.recorder.run(self.parameters, inputs)

    def keep_whole(self, batch: Examples, piece: Piece, parts: Sequence[Piece]) -> None:
        """Keep the output of a batch for its chunks: what isn't a mean over variables is a function of it, with the outputs of
        the other chunks as they are; or a multiple of the chunk's own, which costs less. An error where the chunks have other
        outputs by themselves, or the second derivative of the whole doesn't fall apart into theirs."""
        output = self.values(piece.inputs)[0]
        check_finite(output, "the output")
        for part in parts:
            check_part(lambda inputs: self.values(inputs)[0], batch, output, part.rows, self.recorder.rounding)
        self.whole = WholeBatch(*self.expand(output, piece), piece.count)
        tangent = waves(output)
        for _, term in self.terms:
            if term.key is not None or term.by_variable:
                continue
            try:
                with frozen_rng():
                    expected = term.hessian_product(tangent, self.whole.base)
                    found = [self._found(term, tangent, expected, part) for part in parts]
            except RuntimeError as error:
                raise NotTwiceDifferentiableError(
                    f"the loss or the divergence can't be differentiated twice by the output: {error}"
                ) from error
            tolerance = torch.finfo(output.dtype).eps ** 0.5 * expected.norm()
            if not (torch.cat(found) - expected).norm() <= tolerance:
                raise LLQRError(
                    "the loss or the divergence of a batch isn't made of its chunks': it compares examples with each other, or "
                    "isn't linear in what it says of each. Give the batch whole"
                )

    def _found(self, term: Term, tangent: Tensor, expected: Tensor, part: Piece) -> Tensor:
        """A chunk's product: by itself, if it and its slope are one multiple of what the batch has there."""
        assert self.whole is not None
        own, wanted, output = (
            of_rows(each, part.rows, self.whole.count) for each in (tangent, expected, self.whole.base.output)
        )
        if self.loss_fn is not None and self.whole.slope is not None and part.own_targets is not None:
            try:
                loss, slope = loss_gradient(self.loss_fn, output, part.own_targets)
                product = term.hessian_product(own, BasePoint(output, loss, part.weights))
            except Exception:  # a loss may want the whole batch, or have nothing to count in a chunk
                return self.product_among(term, own, part.rows).clone()
            slopes = of_rows(self.whole.slope, part.rows, self.whole.count)
            count = float((product * wanted).sum() / product.square().sum())
            pairs = ((product, wanted), (slope, slopes))
            if all((count * a - b).norm() <= torch.finfo(b.dtype).eps ** 0.5 * b.norm() for a, b in pairs):
                self.counts[id(term), part.rows.start] = count
                return wanted
        return self.product_among(term, own, part.rows).clone()

    def among(self, part: Tensor, rows: slice, others: Tensor) -> Tensor:
        """The outputs of a chunk, among those of the others."""
        assert self.whole is not None
        each = len(others) // self.whole.count
        return torch.cat((others[: rows.start * each], part, others[rows.stop * each :]))

    def product_among(self, term: Term, tangent: Tensor, rows: slice) -> Tensor:
        """A chunk's product with the second derivative of a term of the whole batch."""
        assert self.whole is not None
        base = self.whole.base
        product = term.hessian_product(self.among(tangent, rows, torch.zeros_like(base.output)), base)
        return of_rows(product, rows, self.whole.count)

    def expand(self, output: Tensor, piece: Piece) -> tuple[BasePoint, Tensor | None]:
        """The point that ψ_N of a batch is expanded around, checked, and ∇ℓ(x_N)."""
        check_finite(output, "the output")
        loss, slope = bound(self.loss_fn, piece.targets), None
        if self.loss_fn is not None:
            loss, slope = loss_gradient(self.loss_fn, output, piece.targets)
            check_mean(self.loss_fn, output, piece.targets)
        weights = piece.weights
        if weights is not None:
            check_weights_fit(weights, output)
            weights = weights.to(output.dtype)
        for _, term in self.terms:
            if term.key is None:
                term.check(output, weights)
                _check_classes(term, output, piece.count)
        return BasePoint(output, loss, weights), slope

    def index(self, term: Term) -> int:
        """Which of the recorded values a term is about."""
        return 0 if term.key is None else 1 + list(self.locations).index(term.key)


class RecordedChunk:
    """One chunk of the batch, as one piece of it with what was recorded there."""

    def __init__(self, context: ChunkContext, piece: Piece, keep: bool) -> None:
        self._context, self._piece, self._keep = context, piece, keep
        factors = [(weight * context.portion.of(term) * self._share(term), term) for weight, term in context.terms]
        self._terms = [(factor, term) for factor, term in factors if factor]
        """Those that count something here, with what they are multiplied by."""
        self._recorded: _Recorded | None = None
        self._trusted = False
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
        context = self._context
        cotangents = [slope * context.portion.variables, *(torch.zeros_like(value) for value in run.values[1:])]
        for _, term in context.loss_terms:
            index = context.index(term)
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
        """Jv, of a J that was looked at."""
        if not self._trusted:
            linear.examine()
            self._trusted = True
        return linear.push(tangents)

    def _curve(self, recorded: _Recorded, tangents: list[Tensor]) -> list[Tensor]:
        """W J v: the output-space products of the flat terms."""
        curved = [torch.zeros_like(tangent) for tangent in tangents]
        for factor, term in self._terms:
            if not term.flat:
                continue
            index = self._context.index(term)
            if self._is_of_all(term):
                product = self._context.product_among(term, tangents[0], self._piece.rows)
            else:
                product = term.hessian_product(tangents[index], self._base(term, recorded.bases[index]))
            curved[index] += product * factor
        return curved

    def _psi(self, term: Term, values: list[Tensor], bases: list[BasePoint]) -> Tensor:
        """ψ, of the whole batch with the outputs of the other chunks as they are where it isn't a mean over variables."""
        index, whole = self._context.index(term), self._context.whole
        if whole is not None and self._is_of_all(term):
            return term.psi(self._context.among(values[0], self._piece.rows, whole.base.output), whole.base)
        return term.psi(values[index], self._base(term, bases[index]))

    def _count(self, term: Term) -> float | None:
        """How often this chunk's own term counts in the batch's; None where that isn't known."""
        return self._context.counts.get((id(term), self._piece.rows.start))

    def _base(self, term: Term, base: BasePoint) -> BasePoint:
        """The point that a term is expanded around; where it is counted, with the loss of the chunk alone."""
        if self._count(term) is None:
            return base
        return replace(base, loss=bound(self._context.loss_fn, self._piece.own_targets))

    def _is_of_all(self, term: Term) -> bool:
        """Whether a term has to be taken as a function of the whole batch's output, of which this is a chunk."""
        if self._context.whole is None or term.key is not None or term.by_variable:
            return False
        return self._count(term) is None

    def _share(self, term: Term) -> float:
        """How much of the batch's term this chunk's is."""
        count = 1.0 if self._is_of_all(term) else self._count(term)
        return Portion(self._piece.variables, self._piece.examples).of(term) if count is None else count

    def _record(self) -> _Recorded:
        """Run the chunk and record what its products need; kept if the whole batch is one chunk."""
        if self._recorded is not None:
            return self._recorded
        context = self._context
        steep = [(factor, term) for factor, term in self._terms if not term.flat]
        arguments = (context.recorder, context.parameters, self._piece.inputs)
        second = HessianProducts(*arguments) if steep else None
        linear = self._linearized(*arguments) if second is None or any(term.flat for _, term in context.terms) else None
        run = linear or second
        assert run is not None
        bases, slope = self._bases(run.values)
        gradient: list[Tensor] | None = None
        self._examine(bases[0] if context.whole is None else context.whole.base, slope, second)
        if second is not None:
            second.of(lambda x: torch.stack([factor * self._psi(term, x, bases) for factor, term in steep]).sum())
        if slope is not None and linear is not None:
            gradient = linear.pull_first(self._cotangents(linear, bases, slope))
        recorded = _Recorded(linear, second, bases, slope, gradient)
        if self._keep:
            self._recorded = recorded
        return recorded

    def _linearized(self, recorder: Recorder, parameters: Parameters, inputs: Inputs) -> JacobianProducts:
        return JacobianProducts(recorder, parameters, inputs)

    def _examine(self, base: BasePoint, slope: Tensor | None, second: HessianProducts | None) -> None:
        """Once a batch: raise for formulas written by hand that aren't what they say, or give wrong second derivatives."""
        context = self._context
        if context.examined or (slope is not None and not slope.any()):
            return
        context.examined = True
        for _, term in context.terms:
            if term.key is None:
                term.hessian_product(torch.zeros_like(base.output), base)  # raises where there is none
        if slope is None:
            return
        if any(term.needs_loss for _, term in context.terms):
            leaf = base.output.detach().requires_grad_()
            with torch.enable_grad():
                names = handwritten([base.loss(leaf)])
            check_handwritten(names, lambda: base.loss(leaf), "the loss", "use KL, which doesn't need the loss's")
        if second is not None:
            second.examine()

    def _bases(self, values: list[Tensor]) -> tuple[list[BasePoint], Tensor | None]:
        """The points that the ψ are expanded around, checked, and ∇ℓ(x_N)."""
        context, piece, output = self._context, self._piece, values[0]
        self._check_again(output)
        if context.whole is None:
            base, slope = context.expand(output, piece)
        else:
            weights = None if piece.weights is None else piece.weights.to(output.dtype)
            base, slope = BasePoint(output, context.whole.base.loss, weights), context.whole.slope
            slope = None if slope is None else of_rows(slope, piece.rows, context.whole.count)
        inside = zip(context.locations.values(), values[1:], strict=True)
        bases = [base, *(location.base(value, piece.count) for location, value in inside)]
        for _, term in (*context.terms, *context.loss_terms):
            if term.key is not None:
                base = bases[context.index(term)]
                term.check(base.output)
                term.check_psi(base)
        return bases, slope

    def _check_again(self, output: Tensor) -> None:
        """Raise where a chunk that is run again has another output than before."""
        length, before = float(output.norm()), self._length
        if before is not None and abs(length - before) > self._context.recorder.rounding(output) ** 0.5 * before:
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


def _check_classes(term: Term, output: Tensor, examples: int) -> None:
    """One number an example isn't a vector of logits, though a batch of them looks like one."""
    if examples > 1 and output.dim() == 1 and isinstance(getattr(term, "family", None), Categorical):
        raise LLQRError(
            f"the output has one number for each of the {examples} examples, and {term!r} wants logits of classes: write "
            "KL(family='bernoulli') for single logits, KL(family='gaussian') for regression"
        )
