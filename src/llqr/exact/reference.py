"""The same step without the layers: by the dense matrix, and by conjugate gradients. References for everything else.

Both differentiate the divergence D(θ_k, θ) of the whole network twice and know nothing of stages, adjoints or recursions;
they work on any module that can be differentiated twice.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from llqr.checks import (
    Inputs,
    Loss,
    batch_size_of,
    call,
    check_finite,
    check_inputs,
    frozen_rng,
    loss_gradient,
    refuse_wrapped,
)
from llqr.curvature import locations
from llqr.curvature.locations import PerLayer
from llqr.curvature.replacements import constants, plain_rules
from llqr.divergences import ActivationTerm, BasePoint, Divergence, LayerwiseLoss, OutputTerm, layerwise
from llqr.errors import ChainError, NotTwiceDifferentiableError, unknown
from llqr.exact.chain import named_stages
from llqr.exact.conjugate import conjugate_gradients
from llqr.exact.definite import cholesky, least_norm
from llqr.exact.derivatives import apply_to_each, refuse_once_differentiable, refuse_wrong_formulas
from llqr.exact.step import Degenerate

Parameters = dict[str, Tensor]


def dense_step(
    model: nn.Module | Sequence[nn.Module],
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss | LayerwiseLoss,
    divergence: str | Divergence,
    damping: PerLayer = 0.0,
    *,
    degenerate: Degenerate = "error",
) -> Parameters:
    """-(H + λ)⁻¹ g with H formed, P × P, and factorised. Arguments as for `exact_step`; any module will do."""
    if degenerate not in ("error", "least-norm"):
        raise unknown("value of degenerate", degenerate, ("error", "least-norm"))
    problem = _Problem(model, inputs, targets, loss_fn, divergence, damping)
    gradient = problem.gradient
    matrix = apply_to_each(problem.curvature, torch.eye(len(gradient), dtype=gradient.dtype, device=gradient.device))
    check_finite(matrix, "the Hessian of the divergence")
    if (matrix - matrix.T).norm() > torch.finfo(matrix.dtype).eps ** 0.5 * matrix.norm():
        raise NotTwiceDifferentiableError(
            "the second derivatives that torch gives for this model aren't symmetric: wrong"
        )
    if degenerate == "least-norm":
        return problem.unflatten(least_norm(matrix, gradient))
    factor = cholesky(matrix, matrix.diagonal().abs(), None)
    return problem.unflatten(-torch.cholesky_solve(gradient[:, None], factor)[:, 0])


def cg_step(
    model: nn.Module | Sequence[nn.Module],
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss | LayerwiseLoss,
    divergence: str | Divergence,
    damping: PerLayer = 0.0,
    *,
    tolerance: float = 1e-10,
    max_steps: int | None = None,
) -> Parameters:
    """-(H + λ)⁻¹ g by conjugate gradients on products with H; for models too big for the other two ways.

    Stops when the residual is `tolerance` times the gradient; warns if that takes more than `max_steps` (default: twice the
    number of parameters, at most 10,000). Where H is singular, the iterates stay in its range: the least-norm step.
    """
    problem = _Problem(model, inputs, targets, loss_fn, divergence, damping)
    gradient = problem.gradient
    limit = min(2 * len(gradient), 10_000) if max_steps is None else max_steps
    solved = conjugate_gradients(problem.curvature, gradient, tolerance, limit)
    if solved.residual > tolerance:
        warnings.warn(
            f"cg_step stopped at a relative residual of {solved.residual:.1e}, not {tolerance:.1e}", stacklevel=2
        )
    return problem.unflatten(solved.step)


class _Problem:
    """g and H of a whole network, as flat vectors and products."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        inputs: Inputs,
        targets: Any,
        loss_fn: Loss | LayerwiseLoss,
        divergence: str | Divergence,
        damping: PerLayer,
    ) -> None:
        output_loss, loss_terms, self.terms = layerwise(loss_fn, divergence)
        assert output_loss is not None
        self.model = _as_module(model)
        refuse_wrapped(self.model)
        check_inputs(inputs, self.model)
        self.inputs, self.batch_size = inputs, batch_size_of(inputs)
        self.parameters = {name: p.clone().requires_grad_() for name, p in locations.trainable(self.model).items()}
        self.places = locations.locations_of(self.model, [*self.terms, *loss_terms])
        weights = locations.diagonal(self.model, self.parameters, self.terms, damping)
        self.diagonal = _flat([torch.full_like(p, weights[n], requires_grad=False) for n, p in self.parameters.items()])
        with torch.enable_grad(), frozen_rng():
            output, activations = self._run()
            check_finite(output, "the output")
            loss, slope = loss_gradient(output_loss, output, targets)
            leaves = list(self.parameters.values())
            value = (slope * output).sum() + self._inside(loss_terms, activations)
            self.gradient = _flat(torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True))
            value = self._divergence(output, activations, BasePoint(output.detach(), loss))
            self.slope = self._first_derivative(value)

    def curvature(self, direction: Tensor) -> Tensor:
        """(H + λ) v."""
        own = self.diagonal * direction
        if not self.slope.requires_grad:
            return own
        try:
            products = torch.autograd.grad(
                self.slope, list(self.parameters.values()), direction, retain_graph=True, materialize_grads=True
            )
        except RuntimeError as error:
            raise _not_twice(error) from error
        return _flat(products) + own

    def unflatten(self, flat: Tensor) -> Parameters:
        parts = torch.split(flat, [p.numel() for p in self.parameters.values()])
        return {n: part.reshape(p.shape) for (n, p), part in zip(self.parameters.items(), parts, strict=True)}

    def _run(self) -> tuple[Tensor, dict[locations.Location, Tensor]]:
        """The output, and what the network has at the places of the terms."""
        before = torch.get_rng_state()
        catching = locations.catching(self.model, list(self.places.values()))
        with (
            catching as caught,
            plain_rules(),
            sdpa_kernel(SDPBackend.MATH),
        ):  # fused attention has no second derivative
            given = {**constants(self.model), **self.parameters}
            output = call(self.model, given, self.inputs)
        if not isinstance(output, Tensor):
            raise ChainError(
                f"the model returned a {type(output).__name__}; wrap it in a module that returns one tensor"
            )
        if not torch.equal(before, torch.get_rng_state()):
            raise ChainError("the model draws random numbers (dropout?): call .eval() on it first")
        return output, caught

    def _divergence(self, output: Tensor, activations: dict[locations.Location, Tensor], base: BasePoint) -> Tensor:
        """D(θ_k, θ), but for the terms on θ itself, which are diagonal and kept with the damping."""
        total = self._inside(self.terms, activations)
        for weight, term in self.terms:
            if isinstance(term, OutputTerm):
                term.check(output)
                total = total + weight * term.psi(output, base)
        return total

    def _inside(self, terms: locations.Terms, activations: dict[locations.Location, Tensor]) -> Tensor:
        """The sum of the terms at places inside the network."""
        total = self.diagonal.new_zeros(())
        for weight, term in terms:
            if isinstance(term, ActivationTerm):
                place = self.places[term.key]
                base = place.base(activations[place], self.batch_size)
                term.check(base)
                total = total + weight * term.psi(activations[place], base)
        return total

    def _first_derivative(self, value: Tensor) -> Tensor:
        leaves = list(self.parameters.values())
        if not value.requires_grad:
            return torch.zeros_like(self.gradient)
        try:
            refuse_wrong_formulas([value])
            slopes = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
            refuse_once_differentiable(slopes)
        except RuntimeError as error:
            raise _not_twice(error) from error
        return _flat(slopes)


def _not_twice(error: Exception) -> NotTwiceDifferentiableError:
    return NotTwiceDifferentiableError(
        f"the model or the loss can't be differentiated twice ({error}): replace that operation, or use exact_step with KL, "
        "which doesn't ask for that"
    )


class _Row(nn.Sequential):
    """A Sequential whose first stage takes what a model takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *rest = self._modules.values()
        assert first is not None
        state = first(*args, **kwargs)
        for stage in rest:
            assert stage is not None
            state = stage(state)
        return state


def _as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    own_forward = isinstance(model, nn.Module) and type(model).forward is not nn.Sequential.forward
    if isinstance(model, nn.Module) and own_forward and not isinstance(model, nn.ModuleList):
        return model
    return _Row(OrderedDict(named_stages(model)))  # type: ignore[arg-type]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
