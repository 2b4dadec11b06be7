"""While a forward pass is recorded, operations that have a rule, or a plain form, are replaced by it.

Torch's `embedding_bag` has no second derivative, and sparse gradients can't be differentiated: both are
plain operations here. `max_norm` renormalises the weights that are looked up, in place, so those are handed over as copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from llqr.curvature.rules import (
    Affine,
    Attention,
    BeyondRulesError,
    Convolution,
    LayerNorm,
    Maybe,
    Pointwise,
    Rule,
    record,
)

Replacement = Callable[..., Maybe]
"""Of an operation, with its arguments; None where torch has to do it."""


def constants(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what a forward pass may write to: buffers, and weights that it renormalises."""
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    weights = {id(module.weight) for module in embeddings if module.max_norm is not None}
    renormalised = {name: p for name, p in model.named_parameters() if id(p) in weights}
    return {name: tensor.detach().clone() for name, tensor in {**dict(model.named_buffers()), **renormalised}.items()}


def _embedding(input: Tensor, weight: Tensor, sparse: bool = False, **options: Any) -> Maybe:
    """With a dense gradient, where it would be sparse."""
    return functional.embedding(input, weight, **options) if sparse else None


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Maybe = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Maybe = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Maybe:
    """Looked up, then added up bag by bag."""
    if scale_grad_by_freq or input.is_floating_point() or (input.dim() == 1) != (offsets is not None):
        return None  # what isn't a derivative, or a mistake: torch says which
    words = input.reshape(-1)
    if offsets is None:
        starts = torch.arange(len(input), device=input.device) * input.shape[1]
    else:
        starts = offsets[:-1] if include_last_offset else offsets
    lengths = torch.diff(starts, append=starts.new_tensor([len(words)]))
    bags = torch.arange(len(starts), device=input.device).repeat_interleave(lengths)
    scales = None if per_sample_weights is None else per_sample_weights.reshape(-1, 1)
    if padding_idx is not None:
        kept = words != padding_idx % len(weight)
        words, bags, scales = words[kept], bags[kept], None if scales is None else scales[kept]
    rows = functional.embedding(words, weight, None, max_norm, norm_type)
    if scales is not None:
        rows = rows * scales
    empty = rows.new_zeros(len(starts), rows.shape[1])
    if mode == "max":
        top = empty.scatter_reduce(0, bags[:, None].expand_as(rows), rows, "amax", include_self=False)
        return top.clone()  # its derivative reads it, and what follows may change it in place
    total = empty.index_add(0, bags, rows)
    return total if mode == "sum" else total / torch.bincount(bags, minlength=len(starts)).clamp(min=1)[:, None]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """As torch has it where it has no kernel; its kernel's second derivative is wrong."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """Torch's kernel has no second derivative, and rounds the first to float32, whatever the dtype."""
    y = functional.hardtanh(input + 3, 0, 6) / 6
    return input.copy_(y) if inplace else y


def _torchs_own(tensor: Tensor) -> bool:
    """Whether torch has to do this itself: under autocast, where it chooses the dtypes and knows how to go back; inside of
    torch.func, whose tensors aren't plain ones; without any record, in inference mode; and for complex numbers."""
    return (
        torch.is_autocast_enabled(tensor.device.type)
        or torch._C._functorch.maybe_current_level() is not None
        or torch.is_inference_mode_enabled()
        or tensor.is_inference()
        or tensor.is_complex()
    )


