"""How good a step is, and how good U is, on the quadratic model of one batch.

With g the gradient of the mean loss, H + λ the damped curvature and δ* = -(H + λ)⁻¹ g, the attainable decrease is
m(δ*) = ½ g·δ*. Along any δ the model is a parabola, a g·δ + ½ a² δ·(H + λ)δ, whose lowest point is at
a = -g·δ / δ·(H + λ)δ. Since g = -(H + λ)δ*, what is attained there, relative to m(δ*), is cos²(δ, δ*) in the metric of H + λ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.checks import Inputs, Loss, check_finite, checked_number
from llqr.curvature import locations
from llqr.curvature.locations import PerLayer
from llqr.curvature.quadratic import QuadraticModel
from llqr.curvature.recorder import Recorder, Selector
from llqr.divergences import Divergence, resolve
from llqr.errors import ChainError, LLQRError, SingularProblemError
from llqr.exact.chain import Chain
from llqr.exact.matrices import conjugate_gradients, flat, unflat
from llqr.exact.steps import exact_step
from llqr.paper import PaperLLQR
from llqr.preconditioner import Preconditioner
from llqr.refit import fit
from llqr.structures import Diagonal, Kronecker, Scalar
from llqr.structures.kronecker import SideStructure
from llqr.structures.stacks import Group

Step = Mapping[str, Tensor]

RICCATI_WORK = 3e9
"""Operations up to which the recursion is taken: some seconds on one core."""
RICCATI_NUMBERS = 2e7
"""Numbers in the largest Jacobian up to which it is."""


def dot(left: Step, right: Step) -> float:
    return sum(float((part.double() * right[name].double()).sum()) for name, part in left.items())


def norm(step: Step) -> float:
    return math.sqrt(dot(step, step))


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
        self,
        quadratic: QuadraticModel,
        damping: Mapping[str, float],
        loss_after: Callable[[Step], float],
        step: dict[str, Tensor],
        method: str,
        tolerance: float,
    ) -> None:
        self._quadratic, self._damping, self._loss_after = quadratic, damping, loss_after
        self.gradient, self.step, self.method = quadratic.gradient, step, method
        self.loss = loss_after({})
        self._product = quadratic.curvature(step)
        self.residual = norm({name: self._product[name] + g for name, g in self.gradient.items()}) / norm(self.gradient)
        """‖(H + λ)δ* + g‖/‖g‖ as it is, measured by a product of its own."""
        # a product's own rounding is in the residual that is measured, and isn't in the one that the recursion has
        self.converged = self.residual <= 2 * tolerance + torch.finfo(flat(self.gradient).dtype).eps ** 0.75
        self.attainable = dot(self.gradient, step) + 0.5 * dot(step, self._product)
        """m(δ*), negative."""


def judge(step: Step, reference: Reference) -> Verdict:
    """Compare a step δ, a tensor for each parameter, with the exact one, for one product."""
    r = reference
    if not isinstance(step, Mapping):
        raise LLQRError(f"a step is a mapping from parameter names to tensors, not a {type(step).__name__}")
    product = r._quadratic.curvature(step)
    for name, part in step.items():
        check_finite(part, f"the step of {name!r}")
    if norm(step) == 0:
        raise LLQRError("the step is zero: there is no direction to judge (does the optimizer have these parameters?)")
    layers: dict[str, list[str]] = {}
    for name in r.gradient:  # a parameter that the model owns itself is a layer of its own
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    parts = {}
    for layer, names in layers.items():
        own, exact = ({name: each[name] for name in names} for each in (step, r.step))
        value = dot(own, r.gradient) + 0.5 * dot(own, product)
        cosine = _ratio(dot(own, exact), norm(own) * norm(exact))
        parts[layer] = LayerPart(cosine, value / r.attainable, _ratio(norm(own), norm(exact)))
    decline, curved = dot(r.gradient, step), dot(step, product)
    metric = math.sqrt(max(0.0, curved)) * math.sqrt(max(0.0, dot(r.step, r._product)))
    best = -decline / curved if curved > 0 else math.nan
    damped = sum(rate * norm({name: step[name]}) ** 2 for name, rate in r._damping.items())
    return Verdict(
        cosine=_ratio(dot(step, r.step), norm(step) * norm(r.step)),
        cosine_h=_ratio(dot(r.step, product), metric),
        fraction=(decline + 0.5 * curved) / r.attainable,
        fraction_along=0.0 if best <= 0 else 0.5 * decline * best / r.attainable,
        best_length=best,
        length=norm(step) / norm(r.step),
        predicted=decline + 0.5 * (curved - damped),
        actual=r._loss_after(step) - r.loss,
        layers=parts,
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan


def reference(
    model: nn.Module,
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss,
    divergence: str | Divergence = "ngd",
    damping: PerLayer = 0.0,
    *,
    tolerance: float = 1e-5,
    max_steps: int | None = None,
    output: Selector | None = None,
    weights: Tensor | None = None,
    training: bool | None = None,
) -> Reference:
    """The quadratic model of a batch with its exact step: by the Riccati recursion for a small `nn.Sequential`, else by
    conjugate gradients, which stall early in float32 where H + λ is badly conditioned: give a copy in float64 there.

    Args:
        tolerance: of the residual ‖(H + λ)δ + g‖/‖g‖. Whether it was reached is in `converged`, and what was in `residual`.
        max_steps: of conjugate gradients; by default twice the number of parameters, at most 2,000.

    The other arguments are those of `QuadraticModel.build`.
    """
    checked_number("tolerance", tolerance, lambda number: 0 < number < 1, "a number between 0 and 1")
    kind = resolve(divergence)
    how: dict[str, Any] = {"output": output, "weights": weights, "training": training}
    quadratic = QuadraticModel.build(model, inputs, targets, loss_fn, kind, damping, **how)
    recorder, parameters = Recorder(model, (), output, training), locations.trainable(model)

    def loss_after(step: Step) -> float:
        like = quadratic.gradient
        moved = {name: p + step[name].to(like[name]) if step else p for name, p in parameters.items()}
        with torch.no_grad():
            return float(loss_fn(recorder.run(moved, inputs)[0], targets).double())

    def found(step: dict[str, Tensor], method: str) -> Reference:
        diagonal = locations.diagonal(model, parameters, (), damping)
        return Reference(quadratic, diagonal, loss_after, step, method, tolerance)

    gradient = flat(quadratic.gradient)
    if not gradient.any():
        raise LLQRError("the gradient is zero: there is no decrease to attain, and nothing to compare with")
    in_mode = training is None or all(module.training == training for module in model.modules())
    if output is None and weights is None and in_mode and _is_small_chain(model, inputs):
        with suppress(ChainError, SingularProblemError):
            exact = found(exact_step(model, inputs, targets, loss_fn, kind, damping), "riccati")  # type: ignore[arg-type]
            if exact.converged:
                return exact
    shapes = {name: g.shape for name, g in quadratic.gradient.items()}
    limit = max_steps or min(2 * len(gradient), 2_000)
    solved = conjugate_gradients(lambda v: flat(quadratic.curvature(unflat(v, shapes))), gradient, tolerance, limit)
    return found(unflat(solved.step, shapes), "cg")


def _is_small_chain(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model is a chain that the recursion solves in seconds: P n² + n³ operations a stage, P n numbers."""
    try:
        sizes = Chain(model).sizes(inputs)  # type: ignore[arg-type]
    except LLQRError:
        return False
    work, largest = sum(n * n * (p + n) for n, p in sizes), max(p * n for n, p in sizes)
    return work <= RICCATI_WORK and largest <= RICCATI_NUMBERS


