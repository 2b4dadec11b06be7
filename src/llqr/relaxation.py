"""fit: the inner loop that learns U from a quadratic model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llqr.checks import checked_integer
from llqr.errors import LLQRError, NonFiniteError
from llqr.preconditioner import Preconditioner
from llqr.solvers import Problem, Quadratic, ScaleFree, Solver
from llqr.structures.stacks import StructureSpec

__all__ = ["Quadratic", "fit"]


def fit(
    q: Quadratic,
    structure: StructureSpec,
    solver: Solver | None = None,
    steps: int = 25,
    start: Preconditioner | None = None,
) -> Preconditioner:
    """U that makes J(U) = g·δ + ½ δ·Hδ small, with δ = -U g, after so many steps of a solver (`ScaleFree()` unless given).

    It begins at the identity, or at `start`, which has to have this structure and stays as it is.
    """
    if not isinstance(getattr(q, "gradient", None), Mapping) or not callable(getattr(q, "curvature", None)):
        raise LLQRError(
            f"a quadratic model is wanted, with `gradient` and `curvature`; this is a {type(q).__name__}. Build one with "
            "QuadraticModel.build(model, inputs, targets, loss_fn, divergence)"
        )
    solver = checked_solver(solver, steps)
    gradient = q.gradient
    if not gradient:
        raise LLQRError("the quadratic model has no parameters")
    _check(gradient)
    u = Preconditioner.identity(gradient, structure)
    if start is not None:
        u.check_same_blocks(start)
        u = start.clone()
    fitted = solver.solve(Problem(q, u), u, steps)
    if not isinstance(fitted, Preconditioner):
        raise LLQRError(
            f"solve() of {solver!r} returned {type(fitted).__name__}: it returns a Preconditioner, as in "
            "u.with_history([J at the start, J after each step])"
        )
    return fitted


def checked_solver(solver: Solver | None, steps: int) -> Solver:
    """The solver that is meant, for so many steps."""
    if solver is None:
        solver = ScaleFree()
    if not isinstance(solver, Solver):
        raise LLQRError(f"the solver is an object such as ScaleFree() or SGDM(lr=0.005), not {solver!r}")
    checked_integer("steps", steps)
    return solver


def _check(gradient: Mapping[str, Tensor]) -> None:
    for name, value in gradient.items():
        if not torch.isfinite(value).all():
            raise NonFiniteError(f"the gradient of {name!r} has values that are not finite")
