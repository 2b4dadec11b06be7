"""Reference: the quadratic model of one batch with its exact minimiser, and what it says of any proposed step.

With g the gradient of the mean loss, H + λ the damped curvature and δ* = -(H + λ)⁻¹ g, the attainable decrease is
m(δ*) = ½ g·δ*. Along any δ the model is a parabola, a g·δ + ½ a² δ·(H + λ)δ, whose lowest point is at
a = -g·δ / δ·(H + λ)δ. Since g = -(H + λ)δ*, what is attained there, relative to m(δ*), is cos²(δ, δ*) in the metric of H + λ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss, check_finite, checked_number
from llqr.curvature import locations
from llqr.curvature.locations import PerLayer
from llqr.curvature.quadratic import QuadraticModel
from llqr.curvature.recorder import Recorder, Selector
from llqr.divergences import Divergence, resolve
from llqr.errors import ChainError, LLQRError, SingularProblemError, unknown
from llqr.exact.chain import Chain
from llqr.exact.matrices import conjugate_gradients, flat, unflat
from llqr.exact.steps import exact_step
from llqr.structures.stacks import owner

Step = Mapping[str, Tensor]


def dot(left: Step, right: Step) -> float:
    return sum(float((part.double() * right[name].double()).sum()) for name, part in left.items())


def norm(step: Step) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(v.double()) for v in step.values()])))


def layers(names: Collection[str]) -> dict[str, list[str]]:
    """The parameters by the module that owns them; one that the model owns itself is a layer of its own."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(owner(name) or name, []).append(name)
    return found


def checked(step: Step, like: Step) -> dict[str, Tensor]:
    """The step in the dtype and order of `like`; an error where it isn't one of all these parameters."""
    if not isinstance(step, Mapping):
        raise LLQRError(f"a step is a mapping from parameter names to tensors, not a {type(step).__name__}")
    for name, part in step.items():
        if name not in like:
            raise unknown("parameter in the step", name, like)
        if not isinstance(part, Tensor) or not part.is_floating_point():
            got = f"of {part.dtype}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise LLQRError(f"the step of {name!r} is a tensor of real numbers; this one is {got}")
        if part.shape != like[name].shape:
            raise LLQRError(
                f"the step of {name!r} has shape {tuple(part.shape)}, and the parameter {tuple(like[name].shape)}"
            )
        check_finite(part, f"the step of {name!r}")
    missing = [name for name in like if name not in step]
    if missing:
        raise LLQRError(
            f"the step lacks {', '.join(map(repr, missing[:5]))}: give a tensor for every parameter, zeros for those at rest"
        )
    return {name: step[name].detach().to(own.device, own.dtype) for name, own in like.items()}


Method = Literal["auto", "riccati", "cg"]
METHODS = ("auto", "riccati", "cg")

RICCATI_WORK = 3e9
"""Operations up to which the recursion is taken: some seconds on one core."""
RICCATI_NUMBERS = 2e7
"""Numbers in the largest Jacobian up to which it is."""


@dataclass(frozen=True)
class LayerPart:
    """A layer's part in a step."""

    cosine: float
    """With the layer's part of δ*, Euclidean; NaN where it rests."""
    fraction: float
    """(g_i·δ_i + ½ δ_i·((H + λ)δ)_i)/m(δ*): the layers' add up to the fraction of the whole step."""
    length: float
    """‖δ_i‖/‖δ*_i‖."""


@dataclass(frozen=True)
class Verdict:
    """What the quadratic model, and the loss itself, say of a step δ."""

    cosine: float
    """With δ*, Euclidean."""
    cosine_h: float
    """With δ*, in the metric of H + λ."""
    fraction: float
    """m(δ)/m(δ*): 1 for the exact step, 0 for none, negative where m rises."""
    fraction_along: float
    """The same at the best length along δ; 0 where no length forward helps."""
    best_length: float
    """The multiple of δ that is best."""
    length: float
    """‖δ‖/‖δ*‖."""
    predicted: float
    """The change of the loss that g·δ + ½ δ·Hδ predicts, without damping."""
    actual: float
    """The change of the loss on this batch."""
    layers: dict[str, LayerPart]


class Reference:
    """The quadratic model at θ of one batch, the exact step, and how good that is. Build one with `reference`."""

    def __init__(
        self, model: nn.Module, quadratic: QuadraticModel, loss: Callable[[Step], float], damping: PerLayer
    ) -> None:
        self._quadratic, self._loss_at = quadratic, loss
        self._parameters = locations.trainable(model)
        self._damping = locations.diagonal(model, self._parameters, (), damping)
        self.gradient = quadratic.gradient
        if norm(self.gradient) == 0:
            raise LLQRError("the gradient is zero: there is no decrease to attain, and nothing to compare with")
        self.loss = loss(self._parameters)
        self.step: dict[str, Tensor] = {}
        """δ*."""
        self.method = ""
        self.residual = math.inf
        """‖(H + λ)δ* + g‖/‖g‖ as it is, measured by a product of its own."""
        self.converged = False
        self.attainable = 0.0
        """m(δ*), negative."""

    def settle(self, step: Step, method: str, tolerance: float) -> None:
        """Take this as the exact step."""
        self.step, self.method = dict(step), method
        self._product = self._quadratic.curvature(self.step)
        self.residual = norm({name: self._product[name] + g for name, g in self.gradient.items()}) / norm(self.gradient)
        # a product's own rounding is in the residual that is measured, and isn't in the one that the recursion has
        self.converged = self.residual <= 2 * tolerance + torch.finfo(flat(self.gradient).dtype).eps ** 0.75
        self.attainable = dot(self.gradient, self.step) + 0.5 * dot(self.step, self._product)


