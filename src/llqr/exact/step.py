"""exact_step: the step of steepest descent under a divergence, by the Riccati recursion along the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llqr.divergences import Divergence
from llqr.errors import DegenerateProblemError, SingularProblemError, unknown
from llqr.exact.blocks import LQR, Loss, build
from llqr.exact.chain import Chain, Inputs
from llqr.exact.riccati import Riccati
from llqr.naming import PerLayer

Degenerate = Literal["error", "least-norm"]


def exact_step(
    stages: nn.Sequential | Sequence[nn.Module],
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss,
    divergence: str | Divergence,
    damping: PerLayer = 0.0,
    *,
    degenerate: Degenerate = "error",
) -> dict[str, Tensor]:
    """The minimiser δθ* = -(H + λ)⁻¹ g of g·δ + ½ δ·(H + λ)δ, by name of the parameter.

    Args:
        stages: the network as an `nn.Sequential` or a sequence of modules; names are those that the Sequential gives.
        inputs: what the first stage is called with; a batch, or a single example without a batch dimension.
        targets: passed on to `loss_fn`.
        loss_fn: `loss_fn(output, targets)`, one number: the mean loss of the batch.
        divergence: an object of `llqr.divergences`, or its name ("newton", "gauss-newton", "ngd", "renyi", "reverse-kl").
        damping: λ_i, one number or a mapping from stage (index or name) or parameter name to a number.
        degenerate: what to do where H + λ isn't positive definite. "error": raise a `SingularProblemError` or an
            `IndefiniteProblemError` that names the stage. "least-norm": return the smallest solution of (H + λ)δ = -g (the
            minimum of least norm where H is singular, the stationary point where it is indefinite).
    """
    lqr = build(Chain(stages), inputs, targets, loss_fn, divergence, damping)
    return solve(lqr, degenerate)


def solve(lqr: LQR, degenerate: Degenerate = "error") -> dict[str, Tensor]:
    """The solution of an LQR as a step by name."""
    if degenerate not in ("error", "least-norm"):
        raise unknown("value of degenerate", degenerate, ("error", "least-norm"))
    try:
        controls = Riccati(lqr).solve(lqr.terminal_gradient).controls
    except DegenerateProblemError:
        if degenerate == "error":
            raise
        controls = _least_norm(lqr)
    return {
        name: part
        for stage, control in zip(lqr.stages, controls, strict=True)
        for name, part in stage.unstack(control).items()
    }


def _least_norm(lqr: LQR) -> list[Tensor]:
    """-H⁺ g by iterated Tikhonov regularisation: δ ← δ - (H + εI)⁻¹ (g + Hδ), with one factorisation for all iterations.

    From zero every iterate stays in the range of H, where the error shrinks by ε / |ε + σ| a step for each eigenvalue σ.
    """
    gradient = lqr.gradient()
    precision = torch.finfo(gradient[0].dtype).eps
    shift = precision**0.4 * _largest_curvature(lqr, gradient)
    shifted = replace(lqr, stages=[replace(stage, diagonal=stage.diagonal + shift) for stage in lqr.stages])
    riccati = Riccati(shifted, positive=False)
    still = torch.zeros_like(lqr.terminal_gradient)
    controls = [torch.zeros_like(part) for part in gradient]
    residual, last = gradient, float("inf")
    for _ in range(200):
        correction = riccati.solve(still, residual).controls
        size = _norm(correction)
        if size >= 0.999 * last:  # rounding, or a part of g outside of the range of H
            break
        controls = [old + new for old, new in zip(controls, correction, strict=True)]
        residual = [g + h for g, h in zip(gradient, lqr.curvature(controls), strict=True)]
        last = size
        if size <= 4 * precision * _norm(controls):
            break
    if _norm(residual) > precision**0.25 * _norm(gradient):
        raise SingularProblemError(
            "the gradient has a part along which the divergence has no curvature: the model falls without bound there, and "
            "there is no solution, not even a least-norm one. Add damping"
        )
    return controls


def _largest_curvature(lqr: LQR, start: list[Tensor]) -> float:
    """An estimate of the norm of H, by power iteration from the gradient."""
    vector, size = start, 0.0
    for _ in range(20):
        scale = _norm(vector)
        if scale == 0:
            break
        vector = lqr.curvature([part / scale for part in vector])
        size = _norm(vector)
    return size or 1.0


def _norm(parts: list[Tensor]) -> float:
    return float(torch.stack([part.norm() for part in parts]).norm())
