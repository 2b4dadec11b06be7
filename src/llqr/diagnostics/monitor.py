"""Monitor: diagnostics every so many steps of a training, as plain numbers and for TensorBoard."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.checks import Inputs, Loss, as_arguments, check_finite, check_model, checked_integer, frozen_rng
from llqr.closures import checked_loss
from llqr.curvature import locations
from llqr.curvature.locations import PerLayer
from llqr.curvature.precision import no_autocast
from llqr.curvature.recorder import Recorder, Selector
from llqr.diagnostics.comparison import judge, norm, reference, refuse_ranks, spectra, staleness
from llqr.divergences import Divergence
from llqr.errors import DegenerateProblemError, LLQRError, LLQRWarning, NonFiniteError
from llqr.paper import PaperLLQR
from llqr.preconditioner import Preconditioner
from llqr.wrapper import Wrapping, stepped_parameters


def proposed_step(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss,
    *,
    output: Selector | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
) -> dict[str, Tensor]:
    """θ after one step of the optimizer on this batch, less θ before, by parameter name; zeros for what it doesn't step.

    Copies of the model and of the optimizer take it, without step hooks; both are left as they were, with buffers, `.grad` and
    random numbers.

    Args:
        optimizer: any torch optimizer of the model's parameters, `LLQR` among them; or several, each for some of them (Muon for
            the matrices, AdamW for the rest). An LLQR whose step begins with a refit refits, on this batch.
        output: picks the tensor that the loss is about out of what the model returns.
        prepare: called with the copy of the model between the backward pass and the step, for clipping and the like.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    _check(optimizers, model, inputs)
    before = locations.trainable(model)
    step = {name: torch.zeros_like(p) for name, p in before.items()}
    for each in optimizers:  # each on copies of its own, so that all of them begin at θ
        memo: dict[int, Any] = {}
        own = _copy(model, "model", memo)
        twin, select = _twin(each, memo, (inputs, targets)), Recorder(own, (), output).selected

        def closure(own: nn.Module = own, twin: Optimizer = twin, select: Selector = select) -> Tensor:
            twin.zero_grad()
            args, kwargs = as_arguments(inputs)
            loss = checked_loss(loss_fn(select(own(*args, **kwargs)), targets))
            check_finite(loss.detach(), "the loss")
            loss.backward()  # type: ignore[no-untyped-call]
            if prepare is not None:
                prepare(own)
            return loss

        with torch.enable_grad(), frozen_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", LLQRWarning)  # it will be said when the step is taken in earnest
            twin.step(closure)  # type: ignore[arg-type]
        after, stepped = dict(own.named_parameters()), stepped_parameters(each, model)
        step.update({name: after[name].detach() - p for name, p in before.items() if name in stepped})
    return step