def _convolution(
    second: bool,
    input: Tensor,
    weight: Tensor,
    bias: Maybe = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Maybe:
    if input.dim() != weight.dim() or isinstance(padding, str) or _torchs_own(input):
        return None
    sizes = [[size] if isinstance(size, int) else list(size) for size in (stride, padding, dilation)]
    rule = Convolution(input, weight, bias, (*sizes, False, [0], groups))
    return record(rule, *rule.inputs, second=second)


def _batch_norm(
    input: Tensor,
    running_mean: Maybe,
    running_var: Maybe,
    weight: Maybe,
    bias: Maybe,
    training: bool,
    momentum: float,
    eps: float,
    second: bool | None = None,
) -> Maybe:
    """With running statistics a batch norm is an affine map: a part of the layer before it, if that is recorded by a rule; or
    plain operations."""
    if training or running_mean is None or running_var is None:
        return None
    dtypes = {part.dtype for part in (input, running_mean, running_var, weight, bias) if part is not None}
    if second is not None and len(dtypes) == 1 and not _torchs_own(input):
        before = _rule_of(input)
        if isinstance(before, Convolution) or (isinstance(before, Affine) and input.dim() == 2):
            rule = before.normalised(input.detach(), running_mean, running_var, weight, bias, eps)
            return record(rule, *rule.inputs, second=second)
    shape = [1, -1] + [1] * (input.dim() - 2)
    inverse_std = (running_var + eps).rsqrt()
    scale = inverse_std if weight is None else weight * inverse_std
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    if last is None or not input.is_contiguous(memory_format=last):
        input = input.contiguous()  # as torch's own returns it: the dropout behind it draws its mask in that order
    return torch.addcmul(shift.view(shape), input, scale.view(shape))


def _pointwise(function: Callable[..., Tensor], second: bool) -> Replacement:
    def replacement(input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Maybe:
        if inplace or any(argument is True for argument in args):
            return None  # what else reads the input has to see the change
        if not input.requires_grad or _torchs_own(input):
            return None
        before = _rule_of(input)
        affine = before if isinstance(before, Affine) and not second else None
        rule = Pointwise(input, lambda x: function(x, *args, **kwargs), second, affine)
        return record(rule, *(affine.inputs if affine is not None else [input]), second=second)

    return replacement


def _rule_of(tensor: Tensor) -> Rule | None:
    """The rule that gave this tensor, if nobody has changed it or what it was computed from since: what follows can be
    recorded together with it."""
    rule = getattr(tensor.grad_fn, "rule", None)
    return rule if isinstance(rule, Rule) and not tensor._version and rule.is_current() else None


def _linear(input: Tensor, weight: Tensor, bias: Maybe = None) -> Maybe:
    if weight.dim() != 2 or _torchs_own(input):
        return None
    return record(Affine(input, weight, bias), input, weight, bias)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Maybe = None,
    bias: Maybe = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Maybe:
    if _torchs_own(input):
        return None
    return record(LayerNorm(input, normalized_shape, weight, bias, eps), input, weight, bias)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Maybe = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Maybe:
    batch = query.shape[:-2]
    alike = batch == key.shape[:-2] == value.shape[:-2] and query.dtype == key.dtype == value.dtype
    if dropout_p or enable_gqa or not alike or not batch or _torchs_own(query):
        return None
    if attn_mask is not None and (attn_mask.requires_grad or is_causal):
        return None
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return record(Attention(query, key, value, attn_mask, factor), query, key, value)


def _refused(*of: Any, **options: Any) -> None:
    raise BeyondRulesError("the model takes a gradient in its forward pass")


def _watched(tensor: Tensor, *hook: Any) -> None:
    """Hooks, on a tensor or on its node of the graph, would be passed by where layers are recorded together."""
    if isinstance(getattr(tensor.grad_fn, "rule", None), Rule):
        raise BeyondRulesError("the model asks for the gradients, or the node in the graph, of a layer that has a rule")


class plain_rules(TorchFunctionMode):  # noqa: N801  (used as `with plain_rules():`)
    """What torch can't differentiate twice, or slowly, by plain operations: right to every order."""

    replacements: dict[Callable[..., Any], Replacement] = {  # noqa: RUF012
        functional.embedding: _embedding,
        functional.embedding_bag: _embedding_bag,
        torch._weight_norm: _weight_norm,
        functional.hardsigmoid: _hardsigmoid,
        functional.batch_norm: _batch_norm,
    }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self.replacements.get(func)
        result = None if replacement is None else replacement(*args, **(kwargs or {}))
        return result if result is not None else func(*args, **(kwargs or {}))


class by_rules(plain_rules):  # noqa: N801
    """Replacements by rules: right for products with the Jacobian, and for nothing beyond; or to `second` order, for Hessian
    products."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.replacements = _HESSIAN if second else _LINEAR


GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
SMOOTH = (functional.gelu, functional.silu, functional.mish, functional.softplus)
"""Torch computes their f' anew each time."""


def _table(second: bool) -> dict[Callable[..., Any], Replacement]:
    """What both orders have."""
    return {
        **plain_rules.replacements,
        **dict.fromkeys(GRADIENTS, _refused),
        Tensor.register_hook: _watched,
        Tensor.grad_fn.__get__: _watched,  # type: ignore[union-attr]
        functional.batch_norm: partial(_batch_norm, second=second),
        **{function: partial(_convolution, second) for function in CONVOLUTIONS},
        **{function: _pointwise(function, second) for function in SMOOTH},
    }


_HESSIAN = _table(second=True)
_LINEAR: dict[Callable[..., Any], Replacement] = {
    **_table(second=False),
    functional.linear: _linear,
    torch.layer_norm: _layer_norm,
    functional.layer_norm: _layer_norm,
    functional.scaled_dot_product_attention: _attention,
}
