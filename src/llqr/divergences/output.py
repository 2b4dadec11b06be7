"""Divergences of what the network returns: ψ_N(x_N)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llqr.divergences.base import BasePoint, Divergence, Reduction, check_reduction
from llqr.divergences.places import L2
from llqr.errors import LLQRError, NotTwiceDifferentiableError
from llqr.families import Categorical, Family, resolve_family, standard_normal

if TYPE_CHECKING:
    from llqr.divergences import Term


DENSE_LIMIT = 1024
"""Numbers of one example's output whose second derivatives are written out."""


class OutputTerm(Divergence):
    """ψ_N(x_N): a function of what the network returns. One of your own has `psi`, and `needs_loss = False` where that
    doesn't ask for `base.loss`."""

    additive = False
    """It adds the examples up, in place of averaging them."""
    needs_loss = True
    by_variable = False
    """It is a mean over the variables of the output (or, where it is additive, their sum), counted by `base.weights`."""

    def terms(self) -> Iterator[tuple[float, Term]]:
        yield 1.0, self

    @abstractmethod
    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        """ψ_N as a function of the output; a scalar."""

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        """∇²ψ_N(x_N^k) v: `state_cost` Q_N times a vector. By differentiating ψ_N twice, unless there is a closed form."""
        what = "the loss" if self.needs_loss else f"psi() of {self!r}"
        return _hessian_product(lambda output: self.psi(output, base), base.output, tangent, what)

    def draw(self, base: BasePoint, generator: torch.Generator) -> Tensor:
        """A random slope at the output, Q_N^½ ε, whose second moment is Q_N = ∇²ψ_N(x_N^k), example by example.

        By the eigenvalues of each example's Q_N, unless there is a closed form. Negative ones (of losses that aren't convex in
        the output) count as zero.
        """
        output = base.output
        count = len(output) if output.dim() > 1 else 1
        size = output.numel() // count
        if size > DENSE_LIMIT:
            raise LLQRError(
                f"{self!r} of {size:,} numbers for each example has no closed form to be drawn from: write "
                "draw(base, generator), or leave divergence out"
            )
        columns = []
        for place in range(size):
            unit = torch.zeros_like(output).reshape(count, size)
            unit[:, place] = 1
            columns.append(self.hessian_product(unit.reshape(output.shape), base).detach().reshape(count, size))
        values, basis = torch.linalg.eigh(torch.stack(columns, 2))
        noise = standard_normal(output.reshape(count, size), generator)
        drawn: Tensor = basis @ (values.clamp_min(0).sqrt() * noise)[..., None]
        return drawn.reshape(output.shape)

    def check(self, output: Tensor, weights: Tensor | None = None) -> None:
        """Raise where this divergence can't be taken of such an output, or the weights don't fit it."""
        if weights is not None and not self.needs_loss:
            raise LLQRError(
                f"{self!r} takes no weights: leave them out, or count each variable by base.weights in psi() and say what "
                "shape they have in check()"
            )

    def check_psi(self, base: BasePoint) -> None:
        """Raise where ψ_N isn't one number, doesn't depend on the output, or has a slope at x_N^k though `flat` says that it
        hasn't: H would lack the curvature of the network itself then.

        The slope is held against those a tenth of the output's size away, and all of it. Rounding leaves far less than that,
        also where predictions are so sure that nothing near them has a slope.
        """
        point = base.output.detach()
        with torch.no_grad():
            value = self.psi(point, base)
        if not isinstance(value, Tensor) or value.dim() > 0:
            shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise LLQRError(
                f"psi() of {self!r} returns one number, a tensor without dimensions such as a mean(); this is {shape}"
            )
        if type(self).hessian_product is not OutputTerm.hessian_product:
            self._check_product(base)
        if not self.flat:
            return
        size = float(point.square().mean().sqrt()) or 1.0
        away = size * torch.linspace(-40, 40, point.numel()).sin().to(point).reshape(point.shape)
        here, near, far = (
            float(slope(lambda output: self.psi(output, base), point + share * away).norm())
            for share in (0.0, 0.1, 1.0)
        )
        if here == near == far == 0:
            raise LLQRError(
                f"psi() of {self!r} doesn't depend on the output, so it has no curvature: is something detached in it?"
            )
        if here > 0.01 * near and here > torch.finfo(point.dtype).eps ** 0.5 * far:
            raise LLQRError(
                f"the gradient of {self!r} isn't zero at the output that it is expanded around: set flat = False, for Hessian "
                "products; or, if it is meant to be a divergence, take away from psi() what is linear in the output"
            )

    def _check_product(self, base: BasePoint) -> None:
        """Raise where a product that is written out isn't that of ψ_N."""
        tangent = torch.linspace(-40, 40, base.output.numel()).sin().to(base.output).reshape(base.output.shape)
        given, expected = self.hessian_product(tangent, base), OutputTerm.hessian_product(self, tangent, base)
        if given.shape != expected.shape or not torch.allclose(
            given, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())
        ):
            raise LLQRError(
                f"hessian_product() of {self!r} isn't the second derivative of its psi(): leave it out, and it is found by "
                "differentiating psi() twice"
            )


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
            return _hessian_product(base.loss, base.output, tangent, "the loss")
        pushed: Tensor = torch.func.jvp(self.residual, (base.output,), (tangent,))[1]
        product: Tensor = torch.func.vjp(self.residual, base.output)[1](pushed)[0]
        return product

    def check_psi(self, base: BasePoint) -> None:
        pass  # flat by its formula

    def __repr__(self) -> str:
        return "GaussNewton()" if self.residual is None else f"GaussNewton(residual={self.residual!r})"


class _Distributional(OutputTerm):
    """A divergence between output distributions whose Hessian at θ_k is `curvature` times the Fisher matrix.

    `reduction="mean"` averages over the variables of the batch (examples, tokens), as the mean loss does; `"sum"` takes the
    joint distribution of the batch, as the paper does, which is batch-size times as curved.
    """

    curvature: float = 1.0
    needs_loss = False
    by_variable = True

    def __init__(self, family: str | Family = "categorical", reduction: Reduction = "mean") -> None:
        check_reduction(reduction)
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


def slope(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """∇f(point) for scalar f; zero where f doesn't depend on it."""
    with torch.enable_grad():
        leaf = point.detach().clone().requires_grad_()
        value = function(leaf)
        gradient = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
    return torch.zeros_like(point) if gradient is None else gradient


def _hessian_product(function: Callable[[Tensor], Tensor], point: Tensor, tangent: Tensor, what: str) -> Tensor:
    """∇²f(point) · tangent for scalar f, by differentiating twice; differentiable in the tangent."""
    with torch.enable_grad():
        leaf = point.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        if not slope.requires_grad:
            return torch.zeros_like(tangent)
        try:
            product = torch.autograd.grad(slope, leaf, tangent, create_graph=tangent.requires_grad, allow_unused=True)[
                0
            ]
        except RuntimeError as error:
            raise NotTwiceDifferentiableError(
                f"{what} can't be differentiated twice ({error}): use KL, which doesn't ask for that, or other operations"
            ) from error
    return torch.zeros_like(tangent) if product is None else product
