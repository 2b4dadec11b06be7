"""exact_step: the step of steepest descent under a divergence, by the Riccati recursion along the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss
from llqr.curvature.locations import PerLayer
from llqr.divergences import Divergence, LayerwiseLoss
from llqr.errors import DegenerateProblemError, unknown
from llqr.exact.blocks import LQR, build
from llqr.exact.chain import Chain
from llqr.exact.definite import least_norm
from llqr.exact.riccati import Riccati

Degenerate = Literal["error", "least-norm"]


def exact_step(
    stages: nn.Sequential | Sequence[nn.Module],
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss | LayerwiseLoss,
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
        loss_fn: `loss_fn(output, targets)`, one number: the mean loss of the batch; or a `LayerwiseLoss`.
        divergence: an object of `llqr.divergences`, or its name ("newton", "gauss-newton", "ngd", "renyi", "reverse-kl").
        damping: λ_i, one number or a mapping from stage (index or name) or parameter name to a number.
        degenerate: what to do where H + λ isn't positive definite. "error": raise a `SingularProblemError` or an
            `IndefiniteProblemError` that names the stage. "least-norm": return the smallest solution of (H + λ)δ = -g (the
            minimum of least norm where H is singular, the stationary point where it is indefinite); that forms H.
    """
    lqr = build(Chain(stages), inputs, targets, loss_fn, divergence, damping)
    return solve(lqr, degenerate)


def solve(lqr: LQR, degenerate: Degenerate = "error") -> dict[str, Tensor]:
    """The solution of an LQR as a step by name."""
    if degenerate not in ("error", "least-norm"):
        raise unknown("value of degenerate", degenerate, ("error", "least-norm"))
    try:
        controls = Riccati(lqr).solve().controls
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
    """-H⁺ g. Which directions are null is a question about all of H, so here it is formed, by the LQR's own products."""
    sizes = [len(stage.diagonal) for stage in lqr.stages]
    gradient = torch.cat(lqr.gradient())
    units = torch.eye(len(gradient), dtype=gradient.dtype, device=gradient.device)
    rows = [torch.cat(lqr.curvature(list(torch.split(unit, sizes)))) for unit in units]
    return list(torch.split(least_norm(torch.stack(rows), gradient), sizes))
