"""Divergences inside of the network: ψ_i(x_i), ψ_i(x_i, θ_i), ψ_i(θ_i); and losses with terms there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llqr.checks import Loss, check_callable, check_finite, check_flag, checked_number
from llqr.divergences.base import (
    REDUCTIONS,
    BasePoint,
    Divergence,
    QuadraticTerm,
    Reduction,
    Term,
    hessian_product,
)
from llqr.divergences.families import standard_normal
from llqr.errors import LLQRError, check_one_of

Metric = float | Tensor | Callable[[Tensor], Tensor] | Divergence
LayerPsi = Callable[[Any, dict[str, Tensor], Any, dict[str, Tensor]], Tensor]
LayerLoss = Callable[[Any, dict[str, Tensor]], Tensor]


class ActivationTerm(Term):
    """ψ_i at one module, by its name or a stage's index; built by `Intermediate` and `Layerwise`.

    ψ is of what the module returns or, where it is `joint`, of what it is called with and its parameters, in one tensor that
    `base.unpack` makes two of.
    """

    needs_loss = False

    def __init__(self, module: str | int, inner: Term, joint: bool = False) -> None:
        self.module, self.inner, self.joint = module, inner, joint
        self.key: tuple[str | int, bool] = (module, joint)
        self.flat, self.additive, self.by_variable = inner.flat, inner.additive, inner.by_variable

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        return self.inner.psi(output, base)

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        return self.inner.hessian_product(tangent, base)

    def draw(self, base: BasePoint, generator: torch.Generator) -> Tensor:
        return self.inner.draw(base, generator)

    def check(self, output: Tensor, weights: Tensor | None = None) -> None:
        self.inner.check(output, weights)

    def check_psi(self, base: BasePoint) -> None:
        self.inner.check_psi(base)

    def __repr__(self) -> str:
        return f"{'Layerwise' if self.joint else 'Intermediate'}({{{self.module!r}: {self.inner!r}}})"


class _Metric(QuadraticTerm):
    """½ (x - x_k)ᵀ W (x - x_k), W a metric that is given or a function of x_k."""

    needs_loss = False

    def __init__(
        self, module: str | int, metric: float | Tensor | Callable[[Tensor], Tensor], reduction: Reduction
    ) -> None:
        self.module, self.metric, self.additive = module, metric, reduction == "sum"
        self.by_variable = not callable(metric)

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        return _times(tangent, self._metric(base))

    def draw(self, base: BasePoint, generator: torch.Generator) -> Tensor:
        """W^½ ε for each example: its second moment is that of ψ."""
        metric, noise = self._metric(base), standard_normal(base.output, generator)
        if metric.dim() < 3:
            return _times(noise, metric.sqrt())
        values, basis = torch.linalg.eigh(metric)
        return _times(_times(noise, values.clamp_min(0).sqrt()), basis.mT)

    def check_psi(self, base: BasePoint) -> None:
        """Raise where the metric doesn't fit the activation."""
        if isinstance(self.metric, (int, float)):
            return
        if base.output.shape[:1] != (base.examples,) and base.examples > 1:
            raise LLQRError(
                f"what {self.module!r} returns has shape {tuple(base.output.shape)}, not a leading dimension of "
                f"{base.examples} examples: a metric over one example's numbers doesn't fit; give a weight"
            )
        metric = self._metric(base)
        check_finite(metric, f"the metric at {self.module!r}")
        if metric.dim() < 3:
            if (metric < 0).any():
                raise LLQRError(f"the metric at {self.module!r} has negative entries on its diagonal")
        elif not torch.allclose(metric, metric.mT):
            raise LLQRError(f"the metric at {self.module!r} isn't symmetric; give (W + W.mT) / 2")
        elif torch.linalg.eigvalsh(metric.double()).min() < -1e-6 * metric.abs().max():
            raise LLQRError(f"the metric at {self.module!r} has a negative eigenvalue: W is positive semi-definite")

    def _metric(self, base: BasePoint) -> Tensor:
        """W with its reduction: a number, diagonals (1 or examples) × numbers, or matrices, likewise."""
        count, output, metric = base.examples, base.output, self.metric
        size, scale = output.numel() // count, 1.0 if self.additive else 1 / count
        found = metric(output) if callable(metric) else metric
        if isinstance(found, (int, float)) or (isinstance(found, Tensor) and found.dim() == 0):
            return output.new_full((), float(found) * scale)
        if not isinstance(found, Tensor):
            raise LLQRError(f"the metric at {self.module!r} returned a {type(found).__name__}, not a number or tensor")
        shape, found = tuple(found.shape), found.detach().to(output) * scale
        several, whose = (count, "their") if callable(metric) else (1, "one example's")
        matrix = (count, size, size) if callable(metric) else (size, size)
        diagonal = output.shape if callable(metric) else output.shape[output.dim() - len(shape) :]
        if shape == matrix:
            return found.reshape(several, size, size)
        if shape == diagonal and found.numel() == several * size:
            return found.reshape(several, size)
        raise LLQRError(
            f"the metric at {self.module!r} has shape {shape}, for activations of shape {tuple(output.shape)}: it is a number, "
            f"a diagonal of {whose} shape, or {' × '.join(map(str, matrix))} numbers"
        )

    def __repr__(self) -> str:
        return _brief(self.metric)


