"""QuadraticModel: m(δ) = g·δ + ½ δ·Hδ of a model, a batch and a divergence, as a gradient and products with H.

For terms that are flat at θ_k a product is Jᵀ W J v: one push through the network, one small product at the outputs, one pull
back (design fact: the LQR's rollout *is* the Jacobian-vector product, its backward sweep *is* the vector-Jacobian product).
Newton's term is a Hessian product. Damping and L2 terms are a diagonal. All of it is in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss, check_finite, check_model, check_weights, tensors_in
from llqr.curvature import locations
from llqr.curvature.chunks import Examples, Piece, Portion, pieces
from llqr.curvature.locations import PerLayer
from llqr.curvature.precision import no_autocast, raised
from llqr.curvature.recorded_chunk import ChunkContext, RecordedChunk
from llqr.curvature.recorder import Parameters, Recorder, Selector, Streams
from llqr.divergences import ActivationTerm, Divergence, LayerwiseLoss, Newton, OutputTerm, Term, layerwise
from llqr.errors import LLQRError, unknown


class QuadraticModel:
    """g·δ + ½ δ·Hδ at the model's present parameters; build one with `QuadraticModel.build`."""

    def __init__(
        self,
        parameters: Parameters,
        chunks: Sequence[Callable[[], RecordedChunk]],
        gradient: Parameters,
        diagonal: dict[str, float],
    ) -> None:
        self._parameters, self._chunks = parameters, chunks
        self.diagonal = diagonal
        """What damping and L2 terms put on H's diagonal, by parameter name."""
        self._versions = [parameter._version for parameter in parameters.values()]
        self.gradient = gradient
        """g of the mean loss, by parameter name."""

    @classmethod
    def build(
        cls,
        model: nn.Module,
        inputs: Inputs,
        targets: Any,
        loss_fn: Loss | LayerwiseLoss | None,
        divergence: str | Divergence,
        damping: PerLayer = 0.0,
        chunk_size: int | None = None,
        *,
        output: Selector | None = None,
        weights: Tensor | None = None,
        training: bool | None = None,
        gradient: Parameters | None = None,
        shared: Collection[str | int] = (),
        only: Collection[str] | None = None,
        closure: Callable[[], Tensor] | None = None,
        portion: Portion | None = None,
        streams: Streams | None = None,
        segments: Collection[str] = (),
    ) -> QuadraticModel:
        """Build the model of one step.

        Args:
            model: any module. What it holds (buffers, `.grad`, modes, the random stream) is left as it was.
            inputs: what it is called with: a tensor, a tuple, or a dict of keywords.
            targets: passed on to `loss_fn`.
            loss_fn: `loss_fn(output, targets)`, the mean loss, or a `LayerwiseLoss`. None if `gradient` is given and the
                divergence needs no loss.
            divergence: an object of `llqr.divergences` or its name.
            damping: added to H's diagonal: one number, or a mapping from module or parameter names.
            chunk_size: examples at a time; the same numbers with the memory of a chunk, for about twice the work.
            output: picks the tensor that loss and divergence are about out of what the model returns.
            weights: one weight a variable (an example, a token): 0 for padding. The loss must ignore the same ones.
            training: run the modules in this mode (False: running BatchNorm statistics, no dropout). None: as they are.
            gradient: g, where it is known already.
            shared: the inputs (keywords or positions) that belong to all examples, such as a mask: chunks don't cut them.
            only: the names of the parameters to step; the others are held fixed.
            closure: returns the loss, for divergences of the loss alone (Newton); it calls the model itself, in place of
                `model(inputs)`, and `inputs` may be ().
            portion: how much this batch counts, where it is a part of a larger one: the quadratic models of the parts add up to
                that of the whole then, but for the diagonal.
            streams: what dropout masks are drawn from; by default the random streams as they are now.
            segments: names or patterns of modules, such as `["layers.*"]`, of which only the inputs are kept. Each product runs
                them again, one at a time. They take and return tensors; batch statistics and dropout are the same each time.
        """
        loss_fn, loss_terms, terms = layerwise(loss_fn, divergence)
        if closure is not None:
            _check_closure(terms, chunk_size)
            loss_fn, output = _itself, None
        check_model(model, inputs, without_inputs=closure is not None)
        batch = Examples(inputs, shared)
        held = locations.trainable(model, only)
        versions = {name: p._version for name, p in held.items()}
        parameters: Parameters = raised(held)
        needs_loss = gradient is None or any(term.needs_loss for _, term in terms)
        if loss_fn is None and needs_loss:
            raise LLQRError(f"{divergence!r} needs the loss and its targets: give loss_fn and targets")
        diagonal = locations.diagonal(model, parameters, terms, damping)
        if not needs_loss:
            loss_fn, loss_terms = None, []
        inside = locations.locations_of(model, [*terms, *loss_terms])
        if chunk_size is not None or portion is not None:
            for _, term in (*terms, *loss_terms):
                if isinstance(term, ActivationTerm) and not term.by_variable:
                    raise LLQRError(
                        f"{term!r} is of a whole batch, which can't be cut: give the batch whole, on one rank"
                    )
        recorder = Recorder(
            model,
            list(inside.values()),
            output,
            training,
            chunk_size is None,
            closure,
            streams=streams,
            segments=locations.segment_modules(model, segments, [location.module for location in inside.values()]),
        )
        functions = [(weight, term) for weight, term in terms if isinstance(term, Term)]  # L2 is on the diagonal
        context = ChunkContext(recorder, parameters, loss_fn, functions, inside, loss_terms, portion or Portion())
        if weights is not None:
            check_weights(weights, tensors_in(batch.inputs)[0].device)
        whole = Piece(batch.inputs, raised(targets), weights, slice(0, batch.count), batch.count)
        cut = [whole] if chunk_size is None else list(pieces(model, batch, whole, chunk_size, training))
        with no_autocast(parameters):
            if len(cut) > 1:
                context.keep_whole(batch, whole, cut)
            chunks: list[Callable[[], RecordedChunk]] = [partial(RecordedChunk, context, piece) for piece in cut]
            if len(cut) == 1:
                kept = chunks[0]()
                chunks = [lambda: kept]
            slope = _total(chunk().gradient() for chunk in chunks) if gradient is None else _given(gradient, parameters)
            for name, value in slope.items():
                check_finite(value, f"the gradient of {name!r}")
        for name, version in versions.items():
            if held[name]._version != version:
                raise LLQRError(
                    f"the model changes its parameter {name!r} in a forward pass, so there is no point to take derivatives at: "
                    "do that outside of forward()"
                )
        return cls(held, chunks, slope, diagonal)

    def curvature(self, direction: Mapping[str, Tensor]) -> Parameters:
        """H·v, damping included."""
        product = self.product(direction)
        held = {_memory(v) for v in direction.values()}
        result: Parameters = {}
        for name, v in direction.items():
            value = product[name].to(torch.promote_types(product[name].dtype, v.dtype))
            # autograd passes tensors on: as they came, to two parameters, expanded
            shared = _memory(value) in held or not value.is_contiguous()
            if self.diagonal[name] or shared:
                value = torch.add(value, v.detach(), alpha=self.diagonal[name])
            held.add(_memory(value))
            result[name] = value
        return result

    def product(self, direction: Mapping[str, Tensor]) -> Parameters:
        """What the batch contributes to H·v: all but the diagonal."""
        direction = self._checked(direction)
        with no_autocast(direction):
            return _total(chunk().curvature(direction) for chunk in self._chunks)

    def curvature_along(self, direction: Mapping[str, Tensor]) -> float:
        """v·Hv, damping included; without the way back through the network where H is JᵀWJ."""
        direction = self._checked(direction)
        damped = sum(self.diagonal[name] * float((v * v).sum()) for name, v in direction.items() if self.diagonal[name])
        with no_autocast(direction):
            return damped + sum(chunk().curvature_along(direction) for chunk in self._chunks)

    def _checked(self, direction: Mapping[str, Tensor]) -> Parameters:
        """In the gradient's precision; an error where it doesn't fit, or is for other parameters than those of now."""
        if self._versions != [parameter._version for parameter in self._parameters.values()]:
            raise LLQRError("the parameters were changed since this quadratic model was built: build it again")
        _check_fits("direction", direction, self.gradient)
        missing = [name for name in self.gradient if name not in direction]
        if missing:
            raise LLQRError(f"the direction lacks {', '.join(map(repr, missing[:5]))}: give a tensor for each of them")
        return {name: v.detach().to(self.gradient[name].dtype) for name, v in direction.items()}

    def value(self, step: Mapping[str, Tensor]) -> Tensor:
        """m(δ) = g·δ + ½ δ·Hδ."""
        curved = self.curvature_along(step)
        return torch.stack([(self.gradient[name] * v).sum() for name, v in step.items()]).sum() + 0.5 * curved


