"""fit: the inner loop that learns U from a quadratic model; and Refit, of LLQR.paper: from a model, a batch and gradients to a
fitted U, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss, as_arguments, check_callable, checked_integer, tensors_in
from llqr.closures import Closure, loss_of_output, tensor_alone, whole_loss
from llqr.curvature import locations
from llqr.curvature.chunks import Examples, Portion, check_chunk_size, total
from llqr.curvature.collector import Called
from llqr.curvature.locations import PerLayer
from llqr.curvature.precision import is_low, raised
from llqr.curvature.quadratic import QuadraticModel
from llqr.curvature.recorder import Selector, Streams, in_modes
from llqr.distributed.processes import Process
from llqr.divergences import L2, Divergence, Newton
from llqr.divergences.families import check_families, summed
from llqr.errors import LLQRError, NonFiniteError, unknown
from llqr.preconditioner import Preconditioner
from llqr.solvers import Problem, Quadratic, ScaleFree, Solver
from llqr.structures.base import Structure
from llqr.structures.stacks import StructureSpec, assign

WHOLE = "num_items_in_batch"
"""Where transformers' models are told how many tokens to divide their loss by: all those of an accumulated batch, of which the
model has seen a part. Without it they return the mean over what they see."""

Batch = tuple[Inputs, Any]
"""Inputs and targets."""


def fit(
    q: Quadratic,
    structure: StructureSpec,
    solver: Solver | None = None,
    steps: int = 25,
    start: Preconditioner | None = None,
) -> Preconditioner:
    """U that minimises J(U) = g·δ + ½ δ·Hδ with δ = -U g, approximately: after `steps` of a solver (default: `ScaleFree()`).

    The fit starts at the identity, or at `start`, which must have this structure and isn't changed.
    """
    if not isinstance(getattr(q, "gradient", None), Mapping) or not callable(getattr(q, "curvature", None)):
        raise LLQRError(
            f"a quadratic model is wanted, with `gradient` and `curvature`; this is a {type(q).__name__}. Build one with "
            "QuadraticModel.build(model, inputs, targets, loss_fn, divergence)"
        )
    solver = checked_solver(solver, steps)
    gradient = q.gradient
    if not gradient:
        raise LLQRError("the quadratic model has no parameters")
    for name, value in gradient.items():
        if not torch.isfinite(value).all():
            raise NonFiniteError(f"the gradient of {name!r} has values that are not finite")
    u = Preconditioner.identity(gradient, structure)
    if start is not None:
        u.check_same_blocks(start)
        u = start.clone()
    fitted = solver.solve(Problem(q, u), u, steps)
    if not isinstance(fitted, Preconditioner):
        raise LLQRError(
            f"solve() of {solver!r} returned {type(fitted).__name__}: it returns a Preconditioner, as in "
            "u.with_history([J at the start, J after each step])"
        )
    return fitted


def checked_solver(solver: Solver | None, steps: int) -> Solver:
    """The solver that is meant, for so many steps."""
    if solver is None:
        solver = ScaleFree()
    if not isinstance(solver, Solver):
        raise LLQRError(f"the solver is an object such as ScaleFree() or SGDM(lr=0.005), not {solver!r}")
    checked_integer("steps", steps)
    return solver


def trainable(parameters: Mapping[str, Tensor]) -> list[str]:
    return [name for name, parameter in parameters.items() if parameter.requires_grad]


@dataclass(frozen=True)
class Source:
    """What there is to fit U on: a batch of its own, or else what the step has evaluated."""

    gradients: Mapping[str, Tensor]
    inputs: Any = None
    targets: Any = None
    loss_fn: Loss | None = None
    """With a batch of its own: the loss whose gradient on it is taken, in place of those."""
    own_batch: bool = False
    closure: Closure | None = None
    called: Called | None = None
    """How the model was when it was called with the inputs that were seen."""
    streams: Streams | None = None
    """What the closure drew from, as it was then."""
    evaluated: bool = False
    """The network is the evaluated one (running BatchNorm statistics, no dropout), for g and H alike; else as it is now."""
    processes: Process = field(default_factory=Process)
    """Those that fit U together, each on its own batch."""


@dataclass
class Refit:
    """How U is fitted; called with what there is to fit it on."""

    model: nn.Module
    called: nn.Module
    """What the loop calls: the model, or a wrapper of torch.compile around it."""
    divergence: Divergence
    structure: StructureSpec
    solver: Solver | None
    steps: int
    damping: PerLayer
    chunk_size: int | None
    loss_fn: Loss | None
    output: Selector | None
    weights: Callable[[Inputs], Tensor] | None
    shared: Collection[str | int]
    segments: Collection[str] = ()

    def __post_init__(self) -> None:
        self.solver = checked_solver(self.solver, self.steps)
        check_chunk_size(self.chunk_size)
        for name in ("loss_fn", "output", "weights"):
            check_callable(name, getattr(self, name))
        terms = [term for _, term in self.divergence.terms()]
        self._needs_loss = any(term.needs_loss for term in terms)
        self._loss_alone = all(isinstance(term, (Newton, L2)) for term in terms)

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise now for what a refit would raise for: structures, metrics and dampings that fit no part of the model."""
        terms = list(self.divergence.terms())
        shapes = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in parameters.items()}
        self.identity(shapes, shapes)
        locations.diagonal(self.model, parameters, terms, self.damping)
        places = locations.locations_of(self.model, terms)
        locations.segment_modules(self.model, self.segments, [place.module for place in places.values()])

    def check_family(self, slopes: Sequence[tuple[Tensor, Tensor]]) -> int:
        """Raise where the divergence's family isn't the loss's. `slopes`: outputs, with what the loss has sent back to them.

        Returns how many variables the loss adds up, if it is known not to be their mean.
        """
        if len(slopes) != 1:  # which of them is the divergence about?
            return 0
        ((output, slope),) = slopes
        terms = [term for _, term in self.divergence.terms()]
        check_families(terms, slope, output)
        return max((summed(term, slope, output) for term in terms), default=0)

    def settings(self) -> tuple[object, ...]:
        """What decides what a refit does, in words; ranks that fit together have to have the same."""
        solver = self.solver if is_dataclass(self.solver) else type(self.solver).__name__
        terms = [(w, term if is_dataclass(term) else type(term).__name__) for w, term in self.divergence.terms()]
        return self.steps, solver, self.damping, self.structure, terms

    def described(self) -> list[str]:
        """Its settings, as one would write them."""
        return [
            f"divergence={self.divergence!r}",
            f"structure={self.structure!r}",
            f"steps={self.steps}, solver={self.solver!r}, damping={self.damping!r}",
            f"chunk_size={self.chunk_size}, segments={list(self.segments)!r}",
        ]

    # --- U, by a structure for all parameters or by patterns of their names ---

    def _structures(self, parameters: Mapping[str, Tensor], only: Collection[str]) -> dict[str, Structure]:
        """By name; a pattern for frozen parameters alone is no mistake, so the patterns are matched with all of them."""
        assigned = assign(self.structure, parameters)
        return {escape(name): assigned[name] for name in only}

    def identity(self, parameters: Mapping[str, Tensor], only: Collection[str]) -> Preconditioner:
        """U = I for some of the parameters."""
        return Preconditioner.identity({name: parameters[name] for name in only}, self._structures(parameters, only))

    def current(self, parameters: Mapping[str, Tensor], u: Preconditioner | None) -> Preconditioner:
        """U for the parameters that are trained: the one that is there, the identity for what it doesn't know."""
        new = self.identity(parameters, trainable(parameters))
        if u is not None:
            new.take(u)
        return new

    def loaded(self, parameters: Mapping[str, Tensor], state: Any) -> Preconditioner:
        """U of a state."""
        blocks = state.get("blocks") if isinstance(state, Mapping) else None
        if not isinstance(blocks, Mapping):
            raise LLQRError("the 'preconditioner' in the state, under 'llqr', has no 'blocks'")
        for name in blocks:
            if name not in parameters:
                raise unknown("block in the state", name, parameters)
        u = self.identity(parameters, [name for name in parameters if name in blocks])
        u.load_state_dict(state)
        return u

    # --- the fit ---

    def __call__(
        self, parameters: Mapping[str, Tensor], source: Source, start: Preconditioner | None
    ) -> Preconditioner:
        """U of the parameters that are trained, fitted from the identity or from `start`."""
        q = self.objective(parameters, source)
        return fit(q, self._structures(parameters, list(q.gradient)), self.solver, self.steps, start)

    def objective(self, parameters: Mapping[str, Tensor], source: Source) -> Quadratic:
        """The quadratic model that J is of."""
        only, processes = trainable(parameters), source.processes
        inputs: Inputs = () if source.inputs is None and not source.own_batch else source.inputs
        if source.own_batch and source.loss_fn is not None:
            about: dict[str, Any] = {"targets": source.targets, "loss_fn": source.loss_fn}
        else:
            about = self._about_step(source, inputs, only)
        whole = "closure" in about  # it calls the model by itself
        weights = None if self.weights is None or whole else self.weights(inputs)
        portion = None
        if processes.several:
            portion = self._portion(processes, None if whole or "output" in about else inputs, weights)
        called = source.called
        with in_modes(called.modes if called is not None else []):
            q = QuadraticModel.build(
                self.model,
                inputs,
                divergence=self.divergence,
                damping=self.damping,
                chunk_size=self.chunk_size,
                weights=weights,
                training=False if source.evaluated else None,
                streams=source.streams if whole else called and called.streams,
                only=only,
                shared=self.shared,
                segments=self.segments,
                portion=portion,
                **{"targets": None, "loss_fn": None, "output": self.output, **about},
            )
        return JoinedModel(q, processes, joined="gradient" in about) if processes.several else q

    def _about_step(self, source: Source, inputs: Inputs, only: list[str]) -> dict[str, Any]:
        """What tells the model's gradient and loss, where they are those of the step."""
        if not source.gradients:
            raise LLQRError(
                "no parameter has a gradient: call loss.backward() before optimizer.step(), or give refit() targets and a "
                "loss_fn"
            )
        gradient = {name: source.gradients[name] for name in only if name in source.gradients}
        closure = None if source.own_batch else source.closure
        if self._loss_alone and self._needs_loss and (closure is None or self.chunk_size is None):
            return {"gradient": gradient, "closure": whole_loss(closure or self._own_loss(inputs), self.model)}
        if inputs == ():
            raise LLQRError(
                "there are no inputs to refit on: the model wasn't called (by model(...), with gradients on) since the last "
                "step. Call it before optimizer.step(), or give LLQR.paper a refit_batch. If your loop calls "
                "torch.compile(model), give it that one"
            )
        if not source.own_batch and not tensors_in(inputs):
            raise LLQRError(
                f"the model was called with a {type(next(iter(inputs))).__name__} and no tensor: call it with tensors, or with "
                "keywords, as in model(**batch)"
            )
        if not self._needs_loss:
            return {"gradient": gradient}
        if closure is None:
            raise LLQRError(self._loss_wanted())
        if self.output is not None:
            raise LLQRError(
                "output picks a part of what the model returns, and the closure is about the whole: give LLQR.paper a loss_fn, "
                "which is given that part, and a refit_batch"
            )
        return {"gradient": gradient, "loss_fn": loss_of_output(self.called, closure), "output": tensor_alone}

    def _portion(self, processes: Process, inputs: Inputs | None, weights: Tensor | None) -> Portion:
        """How much this rank's batch counts among all of them: by its examples, and by the weights of its variables.

        The losses of closures count alike, as they do in the gradients that DistributedDataParallel averages.
        """
        count = 1 if inputs is None else Examples(inputs, self.shared).count
        variables = float(count) if weights is None else total(weights)
        all_variables, examples = processes.sums(variables, count)
        return Portion(variables / all_variables, count / examples)

    def _own_loss(self, inputs: Inputs) -> Closure:
        """The loss that the model's output carries, as transformers' models do when they are given labels."""

        def evaluate() -> Any:
            own = any(map(is_low, self.model.parameters()))  # those of now: a refit may have put others in their place
            args, kwargs = as_arguments(inputs if own else raised(inputs))
            kwargs.pop(WHOLE, None)
            output = None if inputs == () else self.model(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if loss is None:
                raise LLQRError(self._loss_wanted())
            return loss

        return evaluate

    def _loss_wanted(self) -> str:
        return (
            f"{self.divergence!r} needs the loss: call optimizer.step(closure) with a closure that evaluates it, takes it "
            "backward and returns it; or give LLQR.paper a loss_fn and a refit_batch that returns (inputs, targets)"
        )


class JoinedModel:
    """g and H·v of all processes' batches. Each knows its batch's share of them; damping is added once."""

    def __init__(self, model: QuadraticModel, processes: Process, joined: bool) -> None:
        """`joined`: the model's gradient is that of all the batches already."""
        self._model, self._processes = model, processes
        self.gradient = processes.firsts(model.gradient) if joined else self._summed(model.gradient)

    def curvature(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        product, diagonal = self._summed(self._model.product(direction)), self._model.diagonal
        return {name: torch.add(product[name], v, alpha=diagonal[name]) for name, v in direction.items()}

    def _summed(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(shares, self._processes.total(list(shares.values())), strict=True))


def checked_batch(batch: Any) -> Batch:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise LLQRError(
            "refit_batch returns a pair (inputs, targets), with None for targets where the divergence needs none; got "
            f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, Collection) else "")
        )
    return batch[0], batch[1]


def check_fit(u: Preconditioner) -> None:
    """Every fit that is finite is taken, as in Algorithm 1."""
    if not u.history or not math.isfinite(u.history[0]):
        raise NonFiniteError("J isn't finite at the start of the fit, or the solver returned U without a history of J")
    if not math.isfinite(u.history[-1]) or not u.is_finite():
        raise NonFiniteError("the fit didn't stay finite: a smaller inner learning rate, or clip, may help")
