"""Divergences D(θ_k, θ): what a step is measured by.

The paper's layerwise form is D = ψ_N(x_N(θ)) + Σ_i ψ_i(x_i(θ), θ_i), and H = ∇²D at θ_k. Each ψ is one small object that
says where in the network it sits, what it is, whether it is *flat* (its gradient vanishes at θ_k, so that it sends no
adjoint back and asks no stage for second derivatives), and what its Hessian at θ_k does to a vector:

    OutputTerm       ψ_N(x_N)    Newton, GaussNewton, KL, ReverseKL, Renyi
    ActivationTerm   ψ_i(x_i)    one for each place that Intermediate names
    L2               ψ_i(θ_i)    a weight on the parameters themselves

Divergences can be added and multiplied by positive numbers: `KL() + 0.1 * Intermediate({"2": 1.0}) + L2(1e-3)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llqr.errors import LLQRError, unknown
from llqr.families import Bernoulli, Categorical, Family, Gaussian, resolve_family

__all__ = [
    "KL",
    "L2",
    "Bernoulli",
    "Categorical",
    "Divergence",
    "GaussNewton",
    "Gaussian",
    "Intermediate",
    "Newton",
    "Renyi",
    "ReverseKL",
]

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class BasePoint:
    """What ψ_N is expanded around: the output at θ_k, the mean loss ℓ(x_N), and a weight for each variable if they differ."""

    output: Tensor
    loss: Callable[[Tensor], Tensor]
    weights: Tensor | None = None


class Divergence(ABC):
    """A weighted sum of terms, each at one place of the network.

    `flat` says whether ∇D vanishes at θ_k through every activation: then p_i = 0, and only Q blocks remain.
    """

    flat: bool = True

    @abstractmethod
    def terms(self) -> Iterator[tuple[float, Term]]:
        """The terms with their weights."""

    def __add__(self, other: Divergence) -> Divergence:
        if not isinstance(other, Divergence):
            return NotImplemented
        return Sum(((1.0, self), (1.0, other)))

    def __radd__(self, other: object) -> Divergence:
        return self if other == 0 else NotImplemented  # so that sum() works

    def __mul__(self, factor: float) -> Divergence:
        if isinstance(factor, Divergence) or not isinstance(factor, (int, float)):
            return NotImplemented
        if not 0 < factor < math.inf:
            raise LLQRError(f"a divergence is multiplied by a positive number, not {factor!r}")
        return Sum(((float(factor), self),))

    __rmul__ = __mul__


class Sum(Divergence):
    """Σ weight · divergence."""

    def __init__(self, parts: tuple[tuple[float, Divergence], ...]) -> None:
        self.parts = parts
        self.flat = all(part.flat for _, part in parts)

    def terms(self) -> Iterator[tuple[float, Term]]:
        for weight, part in self.parts:
            for inner, term in part.terms():
                yield weight * inner, term

    def __repr__(self) -> str:
        return " + ".join(
            f"{part!r}"
            if weight == 1
            else f"{weight:g} * ({part!r})"
            if isinstance(part, Sum)
            else f"{weight:g} * {part!r}"
            for weight, part in self.parts
        )


class OutputTerm(Divergence):
    """ψ_N(x_N): a function of what the network returns. `additive`: it adds the examples up, in place of averaging them."""

    additive = False
    needs_loss = True

    def terms(self) -> Iterator[tuple[float, Term]]:
        yield 1.0, self

    @abstractmethod
    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        """ψ_N as a function of the output; a scalar."""

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        """∇²ψ_N(x_N^k) v: `state_cost` Q_N times a vector. By differentiating ψ_N twice, unless there is a closed form."""
        return _hessian_product(lambda output: self.psi(output, base), base.output, tangent)

    def check(self, output: Tensor, weights: Tensor | None = None) -> None:
        """Raise where this divergence can't be taken of such an output, or the weights don't fit it."""


class Newton(OutputTerm):
    """The Bregman gap of the (damped) loss, F(θ) - F(θ_k) - ∇F(θ_k)·(θ - θ_k), F = L + λ/2 ‖θ - θ_k‖²: H = ∇²L + λI.

    The gap's last part is linear in θ and has no second derivative, so ψ_N is the loss itself. It isn't flat: its adjoints
    p_i are those of backpropagation, and they carry the curvature of the stages.
    """

    flat = False

    def __init__(self, damping: float = 0.0) -> None:
        self.damping = L2(damping) if damping else None

    def terms(self) -> Iterator[tuple[float, Term]]:
        yield 1.0, self
        if self.damping is not None:
            yield 1.0, self.damping

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        return base.loss(output)

    def __repr__(self) -> str:
        return f"Newton(damping={self.damping.weight})" if self.damping is not None else "Newton()"


class GaussNewton(OutputTerm):
    """½ (x_N - x_N^k)ᵀ W (x_N - x_N^k): H = Jᵀ W J with J the network's Jacobian.

    W is the loss's own Hessian in output space (the generalised Gauss–Newton matrix; J_rᵀ J_r for a squared error) or, for a
    loss ½‖r‖² whose residual `r(output)` isn't linear in the output, the J_rᵀ J_r of the residual that is given.
    """

    def __init__(self, residual: Callable[[Tensor], Tensor] | None = None) -> None:
        self.residual = residual

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        change = output - base.output
        return 0.5 * (change * self.hessian_product(change, base)).sum()

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        if self.residual is None:
            return _hessian_product(base.loss, base.output, tangent)
        pushed: Tensor = torch.func.jvp(self.residual, (base.output,), (tangent,))[1]
        product: Tensor = torch.func.vjp(self.residual, base.output)[1](pushed)[0]
        return product

    def __repr__(self) -> str:
        return "GaussNewton()" if self.residual is None else f"GaussNewton(residual={self.residual!r})"


class _Distributional(OutputTerm):
    """A divergence between output distributions whose Hessian at θ_k is `curvature` times the Fisher matrix.

    `reduction="mean"` averages over the variables of the batch (examples, tokens), as the mean loss does; `"sum"` takes the
    joint distribution of the batch, as the paper does, which is batch-size times as curved.
    """

    curvature: float = 1.0
    needs_loss = False

    def __init__(self, family: str | Family = "categorical", reduction: Reduction = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise unknown("reduction", reduction, ("mean", "sum"))
        self.family = resolve_family(family)
        self.reduction = reduction
        self.additive = reduction == "sum"

    @abstractmethod
    def between(self, base: Tensor, output: Tensor) -> Tensor:
        """The divergence of each variable."""

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        each = self.between(base.output, output)
        if base.weights is not None:
            each = each * base.weights
        return each.sum() / self._total(base)

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        product = self.family.fisher_product(base.output, tangent)
        if base.weights is not None:
            product = product * self.family.spread(base.weights)
        return product * (self.curvature / self._total(base))

    def check(self, output: Tensor, weights: Tensor | None = None) -> None:
        shape = self.family.variables(output)
        if weights is not None and weights.shape != shape:
            raise LLQRError(f"the weights have shape {tuple(weights.shape)}, and the output's variables {tuple(shape)}")

    def _total(self, base: BasePoint) -> float | Tensor:
        if self.reduction == "sum":
            return 1.0
        return self.family.variables(base.output).numel() if base.weights is None else base.weights.sum()

    def _options(self) -> str:
        options = [] if isinstance(self.family, Categorical) and self.family.dim == -1 else [f"family={self.family!r}"]
        return ", ".join(options + ([f"reduction={self.reduction!r}"] if self.reduction != "mean" else []))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options()})"


class KL(_Distributional):
    """KL(p_k ‖ p_θ): the natural gradient; H is the Fisher matrix."""

    def between(self, base: Tensor, output: Tensor) -> Tensor:
        return self.family.kl(base, output)


class ReverseKL(_Distributional):
    """KL(p_θ ‖ p_k): to second order the same as KL."""

    def between(self, base: Tensor, output: Tensor) -> Tensor:
        return self.family.kl(output, base)


class Renyi(_Distributional):
    """log Σ p_k^a p_θ^(1-a) / (a-1), a > 0 the order: H is a times the Fisher matrix; order 1 is the limit, KL."""

    def __init__(self, order: float = 0.5, family: str | Family = "categorical", reduction: Reduction = "mean") -> None:
        if not 0 < order < math.inf:
            raise LLQRError(f"the order of a Rényi divergence is a positive number, not {order!r}")
        super().__init__(family, reduction)
        self.curvature = self.order = float(order)

    def between(self, base: Tensor, output: Tensor) -> Tensor:
        if self.order == 1:
            return self.family.kl(base, output)
        return self.family.renyi(base, output, self.order)

    def __repr__(self) -> str:
        options = self._options()
        return f"Renyi({self.order:g}{', ' if options else ''}{options})"


class ActivationTerm(Divergence):
    """ψ_i(x_i) = ½ (x_i - x_i^k)ᵀ W (x_i - x_i^k) at one place; built by `Intermediate`.

    `place` is a module's name or a stage's index and means what that module returns.
    """

    def __init__(self, place: str | int, metric: float | Tensor, reduction: Reduction) -> None:
        self.place, self.metric, self.reduction = place, metric, reduction
        self.additive = reduction == "sum"

    def terms(self) -> Iterator[tuple[float, Term]]:
        yield 1.0, self

    def psi(self, activation: Tensor, base: Tensor, batch_size: int) -> Tensor:
        change = activation - base
        return 0.5 * (change * self.hessian_product(change, batch_size)).sum()

    def hessian_product(self, tangent: Tensor, batch_size: int) -> Tensor:
        scale = 1.0 / batch_size if self.reduction == "mean" else 1.0
        if not isinstance(self.metric, Tensor):
            return tangent * (self.metric * scale)
        metric = self.metric.to(tangent) * scale
        examples = tangent.reshape(batch_size, -1)
        if metric.numel() == examples.shape[1]:
            return (examples * metric.reshape(-1)).reshape(tangent.shape)
        return (examples @ metric).reshape(tangent.shape)

    def check(self, activation: Tensor, batch_size: int) -> None:
        """Raise where the metric doesn't fit the activation."""
        if not isinstance(self.metric, Tensor):
            return
        shape, size = tuple(self.metric.shape), activation.numel() // batch_size
        if activation.shape[:1] != (batch_size,) and batch_size > 1:
            raise LLQRError(
                f"what {self.place!r} returns has shape {tuple(activation.shape)}, not a leading dimension of {batch_size} "
                "examples: a metric over one example's numbers doesn't fit; give a weight"
            )
        if self.metric.numel() == size and shape == tuple(activation.shape[activation.dim() - len(shape) :]):
            if (self.metric < 0).any():
                raise LLQRError(f"the metric at {self.place!r} has negative entries on its diagonal")
            return
        if shape != (size, size):
            raise LLQRError(
                f"the metric at {self.place!r} has shape {shape}, and one example's activation has {size} numbers: give a "
                f"weight, a diagonal of the activation's shape, or a {size} × {size} matrix"
            )
        if not torch.allclose(self.metric, self.metric.T):
            raise LLQRError(f"the metric at {self.place!r} isn't symmetric; give (W + W.T) / 2")
        if torch.linalg.eigvalsh(self.metric.double())[0] < -1e-6 * self.metric.abs().max():
            raise LLQRError(
                f"the metric at {self.place!r} has a negative eigenvalue; it must be positive semi-definite"
            )

    def __repr__(self) -> str:
        return f"Intermediate({{{self.place!r}: {_brief(self.metric)}}})"


class Intermediate(Divergence):
    """Σ_i ½ (x_i - x_i^k)ᵀ W_i (x_i - x_i^k): metrics on what modules return.

    `metrics` maps a module's name (or a stage's index) to a weight w (W = w·I), to a tensor of one example's shape (W
    diagonal), or to a symmetric positive semi-definite matrix over one example's numbers.
    `reduction="mean"` averages over the batch; `"sum"` adds the examples up, as the paper writes it.
    """

    def __init__(self, metrics: Mapping[str | int, float | Tensor], reduction: Reduction = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise unknown("reduction", reduction, ("mean", "sum"))
        if not isinstance(metrics, Mapping) or not metrics:
            raise LLQRError("Intermediate takes a mapping from module names to metrics, such as {'2': 0.1}")
        for place, metric in metrics.items():
            _check_metric(place, metric)
        self.metrics, self.reduction = dict(metrics), reduction

    def terms(self) -> Iterator[tuple[float, Term]]:
        for place, metric in self.metrics.items():
            yield 1.0, ActivationTerm(place, metric, self.reduction)

    def __repr__(self) -> str:
        inside = ", ".join(f"{place!r}: {_brief(metric)}" for place, metric in self.metrics.items())
        return f"Intermediate({{{inside}}}{', reduction=' + repr(self.reduction) if self.reduction != 'mean' else ''})"


class L2(Divergence):
    """Σ_i w_i/2 ‖θ_i - θ_i^k‖²: a stage term on the parameters themselves; H gets w_i on its diagonal.

    `weight` is one number, or a mapping from module or parameter names (or stage indices) to numbers; what it doesn't name
    gets none.
    """

    def __init__(self, weight: float | Mapping[str | int, float] = 1.0) -> None:
        for place, value in weight.items() if isinstance(weight, Mapping) else [("weight", weight)]:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise LLQRError(f"L2 weights are non-negative numbers; {place!r} is {value!r}")
        self.weight = weight

    def terms(self) -> Iterator[tuple[float, Term]]:
        yield 1.0, self

    def __repr__(self) -> str:
        return f"L2({self.weight!r})"


Term = OutputTerm | ActivationTerm | L2

NAMES: dict[str, Callable[[], Divergence]] = {
    "newton": Newton,
    "gauss-newton": GaussNewton,
    "ngd": KL,
    "renyi": Renyi,
    "reverse-kl": ReverseKL,
}


def resolve(divergence: str | Divergence) -> Divergence:
    """The divergence that a name stands for; a divergence stands for itself."""
    if isinstance(divergence, Divergence):
        return divergence
    if isinstance(divergence, type) and issubclass(divergence, Divergence):
        raise LLQRError(f"the divergence is a class; write {divergence.__name__}() to make one")
    if divergence not in NAMES:
        raise unknown("divergence", divergence, NAMES)
    return NAMES[divergence]()


def _hessian_product(function: Callable[[Tensor], Tensor], point: Tensor, tangent: Tensor) -> Tensor:
    """∇²f(point) · tangent for scalar f, by differentiating twice; differentiable in the tangent."""
    with torch.enable_grad():
        leaf = point.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        if not slope.requires_grad:
            return torch.zeros_like(tangent)
        product = torch.autograd.grad(slope, leaf, tangent, create_graph=tangent.requires_grad, allow_unused=True)[0]
    return torch.zeros_like(tangent) if product is None else product


def _check_metric(place: str | int, metric: float | Tensor) -> None:
    if not isinstance(metric, Tensor):
        if isinstance(metric, bool) or not isinstance(metric, (int, float)) or not 0 < metric < math.inf:
            raise LLQRError(f"the metric at {place!r} is {metric!r}; it is a positive weight or a tensor")
    elif not metric.isfinite().all():
        raise LLQRError(f"the metric at {place!r} has values that are not finite")


def _brief(metric: float | Tensor) -> str:
    return f"tensor{tuple(metric.shape)}" if isinstance(metric, Tensor) else repr(metric)