def _memory(tensor: Tensor) -> int | None:
    """Where its numbers are; None for all of torch.func's tensors, which don't tell."""
    return None if torch._C._functorch.is_functorch_wrapped_tensor(tensor) else tensor.untyped_storage().data_ptr()


def _itself(loss: Tensor, targets: Any) -> Tensor:
    return loss


def _check_closure(terms: locations.Terms, chunk_size: int | None) -> None:
    for _, term in terms:
        if isinstance(term, OutputTerm) and not isinstance(term, Newton):
            raise LLQRError(
                f"a closure gives the loss alone, and {term!r} is about the output: give inputs and loss_fn"
            )
    if chunk_size is not None:
        raise LLQRError(
            "the loss is a closure's or the model's own, of the whole batch, and chunk_size can't cut it: leave it out; "
            "or give targets and a loss_fn (to LLQR.paper a loss_fn, and a refit_batch that returns inputs and targets)"
        )


def _check_fits(what: str, given: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    for name, value in given.items():
        if name not in like:
            raise unknown(f"parameter in the {what}", name, like)
        if not isinstance(value, Tensor) or value.shape != like[name].shape:
            shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise LLQRError(f"the {what} of {name!r} has {shape}, and the parameter {tuple(like[name].shape)}")


def _given(gradient: Parameters, parameters: Parameters) -> Parameters:
    _check_fits("gradient", gradient, parameters)
    return {name: raised(gradient.get(name, torch.zeros_like(p)).detach()) for name, p in parameters.items()}


def _total(parts: Iterator[Parameters]) -> Parameters:
    total = next(parts)
    for part in parts:
        for name in total:
            total[name] = total[name] + part.pop(name)  # not in place: gradients may share memory
    return total
