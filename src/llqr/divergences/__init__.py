"""Divergences D(θ_k, θ): what a step is measured by.

The paper's layerwise form is D = ψ_N(x_N(θ)) + Σ_i ψ_i(x_i(θ), θ_i), and H = ∇²D at θ_k. Each ψ is one small object that
says where in the network it sits, what it is, whether it is *flat* (its gradient vanishes at θ_k, so that it sends no
adjoint back and asks no stage for second derivatives), and what its Hessian at θ_k does to a vector:

    OutputTerm       ψ_N(x_N)    Newton, GaussNewton, KL, ReverseKL, Renyi
    ActivationTerm   ψ_i(x_i), ψ_i(x_i, θ_i)    one for each module that Intermediate or Layerwise names
    L2               ψ_i(θ_i)    a weight on the parameters themselves

Divergences can be added and multiplied by positive numbers: `KL() + 0.1 * Intermediate({"2": 1.0}) + L2(1e-3)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llqr.checks import Loss
from llqr.divergences.base import BasePoint, Divergence, Reduction, Sum, Term
from llqr.divergences.families import Bernoulli, Categorical, Gaussian
from llqr.divergences.inside import L2, ActivationTerm, Intermediate, Layerwise, LayerwiseLoss
from llqr.divergences.output import KL, Distributional, GaussNewton, Newton, OutputTerm, Renyi, ReverseKL
from llqr.errors import LLQRError, meant

__all__ = [
    "KL",
    "L2",
    "ActivationTerm",
    "BasePoint",
    "Bernoulli",
    "Categorical",
    "Divergence",
    "GaussNewton",
    "Gaussian",
    "Intermediate",
    "Layerwise",
    "LayerwiseLoss",
    "Newton",
    "OutputTerm",
    "Renyi",
    "ReverseKL",
    "Sum",
    "Term",
    "layerwise",
    "resolve",
]

NAMES: dict[str, type[Divergence]] = {
    "newton": Newton,
    "gauss-newton": GaussNewton,
    "ngd": KL,
    "renyi": Renyi,
    "reverse-kl": ReverseKL,
}


def resolve(divergence: str | Divergence, reduction: Reduction = "mean") -> Divergence:
    """The divergence that a name stands for; a divergence stands for itself. `reduction` is of names of divergences between
    output distributions."""
    made: dict[str, Callable[[], Divergence]] = {
        name: partial(kind, reduction=reduction) if issubclass(kind, Distributional) else kind
        for name, kind in NAMES.items()
    }
    return meant("divergence", divergence, Divergence, made)


def layerwise(
    loss_fn: Loss | LayerwiseLoss | None, divergence: str | Divergence
) -> tuple[Loss | None, list[tuple[float, Term]], list[tuple[float, Term | L2]]]:
    """The loss of the output, its terms inside the network, and the divergence's terms, with those that come from the loss."""
    terms = list(resolve(divergence).terms())
    if not isinstance(loss_fn, LayerwiseLoss):
        return loss_fn, [], terms
    for weight, term in tuple(terms):
        if isinstance(term, (Newton, GaussNewton)):
            terms += [(weight, inner) for inner in loss_fn.terms(term.flat)]
        elif term.needs_loss:
            raise LLQRError(f"{term!r} is about the loss of the output alone, and this has terms inside the network")
    return loss_fn.loss_fn, [(1.0, inner) for inner in loss_fn.terms()], terms
