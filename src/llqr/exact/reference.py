"""The same step without the layers: by the dense matrix, and by conjugate gradients. References for everything else.

Both differentiate the divergence D(θ_k, θ) of the whole network twice and know nothing of stages, adjoints or Riccati;
they work on any module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from llqr.divergences import L2, ActivationTerm, BasePoint, Divergence, OutputTerm, resolve
from llqr.errors import ChainError, IndefiniteProblemError, LLQRError, unknown
from llqr.exact.blocks import Loss, batch_size_of, jacobian, loss_gradient
from llqr.exact.chain import Inputs, as_arguments, check_finite, check_inputs, frozen_rng
from llqr.exact.riccati import degenerate as degenerate_error
from llqr.exact.riccati import is_positive_definite
from llqr.exact.step import Degenerate
from llqr.naming import PerLayer, per_parameter

Parameters = dict[str, Tensor]


def dense_step(
    model: nn.Module | Sequence[nn.Module],
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss,
    divergence: str | Divergence,
    damping: PerLayer = 0.0,
    *,
    degenerate: Degenerate = "error",
) -> Parameters:
    """-(H + λ)⁻¹ g with H formed, P × P, and factorised. Arguments as for `exact_step`; any module will do."""
    problem = _Problem(model, inputs, targets, loss_fn, divergence, damping)
    matrix, gradient = problem.hessian(), problem.flatten(problem.gradient)
    if degenerate == "least-norm":
        values, vectors = torch.linalg.eigh(matrix)
        kept = values.abs() > len(values) * torch.finfo(values.dtype).eps * values.abs().max()
        coefficients = (vectors.T @ gradient)[kept] / values[kept]
        return problem.unflatten(-(vectors[:, kept] @ coefficients))
    if degenerate != "error":
        raise unknown("value of degenerate", degenerate, ("error", "least-norm"))
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed or not is_positive_definite(factor):
        raise degenerate_error(matrix, None)
    return problem.unflatten(-torch.cholesky_solve(gradient[:, None], factor)[:, 0])


def cg_step(
    model: nn.Module | Sequence[nn.Module],
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss,
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
    gradient = problem.flatten(problem.gradient)
    limit = min(2 * len(gradient), 10_000) if max_steps is None else max_steps
    step, residual = torch.zeros_like(gradient), -gradient
    direction, squared = residual, residual @ residual
    goal = tolerance**2 * squared
    for _ in range(limit):
        if squared <= goal:
            break
        product = problem.curvature(direction)
        curvature = direction @ product
        if curvature <= 0:
            if curvature < -1e-12 * product.norm() * direction.norm():
                raise IndefiniteProblemError(
                    "conjugate gradients met a direction of negative curvature: the quadratic model has no minimum. Add "
                    "damping, or use GaussNewton or KL"
                )
            break
        length = squared / curvature
        step = step + length * direction
        residual = residual - length * product
        before, squared = squared, residual @ residual
        direction = residual + (squared / before) * direction
    if squared > goal:
        reached = float((squared / (gradient @ gradient)).sqrt())
        warnings.warn(f"cg_step stopped at a relative residual of {reached:.1e}, not {tolerance:.1e}", stacklevel=2)
    return problem.unflatten(step)


class _Problem:
    """g and D of a whole network as functions of its parameters."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        inputs: Inputs,
        targets: Any,
        loss_fn: Loss,
        divergence: str | Divergence,
        damping: PerLayer,
    ) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        self.inputs = inputs
        self.terms = list(resolve(divergence).terms())
        check_inputs(inputs, self.model)
        self.parameters = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ChainError("the model has no parameter that requires a gradient: there is nothing to step")
        for name, parameter in self.parameters.items():
            check_finite(parameter, f"parameter {name!r}")
        places = [term.place for _, term in self.terms if isinstance(term, ActivationTerm)]
        self.places = {place: self._module(place) for place in places}
        with torch.no_grad():
            output, self.activations = self.run(self.parameters)
        check_finite(output, "the output")
        loss, _ = loss_gradient(loss_fn, output, targets)
        self.base = BasePoint(output, loss)
        self.batch_size = batch_size_of(inputs, [output])
        self.gradient: Parameters = torch.func.grad(lambda p: loss(self.run(p)[0]))(self.parameters)
        modules = [name for name, _ in self.model.named_children()]  # what an integer key counts
        modules += [name for name, _ in self.model.named_modules() if name and name not in modules]
        self.damping = per_parameter(damping, self.parameters, modules, "damping")
        for weight, term in self.terms:
            if isinstance(term, OutputTerm):
                term.check(output)
            elif isinstance(term, ActivationTerm):
                term.check(self.activations[term.place], self.batch_size)
            elif isinstance(term, L2):
                for name, extra in per_parameter(term.weight, self.parameters, modules, "L2 weights").items():
                    self.damping[name] += weight * extra

    def run(self, parameters: Parameters) -> tuple[Tensor, dict[str | int, Tensor]]:
        """The output, and what the modules that the divergence names return."""
        caught: dict[str | int, Tensor] = {}

        def catcher(place: str | int) -> Callable[..., None]:
            def catch(module: nn.Module, args: Any, output: Tensor) -> None:
                if place in caught:
                    raise LLQRError(f"module {place!r} is called more than once in a pass; a metric needs one place")
                caught[place] = output

            return catch

        hooks = [module.register_forward_hook(catcher(place)) for place, module in self.places.items()]
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        args, kwargs = as_arguments(self.inputs)
        try:
            with frozen_rng():
                output = functional_call(self.model, {**parameters, **buffers}, args, kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        if not isinstance(output, Tensor):
            raise ChainError(
                f"the model returned a {type(output).__name__}; wrap it in a module that returns one tensor"
            )
        return output, caught

    def divergence(self, parameters: Parameters) -> Tensor:
        """D(θ_k, θ), but for the terms on θ itself, which are diagonal and kept with the damping."""
        output, activations = self.run(parameters)
        total = output.new_zeros(())
        for weight, term in self.terms:
            if isinstance(term, OutputTerm):
                total = total + weight * term.psi(output, self.base)
            elif isinstance(term, ActivationTerm):
                here, base = activations[term.place], self.activations[term.place]
                total = total + weight * term.psi(here, base, self.batch_size)
        return total

    def hessian(self) -> Tensor:
        """H + λ, dense and symmetric."""
        point = self.flatten(self.parameters).requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.divergence(self.unflatten(point)), point, create_graph=True)
        matrix = jacobian(slope, [point])
        if matrix is None:
            matrix = point.new_zeros(len(point), len(point))
        return (matrix + matrix.T) / 2 + torch.diag(self._diagonal())

    def curvature(self, direction: Tensor) -> Tensor:
        """(H + λ) v."""
        pullback = torch.func.vjp(torch.func.grad(self.divergence), self.parameters)[1]
        return self.flatten(pullback(self.unflatten(direction))[0]) + self._diagonal() * direction

    def flatten(self, tensors: Parameters) -> Tensor:
        return torch.cat([tensors[name].reshape(-1) for name in self.parameters])

    def unflatten(self, flat: Tensor) -> Parameters:
        parts = torch.split(flat, [p.numel() for p in self.parameters.values()])
        return {n: part.reshape(p.shape) for (n, p), part in zip(self.parameters.items(), parts, strict=True)}

    def _diagonal(self) -> Tensor:
        return self.flatten({n: torch.full_like(p, self.damping[n]) for n, p in self.parameters.items()})

    def _module(self, place: str | int) -> nn.Module:
        """The module of that name, or a Sequential's child of that index."""
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        children = list(self.model.children()) if isinstance(self.model, nn.Sequential) else []
        if isinstance(place, int) and 0 <= place < len(children):
            return children[place]
        if place not in modules:
            raise unknown("module in Intermediate", place, [name for name in modules if name])
        return modules[str(place)]
