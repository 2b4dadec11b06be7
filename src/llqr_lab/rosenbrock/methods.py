"""The methods that are compared, as directions: from a point of the plane to the step that would be taken at rate 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llqr.curvature.quadratic import QuadraticModel
from llqr.divergences import Newton
from llqr.exact import exact_step
from llqr.preconditioner import Preconditioner
from llqr.relaxation import fit
from llqr.solvers import Solver
from llqr.structures import Dense, Scalar
from llqr_lab.rosenbrock.problem import INPUTS, Build, gradient, hessian, joined, mean, named, one_layer, two_layers

Direction = Callable[[Tensor], Tensor]


def riccati(point: Tensor) -> Tensor:
    """-H⁻¹ g by the Riccati recursion along the two layers; where H is indefinite, its stationary point."""
    return joined(exact_step(two_layers(point), INPUTS, None, mean, Newton(), degenerate="least-norm"))


def diagonal_newton(point: Tensor) -> Tensor:
    """-diag(H)⁻¹ g: what is left of Newton without the couplings between the layers."""
    return -gradient(point) / hessian(point).diagonal()


def steepest(point: Tensor) -> Tensor:
    """-g."""
    return -gradient(point)


class Momentum:
    """SGDM: b ← momentum · b + g, direction -lr · b, from b = 0."""

    def __init__(self, lr: float, momentum: float = 0.9) -> None:
        self._lr, self._momentum = lr, momentum
        self._buffer = torch.zeros(2, dtype=torch.float64)

    def __call__(self, point: Tensor) -> Tensor:
        self._buffer = self._momentum * self._buffer + gradient(point)
        return -self._lr * self._buffer


class Relaxed:
    """-U g, with U fitted to Newton's quadratic model from the identity at every `every`-th call, and kept in between."""

    def __init__(
        self, build: Build, structure: Scalar | Dense, every: int, solver: Solver | None = None, steps: int = 25
    ) -> None:
        self._build, self._structure, self._every = build, structure, every
        self._solver, self._steps = solver, steps
        self._calls = 0
        self.u: Preconditioner | None = None

    def __call__(self, point: Tensor) -> Tensor:
        network = self._build(point)
        if self.u is None or self._calls % self._every == 0:
            model = QuadraticModel.build(network, INPUTS, None, mean, Newton())
            self.u = fit(model, self._structure, self._solver, self._steps)
        self._calls += 1
        return -joined(self.u.apply(named(network, gradient(point))))


def scalars(every: int, solver: Solver | None = None, steps: int = 25) -> Relaxed:
    """One number a layer, on the two-layer form."""
    return Relaxed(two_layers, Scalar(per="layer"), every, solver, steps)


def dense(every: int, solver: Solver | None = None, steps: int = 25) -> Relaxed:
    """A full 2 × 2 matrix, on the single-layer form."""
    return Relaxed(one_layer, Dense(), every, solver, steps)
