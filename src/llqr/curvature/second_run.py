"""A run of the model beside the loop's own: for divergences that draw gradients, and where the loop's graph can't be read.

With `v = Jᵀ Q_N^½ ε`, ε standard normal (for KL: the gradient with labels drawn from the model's own distribution), one for
each example, E[v vᵀ] = H. One forward pass at θ and one backward pass with the drawn slopes at the output give all statistics;
no gradient of a parameter is formed. Without a divergence the slopes are those that the loss itself has sent back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from llqr.checks import batch_size_of, bound, check_finite
from llqr.closures import Closure, loss_of_output
from llqr.curvature import locations
from llqr.curvature.collector import Call, as_inputs, returned
from llqr.curvature.linear_maps import LinearMap
from llqr.curvature.precision import no_autocast, raised
from llqr.curvature.recorder import Recorder, Selector
from llqr.curvature.statistics import Sides
from llqr.curvature.uses import find_uses
from llqr.distributed.processes import Process
from llqr.divergences import ActivationTerm, BasePoint, Divergence, Term
from llqr.divergences.families import check_families
from llqr.errors import LLQRError, NonFiniteError

SEED = 0x11C9
"""Of the numbers that are drawn in refits; the random streams of the training are left alone."""


class SecondRun:
    """How the model is run once more in a refit."""

    def __init__(
        self, model: nn.Module, called: nn.Module, divergence: Divergence | None, output: Selector | None
    ) -> None:
        self._model, self._called, self._output = model, called, output
        terms = [] if divergence is None else list(divergence.terms())
        self._terms = [(weight, term) for weight, term in terms if isinstance(term, Term)]  # L2: see `diagonal`
        self._places = locations.locations_of(model, self._terms)
        for _, term in self._terms:
            if isinstance(term, ActivationTerm) and term.joint:
                raise LLQRError(f"LLQR draws gradients of a divergence, and {term!r} has none: use LLQR.paper")
        self._needs_loss = any(term.needs_loss for _, term in self._terms)
        self.divergence = divergence
        self.other_uses: Mapping[str, str] = {}
        """Parameters that aren't in linear maps alone, by what else uses them."""

    def check_step(self, closure: Closure | None) -> None:
        """Raise where the divergence asks for the loss, and the step doesn't tell it."""
        if self._needs_loss and closure is None:
            raise LLQRError(
                f"{self.divergence!r} needs the loss: call optimizer.step(closure) with a closure that evaluates it, takes it "
                "backward and returns it"
            )

    def __call__(
        self, parameters: Mapping[str, Tensor], call: Call, closure: Closure | None, step: int, processes: Process
    ) -> Iterator[tuple[LinearMap, Sides]]:
        """What meets each side of every linear map, use by use."""
        leaves = {name: raised(p.detach()).requires_grad_() for name, p in parameters.items()}
        inputs = as_inputs(self._model, call.args, call.kwargs)
        recorder = (
            Recorder(self._model, streams=call.streams, choose=returned)
            if self.divergence is None
            else Recorder(self._model, list(self._places.values()), self._output, streams=call.streams)
        )
        with no_autocast(leaves), torch.enable_grad():
            outputs = recorder.run(leaves, inputs)
        found = find_uses(outputs, {id(leaf): name for name, leaf in leaves.items()})
        uses, self.other_uses = found.uses, found.other_uses
        if self.divergence is not None:
            slopes = self._drawn(outputs, call, closure, batch_size_of(inputs), step, processes)
        else:
            slopes = [raised(call.gradients.get(place)) for place in range(len(outputs))]
        pairs = [(output, slope) for output, slope in zip(outputs, slopes, strict=True) if slope is not None]
        if not uses or not pairs:
            return
        edges = [GradientEdge(use.node, 0) for use in uses]
        tensors, cotangents = zip(*pairs, strict=True)
        pulled = torch.autograd.grad(tensors, edges, cotangents, allow_unused=True)
        for use, gradient in zip(uses, pulled, strict=True):
            if gradient is not None:
                with torch.no_grad():
                    yield use.map, use.sides(gradient)

    def _drawn(
        self, outputs: list[Tensor], call: Call, closure: Closure | None, examples: int, step: int, processes: Process
    ) -> list[Tensor | None]:
        """Gradients at the outputs, drawn from the divergence: by each rank for itself, as many as it has examples."""
        values = [output.detach() for output in outputs]
        share = examples / max(processes.sums(examples)[0], 1)
        generator = torch.Generator(values[0].device).manual_seed(SEED + step + (processes.rank << 32))
        if values[0].numel() == 0:
            raise NonFiniteError("the batch is empty")
        check_finite(values[0], "the output")
        loss = bound(None, None)
        if self._needs_loss and closure is not None:
            loss = bound(loss_of_output(self._called, closure), None)
        base = BasePoint(values[0], loss)
        slopes: list[Tensor | None] = [None] * len(values)
        keys = list(self._places)
        sent_back = _loss_slope(call, values[0])
        for weight, term in self._terms:
            index = 0 if term.key is None else 1 + keys.index(term.key)
            term.check(values[index])
            if term.key is None:
                if sent_back is not None:
                    check_families([each for _, each in self._terms], sent_back, values[0])
                here = replace(base, weights=_counted(term, sent_back, base))
            else:
                here = self._places[term.key].base(values[index], examples)
                term.check_psi(here)
            # the loss of a closure counts as its gradients do: all ranks alike, whatever they have
            counts = 1.0 if term.additive else 1 / processes.size if term.needs_loss else share
            drawn = term.draw(here, generator) * (weight * counts) ** 0.5
            slope = slopes[index]
            slopes[index] = drawn if slope is None else slope + drawn
        return slopes

    def diagonal(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """What the divergence adds to H's diagonal, for each parameter."""
        return locations.diagonal(
            self._model, parameters, list(self.divergence.terms()) if self.divergence else [], 0.0
        )


def _counted(term: Term, slope: Tensor | None, base: BasePoint) -> Tensor | None:
    """A weight for each variable: 0 for those that the loss doesn't look at, as padding, whose slope is exactly 0."""
    family = getattr(term, "family", None)
    if family is None or slope is None:
        return None
    shape = family.variables(base.output)
    if shape == base.output.shape:
        return None
    seen = slope.ne(0).any(family.dim).to(base.output.dtype)
    return seen if 0 < int(seen.sum()) < seen.numel() else None


def _loss_slope(call: Call, output: Tensor) -> Tensor | None:
    """What the loss has sent back to the output."""
    return next((g for g in call.gradients.values() if g.shape == output.shape), None)
