"""What every divergence is: a weighted sum of terms, and how such sums are written."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from llqr.checks import ShownWithOptions
from llqr.divergences.families import standard_normal
from llqr.errors import LLQRError, NotTwiceDifferentiableError

if TYPE_CHECKING:
    from llqr.divergences.inside import L2

Reduction = Literal["mean", "sum"]
REDUCTIONS = "mean", "sum"

DENSE_LIMIT = 1024
"""Numbers of one example's output whose second derivatives are written out."""


@dataclass(frozen=True)
class BasePoint:
    """What ψ is expanded around: the output at θ_k, the mean loss ℓ(x_N), and a weight for each variable if they differ.

    For a ψ inside of the network `output` is what it has there. `unpack` makes (x_i, θ_i) of a tensor that holds both.
    """

    output: Tensor
    loss: Callable[[Tensor], Tensor]
    weights: Tensor | None = None
    examples: int = 1
    unpack: Callable[[Tensor], Any] | None = None


class Divergence(ShownWithOptions, ABC):
    """A weighted sum of terms, each of the output, of a module or of the parameters.

    `flat` says whether ∇D vanishes at θ_k through every activation: then p_i = 0, and only Q blocks remain.
    """

    flat: bool = True

    @abstractmethod
    def terms(self) -> Iterator[tuple[float, Term | L2]]:
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

    def terms(self) -> Iterator[tuple[float, Term | L2]]:
        for weight, part in self.parts:
            for inner, term in part.terms():
                yield weight * inner, term

    def __repr__(self) -> str:
        shown = []
        for weight, part in self.parts:
            inner = f"({part!r})" if isinstance(part, Sum) and weight != 1 else repr(part)
            shown.append(inner if weight == 1 else f"{weight:g} * {inner}")
        return " + ".join(shown)


class Term(Divergence):
    """One ψ: a function of one tensor, expanded around what that tensor is at θ_k."""

    key: tuple[str | int, bool] | None = None
    """Where it sits inside the network: on a module, and whether on what that is called with; None: on the output."""
    additive = False
    """It adds the examples up, in place of averaging them."""
    needs_loss = True
    by_variable = False
    """It is a mean over the variables of the output (or, where it is additive, their sum), counted by `base.weights`."""
    variable = "the output"
    """What it is a function of, in words."""

    @property
    def title(self) -> str:
        """What errors call it."""
        return f"psi() of {self!r}"

    def terms(self) -> Iterator[tuple[float, Term | L2]]:
        yield 1.0, self

    @abstractmethod
    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        """ψ as a function of the output (of what the network has where it sits); a scalar."""

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        """∇²ψ_N(x_N^k) v: `state_cost` Q_N times a vector. By differentiating ψ_N twice, unless there is a closed form."""
        what = "the loss" if self.needs_loss else self.title
        return hessian_product(partial(self.psi, base=base), base.output, tangent, what)

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
        for column in range(size):
            unit = torch.zeros_like(output).reshape(count, size)
            unit[:, column] = 1
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
        hasn't: H would lack the curvature of the network itself then. The slope is compared with those a tenth of the output's
        size away, and all of it: rounding leaves far less.
        """
        point = base.output.detach()
        with torch.enable_grad():
            value = self.psi(point.clone().requires_grad_(), base)
        if not isinstance(value, Tensor) or value.dim() > 0:
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise LLQRError(
                f"{self.title} has to return one number, a tensor without dimensions such as a mean(); it returned {shape}"
            )
        detached = LLQRError(f"{self.title} doesn't depend on {self.variable}: is something detached in it?")
        if not value.requires_grad:
            raise detached
        if type(self).hessian_product is not Term.hessian_product:
            self._check_product(base)
        if not self.flat:
            return
        size = float(point.square().mean().sqrt()) or 1.0
        here, near, far = (
            float(slope(partial(self.psi, base=base), point + share * size * waves(point)).norm())
            for share in (0.0, 0.1, 1.0)
        )
        if here == near == far == 0:
            raise detached
        if here > 0.01 * near and here > torch.finfo(point.dtype).eps ** 0.5 * far:
            raise LLQRError(
                f"the gradient of {self.title} isn't zero at the present parameters: set flat=False, and H gets the network's "
                f"own second derivatives; or, if it is meant to be a divergence, take away what is linear in {self.variable}"
            )

    def _check_product(self, base: BasePoint) -> None:
        """Raise where a product that is written out isn't that of ψ_N."""
        tangent = waves(base.output)
        given, expected = self.hessian_product(tangent, base), Term.hessian_product(self, tangent, base)
        if given.shape != expected.shape or not torch.allclose(
            given, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())
        ):
            raise LLQRError(
                f"hessian_product() of {self!r} isn't the second derivative of its psi(): leave it out, and it is found by "
                "differentiating psi() twice"
            )


class QuadraticTerm(Term):
    """½ (x - x_k)ᵀ W (x - x_k), given by its product W v."""

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        change = output - base.output
        return 0.5 * (change * self.hessian_product(change, base)).sum()

    @abstractmethod
    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        """W v."""

    def check_psi(self, base: BasePoint) -> None:
        """Flat by its formula."""


def waves(like: Tensor) -> Tensor:
    """A direction in which nothing is special, the same each time."""
    return torch.linspace(-40, 40, like.numel()).sin().to(like).reshape(like.shape)


def slope(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """∇f(point) for scalar f; zero where f doesn't depend on it."""
    with torch.enable_grad():
        leaf = point.detach().clone().requires_grad_()
        value = function(leaf)
        if not value.requires_grad:
            return torch.zeros_like(point)
        return torch.autograd.grad(value, leaf, materialize_grads=True)[0]


def hessian_product(function: Callable[[Tensor], Tensor], point: Tensor, tangent: Tensor, what: str) -> Tensor:
    """∇²f(point) · tangent for scalar f, by differentiating twice; differentiable in the tangent."""
    with torch.enable_grad():
        leaf = point.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        if not slope.requires_grad:
            return torch.zeros_like(tangent)
        try:
            (product,) = torch.autograd.grad(
                slope, leaf, tangent, create_graph=tangent.requires_grad, materialize_grads=True
            )
        except RuntimeError as error:
            raise NotTwiceDifferentiableError(
                f"{what} can't be differentiated twice ({error}): use KL, which doesn't ask for that, or other operations"
            ) from error
    return product
