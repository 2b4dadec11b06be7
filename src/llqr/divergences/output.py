"""Divergences of what the network returns: ψ_N(x_N)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from llqr.checks import checked_number
from llqr.divergences.base import REDUCTIONS, BasePoint, QuadraticTerm, Reduction, Term, hessian_product
from llqr.divergences.families import FAMILIES, Categorical, Family
from llqr.divergences.inside import L2
from llqr.errors import LLQRError, check_one_of, meant


class OutputTerm(Term):
    """ψ_N(x_N): a function of what the network returns. One of your own has `psi`, and `needs_loss = False` where that
    doesn't ask for `base.loss`."""


class Newton(OutputTerm):
    """The Bregman gap of the (damped) loss, F(θ) - F(θ_k) - ∇F(θ_k)·(θ - θ_k), F = L + λ/2 ‖θ - θ_k‖²: H = ∇²L + λI.

    The gap's last part is linear in θ and has no second derivative, so ψ_N is the loss itself. It isn't flat: its adjoints
    p_i are those of backpropagation, and they carry the curvature of the stages.
    """

    flat = False

    def __init__(self, damping: float = 0.0) -> None:
        self.damping = L2(damping) if damping else None

    def terms(self) -> Iterator[tuple[float, Term | L2]]:
        yield 1.0, self
        if self.damping is not None:
            yield 1.0, self.damping

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        return base.loss(output)

    def __repr__(self) -> str:
        return f"Newton(damping={self.damping.weight})" if self.damping is not None else "Newton()"


class GaussNewton(QuadraticTerm, OutputTerm):
    """½ (x_N - x_N^k)ᵀ W (x_N - x_N^k): H = Jᵀ W J with J the network's Jacobian.

    W is the loss's own Hessian in output space (the generalised Gauss–Newton matrix; J_rᵀ J_r for a squared error) or, for a
    loss ½‖r‖² whose residual `r(output)` isn't linear in the output, the J_rᵀ J_r of the residual that is given.
    """

    def __init__(self, residual: Callable[[Tensor], Tensor] | None = None) -> None:
        self.residual = residual

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        if self.residual is None:
            return hessian_product(base.loss, base.output, tangent, "the loss")
        pushed: Tensor = torch.func.jvp(self.residual, (base.output,), (tangent,))[1]
        product: Tensor = torch.func.vjp(self.residual, base.output)[1](pushed)[0]
        return product

    def __repr__(self) -> str:
        return "GaussNewton()" if self.residual is None else f"GaussNewton(residual={self.residual!r})"


class Distributional(OutputTerm):
    """A divergence between output distributions whose Hessian at θ_k is `curvature` times the Fisher matrix.

    `reduction="mean"` averages over the variables of the batch (examples, tokens), as the mean loss does; `"sum"` takes the
    joint distribution of the batch, as the paper does, which is batch-size times as curved.
    """

    curvature: float = 1.0
    needs_loss = False
    by_variable = True

    def __init__(self, family: str | Family = "categorical", reduction: Reduction = "mean") -> None:
        check_one_of("reduction", reduction, REDUCTIONS)
        self.family = meant("family", family, Family, FAMILIES)
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

    def draw(self, base: BasePoint, generator: torch.Generator) -> Tensor:
        drawn = self.family.draw(base.output, generator)
        if base.weights is not None:
            drawn = drawn * self.family.spread(base.weights).sqrt()
        return drawn * (self.curvature / self._total(base)) ** 0.5

    def check(self, output: Tensor, weights: Tensor | None = None) -> None:
        shape = self.family.variables(output)
        if weights is not None and weights.shape != shape:
            raise LLQRError(f"the weights have shape {tuple(weights.shape)}, and the output's variables {tuple(shape)}")

    def check_psi(self, base: BasePoint) -> None:
        pass  # flat by its formula

    def _total(self, base: BasePoint) -> float | Tensor:
        if self.reduction == "sum":
            return 1.0
        return self.family.variables(base.output).numel() if base.weights is None else base.weights.sum()

    def _options(self) -> str:
        options = [] if isinstance(self.family, Categorical) and self.family.dim == -1 else [f"family={self.family!r}"]
        return ", ".join(options + ([f"reduction={self.reduction!r}"] if self.reduction != "mean" else []))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options()})"


class KL(Distributional):
    """KL(p_k ‖ p_θ): the natural gradient; H is the Fisher matrix."""

    def between(self, base: Tensor, output: Tensor) -> Tensor:
        return self.family.kl(base, output)


class ReverseKL(Distributional):
    """KL(p_θ ‖ p_k): to second order the same as KL."""

    def between(self, base: Tensor, output: Tensor) -> Tensor:
        return self.family.kl(output, base)


class Renyi(Distributional):
    """log Σ p_k^a p_θ^(1-a) / (a-1), a > 0 the order: H is a times the Fisher matrix; order 1 is the limit, KL."""

    def __init__(self, order: float = 0.5, family: str | Family = "categorical", reduction: Reduction = "mean") -> None:
        super().__init__(family, reduction)
        what = "the order of a Rényi divergence"
        self.curvature = self.order = checked_number(what, order, lambda a: 0 < a < math.inf, "a positive number")

    def between(self, base: Tensor, output: Tensor) -> Tensor:
        if self.order == 1:
            return self.family.kl(base, output)
        return self.family.renyi(base, output, self.order)

    def __repr__(self) -> str:
        options = self._options()
        return f"Renyi({self.order:g}{', ' if options else ''}{options})"