def _times(tangent: Tensor, metric: Tensor) -> Tensor:
    """W v, for each example."""
    if metric.dim() == 0:
        return tangent * metric
    examples = tangent.reshape(-1, metric.shape[-1])
    if metric.dim() == 2:
        return (examples * metric).reshape(tangent.shape)
    product = examples @ metric[0] if len(metric) == 1 else (examples[:, None] @ metric)[:, 0]
    return product.reshape(tangent.shape)


class Intermediate(Divergence):
    """Σ_i ψ_i(x_i) of what modules return.

    `metrics` maps a module's name (or a stage's index) to one of these:

    - W of ψ_i = ½ (x_i - x_i^k)ᵀ W (x_i - x_i^k): a weight w (W = w·I), a tensor of one example's shape (W diagonal), or a
      symmetric positive semi-definite matrix over one example's numbers;
    - a function W(x_i^k) that returns a number, a diagonal of the activation's shape, or a matrix for each example;
    - a divergence of what the module returns that needs no loss: `KL()` of a probe head's logits.

    `reduction="mean"` averages W over the batch; `"sum"` adds the examples up, as the paper writes it. A divergence has its
    own.
    """

    def __init__(self, metrics: Mapping[str | int, Metric], reduction: Reduction = "mean") -> None:
        check_one_of("reduction", reduction, REDUCTIONS)
        if not isinstance(metrics, Mapping) or not metrics:
            raise LLQRError("Intermediate takes a mapping from module names to metrics, such as {'2': 0.1}")
        for module, metric in metrics.items():
            _check_metric(module, metric)
        self.metrics, self.reduction = dict(metrics), reduction
        self.flat = all(metric.flat for metric in metrics.values() if isinstance(metric, Divergence))

    def terms(self) -> Iterator[tuple[float, Term | L2]]:
        for module, metric in self.metrics.items():
            of_it = metric if isinstance(metric, Divergence) else _Metric(module, metric, self.reduction)
            for weight, term in of_it.terms():
                assert isinstance(term, Term)
                yield weight, ActivationTerm(module, term)

    def __repr__(self) -> str:
        inside = ", ".join(f"{module!r}: {_brief(metric)}" for module, metric in self.metrics.items())
        return f"Intermediate({{{inside}}}{', reduction=' + repr(self.reduction) if self.reduction != 'mean' else ''})"


class Layerwise(Divergence):
    """Σ_i ψ_i(x_i, θ_i): any function of what a module is called with and of its parameters (Definition 1 of the paper).

    `psis` maps a module's name (or a stage's index) to `psi(x, parameters, x_k, parameters_k)`, which returns one number.
    `x` is what the module is called with (a tuple, if that is more than one tensor), `parameters` maps the module's own names
    to tensors, and `_k` marks both at θ_k. `flat=False`: ψ_i has a slope at θ_k (∇ψ_i in the paper's adjoint), and H has
    the second derivatives of the network along it.
    """

    def __init__(self, psis: Mapping[str | int, LayerPsi], flat: bool = True) -> None:
        _check_functions("Layerwise", psis, "psi(x, parameters, x_k, parameters_k)")
        check_flag("flat", flat)
        self.psis, self.flat = dict(psis), flat

    def terms(self) -> Iterator[tuple[float, Term | L2]]:
        for module, psi in self.psis.items():
            yield 1.0, ActivationTerm(module, _Joint(psi, self.flat, f"psi at {module!r}"), joint=True)

    def __repr__(self) -> str:
        inside = ", ".join(f"{module!r}: {_brief(psi)}" for module, psi in self.psis.items())
        return f"Layerwise({{{inside}}}{'' if self.flat else ', flat=False'})"