# --- U of LLQR.paper ---

SMALL = 512
"""Numbers in a block up to which it is formed."""
MOST = 2**20
"""Singular values of a Kronecker product that are kept; of longer factors, that many evenly chosen ones."""


def spectra(u: Preconditioner) -> dict[str, Tensor]:
    """The eigenvalues of each block in increasing order, or its singular values where it isn't symmetric, under the names of
    `u.blocks`. A block that is neither a multiple number by number, nor a Kronecker product, nor small has none."""
    if not isinstance(u, Preconditioner):
        had = "LLQR.paper has one in optimizer.preconditioner after its first refit"
        raise LLQRError(f"spectra are those of a Preconditioner, not of a {type(u).__name__}; {had}")
    if not u.is_finite():
        raise LLQRError("U isn't finite: it has no spectrum")
    found = {key: _spectrum(group, i) for group in u.groups for i, key in enumerate(group.names)}
    return {key: values.sort().values for key, values in found.items() if values is not None}


def _spectrum(group: Group, index: int) -> Tensor | None:
    structure, shape, size = group.structure, group.shape, math.prod(group.shape)
    tensors = {name: stack[index : index + 1].detach().cpu().double() for name, stack in group.tensors.items()}
    if isinstance(structure, (Scalar, Diagonal, SideStructure)) and len(tensors) == 1:  # it acts number by number
        return next(iter(tensors.values())).reshape(-1)
    if isinstance(structure, Kronecker):
        return _of_factors([stack[0] for stack in tensors.values()])
    if size > SMALL:
        return None
    repeated = {name: stack.expand(size, *stack.shape[1:]) for name, stack in tensors.items()}
    units = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    matrix: Tensor = structure.apply(repeated, units).reshape(size, size)
    symmetric = (matrix - matrix.mT).norm() <= 1e-5 * matrix.norm()
    values: Tensor = torch.linalg.eigvalsh((matrix + matrix.mT) / 2) if symmetric else torch.linalg.svdvals(matrix)
    return values


