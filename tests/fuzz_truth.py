"""Losses of drawn networks, and the truth about their gradient and curvature, written without the library.

The network is run with the operations written out that the library has rules for, or that torch has no right second derivative
of. Its Jacobian comes row by row where the output is small, else by two backward passes; a Hessian by two as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fuzz_blocks import Draw, Shape, written_out

Of = Callable[[Tensor], Tensor]
ROWS = 16


def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An activation that takes `inplace`."""

    def run(x: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        return x.copy_(function(x.clone(), *args, **kwargs)) if inplace else function(x, *args, **kwargs)

    return run


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    soft = torch.log1p(torch.exp((beta * x).clamp(max=threshold))) / beta
    return torch.where(beta * x > threshold, x, soft)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = (
        (x.clone()[..., None, :] * weight).sum(-1).contiguous()
    )  # torch keeps no input of a frozen layer, which may change it
    return y if bias is None else y + bias


def standardised(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any) -> Tensor:
    return scaled(standardised(x, list(range(-len(shape), 0)), eps), weight, bias, shape).contiguous()


def group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    grouped = x.reshape(len(x), groups, -1)
    y = scaled(standardised(grouped, [-1], eps).reshape(x.shape), weight, bias, [-1] + [1] * (x.dim() - 2))
    return laid_out(y, x)


def laid_out(y: Tensor, x: Tensor) -> Tensor:
    """In memory as torch's norms of x are; masks of dropout are drawn in that order."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return y.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def batch_norm(x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False,
               momentum: Any = 0.1, eps: float = 1e-5) -> Tensor:  # fmt: skip
    shape = [-1] + [1] * (x.dim() - 2)
    if training or mean is None:
        if x.numel() == x.shape[1]:
            raise ValueError("torch has no statistics of one value")
        normal = standardised(x, [0, *range(2, x.dim())], eps)
    else:
        normal = (x - mean.reshape(shape)) / (var.reshape(shape) + eps).sqrt()
    return laid_out(scaled(normal, weight, bias, shape), x)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, drop: float = 0.0, is_causal: bool = False,
              scale: Any = None) -> Tensor:  # fmt: skip
    if drop:  # the same mask as torch's
        return F.scaled_dot_product_attention(q, k, v, mask, drop, is_causal, scale=scale)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=q.dtype).triu(1)
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def looked_up(words: Tensor, table: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """With a dense gradient."""
    return F.embedding(words, table, *args[:4], **{**kwargs, "sparse": False})


def bags(words: Tensor, table: Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
         scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
         include_last_offset: bool = False, padding_idx: Any = None) -> Tensor:  # fmt: skip
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(table, words.reshape(-1).contiguous(), max_norm, norm_type)
    each = []
    for bag in words:
        rows = table[bag if padding_idx is None else bag[bag != padding_idx]]
        if not len(rows):
            each.append(torch.zeros_like(table[0]))
        else:
            each.append(rows.sum(0) if mode == "sum" else rows.mean(0) if mode == "mean" else rows.max(0).values)
    return torch.stack(each)


class WrittenOut(TorchFunctionMode):
    """While in force, these operations are others."""

    others: Mapping[Any, Callable[..., Any]] = {
        F.linear: linear, F.layer_norm: layer_norm, F.group_norm: group_norm, F.batch_norm: batch_norm,
        F.scaled_dot_product_attention: attention, F.embedding_bag: bags, F.embedding: looked_up,
        F.gelu: gelu, F.softplus: softplus,
        torch._weight_norm: lambda v, g, dim=0: v * (g / torch.norm_except_dim(v, 2, dim)),
        F.silu: in_place(lambda x: x / (1 + torch.exp(-x))),
        F.mish: in_place(lambda x: x * torch.tanh(softplus(x))),
        F.hardsigmoid: in_place(lambda x: (x + 3).clamp(0, 6) / 6),
        F.hardswish: in_place(lambda x: x * (x + 3).clamp(0, 6) / 6),
    }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.others.get(func, func)(*args, **(kwargs or {}))


# --- losses ---

Loss = tuple[Callable[[Tensor, Any], Tensor], Tensor, Of]
"""What the library is given, the targets, and the loss written out."""


def classes(d: Draw, shape: Shape, dim: int) -> Loss:
    """Cross-entropies of logits along a dimension; losses that have no second derivative, or are no means."""
    size = shape[dim]
    rest = [n for i, n in enumerate(shape) if i != dim % len(shape)]
    targets = torch.randint(size, rest)
    kind = d.one(*["plain"] * 4, "ignored", "ignored", "weights", "smooth", "soft", "sum", "margin", "ctc", "nll")
    weight = torch.rand(size, dtype=torch.float64) + 0.2 if kind == "weights" or d.chance(0.15) else None
    if kind == "ignored" and rest:
        targets = torch.where(torch.rand(rest) < 0.4, -100, targets)
        targets.view(-1)[0] = 0
    smoothing = 0.2 if kind == "smooth" else 0.0

    def logits(x: Tensor) -> Tensor:
        return x.movedim(dim, -1).reshape(-1, size)

    def weighed(x: Tensor) -> Tensor | None:
        return None if weight is None else weight.to(x.dtype)

    def entropy(x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(logits(x), y.reshape(-1), weighed(x), label_smoothing=smoothing, reduction=reduction)

    def plain(x: Tensor) -> Tensor:
        log_p = logits(x) - logits(x).logsumexp(-1, keepdim=True)
        kept = targets.reshape(-1) >= 0
        y, w = targets.reshape(-1)[kept], torch.ones(size, dtype=x.dtype) if weight is None else weight
        log_p = log_p[kept]
        nll = -(log_p[range(len(y)), y] * w[y]).sum()
        return ((1 - smoothing) * nll - smoothing / size * (log_p * w).sum()) / w[y].sum()

    if kind == "soft":
        soft = torch.rand(shape, dtype=torch.float64).softmax(dim)
        count = len(logits(soft))
        return (
            lambda x, y: F.cross_entropy(logits(x), logits(y)),
            soft,
            lambda x: -(soft * (x - x.logsumexp(dim, keepdim=True))).sum() / count,
        )
    if kind == "sum" and len(rest) == 1:
        d.marks.add("sum")
        total = float((torch.ones(size) if weight is None else weight)[targets].sum())
        return lambda x, y: entropy(x, y, "sum"), targets, lambda x: total * plain(x)
    if kind == "margin" and len(rest) == 1:
        d.marks.add("once loss")
        return lambda x, y: F.multi_margin_loss(x, y), targets, lambda x: margins(x, targets)
    if kind == "ctc" and len(shape) == 3 and dim == -1:
        return ctc(d, shape)
    if kind == "nll":
        return lambda x, y: F.nll_loss(logits(x).log_softmax(-1), y.reshape(-1), weighed(x)), targets, plain
    return entropy, targets, plain


def margins(x: Tensor, y: Tensor) -> Tensor:
    gaps = (1 - x.gather(1, y[:, None]) + x).clamp(min=0).scatter(1, y[:, None], 0.0)
    return gaps.mean(1).mean()


def ctc(d: Draw, shape: Shape) -> Loss:
    """One symbol in each sequence."""
    d.marks.add("once loss")
    batch, steps, size = shape
    targets = torch.randint(1, size, (batch, 1))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        lengths = torch.full((len(x),), steps), torch.ones(len(x), dtype=torch.long)
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), y, *lengths)

    def plain(x: Tensor) -> Tensor:
        log_p = x.log_softmax(-1)
        symbol = log_p.gather(2, targets[:, :, None].expand(batch, steps, 1)).squeeze(2)
        spans = [(a, b) for a in range(steps) for b in range(a + 1, steps + 1)]
        paths = [log_p[:, :a, 0].sum(1) + symbol[:, a:b].sum(1) + log_p[:, b:, 0].sum(1) for a, b in spans]
        return -torch.stack(paths).logsumexp(0).mean()

    return loss, targets, plain


def numbers(d: Draw, shape: Shape) -> Loss:
    """Losses of regressions."""
    targets = torch.randn(shape, dtype=torch.float64)
    kind = d.one("mse", "mse", "huber", "smooth l1", "l1", "poisson", "cosine")

    def cosine(x: Tensor, y: Tensor) -> Tensor:
        return 1 - F.cosine_similarity(x, y, -1).mean()

    losses: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Of]] = {
        "mse": (F.mse_loss, lambda x: (x - targets).square().mean()),
        "huber": (F.huber_loss, lambda x: huber(x - targets).mean()),
        "smooth l1": (F.smooth_l1_loss, lambda x: huber(x - targets).mean()),
        "l1": (F.l1_loss, lambda x: (x - targets).abs().mean()),
        "poisson": (lambda x, y: F.poisson_nll_loss(x, y), lambda x: (x.exp() - targets * x).mean()),
        "cosine": (
            cosine,
            lambda x: 1 - ((x * targets).sum(-1) / (x.square().sum(-1) * targets.square().sum(-1)).sqrt()).mean(),
        ),
    }
    loss, plain = losses[kind]
    return loss, targets, plain


def huber(gap: Tensor) -> Tensor:
    return torch.where(gap.abs() < 1, 0.5 * gap.square(), gap.abs() - 0.5)


def coins(d: Draw, shape: Shape) -> Loss:
    targets = torch.randint(2, shape).double()
    more = torch.rand(shape[-1:], dtype=torch.float64) + 0.5 if d.chance(0.4) else None
    if d.chance(0.2):
        return lambda x, y: F.soft_margin_loss(x, 2 * y - 1), targets, lambda x: softplus((1 - 2 * targets) * x).mean()

    def plain(x: Tensor) -> Tensor:
        return (softplus(-x) * targets * (1 if more is None else more) + softplus(x) * (1 - targets)).mean()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x, y, pos_weight=None if more is None else more.to(x.dtype))

    return loss, targets, plain


# --- the truth ---


class Truth:
    """g and H·v of a network at its present parameters; streams are where the caller has put them."""

    def __init__(self, model: nn.Module, names: Sequence[str], run: Callable[[], Tensor], loss: Of) -> None:
        parameters = dict(model.named_parameters())
        self.leaves = [parameters[name].detach().clone().requires_grad_() for name in names]
        held = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in parameters.items()}
        held |= {name: buffer.clone() for name, buffer in model.named_buffers()}
        held |= {name: leaf.clone() for name, leaf in zip(names, self.leaves, strict=True)}
        with written_out(), sdpa_kernel(SDPBackend.MATH), WrittenOut():
            self.output = functional_call(Calling(model, run), {f"model.{name}": t for name, t in held.items()}, ())
        self.loss = loss
        self.value = loss(self.output)
        self.slopes = self._pulled(self.value, create_graph=True)
        self.gradient = flat(self.slopes).detach()
        self.rows = torch.zeros(0)
        if self.output.numel() <= ROWS:
            units = torch.eye(self.output.numel(), dtype=torch.float64)
            self.rows = torch.stack([flat(self._pulled(self.output, u.reshape(self.output.shape))) for u in units])

    def _pulled(self, of: Tensor, cotangent: Any = None, create_graph: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            of, self.leaves, cotangent, retain_graph=True, create_graph=create_graph, materialize_grads=True
        )

    def steep(self, v: Tensor) -> Tensor:
        """∇²L v."""
        along = flat(self.slopes) @ v
        return flat(self._pulled(along)) if along.requires_grad else torch.zeros_like(v)

    def curved(self, psi: Of, v: Tensor) -> Tensor:
        """Jᵀ ∇²ψ J v."""
        base = self.output.detach().requires_grad_()
        slope = torch.autograd.grad(psi(base), base, create_graph=True)[0]
        if not slope.requires_grad:
            return torch.zeros_like(v)
        pushed = self._pushed(v).reshape(base.shape)
        (product,) = torch.autograd.grad(slope, base, pushed, materialize_grads=True)
        if len(self.rows):
            return product.reshape(-1) @ self.rows
        return flat(self._pulled(self.output, product))

    def _pushed(self, v: Tensor) -> Tensor:
        if len(self.rows):
            return self.rows @ v
        u = torch.zeros_like(self.output).requires_grad_()
        along = flat(self._pulled(self.output, u, create_graph=True)) @ v
        return torch.autograd.grad(along, u, materialize_grads=True)[0] if along.requires_grad else torch.zeros_like(u)


class Calling(nn.Module):
    """Something that calls the model, as a module that holds it."""

    def __init__(self, model: nn.Module, run: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self) -> Tensor:
        return self.run()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
