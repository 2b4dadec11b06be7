"""Blocks on sequences and pictures (see `fuzz_blocks`), what a network begins with, and what it ends with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, weight_norm

from fuzz_blocks import BLOCKS, IN_PLACE, Draw, Fn, Made, Shape, block


def after(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@block(2, 3, times=4)
def convolution(d: Draw, shape: Shape) -> Made:
    """Strided, padded, dilated, grouped; a norm behind it, running or not; changed in place."""
    space, before = len(shape) - 1, shape[0]
    groups = before if d.chance(0.25) else 1
    out = groups * d.size(1, 2) if groups > 1 else d.size()
    kernel = d.size(1, min(3, *shape[1:]))
    padding, stride, dilation = (
        d.size(0, kernel - 1),
        d.size(1, 2),
        1 if kernel > 1 and min(shape[1:]) < 4 else d.size(1, 2),
    )
    if kernel * dilation > min(shape[1:]) + 2 * padding:
        dilation = 1
    kinds: Any = (nn.Conv1d, nn.Conv2d)[space - 1]
    mode = d.one("zeros", "zeros", "zeros", "reflect", "circular", "replicate")
    sizes = [after(size, kernel, stride, padding, dilation) for size in shape[1:]]
    given: Any = padding
    if d.chance(0.1):
        given, sizes, stride = "same", list(shape[1:]), 1
    layer = kinds(before, out, kernel, stride, given, dilation, groups, bias=d.chance(0.6), padding_mode=mode)
    wrapped = d.one(*[None] * 6, "weight", "spectral")
    if wrapped == "weight":
        layer = weight_norm(layer) if d.chance(0.5) else parametrizations.weight_norm(layer)
    elif wrapped == "spectral":
        layer = parametrizations.spectral_norm(layer)
    layers = [layer]
    if d.chance(0.4):
        layers.append(normed(d, (out, *sizes)))
    if d.chance(0.4):
        name = d.one(*IN_PLACE)
        layers.append(Fn(name, lambda y: (IN_PLACE[name](y), y)[1]))
    return nn.Sequential(*layers), (out, *sizes)


def normed(d: Draw, shape: Shape) -> nn.Module:
    """A norm over channels; those of batches have running statistics that aren't 0 and 1."""
    space, channels = len(shape) - 1, shape[0]
    kind = d.one("batch", "batch", "group", "instance", "response")
    if math.prod(shape[1:]) == 1 and kind in ("group", "instance"):
        kind = "response"  # of one value there is nothing left but rounding, at kinks of what follows
    d.marks.add("norm")  # torch refuses to normalise a single value
    if kind == "group":
        return nn.GroupNorm(d.one(1, channels), channels, affine=d.chance(0.8))
    if kind == "response":
        return nn.LocalResponseNorm(2)
    running = d.chance(0.8)
    if kind == "instance":
        return (nn.InstanceNorm1d, nn.InstanceNorm2d)[space - 1](
            channels, affine=d.chance(0.5), track_running_stats=d.chance(0.3)
        )
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[space](
        channels, affine=d.chance(0.8), track_running_stats=running
    )
    if running:
        norm.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return norm


@block(1, 2, 3)
def channel_norm(d: Draw, shape: Shape) -> Made:
    if len(shape) == 1:
        norm = nn.BatchNorm1d(shape[0])
        d.marks.add("norm")
        return norm, shape
    return normed(d, shape), shape