def judge(step: Step, reference: Reference) -> Verdict:
    """Hold a step δ against the exact one, for one product."""
    r, step = reference, checked(step, reference.gradient)
    if norm(step) == 0:
        raise LLQRError("the step is zero: there is no direction to judge (does the optimizer have these parameters?)")
    product = r._quadratic.curvature(step)
    parts = {}
    for layer, names in layers(r.gradient.keys()).items():
        own, exact = ({name: each[name] for name in names} for each in (step, r.step))
        value = dot(own, r.gradient) + 0.5 * dot(own, product)
        cosine = _ratio(dot(own, exact), norm(own) * norm(exact))
        parts[layer] = LayerPart(cosine, value / r.attainable, _ratio(norm(own), norm(exact)))
    decline, curved = dot(r.gradient, step), dot(step, product)
    metric = math.sqrt(max(0.0, curved)) * math.sqrt(max(0.0, dot(r.step, r._product)))
    best = -decline / curved if curved > 0 else math.nan
    damped = sum(rate * float(step[name].double().square().sum()) for name, rate in r._damping.items())
    return Verdict(
        cosine=_ratio(dot(step, r.step), norm(step) * norm(r.step)),
        cosine_h=_ratio(dot(r.step, product), metric),
        fraction=(decline + 0.5 * curved) / r.attainable,
        fraction_along=0.0 if best <= 0 else 0.5 * decline * best / r.attainable,
        best_length=best,
        length=norm(step) / norm(r.step),
        predicted=decline + 0.5 * (curved - damped),
        actual=r._loss_at({name: p + step[name] for name, p in r._parameters.items()}) - r.loss,
        layers=parts,
    )


def reference(
    model: nn.Module,
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss,
    divergence: str | Divergence = "ngd",
    damping: PerLayer = 0.0,
    *,
    method: Method = "auto",
    tolerance: float = 1e-5,
    max_steps: int | None = None,
    chunk_size: int | None = None,
    output: Selector | None = None,
    weights: Tensor | None = None,
    training: bool | None = None,
    shared: Collection[str | int] = (),
) -> Reference:
    """The quadratic model of a batch with its exact step; the model is left as it was.

    Args:
        method: "riccati" (the model is an `nn.Sequential`), "cg", or "auto": the first where it is a chain that is small
            enough, else the second.
        tolerance: of the residual ‖(H + λ)δ + g‖/‖g‖. Whether it was reached is in `converged`, and what was in `residual`.
        max_steps: of conjugate gradients; by default twice the number of parameters, at most 2,000.

    The other arguments are those of `QuadraticModel.build`. In float32 conjugate gradients stall early where H + λ is badly
    conditioned: give a copy of the model in float64, `copy.deepcopy(model).double()`, where that matters.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    checked_number("tolerance", tolerance, lambda number: 0 < number < 1, "a number between 0 and 1")
    kind = resolve(divergence)
    quadratic = QuadraticModel.build(
        model,
        inputs,
        targets,
        loss_fn,
        kind,
        damping,
        chunk_size,
        output=output,
        weights=weights,
        training=training,
        shared=shared,
    )
    recorder = Recorder(model, (), output, training)

    def loss(parameters: Step) -> float:
        with torch.no_grad():
            return float(loss_fn(recorder.run(dict(parameters), inputs)[0], targets).double())

    found = Reference(model, quadratic, loss, damping)
    in_mode = training is None or all(module.training == training for module in model.modules())
    plain = chunk_size is None and output is None and weights is None and in_mode
    if method == "riccati" or (method == "auto" and plain and _small_chain(model, inputs)):
        try:
            step = exact_step(model, inputs, targets, loss_fn, kind, damping)  # type: ignore[arg-type]
            found.settle(step, "riccati", tolerance)
        except (ChainError, SingularProblemError):
            if method == "riccati":
                raise
    if not found.converged and method != "riccati":
        shapes = {name: g.shape for name, g in found.gradient.items()}
        limit = max_steps or min(2 * flat(found.gradient).numel(), 2_000)
        solved = conjugate_gradients(
            lambda v: flat(quadratic.curvature(unflat(v, shapes))), flat(found.gradient), tolerance, limit
        )
        found.settle(unflat(solved.step, shapes), "cg", tolerance)
    return found


def _small_chain(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model is a chain that the recursion solves in seconds: P n² + n³ operations a stage, P n numbers."""
    if type(model).forward is not nn.Sequential.forward:
        return False
    try:
        chain = Chain(model)  # type: ignore[arg-type]
        states = chain.run(inputs)
    except LLQRError:
        return False
    work = largest = 0
    for state, parameters in zip(states, chain.parameters, strict=True):
        n, p = state.numel(), sum(part.numel() for part in parameters.values())
        work += p * n * n + n**3
        largest = max(largest, p * n)
    return work <= RICCATI_WORK and largest <= RICCATI_NUMBERS


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan
