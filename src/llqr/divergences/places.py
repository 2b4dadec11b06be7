"""Divergences at other places than the output: on activations, ψ_i(x_i), and on the parameters themselves, ψ_i(θ_i)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llqr.divergences.base import Divergence, Reduction, check_reduction
from llqr.errors import LLQRError
from llqr.families import standard_normal

if TYPE_CHECKING:
    from llqr.divergences import Term


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

    def draw(self, activation: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
        """W^½ ε for each example: its second moment is that of ψ_i."""
        noise = standard_normal(activation, generator)
        scale: float = batch_size**-0.5 if self.reduction == "mean" else 1.0
        if not isinstance(self.metric, Tensor):
            return noise * (math.sqrt(self.metric) * scale)
        metric, examples = self.metric.to(activation), noise.reshape(batch_size, -1)
        if metric.numel() == examples.shape[1]:
            return (examples * (metric.reshape(-1).sqrt() * scale)).reshape(activation.shape)
        values, basis = torch.linalg.eigh(metric)
        drawn: Tensor = (examples * (values.clamp_min(0).sqrt() * scale)) @ basis.mT
        return drawn.reshape(activation.shape)

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
        check_reduction(reduction)
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


def _check_metric(place: str | int, metric: float | Tensor) -> None:
    if not isinstance(metric, Tensor):
        if isinstance(metric, bool) or not isinstance(metric, (int, float)) or not 0 < metric < math.inf:
            raise LLQRError(f"the metric at {place!r} is {metric!r}; it is a positive weight or a tensor")
    elif not metric.isfinite().all():
        raise LLQRError(f"the metric at {place!r} has values that are not finite")


def _brief(metric: float | Tensor) -> str:
    return f"tensor{tuple(metric.shape)}" if isinstance(metric, Tensor) else repr(metric)
