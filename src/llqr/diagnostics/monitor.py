"""Monitor: diagnostics every so many steps of a training, as plain numbers and for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.checks import Inputs, Loss
from llqr.diagnostics.judging import Reference, reference
from llqr.diagnostics.proposals import proposed_step
from llqr.diagnostics.spectra import QUANTILES, Spectrum, spectra
from llqr.diagnostics.staleness import Objectives, refuse_ranks, staleness
from llqr.diagnostics.vectors import norm
from llqr.divergences import Divergence
from llqr.errors import DegenerateProblemError, LLQRError, NonFiniteError
from llqr.naming import PerLayer
from llqr.paper import PaperLLQR
from llqr.precision import no_autocast
from llqr.recorder import Selector

Line = dict[str, Any]
NUMBERS = ("cosine", "cosine_h", "fraction", "fraction_along", "length", "predicted", "actual")
"""Of a verdict, that a line has for each step."""


class Writer(Protocol):
    """What TensorBoard's SummaryWriter does, and others like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...

    def add_histogram(self, tag: str, values: Tensor, global_step: int) -> Any: ...


class Monitor:
    """Looks at a training before every `every`-th step, and changes nothing in it.

    It is called with the number of steps so far and the batch of the coming one, before that:

        monitor = Monitor(model, optimizer, loss_fn, writer, every=100)
        for step, (inputs, targets) in enumerate(batches):
            monitor(step, inputs, targets)
            ...

    The steps that are judged are "gradient" (-g), "optimizer" (what the optimizer will do, lr and momentum included) and, with
    an `LLQR.paper` that has a U, "preconditioned" (-U g). `docs/diagnostics.md` says what a line holds.

    Args:
        loss_fn: `loss_fn(output, targets)`, the mean loss.
        writer: anything with `add_scalar` and `add_histogram`, such as TensorBoard's SummaryWriter.
        record: called with each line, a dict for JSON.
        divergence: of the quadratic model; by default that of an `LLQR.paper`, else "ngd".
        damping: of the quadratic model.
        training: its modules' mode; by default the one that they have: then dropout's masks are those of the coming step.
        products: the most products that the exact step may take; whether they were enough is in the line.
        prepare: as for `proposed_step`: called with a copy of the model between its backward pass and its step.
        weights: from the inputs to one weight a variable, 0 for padding.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Loss,
        writer: Writer | None = None,
        *,
        every: int = 100,
        record: Callable[[Line], object] | None = None,
        divergence: str | Divergence | None = None,
        damping: PerLayer = 1e-3,
        products: int = 100,
        tolerance: float = 1e-3,
        training: bool | None = None,
        output: Selector | None = None,
        weights: Callable[[Inputs], Tensor] | None = None,
        prepare: Callable[[nn.Module], object] | None = None,
    ) -> None:
        for name, value in (("every", every), ("products", products)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LLQRError(f"{name} is a positive integer, not {value!r}")
        refuse_ranks(optimizer)
        self.model, self.optimizer, self.loss_fn, self.writer = model, optimizer, loss_fn, writer
        self.every, self.record, self.damping, self.products = every, record, damping, products
        own = optimizer._refit.divergence if isinstance(optimizer, PaperLLQR) else "ngd"
        self.divergence = own if divergence is None else divergence
        self.tolerance, self.training, self.output = tolerance, training, output
        self.weights, self.prepare = weights, prepare

    def __call__(self, step: int, inputs: Inputs, targets: Any) -> Line | None:
        """Look, if it is time; what was seen, as a line."""
        return self.look(step, inputs, targets) if step % self.every == 0 else None

    def look(self, step: int, inputs: Inputs, targets: Any) -> Line:
        """Look now. Where there is no exact step (a loss that isn't finite, an indefinite H + λ), the line has the reason."""
        line: Line = {"step": step, "trouble": None}
        parameters = dict(self.model.named_parameters())
        with no_autocast(parameters):
            u = self.optimizer.preconditioner if isinstance(self.optimizer, PaperLLQR) else None
            found = {} if u is None or not u.is_finite() else spectra(u)
            try:
                line |= self._steps(self._reference(inputs, targets), inputs, targets)
                line |= self._staleness(inputs, targets)
            except (NonFiniteError, DegenerateProblemError) as error:
                line["trouble"] = str(error)
        line["quantiles"] = list(QUANTILES)
        line["spectra"] = {block: [_finite(q) for q in each.quantiles()] for block, each in found.items()}
        if self.writer is not None:
            _write(self.writer, line, found)
        if self.record is not None:
            self.record(line)
        return line

    def _reference(self, inputs: Inputs, targets: Any) -> Reference:
        return reference(
            self.model,
            inputs,
            targets,
            self.loss_fn,
            self.divergence,
            self.damping,
            tolerance=self.tolerance,
            max_steps=self.products,
            output=self.output,
            weights=None if self.weights is None else self.weights(inputs),
            training=self.training,
        )

    def _steps(self, exact: Reference, inputs: Inputs, targets: Any) -> Line:
        steps: dict[str, Mapping[str, Tensor]] = {"gradient": {name: -g for name, g in exact.gradient.items()}}
        optimizer = self.optimizer
        if isinstance(optimizer, PaperLLQR) and optimizer.preconditioner is not None:
            steered = optimizer.preconditioner.steer(exact.gradient).gradients
            steps["preconditioned"] = {name: -steered.get(name, g) for name, g in exact.gradient.items()}
        proposed = proposed_step(
            self.optimizer, self.model, inputs, targets, self.loss_fn, output=self.output, prepare=self.prepare
        )
        line: Line = {
            "loss": exact.loss,
            "exact": {"method": exact.method, "residual": exact.residual, "converged": exact.converged},
            "attainable": exact.attainable,
        }
        if all(bool(part.isfinite().all()) for part in proposed.values()) and norm(proposed) > 0:
            steps["optimizer"] = proposed
        verdicts = {name: exact.judge(each, by_layer=False) for name, each in steps.items()}
        for number in NUMBERS:
            line[number] = {name: _finite(getattr(verdict, number)) for name, verdict in verdicts.items()}
        parts = exact.parts(steps["optimizer"]) if "optimizer" in steps else {}
        line["layers"] = {layer: {n: _finite(v) for n, v in asdict(part).items()} for layer, part in parts.items()}
        return line

    def _staleness(self, inputs: Inputs, targets: Any) -> Line:
        if not isinstance(self.optimizer, PaperLLQR) or self.optimizer.preconditioner is None:
            return {"staleness": None}
        found = staleness(self.optimizer, inputs, targets, self.loss_fn)

        def told(objectives: Objectives) -> Line:
            return {name: _finite(value) for name, value in asdict(objectives).items()}

        return {
            "staleness": _finite(found.as_is.staleness),
            "staleness_along": _finite(found.along.staleness),
            "objective": told(found.as_is),
            "objective_along": told(found.along),
        }


def _write(writer: Writer, line: Line, found: Mapping[str, Spectrum]) -> None:
    step = line["step"]
    for number in NUMBERS:
        for name, value in line.get(number, {}).items():
            if value is not None:
                writer.add_scalar(f"diagnostics/{number}/{name}", value, step)
    for name in ("staleness", "staleness_along"):
        if line.get(name) is not None:
            writer.add_scalar(f"diagnostics/{name}", line[name], step)
    for layer, numbers in line.get("layers", {}).items():
        if numbers["cosine"] is not None:
            writer.add_scalar(f"diagnostics/layers/{layer}/cosine", numbers["cosine"], step)
    for block, spectrum in found.items():
        writer.add_histogram(f"diagnostics/spectrum/{block}", spectrum.histogram_sample(), step)


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
