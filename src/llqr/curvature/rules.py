"""Rules: operations that the engine records by nodes of its own, because torch differentiates them slowly.

A Jacobian-vector product is read off the graph of a vector-Jacobian product by differentiating once more, by the cotangent:
u ↦ Jᵀu is linear, and its transpose is v ↦ Jv. Torch's own graph for Jᵀu also carries the way back to the activations, and
for normalisations and convolutions its double-backward formulas pay for that even when nobody asks. By a rule Jᵀ is one node
whose derivative is J and nothing else: exact for products with J and Jᵀ, and wrong for anything beyond. A rule that has
`twice` can be recorded to second order as well, for Hessian products. replacements.py says which operations are recorded so.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Maybe = Tensor | None
Map = Callable[[Tensor], Tensor]


class BeyondRulesError(Exception):
    """A model does what rules aren't made for: it takes a gradient in its forward pass, for which they would have to be right
    to one order more than they are; or it looks at autograd's graph, which has other nodes with them."""


class Rule(ABC):
    """One operation y = f(inputs) at one point, with its value and its products. To write one:

    - `forward` returns y. It is called once, with `needed` set: which inputs a derivative is asked for. It is the place to
      `keep` the tensors that the products read; a product raises if somebody has changed them in place since.
    - `pull(u)` returns Jᵀu as one part for each input, in their order, None where it isn't needed.
    - `push(v)` returns Jv, given one part for each input, None for zero; None where all of it is zero.
    - `twice`, for Hessian products, if the rule is right to second order too.

    Products are called any number of times, in several threads: they write to nothing that the rule holds. What a rule holds
    is detached, but for `inputs`: those are tensors of the graph, and `twice` is by them.
    """

    inputs: tuple[Maybe, ...] = ()
    """As they are in the graph; needed for `twice`, and where what follows is recorded together with this."""
    needed: Sequence[bool]
    handwritten: Sequence[str] = ()
    """The names of functions in it whose backward isn't torch's own."""
    _made_from: tuple[int, ...] = ()
    """The inputs' versions when y was computed."""
    _kept: Sequence[Tensor] = ()
    _versions: tuple[int, ...] = ()

    def keep(self, *tensors: Tensor) -> None:
        self._kept, self._versions = tensors, _versions(tensors)

    def is_current(self) -> bool:
        """Whether the inputs are what y was computed from still."""
        return self._made_from == _versions(self.inputs)

    def checked(self) -> Self:
        """Itself; an error, as autograd's, where somebody has changed what the products read."""
        if self._versions != _versions(self._kept):
            raise self.changed()
        return self

    def changed(self) -> Exception:
        return RuntimeError("a tensor that a derivative needs was changed by an in-place operation")

    @abstractmethod
    def forward(self) -> Tensor:
        """y."""

    @abstractmethod
    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        """Jᵀu."""

    @abstractmethod
    def push(self, v: Sequence[Maybe]) -> Maybe:
        """Jv."""

    def twice(self, u: Tensor, v: Sequence[Maybe], of_u: bool, needed: Sequence[bool]) -> tuple[Maybe, ...]:
        """The gradient of ⟨v, Jᵀu⟩ by u, which is Jv, and by each of the inputs, which J depends on."""
        raise NotImplementedError


def _versions(tensors: Sequence[Maybe]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors if tensor is not None and not tensor.is_inference())


def record(rule: Rule, *inputs: Maybe, second: bool = False) -> Tensor:
    """y, with the rule for its derivative by these inputs; and for its second derivatives, if these are the rule's inputs."""
    return _Recorded.apply(rule, second, *inputs)  # type: ignore[no-untyped-call, no-any-return]


class _Recorded(torch.autograd.Function):
    """y = f(inputs), whose backward is a node of its own."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, second: bool, *inputs: Maybe) -> Tensor:
        ctx.rule, ctx.second = rule, second
        rule.needed, rule._made_from = ctx.needs_input_grad[2:], _versions(rule.inputs)
        y = rule.forward()
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # a view couldn't be changed in place

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Maybe, ...]:
        if not torch.is_grad_enabled():
            return None, None, *ctx.rule.checked().pull(u)
        return (None, None, *_Transposed.apply(u, ctx.rule, *(ctx.rule.inputs if ctx.second else ())))  # type: ignore[no-untyped-call]


class _Transposed(torch.autograd.Function):
    """u ↦ Jᵀu with the derivative v ↦ Jv; and those by the inputs, if they are given."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, rule: Rule, *inputs: Maybe) -> tuple[Maybe, ...]:
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        if inputs:
            ctx.save_for_backward(u)
        return rule.checked().pull(u)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *v: Maybe) -> tuple[Maybe, ...]:
        of_u, _, *of_inputs = ctx.needs_input_grad
        if not of_inputs:
            return ctx.rule.push(v), None
        by_u, *by_inputs = ctx.rule.twice(*ctx.saved_tensors, v, of_u, of_inputs)
        return by_u, None, *by_inputs