class _Joint(Term):
    """ψ(x, θ) as a function of both in one tensor."""

    needs_loss = False
    variable = "x and the parameters"

    def __init__(self, function: LayerPsi | LayerLoss, flat: bool, title: str, of_change: bool = True) -> None:
        self.function, self.flat, self._title, self._of_change = function, flat, title, of_change

    @property
    def title(self) -> str:
        return self._title

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        assert base.unpack is not None
        return self.function(*base.unpack(output), *(base.unpack(base.output) if self._of_change else ()))

    def __repr__(self) -> str:
        return _brief(self.function)


class _JointCurvature(QuadraticTerm, _Joint):
    """½ (z - z_k)ᵀ ∇²ψ(z_k) (z - z_k), z = (x, θ): what Gauss–Newton keeps of a term of the loss."""

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        return hessian_product(partial(_Joint.psi, self, base=base), base.output, tangent, self.title)


class LayerwiseLoss:
    """ℓ(x_N) + Σ_i ℓ_i(x_i, θ_i): a mean loss with terms inside the network (footnote 1 of the paper).

    For `exact_step`, `dense_step`, `cg_step` and `QuadraticModel.build`, in the place of `loss_fn`. `terms` maps a module's
    name (or a stage's index) to `term(x, parameters)`: x is what the module is called with, `parameters` its parameters by its
    own names. Newton's H has the second derivatives of all of it; Gauss–Newton's has those of each ℓ_i by x_i and θ_i.
    """

    def __init__(self, loss_fn: Loss, terms: Mapping[str | int, LayerLoss]) -> None:
        check_callable("loss_fn", loss_fn)
        _check_functions("LayerwiseLoss", terms, "term(x, parameters)")
        self.loss_fn, self._terms = loss_fn, dict(terms)

    def __call__(self, output: Tensor, targets: Any) -> Tensor:
        raise LLQRError(
            "a LayerwiseLoss has terms that an output doesn't show: it is for exact_step, dense_step, cg_step and "
            "QuadraticModel.build"
        )

    def terms(self, flat: bool = False) -> list[ActivationTerm]:
        """Its terms inside the network; with `flat`, their curvature alone."""
        kind = _JointCurvature if flat else _Joint
        return [
            ActivationTerm(module, kind(term, flat, f"the loss term at {module!r}", of_change=False), joint=True)
            for module, term in self._terms.items()
        ]


class L2(Divergence):
    """Σ_i w_i/2 ‖θ_i - θ_i^k‖²: a stage term on the parameters themselves; H gets w_i on its diagonal.

    `weight` is one number, or a mapping from module or parameter names (or stage indices) to numbers; what it doesn't name
    gets none.
    """

    needs_loss = False

    def __init__(self, weight: float | Mapping[str | int, float] = 1.0) -> None:
        for module, value in weight.items() if isinstance(weight, Mapping) else [("all", weight)]:
            checked_number(f"the L2 weight of {module!r}", value, lambda w: 0 <= w < math.inf, "zero or more")
        self.weight = weight

    def terms(self) -> Iterator[tuple[float, Term | L2]]:
        yield 1.0, self

    def __repr__(self) -> str:
        return f"L2({self.weight!r})"


def _check_metric(module: str | int, metric: Metric) -> None:
    if isinstance(metric, Divergence):
        for _, term in metric.terms():
            if not isinstance(term, Term) or term.key is not None or term.needs_loss:
                raise LLQRError(
                    f"{term!r} can't be taken of what {module!r} returns: give a metric, or a divergence of outputs that needs "
                    "no loss, such as KL()"
                )
    elif isinstance(metric, Tensor):
        if not metric.isfinite().all():
            raise LLQRError(f"the metric at {module!r} has values that are not finite")
    elif not callable(metric):
        meaning = "a positive weight, a tensor, a function of the activation, or a divergence"
        checked_number(f"the metric at {module!r}", metric, lambda weight: 0 < weight < math.inf, meaning)


def _check_functions(what: str, functions: object, form: str) -> None:
    if not isinstance(functions, Mapping) or not functions or not all(map(callable, functions.values())):
        raise LLQRError(f"{what} takes a mapping from module names to functions {form}")


def _brief(metric: object) -> str:
    """Without an address in memory, so that all ranks say the same."""
    if isinstance(metric, Tensor):
        return f"tensor{tuple(metric.shape)}"
    function = callable(metric) and not isinstance(metric, Divergence)
    return getattr(metric, "__qualname__", type(metric).__name__) if function else repr(metric)