def _of_factors(factors: Sequence[Tensor]) -> Tensor:
    """The singular values of a Kronecker product are the products of those of its factors."""
    singular = [factor.abs() if factor.dim() == 1 else torch.linalg.svdvals(factor) for factor in factors]
    if math.prod(map(len, singular)) > MOST:
        most = int(MOST ** (1 / len(singular)))
        chosen = [torch.linspace(0, len(each) - 1, min(most, len(each))).round().long() for each in singular]
        singular = [each.sort().values[places] for each, places in zip(singular, chosen, strict=True)]
    values = singular[0]
    for other in singular[1:]:
        values = torch.outer(values, other).reshape(-1)
    return values


@dataclass(frozen=True)
class Objectives:
    """J of the identity, of the present U and of a freshly fitted one, on the same batch."""

    identity: float
    current: float
    fresh: float

    @property
    def staleness(self) -> float:
        """0 where the present U is as good as a fresh one, 1 where it is no better than the identity, more where it is worse.

        NaN where a fresh fit gains nothing over the identity.
        """
        gain = self.identity - self.fresh
        return (self.current - self.fresh) / gain if gain > 0 else math.nan


def staleness(optimizer: PaperLLQR, inputs: Inputs, targets: Any, loss_fn: Loss) -> Objectives:
    """How stale the U of an optimizer is on a batch: by the objective, structure and solver of its own refits.

    A fresh fit is one from the identity, without the moving average. Neither model nor optimizer is changed.
    """
    if not isinstance(optimizer, PaperLLQR):
        raise LLQRError(f"staleness is that of the U of LLQR.paper; this is a {type(optimizer).__name__}")
    if optimizer.preconditioner is None:
        raise LLQRError("there is no U yet: it is the identity until the first refit")
    refuse_ranks(optimizer)
    q = optimizer.objective(inputs, targets, loss_fn)
    parameters = {name: p for name, p in optimizer.model.named_parameters() if name in q.gradient}
    current = optimizer._refit.current(parameters, optimizer.preconditioner)
    fresh = fit(q, current.structures, optimizer.solver, optimizer.steps)
    steps = [{name: -part for name, part in u.apply(dict(q.gradient)).items()} for u in (current, fresh)]
    steps.insert(0, {name: -g for name, g in q.gradient.items()})
    return Objectives(*(dot(q.gradient, step) + 0.5 * dot(step, q.curvature(step)) for step in steps))


def refuse_ranks(optimizer: Optimizer) -> None:
    """Raise where a look at one process would be taken for one at all that train together."""
    if isinstance(optimizer, PaperLLQR) and optimizer.processes.several:
        raise LLQRError("staleness is that of one process's training, and not yet among several")