def _detached(*tensors: Maybe) -> list[Any]:
    return [None if tensor is None else tensor.detach() for tensor in tensors]


class Product(Rule):
    """y = x · w + b, linear in x and in w, whose first dimension is y's channels. `value` is y where it is known already."""

    def __init__(self, x: Tensor, w: Tensor, b: Maybe, settings: tuple[Any, ...] = (), value: Maybe = None) -> None:
        self.inputs: tuple[Tensor, Tensor, Maybe] = (x, w, b)
        self.x, self.w, self.b = _detached(x, w, b)
        self.settings, self._value = settings, value

    @abstractmethod
    def compute(self) -> Tensor:
        """y."""

    def forward(self) -> Tensor:
        self.keep(*(tensor for tensor, wanted in ((self.x, self.needed[1]), (self.w, self.needed[0])) if wanted))
        y, self._value = self.compute() if self._value is None else self._value, None  # the products don't need it
        self.shape = y.shape
        return y

    def normalised(self, y: Tensor, mean: Tensor, variance: Tensor, w: Maybe, b: Maybe, eps: float) -> Product:
        """The batch norm of y by running statistics: it is such a product too, of the same x with other weights and another
        bias, so that the products with J pay nothing for it."""
        x, kernel, shift = self.inputs
        scale = (variance + eps).rsqrt() if w is None else (variance + eps).rsqrt() * w
        offset = scale * (-mean if shift is None else shift - mean)
        value = torch.batch_norm(y, w, b, mean, variance, False, 0.0, eps, False).detach()
        kernel = kernel * scale.reshape(-1, *[1] * (kernel.dim() - 1))
        return type(self)(x, kernel, offset if b is None else offset + b, self.settings, value)


class Affine(Product):
    """y = x wᵀ + b: Jv = v_x wᵀ + x v_wᵀ + v_b, added up inside the matrix products."""

    def compute(self) -> Tensor:
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


class Convolution(Product):
    """y = x * w + b: Jv = v_x * w + x * v_w + v_b."""

    def compute(self) -> Tensor:
        y: Tensor = torch.ops.aten.convolution(self.x, self.w, self.b, *self.settings)
        return y

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
        self.x, self.w, self.b = _detached(x, w, b)
        self.shape, self.eps = list(shape), eps
        self.keep(self.x, *([] if w is None else [self.w]))

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


class Pointwise(Rule):
    """y = f(x) number by number: J = diag(f'(x)), computed once in place of at every product.

    To second order the gradient of ⟨v, u ∘ f'(x)⟩ by x is v ∘ u ∘ f''(x), with f'' computed at the first product. To first
    order it can be one rule with the affine map that x comes from: then Jv is multiplied by f'(x) in place.
    """

    def __init__(self, x: Tensor, function: Map, second: bool, affine: Affine | None = None) -> None:
        self._function, self._affine = function, affine
        self._bend: Maybe = None
        if second:
            self.inputs = (x,)
            self.keep(x)
        _, y, self.slope = self._differentiated(x, create_graph=False)
        self._value = y.detach()

    def checked(self) -> Self:
        if self._affine is not None:
            self._affine.checked()
        return super().checked()

    def forward(self) -> Tensor:
        y = self._value
        del self._value  # the products don't need it
        return y

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        u = u * self.slope
        return (u,) if self._affine is None else self._affine.pull(u)

    def push(self, v: Sequence[Maybe]) -> Maybe:
        if self._affine is None:
            return None if v[0] is None else v[0] * self.slope
        moved = self._affine.push(v)
        return None if moved is None else moved.mul_(self.slope)

    def twice(self, u: Tensor, v: Sequence[Maybe], of_u: bool, needed: Sequence[bool]) -> tuple[Maybe, ...]:
        if v[0] is None:
            return None, None
        return v[0] * self.slope if of_u else None, v[0] * (u * self._second_derivative()) if needed[0] else None

    def _second_derivative(self) -> Tensor:
        if self._bend is None:
            leaf, y, slope = self._differentiated(self.checked()._kept[0], create_graph=True)
            (self._bend,) = torch.autograd.grad(slope, leaf, torch.ones_like(y))
        return self._bend

    def _differentiated(self, x: Tensor, create_graph: bool) -> tuple[Tensor, Tensor, Tensor]:
        """x, f(x) and f'(x)."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = self._function(leaf)
            return leaf, y, torch.autograd.grad(y, leaf, torch.ones_like(y), create_graph=create_graph)[0]


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
        u, (of_q, of_k, of_v) = _stacked(u), self.needed
        scores = self._softmax(torch.bmm(u, self.v.mT))
        return (
            torch.bmm(scores, self.k).mul_(self.scale).reshape(self.shapes[0]) if of_q else None,
            torch.bmm(scores.mT, self.q).mul_(self.scale).reshape(self.shapes[1]) if of_k else None,
            torch.bmm(self.weights.mT, u).reshape(self.shapes[2]) if of_v else None,
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
