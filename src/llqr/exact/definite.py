"""Symmetric matrices that should be positive definite: how to factorise them, and what to say when they are not."""

from __future__ import annotations

import torch
from torch import Tensor

from llqr.errors import DegenerateProblemError, IndefiniteProblemError, SingularProblemError


def cholesky(matrix: Tensor, scale: Tensor, stage: str | None) -> Tensor:
    """The Cholesky factor, or the error that says why there is none.

    `scale` says how large the numbers were that each diagonal entry was computed from: what is smaller than their rounding,
    with some room for what earlier eliminations amplified, is taken for zero.
    """
    matrix = (matrix + matrix.T) / 2
    factor, failed = torch.linalg.cholesky_ex(matrix)
    precision = torch.finfo(matrix.dtype).eps
    noise = max(8 * len(matrix) * precision, precision**0.75)
    if not bool(failed) and bool((factor.diagonal().square() > noise * scale).all()):
        return factor  # type: ignore[no-any-return]
    unit = torch.where(scale > 0, scale, torch.ones_like(scale)).rsqrt()
    lowest = float(torch.linalg.eigvalsh(unit[:, None] * matrix * unit)[0])
    raise _indefinite(lowest, stage) if lowest < -(precision**0.5) else _singular(stage)


def least_norm(matrix: Tensor, gradient: Tensor) -> Tensor:
    """-H⁺ g: the smallest solution of Hδ = -g, with eigenvalues within rounding of zero taken for zero."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    kept = values.abs() > len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    coefficients = vectors.T @ gradient
    lost = coefficients[~kept].norm()
    if lost > torch.finfo(values.dtype).eps ** 0.5 * gradient.norm():
        raise SingularProblemError(
            "the gradient has a part along which the divergence has no curvature: the model falls without bound there, and "
            "there is no solution, not even a least-norm one. Add damping"
        )
    return -torch.mv(vectors[:, kept], coefficients[kept] / values[kept])


def _where(stage: str | None) -> str:
    return "" if stage is None else f" at stage {stage!r}"


def _indefinite(lowest: float, stage: str | None) -> DegenerateProblemError:
    return IndefiniteProblemError(
        f"the quadratic model is unbounded below{_where(stage)} (curvature as low as {lowest:.2g} of its scale): a saddle, no "
        "minimum. Raise the damping; or use GaussNewton or KL, which are never indefinite for a convex loss; or ask for the "
        "stationary point with degenerate='least-norm'",
        stage,
    )


def _singular(stage: str | None) -> DegenerateProblemError:
    return SingularProblemError(
        f"the quadratic model is singular{_where(stage)}: it has directions without curvature, so its minimum isn't unique. "
        "Add damping (damping=1e-3, say), or ask for the smallest solution with degenerate='least-norm'",
        stage,
    )
