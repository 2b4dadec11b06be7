"""Activations right to second order, for products with Hessians.

Such a product goes backward through the recorded gradient at one point again and again, so what torch would compute anew each
time from that point, the second derivative of an activation, is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llqr.rules.base import Maybe, check_outside, recording

Map = Callable[[Tensor], Tensor]


class Smooth(torch.autograd.Function):
    """y = f(x) number by number; the gradient is w = u ∘ f'(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Map) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = function(leaf)
            (ctx.slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        ctx.function, ctx.during = function, recording.now
        ctx.save_for_backward(x)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None]:
        check_outside(ctx.during)
        if not torch.is_grad_enabled():
            return u * ctx.slope, None
        (x,) = ctx.saved_tensors
        return _Slope.apply(u, x, ctx.slope, ctx.function), None  # type: ignore[no-untyped-call]


class _Slope(torch.autograd.Function):
    """w = u ∘ f'(x): dw = du ∘ f'(x) + dx ∘ (u ∘ f''(x)), with the last bracket computed at the first product and kept."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, x: Tensor, slope: Tensor, function: Map) -> Tensor:
        ctx.slope, ctx.function, ctx.u, ctx.bent = slope, function, u.detach(), None
        ctx.save_for_backward(x)
        return u * slope

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Maybe, ...]:
        of_u, of_x = ctx.needs_input_grad[:2]
        if of_x and ctx.bent is None:
            ctx.bent = ctx.u * _bend(ctx.function, ctx.saved_tensors[0])
            del ctx.u
        return v * ctx.slope if of_u else None, v * ctx.bent if of_x else None, None, None


def _bend(function: Map, x: Tensor) -> Tensor:
    """f''(x)."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y), create_graph=True)
        return torch.autograd.grad(slope, leaf, torch.ones_like(y))[0]
