"""Conjugate gradients on products with H: the exact step where nothing can be factorised."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llqr.checks import check_finite
from llqr.errors import IndefiniteProblemError


class Solved(NamedTuple):
    """δ, the norm of Hδ + g relative to that of g as the recursion has it, and how many products it took."""

    step: Tensor
    residual: float
    products: int


def conjugate_gradients(
    curvature: Callable[[Tensor], Tensor],
    gradient: Tensor,
    tolerance: float,
    max_steps: int,
    precondition: Callable[[Tensor], Tensor] = lambda residual: residual,
) -> Solved:
    """Hδ = -g from δ = 0, until the residual is `tolerance` times the gradient or for so many steps.

    Where H is singular, the iterates stay in its range: the least-norm step (if nothing preconditions).
    """
    step, residual = torch.zeros_like(gradient), -gradient
    direction = precondition(residual)
    squared, scaled = residual @ residual, residual @ direction
    start, goal = squared, tolerance**2 * squared
    products = 0
    while products < max_steps and not squared <= goal:  # a NaN goes on, to be met below
        product = curvature(direction)
        products += 1
        check_finite(product, "a product with the Hessian")
        bend = direction @ product
        if bend <= 0:
            if bend < -1e-12 * product.norm() * direction.norm():
                raise IndefiniteProblemError(
                    "conjugate gradients met a direction of negative curvature: the quadratic model has no minimum. Raise "
                    "the damping, or use GaussNewton or KL"
                )
            break
        length = scaled / bend
        step = step + length * direction
        residual = residual - length * product
        following = precondition(residual)
        before, squared, scaled = scaled, residual @ residual, residual @ following
        direction = following + (scaled / before) * direction
    return Solved(step, float((squared / start).sqrt()) if start > 0 else 0.0, products)
