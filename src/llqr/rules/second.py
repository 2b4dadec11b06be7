"""Rules that are right to second order, for products with Hessians.

Such a product goes backward through the recorded gradient at one point again and again, so what torch would compute anew each
time from that point (the second derivative of an activation) is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llqr.rules.base import Maybe


class Smooth(torch.autograd.Function):
    """y = f(x) number by number, with f'(x) and f''(x) computed once: the gradient is w = u ∘ f'(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = function(leaf)
            (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y), create_graph=True)
            (ctx.bend,) = torch.autograd.grad(slope, leaf, torch.ones_like(y))
        ctx.slope = slope.detach()
        ctx.save_for_backward(x)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _Slope.apply(u, x, ctx.slope, ctx.bend), None  # type: ignore[no-untyped-call]


class _Slope(torch.autograd.Function):
    """w = u ∘ f'(x): dw = du ∘ f'(x) + dx ∘ (u ∘ f''(x)), with the last bracket computed at the first product."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, x: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
        ctx.slope, ctx.bend, ctx.bent = slope, bend, None
        ctx.save_for_backward(u)
        return u * slope

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Maybe, ...]:
        of_u, of_x = ctx.needs_input_grad[:2]
        if of_x and ctx.bent is None:
            ctx.bent = ctx.saved_tensors[0] * ctx.bend
        return v * ctx.slope if of_u else None, v * ctx.bent if of_x else None, None, None