@block(2, 3)
def transposed(d: Draw, shape: Shape) -> Made:
    kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d)[len(shape) - 2]
    kernel, stride, out = d.size(1, 3), d.size(1, 2), d.size()
    padding = d.size(0, (kernel - 1) // 2)
    extra = d.size(0, stride - 1)
    sizes = [(size - 1) * stride - 2 * padding + kernel + extra for size in shape[1:]]
    layer = kind(shape[0], out, kernel, stride, padding, extra, bias=d.chance(0.7))
    return nn.Sequential(layer, shrunk(sizes)), (out, *(min(size, 5) for size in sizes))


def shrunk(sizes: list[int]) -> nn.Module:
    """At most five numbers a side."""
    return Fn("[:5]", lambda x: x[..., :5] if len(sizes) == 1 else x[..., :5, :5])


@block(2, 3, times=2)
def pooled(d: Draw, shape: Shape) -> Made:
    space = len(shape) - 1
    kind = d.one("max", "avg", "adaptive max", "adaptive avg", "lp")
    if kind.startswith("adaptive"):
        size = d.size(1, 3)
        pools = ((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d), (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d))
        return pools[kind == "adaptive avg"][space - 1](size), (shape[0], *[size] * space)
    kernel = d.size(1, min(3, *shape[1:]))
    stride, padding = d.size(1, 2), d.size(0, kernel // 2)
    if kind == "lp":
        pool: Any = (nn.LPPool1d, nn.LPPool2d)[space - 1](2.0, kernel, stride)
        return nn.Sequential(nn.Sigmoid(), pool), (shape[0], *(after(s, kernel, stride, 0, 1) for s in shape[1:]))
    pool = ((nn.MaxPool1d, nn.MaxPool2d), (nn.AvgPool1d, nn.AvgPool2d))[kind == "avg"][space - 1](
        kernel, stride, padding
    )
    return pool, (shape[0], *(after(size, kernel, stride, padding, 1) for size in shape[1:]))


@block(2, 3)
def resized(d: Draw, shape: Shape) -> Made:
    """Padded, upsampled, shuffled."""
    space = len(shape) - 1
    if space == 2 and d.chance(0.3):
        layer = nn.Sequential(nn.Conv2d(shape[0], 4, 1), nn.PixelShuffle(2), shrunk([2 * size for size in shape[1:]]))
        return layer, (1, *(min(2 * size, 5) for size in shape[1:]))
    if d.chance(0.5):
        mode = d.one("constant", "reflect", "replicate", "circular")
        return nn.Sequential(Fn(f"pad {mode}", lambda x: F.pad(x, [1, 1] * space, mode)), shrunk([0] * space)), (
            shape[0],
            *(min(size + 2, 5) for size in shape[1:]),
        )
    mode = d.one("nearest", "linear" if space == 1 else "bilinear", "nearest" if space == 1 else "bicubic")
    return nn.Sequential(nn.Upsample(size=[4] * space, mode=mode)), (shape[0], *[4] * space)


def channels_last(x: Tensor) -> Tensor:
    """Where derivatives by x are asked for: else torch crashes in the derivative of a group norm of it."""
    return x.contiguous(memory_format=torch.channels_last) if x.requires_grad else x


@block(2, 3)
def turned(d: Draw, shape: Shape) -> Made:
    """Dimensions in another order; channels_last; flattened."""
    if len(shape) == 3 and d.chance(0.4):
        return Fn("channels_last", channels_last), shape
    if d.chance(0.5):
        return Fn("transposed", lambda x: x.transpose(1, -1)), (shape[-1], *shape[1:-1], shape[0])
    return nn.Flatten(1, 2), (shape[0] * shape[1], *shape[2:])


@block(2, times=2)
def recurrent(d: Draw, shape: Shape) -> Made:
    size, both, projected = d.size(2, 3), d.chance(0.3), 0
    kind: Any = d.one(nn.RNN, nn.LSTM, nn.GRU)
    options: dict[str, Any] = {"bidirectional": both, "batch_first": True, "num_layers": d.one(1, 1, 2)}
    if kind is nn.LSTM and d.chance(0.3):
        options["proj_size"] = projected = size - 1
    if d.chance(0.2):
        cell = d.one(nn.RNNCell, nn.LSTMCell, nn.GRUCell)(shape[-1], size)

        def steps(x: Tensor, cell: nn.Module) -> Tensor:
            state: Any = None
            for part in x.unbind(1):
                state = cell(part, state)
            return state[0] if isinstance(state, tuple) else state

        return Fn("steps", steps, cell), (size,)
    out = (projected or size) * (2 if both else 1)
    return Fn("[0]", lambda x, layer: layer(x)[0], kind(shape[-1], size, **options)), (shape[0], out)


@block(2, times=3)
def attention(d: Draw, shape: Shape) -> Made:
    steps, width = shape
    kind, causal = d.one("multihead", "encoder", "plain", "plain"), d.chance(0.4)
    drop = 0.3 if d.chance(0.15) else 0.0
    if drop:
        d.marks.add("random")
    mask = torch.full((steps, steps), float("-inf"), dtype=torch.float64).triu(1) if causal else None
    if kind == "plain":
        heads = nn.Linear(width, 6)
        shaped = d.one(True, False)

        def attend(x: Tensor, layer: nn.Module) -> Tensor:
            q, k, v = layer(x).chunk(3, -1)
            if shaped:
                q, k, v = (part[:, None] for part in (q, k, v))
            given = mask.to(q.dtype) if mask is not None and not shaped else None
            y = F.scaled_dot_product_attention(q, k, v, given, drop, causal and given is None, scale=d_scale)
            return y.squeeze(1) if shaped else y

        d_scale = d.one(None, 0.7)
        return Fn("sdpa", attend, heads), (steps, 2)
    heads_count = 2 if width % 2 == 0 else 1
    if kind == "multihead":
        layer = nn.MultiheadAttention(
            width, heads_count, drop, batch_first=True, bias=d.chance(0.8), add_bias_kv=d.chance(0.1)
        )
        weighed = d.chance(0.3)
        return Fn(
            "mha",
            lambda x, a: a(x, x.flip(1), x, attn_mask=mask if mask is None else mask.to(x.dtype), need_weights=weighed)[
                0
            ],
            layer,
        ), shape
    encoder = nn.TransformerEncoderLayer(
        width, heads_count, 3, drop, d.one("relu", "gelu", F.silu), batch_first=True, norm_first=d.chance(0.5)
    )
    return Fn("encoder", lambda x, a: a(x, src_mask=mask if mask is None else mask.to(x.dtype)), encoder), shape


WORDS = 5


def beginning(d: Draw, batch: int, single: bool) -> tuple[Tensor, list[nn.Module], Shape]:
    """Inputs, the modules that take them, and the shape of one example behind them."""
    kind = "vector" if single else d.one("vector", "vector", "sequence", "picture", "picture", "words", "bag")
    if kind == "words":
        table = nn.Embedding(
            WORDS, d.size(), d.one(None, 0), d.one(None, None, 0.8), sparse=d.chance(0.15), scale_grad_by_freq=False
        )
        steps = d.size()
        return torch.randint(WORDS, (batch, steps)), [table], (steps, table.embedding_dim)
    if kind == "bag":
        mode = d.one("sum", "mean", "max")
        bag = nn.EmbeddingBag(
            WORDS, d.size(), d.one(None, None, 0.8), mode=mode, padding_idx=d.one(None, 1), sparse=False
        )
        words = torch.randint(WORDS, (batch, 3))
        if bag.padding_idx is not None and (words == bag.padding_idx).all(1).any():
            d.marks.add("once")  # torch has no second derivative of a bag of padding alone
        return words, [bag], (bag.embedding_dim,)
    shape: Shape = (
        (d.size(2, 5),) if kind == "vector" else (d.size(), d.size()) if kind == "sequence" else (d.size(1, 3), 4, 4)
    )
    x = torch.randn(*(() if single else (batch,)), *shape, dtype=torch.float64)
    if kind == "picture" and d.chance(0.3):
        return x.contiguous(memory_format=torch.channels_last), [nn.Conv2d(shape[0], shape[0], 1)], shape
    return x, [], shape


def body(d: Draw, shape: Shape, single: bool) -> tuple[list[nn.Module], Shape]:
    modules: list[nn.Module] = []
    for _ in range(d.size(1, 4)):
        made, shape = d.one(*BLOCKS[0 if single else len(shape)])(d, shape)
        modules.append(made)
    return modules, shape


def ending(d: Draw, shape: Shape, kind: str, size: int, single: bool) -> tuple[list[nn.Module], Shape]:
    """Modules to an output of `size` numbers a variable: for each example, each step, or along dimension 1."""
    if kind == "steps" and len(shape) == 2:
        return [nn.Linear(shape[-1], size)], (shape[0], size)
    if kind == "along 1" and len(shape) == 2:
        return [nn.Conv1d(shape[0], size, 1)], (size, shape[1])
    if kind == "along 1" and len(shape) == 3:
        return [nn.AdaptiveAvgPool2d(2), nn.Conv2d(shape[0], size, 1)], (size, 2, 2)
    if single:
        return [nn.Linear(shape[-1], size)], (size,)
    flat = [] if len(shape) == 1 else [nn.Flatten()]
    return [*flat, nn.Linear(math.prod(shape), size)], (size,)
