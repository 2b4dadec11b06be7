"""One chunk of a batch: run, recorded, and asked for its share of g and of H·v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from llqr.checks import Loss, bound, check_finite, check_mean, check_weights_fit, frozen_rng, loss_gradient
from llqr.curvature.chunks import Examples, Piece, Portion, check_part, of_rows
from llqr.curvature.engine import HessianProducts, JacobianProducts
from llqr.curvature.graph import check_handwritten, handwritten
from llqr.curvature.locations import Locations
from llqr.curvature.recorder import Parameters, Recorder
from llqr.divergences import BasePoint, Term
from llqr.divergences.base import slope as slope_of
from llqr.divergences.base import waves
from llqr.divergences.families import Categorical
from llqr.errors import LLQRError, NotTwiceDifferentiableError


@dataclass(frozen=True)
class WholeBatch:
    """The output of a batch, as the point that ψ_N is expanded around, and the loss's slope there."""

    base: BasePoint
    slope: Tensor | None
    count: int


class AmongOthers(Term):
    """A term of a batch as a function of one chunk's output, with the outputs of the other chunks as they are."""

    def __init__(self, term: Term, whole: WholeBatch, rows: slice) -> None:
        self.flat = term.flat
        self._term, self._whole, self._rows = term, whole, rows

    def _among(self, part: Tensor, others: Tensor) -> Tensor:
        each = len(others) // self._whole.count
        return torch.cat((others[: self._rows.start * each], part, others[self._rows.stop * each :]))

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        whole = self._whole.base
        return self._term.psi(self._among(output, whole.output), whole)

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        whole = self._whole.base
        product = self._term.hessian_product(self._among(tangent, torch.zeros_like(whole.output)), whole)
        return of_rows(product, self._rows, self._whole.count)


@dataclass
class ChunkContext:
    """What the chunks of one batch have in common."""

    recorder: Recorder
    parameters: Parameters
    loss_fn: Loss | None
    terms: list[tuple[float, Term]]
    locations: Locations
    loss_terms: Sequence[tuple[float, Term]] = ()
    portion: Portion = field(default_factory=Portion)
    """Of a larger batch, that this one is."""
    whole: WholeBatch | None = None
    """Of a batch that is cut."""
    cut: dict[tuple[int, int], tuple[float, Term]] = field(default_factory=dict)
    """By a term's id and a chunk's first row: what the batch's term is for the chunk, where it isn't a mean over variables."""
    examined: bool = False
    """Whether the formulas in model and loss were looked at."""

    def terms_of(self, piece: Piece) -> list[tuple[float, Term]]:
        """The terms that count something in a chunk, with what they are multiplied by."""
        found = []
        for weight, term in self.terms:
            share, own = self.cut.get((id(term), piece.rows.start), (piece.share.of(term), term))
            found.append((weight * self.portion.of(term) * share, own))
        return [(factor, term) for factor, term in found if factor]

    def keep_whole(self, batch: Examples, piece: Piece, parts: Sequence[Piece]) -> None:
        """Keep the output of a batch for its chunks: what isn't a mean over variables is a function of it, with the outputs of
        the other chunks as they are; or a multiple of the chunk's own, which costs less. An error where the chunks have other
        outputs by themselves, or the second derivative of the whole doesn't fall apart into theirs."""
        output = self._output(piece)
        check_finite(output, "the output")
        for part in parts:
            expected = of_rows(output, part.rows, piece.count)
            check_part(partial(self._output, part), expected, self.recorder.rounding(output), batch)
        whole = self.whole = self.expand(output, piece)
        tangent = waves(output)
        for _, term in self.terms:
            if term.key is not None or term.by_variable:
                continue
            try:
                with frozen_rng():
                    product = term.hessian_product(tangent, whole.base)
                    found = [self._cut(term, part, tangent, product) for part in parts]
            except RuntimeError as error:
                raise NotTwiceDifferentiableError(
                    f"the loss or the divergence can't be differentiated twice by the output: {error}"
                ) from error
            tolerance = torch.finfo(output.dtype).eps ** 0.5 * product.norm()
            if not (torch.cat(found) - product).norm() <= tolerance:
                raise LLQRError(
                    "the loss or the divergence of a batch isn't made of its chunks': it compares examples with each other, or "
                    "isn't linear in what it says of each. Give the batch whole"
                )

    def _output(self, piece: Piece) -> Tensor:
        with torch.no_grad():
            return self.recorder.run(self.parameters, piece.inputs)[0]

    def _cut(self, term: Term, part: Piece, tangent: Tensor, product: Tensor) -> Tensor:
        """A chunk's product, and in `cut` what it is of: its own term, if that and its slope are one multiple of what the batch
        has there."""
        whole = self.whole
        assert whole is not None
        v, wanted, output = (of_rows(each, part.rows, whole.count) for each in (tangent, product, whole.base.output))
        own = _own_product(self.loss_fn, term, part, output, v)
        if own is not None and whole.slope is not None:
            multiple = float((own[0] * wanted).sum() / own[0].square().sum())
            pairs = zip(own, (wanted, of_rows(whole.slope, part.rows, whole.count)), strict=True)
            if all((multiple * a - b).norm() <= torch.finfo(b.dtype).eps ** 0.5 * b.norm() for a, b in pairs):
                self.cut[id(term), part.rows.start] = multiple, term
                return wanted
        among = AmongOthers(term, whole, part.rows)
        self.cut[id(term), part.rows.start] = 1.0, among
        return among.hessian_product(v, whole.base).clone()

    def expand(self, output: Tensor, piece: Piece) -> WholeBatch:
        """The point that ψ_N of a batch is expanded around, checked, and ∇ℓ(x_N)."""
        check_finite(output, "the output")
        loss, slope = bound(self.loss_fn, piece.targets), None
        if self.loss_fn is not None:
            loss, slope = loss_gradient(self.loss_fn, output, piece.targets)
            check_mean(self.loss_fn, output, piece.targets)
        if piece.weights is not None:
            check_weights_fit(piece.weights, output)
        base = BasePoint(output, loss, _of_dtype(piece.weights, output))
        for _, term in self.terms:
            if term.key is None:
                term.check(output, base.weights)
                _check_classes(term, output, piece.count)
        return WholeBatch(base, slope, piece.count)

    def index(self, term: Term) -> int:
        """Which of the recorded values a term is about."""
        return 0 if term.key is None else 1 + list(self.locations).index(term.key)