def _check(optimizers: list[Optimizer], model: nn.Module, inputs: Inputs) -> None:
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise LLQRError("optimizer is a torch optimizer of the model's parameters, or a list of such")
    check_model(model, inputs)
    names = [name for each in optimizers for name in stepped_parameters(each, model)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise LLQRError(f"two of the optimizers step {twice!r}: give each the parameters that are its own")


def _copy(value: Any, what: str, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise LLQRError(f"the {what} can't be copied, and steps are tried out on a copy ({error})") from error


def _twin(optimizer: Optimizer, memo: dict[int, Any], batch: tuple[Inputs, Any]) -> Optimizer:
    """A copy of the optimizer for the parameters of the model's copy.

    With all that a class keeps beside its groups and state, which copy.deepcopy loses, but hooks, and `step` where a scheduler
    has wrapped it.
    """
    if isinstance(optimizer, Wrapping):
        memo[id(optimizer.base)] = _twin(optimizer.base, memo, batch)
    own = type(optimizer).__getstate__ is not Optimizer.__getstate__
    content = dict(optimizer.__getstate__() if own else vars(optimizer))
    if content.get("refit_batch") is not None:
        content["refit_batch"] = lambda: batch  # the loop's own would be drawn from a stream that training goes on with
    kept = {name: value for name, value in content.items() if name != "step" and not name.startswith("_optimizer_")}
    twin: Optimizer = object.__new__(type(optimizer))
    state = {name: _copy(value, type(optimizer).__name__, memo) for name, value in kept.items()}
    twin.__setstate__(state)
    return twin


Line = dict[str, Any]
NUMBERS = ("cosine", "cosine_h", "fraction", "fraction_along", "length", "predicted", "actual")
"""Of a verdict, that a line has for each step."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


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
        writer: Any = None,
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
        checked_integer("every", every)
        checked_integer("products", products)
        refuse_ranks(optimizer)
        self.model, self.optimizer, self.loss_fn, self.writer = model, optimizer, loss_fn, writer
        self.every, self.record, self.weights = every, record, weights
        own = optimizer.divergence if isinstance(optimizer, PaperLLQR) else "ngd"
        self._reference = partial(
            reference,
            model,
            loss_fn=loss_fn,
            divergence=own if divergence is None else divergence,
            damping=damping,
            tolerance=tolerance,
            max_steps=products,
            output=output,
            training=training,
        )
        self._proposed = partial(proposed_step, optimizer, model, loss_fn=loss_fn, output=output, prepare=prepare)

    def __call__(self, step: int, inputs: Inputs, targets: Any) -> Line | None:
        """Look, if it is time; what was seen, as a line."""
        return self.look(step, inputs, targets) if step % self.every == 0 else None

    def look(self, step: int, inputs: Inputs, targets: Any) -> Line:
        """Look now. Where there is no exact step (a loss that isn't finite, an indefinite H + λ), the line has the reason."""
        line: Line = {"step": step, "trouble": None}
        u = self.optimizer.preconditioner if isinstance(self.optimizer, PaperLLQR) else None
        with no_autocast(dict(self.model.named_parameters())):
            found = {} if u is None or not u.is_finite() else spectra(u)
            try:
                line |= self._steps(u, inputs, targets)
                if isinstance(self.optimizer, PaperLLQR) and u is not None:
                    objectives = staleness(self.optimizer, inputs, targets, self.loss_fn)
                    line |= {"staleness": objectives.staleness, "objective": asdict(objectives)}
                else:
                    line["staleness"] = None
            except (NonFiniteError, DegenerateProblemError) as error:
                line["trouble"] = str(error)
        line["quantiles"] = list(QUANTILES)
        line["spectra"] = {block: _quantiles(values) for block, values in found.items()}
        line = _finite(line)
        if self.writer is not None:
            for tag, value in _numbers("diagnostics", line):
                self.writer.add_scalar(tag, value, step)
            for block, values in found.items():
                self.writer.add_histogram(f"diagnostics/spectrum/{block}", values, step)
        if self.record is not None:
            self.record(line)
        return line

    def _steps(self, u: Preconditioner | None, inputs: Inputs, targets: Any) -> Line:
        weights = None if self.weights is None else self.weights(inputs)
        exact = self._reference(inputs=inputs, targets=targets, weights=weights)
        steps = {"gradient": {name: -g for name, g in exact.gradient.items()}}
        if u is not None:
            known = u.precondition(exact.gradient).gradients
            steps["preconditioned"] = {name: -known.get(name, g) for name, g in exact.gradient.items()}
        proposed = self._proposed(inputs=inputs, targets=targets)
        if 0 < norm(proposed) < math.inf:
            steps["optimizer"] = proposed
        verdicts = {name: judge(each, exact) for name, each in steps.items()}
        layers = verdicts["optimizer"].layers if "optimizer" in verdicts else {}
        return {
            "loss": exact.loss,
            "exact": {"method": exact.method, "residual": exact.residual, "converged": exact.converged},
            "attainable": exact.attainable,
            **{number: {name: getattr(v, number) for name, v in verdicts.items()} for number in NUMBERS},
            "layers": {layer: asdict(part) for layer, part in layers.items()},
        }


def _quantiles(values: Tensor) -> list[float]:
    """The least value with at least so much of the spectrum at or below it."""
    return [float(values[max(0, math.ceil(len(values) * at - 1e-6) - 1)]) for at in QUANTILES]


def _finite(value: Any) -> Any:
    """The same with None for what isn't finite: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(tag: str, line: Line) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, dict):
            yield from _numbers(f"{tag}/{name}", value)
        elif isinstance(value, float):
            yield f"{tag}/{name}", value
