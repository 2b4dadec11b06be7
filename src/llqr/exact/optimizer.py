"""Exact: the exact minimiser of the damped quadratic model at every step, as an optimizer (Levenberg–Marquardt)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from llqr.checks import Loss, check_amount, check_callable, check_model, check_tensors
from llqr.curvature import locations
from llqr.curvature.chunks import Piece
from llqr.curvature.precision import no_autocast
from llqr.curvature.recorded_chunk import ChunkContext
from llqr.curvature.recorder import Parameters, Recorder
from llqr.divergences import Divergence, LayerwiseLoss, Newton, resolve
from llqr.errors import (
    ChainError,
    DegenerateProblemError,
    IndefiniteProblemError,
    LLQRError,
    LLQRWarning,
    callers_level,
    unknown,
)
from llqr.exact.blocks import build
from llqr.exact.chain import Chain
from llqr.exact.closure import Closure, Live
from llqr.exact.rows import RoomError
from llqr.exact.systems import Conjugate, Dual, Point, Primal, Stages, System

Method = Literal["auto", "dual", "primal", "cg", "riccati"]
METHODS = ("auto", "dual", "primal", "cg", "riccati")

REFUSALS = 12
"""Steps that may be refused in a row, each with a larger damping than the one before."""
GROWTH = 2.0
"""What the damping is multiplied by after the first refusal; after the second by twice as much, and so on."""
AHEAD, MOST_BENT = 0.1, 0.75
"""Where along a step its bend is looked for; and the most that the bend may be of the step."""
COUNTS = ("steps", "refused", "stalled", "cut_short")


class Exact(torch.optim.Optimizer):
    """Steps to the minimum of g·δ + ½ δ·Hδ + ½ μ‖δ‖², plus its bend, for networks and batches that are small enough.

        optimizer = Exact(model)
        for _ in range(100):
            loss = optimizer.step(lambda: residuals(model))

    `step(closure)` calls the closure several times, as `torch.optim.LBFGS` does, but the closure returns what the loss is made
    of and takes no gradient:

    - residuals, a tensor or a tuple of them; the loss is the sum of their mean squares. They may hold derivatives of the
      network (`torch.autograd.grad(…, create_graph=True)`);
    - with a `loss_fn`, the pair `(output, targets)`; the loss is `loss_fn(output, targets)`, a mean over the batch;
    - with `divergence="newton"` also the loss itself, one number.

    The damping μ follows the ratio of the decrease that came to the one that H had promised. A step that doesn't lower the loss
    is taken back, and tried again with more damping. `step` returns the loss before the step; `stats` says how it went.

    Args:
        model: the module whose parameters are stepped: those that require a gradient, in float32 or float64.
        loss_fn: see above.
        divergence: what gives H: an object of `llqr.divergences` or its name. Gauss–Newton unless you say otherwise; "ngd" for
            classifiers (the same matrix for a cross-entropy); "newton", where μ is raised until H + μ is positive definite.
        method: "dual" (a system with a row for each number of the output), "primal" (a row for each parameter), "cg" (conjugate
            gradients), "riccati" (along the stages of an nn.Sequential), all for the same step; that of "cg" is as exact as
            `tolerance`. "auto" takes the one with least arithmetic among those that fit into `memory`.
        damping: the first μ, as a share of the curvature along the gradient.
        momentum: μ pulls the step towards this share of the step before, and not towards zero: for batches that change.
        tolerance: of conjugate gradients, the residual as a share of the gradient.
        memory: the bytes that Jacobians and systems may take, and in turn the products that run at once. Not counted is the
            graph of a forward pass, nor its gradients, which "dual" and "primal" keep for each column of the output.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss | None = None,
        divergence: str | Divergence = "gauss-newton",
        method: Method = "auto",
        *,
        damping: float = 1e-3,
        momentum: float = 0.0,
        tolerance: float = 1e-3,
        memory: int = 2**31,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise LLQRError(f"the model is a {type(model).__name__}, not an nn.Module: write Exact(model)")
        check_callable("loss_fn", loss_fn)
        if isinstance(loss_fn, LayerwiseLoss):
            raise LLQRError("Exact takes no LayerwiseLoss: let the closure return such terms as residuals")
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        for name, value, most in (
            ("damping", damping, math.inf),
            ("momentum", momentum, 1),
            ("tolerance", tolerance, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < most:
                raise LLQRError(f"{name} is a number from 0 to {most}, not {value!r}")
        if damping == 0 or tolerance == 0:
            raise LLQRError("damping and tolerance are larger than zero")
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
            raise LLQRError(f"memory is a number of bytes, not {memory!r}")
        self._model, self._loss_fn, self._method, self._memory = model, loss_fn, method, memory
        self._divergence, self._tolerance = resolve(divergence), tolerance
        for name, parameter in locations.trainable(model).items():
            if torch.finfo(parameter.dtype).bits < 32:
                raise LLQRError(f"{name!r} is {parameter.dtype}, too coarse for exact steps: write model.float()")
        self._named = _steppable(model)
        if len(self._kinds()) > 1:
            raise LLQRError("the parameters have several dtypes or devices: convert the model to one")
        self._kind = self._kinds()
        defaults = {"damping": float(damping), "momentum": float(momentum), "mu": 0.0, **dict.fromkeys(COUNTS, 0)}
        super().__init__(self._named.values(), defaults)
        self._method_taken, self._ratio = "", math.nan

    @property
    def stats(self) -> Stats:
        """Counts since the first step, and what the last one did."""
        group = self.param_groups[0]
        counts = {count: group[count] for count in COUNTS}
        return Stats(**counts, damping=group["mu"], method=self._method_taken, ratio=self._ratio)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise LLQRError("Exact steps all parameters in one system: there is one group")
        super().add_param_group(_Group(param_group))

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # a copy has a copy of the model

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "param_groups": [_Group(group) for group in state["param_groups"]]})

    def _kinds(self) -> set[tuple[torch.dtype, torch.device]]:
        return {(p.dtype, p.device) for p in self._named.values()}

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor:  # type: ignore[override]
        """One step on what the closure returns; the loss before it. On Ctrl-C the parameters are the best ones so far."""
        if closure is None or not callable(closure):
            raise LLQRError(
                "step() needs a closure that returns residuals, or with a loss_fn the output and its targets"
            )
        check_model(self._model, (), without_inputs=True)
        named = _steppable(self._model)
        for name in {**self._named, **named}:
            if named.get(name) is not self._named.get(name):
                raise LLQRError(
                    f"{name!r} was replaced, added, taken away, or requires a gradient no longer or only now: make another "
                    "Exact(model)"
                )
        if self._kinds() != self._kind:
            raise LLQRError("the parameters were converted since Exact was made: make another Exact(model)")
        live = Live(self._model, self._loss_fn, closure, isinstance(self._divergence, Newton))
        system, method = self._system(live)
        gradient, group = system.point.gradient_vector, self.param_groups[0]
        start = {name: p.detach().clone() for name, p in self._named.items()}
        squared = float(gradient @ gradient)
        curvature = abs(float(gradient @ system.product(gradient))) / squared if squared else 0.0
        floor = torch.finfo(gradient.dtype).eps * curvature
        mu, growth = max(group["mu"] or group["damping"] * (curvature or 1.0), floor), GROWTH
        carried = group["momentum"] * self._last_step(system.point)
        refused, ratio, step, taken = 0, math.nan, carried, False
        try:
            while squared and refused < REFUSALS:
                step, promised = self._solve(system, carried, mu)
                if promised > 4 * torch.finfo(gradient.dtype).eps * abs(live.loss):
                    step = step + self._bend(live, system, start, step, mu)
                    self._move(system.point, start, step)
                    ratio = (live.loss - live.again()[0]) / promised
                    if ratio > 0:
                        taken = True
                        break
                    self._set(start)
                elif not math.isnan(promised) and not carried.any():
                    break  # no more to win than rounding
                refused += 1
                if carried.any():
                    carried = torch.zeros_like(carried)
                else:
                    mu, growth = mu * growth, growth * 2
        finally:
            if not taken:
                self._set(start)
        if taken:
            group["mu"] = mu * max(1 / 3, 1 - (2 * ratio - 1) ** 3)  # Nielsen's rule
            for name, change in system.point.named(step).items():
                self.state[self._named[name]]["step"] = change.clone()
        elif not refused:
            group["mu"] = mu / 3
        if system.cut_short and not group["cut_short"]:
            warnings.warn(
                "conjugate gradients stopped at their limit of products, before their residual was tolerance="
                f"{self._tolerance:g} times the gradient: the steps are less exact than that (stats.cut_short counts them)",
                LLQRWarning,
                stacklevel=callers_level(),
            )
        for count, more in zip(COUNTS, (1, refused, int(not taken), system.cut_short), strict=True):
            group[count] += more
        self._method_taken, self._ratio = method, ratio
        return gradient.new_tensor(live.loss)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, bit for bit."""
        if not isinstance(state_dict, dict) or not {"param_groups", "state"} <= state_dict.keys():
            raise LLQRError("this is no state: give what state_dict() of an Exact returned")
        if len(state_dict["param_groups"]) != 1:
            raise LLQRError("the state is of another optimizer: Exact has one group of parameters")
        for group in state_dict["param_groups"]:
            for name in ("damping", "momentum", "mu", *COUNTS):
                check_amount(f"{name!r} in the state", group.get(name))
        steps = {number: held.get("step") for number, held in state_dict["state"].items()}
        check_tensors("the state", steps)
        shapes = [p.shape for p in self._named.values()]
        if any(number not in range(len(shapes)) or step.shape != shapes[number] for number, step in steps.items()):
            raise LLQRError("the state is of a model with other parameters")
        super().load_state_dict(state_dict)

    def _solve(self, system: System, carried: Tensor, mu: float) -> tuple[Tensor, float]:
        """The step, and how far the quadratic model says that it lowers the loss; NaN where it has no minimum."""
        try:
            step = system.solve(system.point.slope, carried, mu)
        except DegenerateProblemError:
            return carried, math.nan
        return step, -float(system.point.gradient_vector @ step + 0.5 * step @ system.product(step))

    def _bend(self, live: Live, system: System, start: Parameters, step: Tensor, mu: float) -> Tensor:
        """How the path to the minimum bends: ½ (H + μ)⁻¹ Jᵀ W x'', with x'' the second derivative of the output along the step
        (geodesic acceleration), found by running the closure a little way along it. None where it isn't small beside the step,
        or H isn't JᵀWJ."""
        point = system.point
        none = torch.zeros_like(step)
        if not point.flat_terms or len(point.values) > 1:
            return none
        self._move(point, start, AHEAD * step)
        change = live.again()[1].reshape(-1) - point.values[0].reshape(-1)
        second = 2 / AHEAD * (change / AHEAD - system.push(step))
        if not second.isfinite().all():
            return none
        bend = 0.5 * system.solve(point.weigh(second), none, mu)
        return bend if 2 * bend.norm() <= MOST_BENT * step.norm() else none

    def _move(self, point: Point, start: Parameters, step: Tensor) -> None:
        self._set({name: start[name] + change for name, change in point.named(step).items()})

    def _set(self, values: Parameters) -> None:
        for name, value in values.items():
            self._named[name].copy_(value)

    def _last_step(self, point: Point) -> Tensor:
        held = {name: self.state[p].get("step", torch.zeros_like(p)) for name, p in self._named.items()}
        return point.flat(held)

    def _system(self, live: Live) -> tuple[System, str]:
        """The system that takes the least arithmetic of those that fit into memory, and its name."""
        point = self._point(live)
        ways = self._ways(live, point)
        errors: dict[str, LLQRError] = {}
        names = sorted(ways, key=lambda name: ways[name].work) if self._method == "auto" else [self._method]
        for name in names:
            way = ways[name]
            if way.reason:
                errors[name] = LLQRError(f"method={name!r} can't be taken here: {way.reason}")
            elif way.bytes > self._memory:
                errors[name] = LLQRError(
                    f"method={name!r} takes {way.bytes:,} bytes for {point.rows_of_output:,} numbers of the output and "
                    f"{len(point.gradient_vector):,} parameters, and memory={self._memory:,}: allow more, take fewer examples "
                    "at a time, or write method='cg'"
                )
            else:
                try:
                    return way.make(), name
                except (ChainError, IndefiniteProblemError, RoomError) as error:
                    errors[name] = error
        raise errors[names[0]]

    def _ways(self, live: Live, point: Point) -> dict[str, _Way]:
        n, p, item = point.rows_of_output, len(point.gradient_vector), point.gradient_vector.element_size()
        largest = max(each.numel() for each in self._named.values())
        examples = sum(count for count, _ in live.groups)
        a_pass = 100.0 * p * examples + 6e7  # small matrices run at a tenth of the speed of large ones
        flat = "" if point.flat_terms else "it is for divergences that are flat, as Gauss–Newton and KL are"
        uniform = "" if point.uniform is not None else "the divergence has other L2 weights for some parameters"
        room = self._memory // item
        chunk = (self._memory // item - 3 * p * p) // (p + largest)
        primal_work = (2.0 * n if point.flat_terms else 2.0 * a_pass / p) * p * p + p**3 / 3
        return {
            "dual": _Way(
                2.0 * n * n * p + n**3,
                item * (n * (p + largest) + 3 * n * n),
                flat or uniform,
                lambda: Dual(point, room),
            ),
            "primal": _Way(
                primal_work, item * (3 * p * p + p + largest), "", lambda: Primal(point, max(1, chunk), room)
            ),
            "cg": _Way(600 * a_pass, 0, "", lambda: Conjugate(point, self._last_step(point), self._tolerance)),
            "riccati": self._riccati(live, point),
        }

    def _riccati(self, live: Live, point: Point) -> _Way:
        if self._loss_fn is None or not isinstance(self._model, nn.Sequential) or live.inputs is None:
            return _Way(
                math.inf, 0, "it is for an nn.Sequential and a closure that returns model(inputs), targets", _no
            )
        try:
            chain = Chain(self._model)
            states = [state.numel() for state in chain.run(live.inputs)]
        except ChainError as error:
            return _Way(math.inf, 0, str(error), _no)
        sizes = [
            (n, sum(p.numel() for p in parameters.values()))
            for n, parameters in zip(states, chain.parameters, strict=True)
        ]
        work = sum(10.0 * n * n * (n + p) for n, p in sizes)
        held = point.gradient_vector.element_size() * (sum(n * (n + p) for n, p in sizes) + 4 * max(states) ** 2)

        def make() -> Stages:
            assert live.inputs is not None
            assert self._loss_fn is not None
            return Stages(point, build(chain, live.inputs, live.targets, self._loss_fn, self._divergence))

        return _Way(work, held, "", make)

    def _point(self, live: Live) -> Point:
        """g and H at the present parameters."""
        terms = list(self._divergence.terms())
        held = locations.trainable(self._model, list(self._named))
        parameters = {name: p.clone() for name, p in held.items()}  # products go on while steps are tried
        places = locations.locations_of(self._model, terms)
        recorder = Recorder(self._model, list(places.values()), call=live.output, streams=live.streams)
        context = ChunkContext(recorder, parameters, live.loss_fn, terms, places)
        piece = Piece((), live.targets, None, slice(None), 1.0, 1.0, live.groups[0][0])
        with torch.enable_grad(), no_autocast(parameters):
            point = Point(
                context,
                piece,
                locations.diagonal(self._model, parameters, terms, 0.0),
                live.groups,
                self._method == "cg",
            )
            live.compare(point.values[0])
        return point


@dataclass
class Stats:
    """Counts since the first step, and what the last one did."""

    steps: int
    refused: int
    """Steps that were tried and taken back."""
    stalled: int
    """Calls of step() that found no step that lowers the loss: at a minimum, to rounding."""
    cut_short: int
    """Solutions by conjugate gradients that stopped at their limit of products, before they met the tolerance."""
    damping: float
    """μ of the next step."""
    method: str
    ratio: float
    """Of the decrease that came to the one that the quadratic model had promised."""


class _Way(NamedTuple):
    """What a method would cost, why it can't be taken, and how it is."""

    work: float
    bytes: int
    reason: str
    make: Callable[[], System]


def _steppable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}


class _Group(dict[str, Any]):
    """Schedulers ask for a group's rate."""

    def __missing__(self, key: str) -> Any:
        if key == "lr":
            raise LLQRError("Exact has no learning rate, so there is none to schedule: leave the scheduler out")
        raise KeyError(key)


def _no() -> System:
    raise AssertionError
