"""The rules of layers: affine maps, convolutions, norms, attention, and smooth activations, also to second order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llqr.curvature.rules.base import Maybe, Rule, Twice, check_outside, recording


def _read(x: Tensor, w: Tensor, needed: Sequence[bool]) -> list[Tensor]:
    """What the derivatives of a product of x and w read: x for those by w, and w for those by x."""
    return [tensor for tensor, wanted in ((x, needed[1]), (w, needed[0])) if wanted]


class Affine(Rule):
    """y = x wᵀ + b: Jv = v_x wᵀ + x v_wᵀ + v_b, added up inside the matrix products."""

    def __init__(self, x: Tensor, w: Tensor, b: Maybe) -> None:
        self.inputs = (x, w, b)
        self.x, self.w, self.b = x.detach(), w.detach(), None if b is None else b.detach()
        self.shape = (*x.shape[:-1], len(w))

    def forward(self) -> Tensor:
        self.keep(*_read(self.x, self.w, self.needed))
        return torch._C._nn.linear(self.x, self.w, self.b)

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        rows = u.reshape(-1, u.shape[-1])
        of_x, of_w, of_b = self.needed
        return (
            torch.mm(rows, self.w).reshape(self.x.shape) if of_x else None,
            torch.mm(rows.T, self.x.reshape(len(rows), -1)) if of_w else None,
            rows.sum(0) if of_b else None,
        )

    def push(self, v: Sequence[Maybe]) -> Maybe:
        v_x, v_w, v_b = v
        moved: Maybe = None
        if v_w is not None:
            x = self.x.reshape(-1, self.x.shape[-1])
            moved = torch.mm(x, v_w.T) if v_b is None else torch.addmm(v_b, x, v_w.T)
        elif v_b is not None:
            moved = v_b.repeat(math.prod(self.shape[:-1]), 1)
        if v_x is not None:
            rows = v_x.reshape(-1, v_x.shape[-1])
            moved = torch.mm(rows, self.w.T) if moved is None else moved.addmm_(rows, self.w.T)
        return None if moved is None else moved.reshape(self.shape)


class Convolution(Twice):
    """y = x * w + b: Jv = v_x * w + x * v_w + v_b. `value` is y where it is known already."""

    def __init__(self, x: Tensor, w: Tensor, b: Maybe, settings: tuple[Any, ...], value: Maybe = None) -> None:
        self.inputs: tuple[Tensor, Tensor, Maybe] = (x, w, b)
        self.x, self.w, self.b = x.detach(), w.detach(), None if b is None else b.detach()
        self.settings, self._value = settings, value

    def forward(self) -> Tensor:
        self.keep(*_read(self.x, self.w, self.needed))
        y, self._value = self._value, None  # the products don't need it
        if y is None:
            y = torch.ops.aten.convolution(self.x, self.w, self.b, *self.settings)
        self.shape = y.shape
        return y

    def normalised(self, y: Tensor, mean: Tensor, variance: Tensor, w: Maybe, b: Maybe, eps: float) -> Convolution:
        """The batch norm of y by running statistics: it is a convolution too, of the same x with other weights and another
        bias, so that the products pay nothing for it."""
        x, kernel, shift = self.inputs
        scale = (variance + eps).rsqrt() if w is None else (variance + eps).rsqrt() * w
        offset = scale * (-mean if shift is None else shift - mean)
        value = torch.batch_norm(y, w, b, mean, variance, False, 0.0, eps, False).detach()
        kernel = kernel * scale.reshape(-1, *[1] * (kernel.dim() - 1))
        return Convolution(x, kernel, offset if b is None else offset + b, self.settings, value)

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        sizes = None if self.b is None else list(self.b.shape)
        return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
            u, self.x, self.w, sizes, *self.settings, list(self.needed)
        )

    def push(self, v: Sequence[Maybe]) -> Maybe:
        v_x, v_w, v_b = v
        moved: Maybe = None
        if v_w is not None:
            moved = torch.ops.aten.convolution(self.x, v_w, None, *self.settings)
        if v_x is not None:
            through = torch.ops.aten.convolution(v_x, self.w, None, *self.settings)
            moved = through if moved is None else moved.add_(through)
        if v_b is not None:
            shift = v_b.reshape(1, -1, *[1] * (len(self.shape) - 2))
            moved = shift.expand(self.shape) if moved is None else moved.add_(shift)
        return moved

    def twice(self, u: Tensor, v: Sequence[Maybe], of_u: bool, needed: Sequence[bool]) -> tuple[Maybe, ...]:
        """It is linear in x and in w: the gradient by one of them is Jᵀu with v in the place of the other."""
        v_x, v_w, _ = v
        wanted = [needed[0] and v_w is not None, needed[1] and v_x is not None, False]
        factors = (self.x if v_x is None else v_x, self.w if v_w is None else v_w)
        by_u = self.push(v) if of_u else None
        if not any(wanted):
            return by_u, None, None, None
        return by_u, *torch.ops.aten.convolution_backward(u, *factors, None, *self.settings, wanted)


class LayerNorm(Rule):
    """y = n(x) ∘ w + b with n(x) = (x - mean) / std over the last dimensions.

    N = ∂n/∂x = (I - 11ᵀ/k - nnᵀ/k) / std is its own transpose, so torch's one kernel for Nᵀ(u ∘ w) does N v as well:
    Jv = (N v_x) ∘ w + n ∘ v_w + v_b.
    """

    def __init__(self, x: Tensor, shape: Sequence[int], w: Maybe, b: Maybe, eps: float) -> None:
        self.x, self.shape, self.eps = x.detach(), list(shape), eps
        self.w, self.b = (None if part is None else part.detach() for part in (w, b))
        self.keep(self.x, *([] if self.w is None else [self.w]))

    def forward(self) -> Tensor:
        y, self.mean, self.inverse_std = torch.native_layer_norm(self.x, self.shape, self.w, self.b, self.eps)
        return y

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        return self._transposed(u, self.w, self.b, list(self.needed))

    def push(self, v: Sequence[Maybe]) -> Maybe:
        v_x, v_w, v_b = v
        moved: Maybe = None
        if v_x is not None:
            moved = self._transposed(v_x, None, None, [True, False, False])[0]
            if moved is not None and self.w is not None:
                moved.mul_(self.w)
        if v_w is not None:
            normal = (self.x - self.mean).mul_(self.inverse_std)
            moved = normal.mul_(v_w) if moved is None else moved.addcmul_(normal, v_w)
        if v_b is not None:
            moved = v_b.expand(self.x.shape) if moved is None else moved.add_(v_b)
        return moved

    def _transposed(self, u: Tensor, w: Maybe, b: Maybe, needed: list[bool]) -> tuple[Maybe, ...]:
        return torch.ops.aten.native_layer_norm_backward(  # type: ignore[no-any-return]
            u, self.x, self.shape, self.mean, self.inverse_std, w, b, needed
        )


class BatchNorm(Rule):
    """y = n(x) ∘ w + b with n(x) = (x - mean) / std by running statistics: Jv = v_x ∘ w/std + n(x) ∘ v_w + v_b.

    The last two terms are the batch norm of x with v_w and v_b for weights, so that torch's kernels do all but one product.
    """

    def __init__(self, x: Tensor, mean: Tensor, variance: Tensor, w: Maybe, b: Maybe, eps: float) -> None:
        self.x, self.mean, self.variance, self.eps = x.detach(), mean.detach(), variance.detach(), eps
        self.w, self.b = (None if part is None else part.detach() for part in (w, b))
        scale = (self.variance + eps).rsqrt()
        self.scale = (scale if self.w is None else scale * self.w).reshape(1, -1, *[1] * (x.dim() - 2))
        self.keep(self.x, self.mean, self.variance)

    def forward(self) -> Tensor:
        return self._norm(self.w, self.b)

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        return torch.ops.aten.native_batch_norm_backward(  # type: ignore[no-any-return]
            u, self.x, self.w, self.mean, self.variance, None, None, False, self.eps, list(self.needed)
        )

    def push(self, v: Sequence[Maybe]) -> Maybe:
        v_x, v_w, v_b = v
        moved: Maybe = None
        if v_w is not None or v_b is not None:
            moved = self._norm(torch.zeros_like(self.mean) if v_w is None else v_w, v_b)
        if v_x is not None:
            moved = v_x * self.scale if moved is None else moved.addcmul_(v_x, self.scale)
        return moved

    def _norm(self, w: Maybe, b: Maybe) -> Tensor:
        return torch.batch_norm(self.x, w, b, self.mean, self.variance, False, 0.0, self.eps, False)


class Pointwise(Rule):
    """y = f(x) number by number: J = diag(f'(x)), computed once in place of at every product."""

    def __init__(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> None:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = function(leaf.clone())  # a copy, for functions that may work in place
            (self.slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        self._y = y.detach()

    def forward(self) -> Tensor:
        y = self._y
        del self._y  # the products don't need it
        return y

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        return (u * self.slope,)

    def push(self, v: Sequence[Maybe]) -> Maybe:
        return None if v[0] is None else v[0] * self.slope


class Activated(Rule):
    """f(y) of an affine map y, as one rule: Jv is multiplied by f'(y) in place."""

    def __init__(self, affine: Affine, function: Pointwise) -> None:
        self._affine, self._function = affine, function

    def check(self) -> None:
        self._affine.check()

    def forward(self) -> Tensor:
        return self._function.forward()

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        return self._affine.pull(u * self._function.slope)

    def push(self, v: Sequence[Maybe]) -> Maybe:
        moved = self._affine.push(v)
        return None if moved is None else moved.mul_(self._function.slope)


class Attention(Rule):
    """y = P v with P = softmax(S), S = a·q kᵀ + mask; a softmax's Jacobian σ(·) is its own transpose.

    Jᵀu: dv = Pᵀu, dS = σ(u vᵀ), dq = a·dS k, dk = a·dSᵀq.   Jv: σ(a·(v_q kᵀ + q v_kᵀ)) v + P v_v.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, scale: float) -> None:
        self.shapes = [tensor.shape for tensor in (q, k, v)]
        self.q, self.k, self.v = (_stacked(tensor.detach()) for tensor in (q, k, v))
        self.scale, self.mask = scale, mask

    def forward(self) -> Tensor:
        of_q, of_k, _ = self.needed
        read = ((self.q, of_k), (self.k, of_q), (self.v, of_q or of_k))
        self.keep(*(tensor for tensor, wanted in read if wanted))
        scores = torch.bmm(self.q, self.k.mT).mul_(self.scale).reshape(*self.shapes[0][:-1], self.shapes[1][-2])
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -math.inf) if self.mask.dtype == torch.bool else scores + self.mask
        self.weights = _stacked(torch._safe_softmax(scores, -1))
        return self._unstacked(torch.bmm(self.weights, self.v))

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        u = _stacked(u)
        scores = self._softmax(torch.bmm(u, self.v.mT))
        parts = (
            torch.bmm(scores, self.k).mul_(self.scale) if self.needed[0] else None,
            torch.bmm(scores.mT, self.q).mul_(self.scale) if self.needed[1] else None,
            torch.bmm(self.weights.mT, u) if self.needed[2] else None,
        )
        return tuple(
            None if part is None else part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)
        )

    def push(self, v: Sequence[Maybe]) -> Maybe:
        v_q, v_k, v_v = (None if part is None else _stacked(part) for part in v)
        moved = None if v_v is None else torch.bmm(self.weights, v_v)
        scores = None if v_q is None else torch.bmm(v_q, self.k.mT)
        if v_k is not None:
            scores = torch.bmm(self.q, v_k.mT) if scores is None else scores.baddbmm_(self.q, v_k.mT)
        if scores is not None:
            weights = self._softmax(scores).mul_(self.scale)
            moved = torch.bmm(weights, self.v) if moved is None else moved.baddbmm_(weights, self.v)
        return None if moved is None else self._unstacked(moved)

    def _softmax(self, scores: Tensor) -> Tensor:
        return torch._softmax_backward_data(scores, self.weights, -1, scores.dtype)

    def _unstacked(self, y: Tensor) -> Tensor:
        return y.reshape(*self.shapes[0][:-1], self.shapes[2][-1])


def _stacked(x: Tensor) -> Tensor:
    """All but the last two dimensions as one."""
    return x.reshape(-1, *x.shape[-2:])


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