class RecordedChunk:
    """One chunk of the batch, run, with what its products need."""

    def __init__(
        self, context: ChunkContext, piece: Piece, linearized: type[JacobianProducts] = JacobianProducts
    ) -> None:
        self._context, self._piece = context, piece
        self._terms = context.terms_of(piece)
        self.flat_terms = all(term.flat for _, term in self._terms)
        """H = JᵀWJ, but for the diagonal."""
        arguments = (context.recorder, context.parameters, piece.inputs)
        self.run = linearized(*arguments) if self.flat_terms else HessianProducts(*arguments)
        whole = context.whole or context.expand(self.run.values[0], piece)
        self.bases, self.loss_slope = self._bases(whole)
        self._examine(whole.base)
        if isinstance(self.run, HessianProducts):
            self.run.of(self._psi)

    def gradient(self) -> Parameters:
        """This chunk's share of g."""
        assert self.loss_slope is not None
        context, (_, *inside) = self._context, self.run.values
        cotangents = [self.loss_slope * context.portion.variables, *map(torch.zeros_like, inside)]
        for _, term in context.loss_terms:
            index = context.index(term)
            cotangents[index] += slope_of(partial(term.psi, base=self.bases[index]), self.run.values[index])
        return self._named(self.run.pull_first(cotangents))

    def curvature(self, direction: Mapping[str, Tensor]) -> Parameters:
        """This chunk's share of H·v."""
        tangents = self._tangents(direction)
        if isinstance(self.run, HessianProducts):
            return self._named(self.run.product(tangents))
        return self._named(self.run.pull(self._curve(self.push(tangents))))

    def curvature_along(self, direction: Mapping[str, Tensor]) -> float:
        """v·Hv: Jv·WJv where the terms are flat."""
        if not self.flat_terms:
            product = self.curvature(direction)
            return _dot([direction[name] for name in product], list(product.values()))
        pushed = self.push(self._tangents(direction))
        return _dot(pushed, self._curve(pushed))

    def _tangents(self, direction: Mapping[str, Tensor]) -> list[Tensor]:
        return [direction[name].detach() for name in self._context.parameters]

    def push(self, tangents: list[Tensor]) -> list[Tensor]:
        """Jv, of a J that was looked at."""
        assert isinstance(self.run, JacobianProducts)
        if not self._piece.trusted:
            self.run.examine()
            self._piece.trusted = True
        return self.run.push(tangents)

    def _curve(self, tangents: list[Tensor]) -> list[Tensor]:
        """W J v: the products in output space."""
        curved = [torch.zeros_like(tangent) for tangent in tangents]
        for factor, term in self._terms:
            index = self._context.index(term)
            curved[index] += term.hessian_product(tangents[index], self.bases[index]) * factor
        return curved

    def _psi(self, values: list[Tensor]) -> Tensor:
        """Σ ψ."""
        found = []
        for factor, term in self._terms:
            index = self._context.index(term)
            found.append(factor * term.psi(values[index], self.bases[index]))
        return torch.stack(found).sum()

    def _examine(self, base: BasePoint) -> None:
        """Once a batch: raise for formulas written by hand that aren't what they say, or give wrong second derivatives."""
        context = self._context
        if context.examined or (self.loss_slope is not None and not self.loss_slope.any()):
            return
        context.examined = True
        for _, term in context.terms:
            if term.key is None:
                term.hessian_product(torch.zeros_like(base.output), base)  # raises where there is none
        if self.loss_slope is None:
            return
        if any(term.needs_loss for _, term in context.terms):
            leaf = base.output.detach().requires_grad_()
            with torch.enable_grad():
                names = handwritten([base.loss(leaf)])
            check_handwritten(names, lambda: base.loss(leaf), "the loss", "use KL, which doesn't need the loss's")
        if isinstance(self.run, HessianProducts):
            self.run.examine()

    def _bases(self, whole: WholeBatch) -> tuple[list[BasePoint], Tensor | None]:
        """The points that the ψ are expanded around, checked, and ∇ℓ(x_N)."""
        context, piece, (output, *inside) = self._context, self._piece, self.run.values
        base, slope = whole.base, whole.slope
        if context.whole is not None:
            expected = of_rows(base.output, piece.rows, whole.count)
            if not (output - expected).norm() <= context.recorder.rounding(output) ** 0.5 * expected.norm():
                raise LLQRError(
                    "the model has another output each time that it is run: does it draw from a random generator of its own, "
                    "or count its calls? Give the batch whole, or training=False"
                )
            base = BasePoint(output, bound(context.loss_fn, piece.targets), _of_dtype(piece.weights, output))
            slope = None if slope is None else of_rows(slope, piece.rows, whole.count)
        places = zip(context.locations.values(), inside, strict=True)
        bases = [base, *(location.base(value, piece.count) for location, value in places)]
        for _, term in (*context.terms, *context.loss_terms):
            if term.key is not None:
                base = bases[context.index(term)]
                term.check(base.output)
                term.check_psi(base)
        return bases, slope

    def _named(self, tensors: list[Tensor]) -> Parameters:
        return dict(zip(self._context.parameters, tensors, strict=True))


def _own_product(
    loss_fn: Loss | None, term: Term, part: Piece, output: Tensor, tangent: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The product of a chunk's own term, and the slope of its own loss; None where there is none, because the loss wants the
    whole batch, or has nothing to count in a chunk."""
    if loss_fn is None or part.targets is None:
        return None
    try:
        loss, slope = loss_gradient(loss_fn, output, part.targets)
        return term.hessian_product(tangent, BasePoint(output, loss, part.weights)), slope
    except Exception:
        return None


def _of_dtype(weights: Tensor | None, output: Tensor) -> Tensor | None:
    return None if weights is None else weights.to(output.dtype)


def _dot(left: list[Tensor], right: list[Tensor]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(left, right, strict=True))


def _check_classes(term: Term, output: Tensor, examples: int) -> None:
    """One number an example isn't a vector of logits, though a batch of them looks like one."""
    if examples > 1 and output.dim() == 1 and isinstance(getattr(term, "family", None), Categorical):
        raise LLQRError(
            f"the output has one number for each of the {examples} examples, and {term!r} wants logits of classes: write "
            "KL(family='bernoulli') for single logits, KL(family='gaussian') for regression"
        )
