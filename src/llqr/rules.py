"""Linear rules for the operations whose second derivatives torch computes slowly.

A Jacobian-vector product is read off the graph of a vector-Jacobian product by differentiating once more, by the cotangent:
u ↦ Jᵀu is linear, and its transpose is v ↦ Jv. Torch's own graph for Jᵀu also carries the way back to the activations, and
for normalisations and convolutions its double-backward formulas pay for that even when nobody asks. Here Jᵀ is one node whose
derivative is J and nothing else: exact for products with J and Jᵀ, and wrong for anything beyond, so these rules are in force
only while a forward pass is recorded for such products (`linear_rules`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from llqr.embeddings import embedding, embedding_bag

Maybe = Tensor | None


class _Transposed(torch.autograd.Function):
    """u ↦ Jᵀu with the derivative v ↦ Jv."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, rule: Rule) -> tuple[Maybe, ...]:
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        rule.check()
        return rule.pull(u)

    @staticmethod
    def backward(ctx: Any, *v: Maybe) -> tuple[Maybe, None]:
        return ctx.rule.push(v), None


class _Recorded(torch.autograd.Function):
    """y = f(inputs), whose backward is a node of its own."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, *inputs: Maybe) -> Tensor:
        ctx.rule = rule
        rule.needed = ctx.needs_input_grad[1:]
        return rule.forward()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Maybe, ...]:
        return (None, *_Transposed.apply(u, ctx.rule))  # type: ignore[no-untyped-call]


class Rule(ABC):
    """One operation at one point: its value, Jᵀu and Jv."""

    needed: Sequence[bool]
    """Which inputs a derivative is asked for."""
    kept: Sequence[Tensor] = ()
    """What the products read: nobody may change it meanwhile."""
    versions: Sequence[int] = ()

    def keep(self, *tensors: Tensor) -> None:
        self.kept, self.versions = tensors, [tensor._version for tensor in tensors]

    def check(self) -> None:
        """Raise as autograd does where a tensor that it saved was changed."""
        if any(tensor._version != version for tensor, version in zip(self.kept, self.versions, strict=True)):
            raise RuntimeError("a tensor that a derivative needs was changed by an in-place operation")

    @abstractmethod
    def forward(self) -> Tensor:
        """y."""

    @abstractmethod
    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        """Jᵀu, one part for each input, None where not needed."""

    @abstractmethod
    def push(self, v: Sequence[Maybe]) -> Maybe:
        """Jv, from one part for each input, None for zero."""


class Affine(Rule):
    """y = x wᵀ + b: Jv = v_x wᵀ + x v_wᵀ + v_b, added up inside the matrix products."""

    def __init__(self, x: Tensor, w: Tensor, b: Maybe) -> None:
        self.x, self.w, self.b = x.detach(), w.detach(), None if b is None else b.detach()
        self.shape = (*x.shape[:-1], len(w))
        self.keep(self.x, self.w)

    def forward(self) -> Tensor:
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


class Convolution(Rule):
    """y = x * w + b: Jv = v_x * w + x * v_w + v_b."""

    def __init__(self, x: Tensor, w: Tensor, b: Maybe, settings: tuple[Any, ...]) -> None:
        self.x, self.w, self.b = x.detach(), w.detach(), None if b is None else b.detach()
        self.settings = settings
        self.keep(self.x, self.w)

    def forward(self) -> Tensor:
        y: Tensor = torch.ops.aten.convolution(self.x, self.w, self.b, *self.settings)
        self.shape = y.shape
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


class _Replacing(TorchFunctionMode):
    """While in force, operations that have a replacement are recorded by it."""

    replacements: dict[Callable[..., Any], Callable[..., Maybe]]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self.replacements.get(func)
        if replacement is not None and not _saved_elsewhere():
            result = replacement(*args, **(kwargs or {}))
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


def _saved_elsewhere() -> bool:
    """Whether somebody else keeps what autograd saves, as checkpointed blocks do.

    They run again in the backward pass, where these rules aren't in force, and take what that saves for what this did.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _convolve(spatial: int) -> Callable[..., Maybe]:
    def convolve(
        input: Tensor,
        weight: Tensor,
        bias: Maybe = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Maybe:
        if input.dim() != spatial + 2 or isinstance(padding, str) or _autocast(input):
            return None
        settings = (
            *(_tuple(value, spatial) for value in (stride, padding, dilation)),
            False,
            [0] * spatial,
            groups,
        )
        return _record(Convolution(input, weight, bias, settings), input, weight, bias)

    return convolve


def _linear(input: Tensor, weight: Tensor, bias: Maybe = None) -> Maybe:
    if weight.dim() != 2 or _autocast(input):
        return None
    return _record(Affine(input, weight, bias), input, weight, bias)


def _autocast(tensor: Tensor) -> bool:
    """Under autocast torch chooses the dtypes, and knows how to go back."""
    return torch.is_autocast_enabled(tensor.device.type)


def _pointwise(function: Callable[..., Tensor]) -> Callable[..., Maybe]:
    def replacement(input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Maybe:
        if inplace or any(argument is True for argument in args):
            return None  # what else reads the input has to see the change
        return _record(Pointwise(input, lambda x: function(x, *args, **kwargs)), input) if input.requires_grad else None

    return replacement


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Maybe = None,
    bias: Maybe = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Maybe:
    if _autocast(input):
        return None
    return _record(LayerNorm(input, normalized_shape, weight, bias, eps), input, weight, bias)


def _batch_norm(
    input: Tensor,
    running_mean: Maybe,
    running_var: Maybe,
    weight: Maybe = None,
    bias: Maybe = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Maybe:
    """With running statistics a batch norm is an affine map, and plain operations say so."""
    if training or running_mean is None or running_var is None:
        return None
    shape = [1, -1] + [1] * (input.dim() - 2)
    inverse_std = (running_var + eps).rsqrt()
    scale = inverse_std if weight is None else weight * inverse_std
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    return torch.addcmul(shift.view(shape), input, scale.view(shape))


def _record(rule: Rule, *inputs: Maybe) -> Tensor:
    return _Recorded.apply(rule, *inputs)  # type: ignore[no-untyped-call, no-any-return]


def _tuple(value: Any, length: int) -> list[int]:
    values = [value] * length if isinstance(value, int) else list(value)
    return values * length if len(values) == 1 else values


class embedding_rules(_Replacing):  # noqa: N801  (used as `with embedding_rules():`)
    """What torch can't differentiate twice, by plain operations that it can."""

    replacements = {functional.embedding: embedding, functional.embedding_bag: embedding_bag}  # noqa: RUF012


class exact_rules(_Replacing):  # noqa: N801
    """Replacements by plain operations, right to every order."""

    replacements = {**embedding_rules.replacements, functional.batch_norm: _batch_norm}  # noqa: RUF012


class linear_rules(_Replacing):  # noqa: N801
    """Those, and the linear rules above: right for products with the Jacobian, and for nothing beyond."""

    replacements = {  # noqa: RUF012
        **exact_rules.replacements,
        functional.linear: _linear,
        torch.conv1d: _convolve(1),
        torch.conv2d: _convolve(2),
        torch.conv3d: _convolve(3),
        torch.layer_norm: _layer_norm,
        functional.layer_norm: _layer_norm,
        **{f: _pointwise(f) for f in (functional.gelu, functional.silu, functional.mish, functional.softplus)},
    }
