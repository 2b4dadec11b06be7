"""Exact: the exact minimiser of the damped quadratic model at every step, as an optimizer (Levenberg–Marquardt)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llqr.checks import (
    Loss,
    check_amount,
    check_callable,
    check_model,
    check_precision,
    check_tensors,
    checked_integer,
    checked_number,
)
from llqr.curvature import locations
from llqr.curvature.chunks import Piece
from llqr.curvature.precision import no_autocast
from llqr.curvature.recorded_chunk import ChunkContext
from llqr.curvature.recorder import Parameters, Recorder
from llqr.divergences import Divergence, LayerwiseLoss, Newton, Term, resolve
from llqr.divergences.families import check_families
from llqr.errors import DegenerateProblemError, LLQRError, LLQRWarning, callers_level, unknown
from llqr.exact.live import Closure, Live
from llqr.exact.point import Point
from llqr.exact.systems import System, as_stages, prepared

Method = Literal["auto", "dual", "primal", "cg", "riccati"]
METHODS = ("auto", "dual", "primal", "cg", "riccati")

REFUSALS = 12
"""Steps that may be refused in a row, each with a larger damping than the one before."""
GROWTH = 2.0
"""What the damping is multiplied by after the first refusal; after the second by twice as much, and so on."""
CORRECTIONS, WORTHWHILE = 10, 0.9
"""The most corrections of a step, and what each has to bring the loss down to for another one to follow."""
COUNTS = ("steps", "refused", "stalled", "cut_short")


class Exact(torch.optim.Optimizer):
    """An optimizer whose steps minimise g·δ + ½ δ·Hδ + ½ μ‖δ‖² exactly, for small networks and batches.

        optimizer = Exact(model)
        for _ in range(100):
            loss = optimizer.step(lambda: residuals(model))

    `step(closure)` calls the closure several times, as `torch.optim.LBFGS` does. But this closure returns what the loss is made
    of, and doesn't call `backward()`:

    - residuals, a tensor or a tuple of them; the loss is the sum of their mean squares. They may hold derivatives of the
      network (`torch.autograd.grad(…, create_graph=True)`);
    - with a `loss_fn`, the pair `(output, targets)`; the loss is `loss_fn(output, targets)`, a mean over the batch;
    - with `divergence="newton"` also the loss itself, one number.

    After a step, corrections bring it nearer to the minimum of the loss itself plus ½ μ‖δ‖², as long as they lower the loss
    enough. Each uses the same H with the gradient at the new output, and costs one run of the closure. (There are none for
    "newton" and `Intermediate`.) The damping μ follows the ratio of the actual decrease to the predicted one. A step that
    doesn't lower the loss is undone, and tried again with more damping. `step` returns the loss before the step; `stats` has
    counts and what the last step did.

    Args:
        model: the module whose parameters are stepped: those that require a gradient, in float32 or float64.
        loss_fn: see above.
        divergence: an object of `llqr.divergences` or its name; H is its second derivative. "ngd" is for classifiers (for a
            cross-entropy the same matrix as "gauss-newton"); with "newton", μ is raised until H + μ is positive definite.
        method: "dual" (a system with a row for each number of the output), "primal" (a row for each parameter), "cg" (conjugate
            gradients), "riccati" (along the stages of an nn.Sequential). All give the same step, "cg" up to its `tolerance`.
            "auto" takes the one with the fewest operations among those that fit into `memory`.
        damping: the first μ, as a share of the curvature along the gradient.
        momentum: for batches that change: μ pulls the step towards this share of the last step, not towards zero.
        tolerance: of conjugate gradients, the residual as a share of the gradient.
        memory: the bytes that Jacobians with their intermediate tensors, and the systems, may take. The graph of a forward pass
            and the gradients of one backward pass aren't counted.
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
        checked_number("damping", damping, lambda number: 0 < number < math.inf, "a number larger than 0")
        checked_number("momentum", momentum, lambda number: 0 <= number < 1, "a number from 0 to 1")
        checked_number("tolerance", tolerance, lambda number: 0 < number < 1, "a number between 0 and 1")
        checked_integer("memory", memory, "a number of bytes")
        self._model, self._loss_fn, self._method, self._memory = model, loss_fn, method, memory
        self._divergence, self._tolerance = resolve(divergence), tolerance
        for name, parameter in locations.trainable(model).items():
            check_precision(name, parameter)
        self._named = _steppable(model)
        self._kinds = _kinds(self._named)
        if len(self._kinds) > 1:
            raise LLQRError("the parameters have several dtypes or devices: convert the model to one")
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

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor:  # type: ignore[override]
        """One step on what the closure returns; the loss before it. On Ctrl-C the parameters stay as they were."""
        if not callable(closure):
            raise LLQRError("step() needs a closure that returns residuals, or with a loss_fn (output, targets)")
        check_model(self._model, (), without_inputs=True)
        named = _steppable(self._model)
        for name in {**self._named, **named}:
            if named.get(name) is not self._named.get(name):
                what = "was replaced, added, taken away, or requires a gradient no longer or only now"
                raise LLQRError(f"{name!r} {what}: make another Exact(model)")
        if _kinds(named) != self._kinds:
            raise LLQRError("the parameters were converted since Exact was made: make another Exact(model)")
        live = Live(self._model, self._loss_fn, closure, isinstance(self._divergence, Newton))
        point, group = self._point(live), self.param_groups[0]
        gradient, last = point.gradient_vector, self._last_step(point)
        examples = sum(count for count, _ in live.groups)
        stages = as_stages(self._model, self._loss_fn, live.inputs, live.targets, self._divergence)
        system, method = prepared(point, self._method, self._memory, examples, last, self._tolerance, stages)
        start = {name: p.detach().clone() for name, p in self._named.items()}
        along = gradient / gradient.abs().max()  # its square may be beyond float32
        curvature = abs(float(along @ system.product(along) / (along @ along))) if gradient.any() else 0.0
        rounding = torch.finfo(gradient.dtype).eps
        mu, growth = max(group["mu"] or group["damping"] * (curvature or 1.0), rounding * curvature), GROWTH
        carried = group["momentum"] * last
        refused, ratio, step, taken, done = 0, math.nan, carried, False, False
        try:
            while gradient.any() and refused < REFUSALS and not taken:
                step, promised = self._solve(system, carried, mu)
                if promised > 4 * rounding * abs(live.loss):
                    step, loss = self._corrected(live, system, start, step, carried, mu)
                    ratio = (live.loss - loss) / promised
                    taken = ratio > 0 and math.isfinite(loss)
                elif promised > 0 and not carried.any():
                    break  # no more to win than rounding; a promise below zero is the noise of a solution with too small a μ
                if not taken:
                    refused += 1
                    if carried.any():
                        carried = torch.zeros_like(carried)
                    else:
                        mu, growth = mu * growth, growth * 2
            if not group["steps"]:  # a closure that draws its own batches does so in the first step
                self._set(start)
                live.compare(live.again()[1])
            if taken:
                self._move(point, start, step)
            done = taken
        finally:
            if not done:
                self._set(start)
        if taken:
            group["mu"] = mu * max(1 / 3, 1 - (2 * ratio - 1) ** 3)  # Nielsen's rule
            for name, change in point.named(step).items():
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
        for parameter, held in self.state.items():  # torch takes a "step" for a count, and leaves it as it is
            held["step"] = held["step"].to(parameter)

    def _solve(self, system: System, carried: Tensor, mu: float) -> tuple[Tensor, float]:
        """The step, and how far the quadratic model says that it lowers the loss; NaN where it has no minimum."""
        try:
            step = system.solve(system.point.slope, carried, mu)
        except DegenerateProblemError:
            return carried, math.nan
        slope, curved = (each.double() @ step.double() for each in (system.point.gradient_vector, system.product(step)))
        return step, -float(slope + 0.5 * curved)

    def _corrected(
        self, live: Live, system: System, start: Parameters, step: Tensor, carried: Tensor, mu: float
    ) -> tuple[Tensor, float]:
        """The step, nearer to the minimum of L(θ + δ) + ½ δ·dδ + ½ μ‖δ - c‖², and the loss there.

        δ ← δ - (H + μ)⁻¹ (Jᵀ∇ℓ(x(θ + δ)) + dδ + μ(δ - c)): Newton's method with H and J as they are at θ, where H = JᵀWJ + d.
        It goes on as long as corrections get shorter, and each lowers the loss by a tenth (one below zero: at all).
        """
        point = system.point
        self._move(point, start, step)
        (loss, output), last = live.again(), step
        for _ in range(CORRECTIONS if point.flat_terms and len(point.values) == 1 else 0):
            if not math.isfinite(loss):
                break
            try:
                more = system.solve(live.slope(output), carried - step - point.diagonal * step / mu, mu)
            except DegenerateProblemError:  # conjugate gradients from here meet a direction that those before didn't
                break
            if not more.norm() < last.norm():
                break
            self._move(point, start, step + more)
            lower, output = live.again()
            if not -math.inf < lower < loss:
                break
            step, last, pays = step + more, more, lower <= WORTHWHILE * loss
            loss = lower
            if not pays:
                break
        return step, loss

    def _move(self, point: Point, start: Parameters, step: Tensor) -> None:
        self._set({name: start[name] + change for name, change in point.named(step).items()})

    def _set(self, values: Parameters) -> None:
        for name, value in values.items():
            self._named[name].copy_(value)

    def _last_step(self, point: Point) -> Tensor:
        held = {name: self.state.get(p, {}).get("step", torch.zeros_like(p)) for name, p in self._named.items()}
        return point.flat(held)

    def _point(self, live: Live) -> Point:
        """g and H at the present parameters."""
        terms = list(self._divergence.terms())
        held = locations.trainable(self._model, list(self._named))
        parameters = {name: p.clone() for name, p in held.items()}  # products go on while steps are tried
        places = locations.locations_of(self._model, terms)
        recorder = Recorder(self._model, list(places.values()), call=live.replaced, streams=live.streams)
        functions = [(weight, term) for weight, term in terms if isinstance(term, Term)]
        context = ChunkContext(recorder, parameters, live.loss_fn, functions, places)
        piece = Piece((), live.targets, None, slice(None), live.groups[0][0])
        with torch.enable_grad(), no_autocast(parameters):
            diagonal = locations.diagonal(self._model, parameters, terms, 0.0)
            point = Point(context, piece, diagonal, live.groups, self._method == "cg")
            output = point.values[0]
            live.compare(output)
            slope = point.slope[: output.numel()].reshape(output.shape)
            small = torch.finfo(slope.dtype).eps ** 0.5 / slope.numel()  # at a minimum it is rounding
            if not self.param_groups[0]["steps"] and float(slope.norm()) > small:
                check_families((term for _, term in terms), slope, output)
        return point


@dataclass
class Stats:
    """Counts since the first step, and what the last one did."""

    steps: int
    refused: int
    """Steps that were tried and taken back."""
    stalled: int
    """Calls of step() that found no step that lowers the loss: at a minimum to rounding, or right on a saddle point."""
    cut_short: int
    """Solutions by conjugate gradients that stopped at their limit of products, before they met the tolerance."""
    damping: float
    """μ of the next step."""
    method: str
    ratio: float
    """Of the decrease that came to the one that the quadratic model had promised."""


def _steppable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}


def _kinds(named: Parameters) -> set[tuple[torch.dtype, torch.device]]:
    return {(p.dtype, p.device) for p in named.values()}


class _Group(dict[str, Any]):
    """Schedulers ask for a group's rate."""

    def __missing__(self, key: str) -> Any:
        if key == "lr":
            raise LLQRError("Exact has no learning rate, so there is none to schedule: leave the scheduler out")
        raise KeyError(key)
