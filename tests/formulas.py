"""Layers whose backward formulas are written by hand: right ones, and ones that keep a part of their forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


class Formula(NamedTuple):
    """y(kept, x, …) and its gradients(u, kept, x, …), where kept(x, …) are numbers that both of them need."""

    kept: Callable[..., Tensors]
    y: Callable[..., Tensor]
    gradients: Callable[..., Tensors]
    parameters: int = 0
    """How many vectors, as wide as x, it takes."""
    hidden: tuple[Collection[int], ...] = ((0,),)
    """Which of the numbers a wrong backward pass may take from the forward pass."""


def written(formula: Formula, keeps: Collection[int] = (), single: bool = False) -> Any:
    """Written by hand, with some numbers kept in `ctx`; computing in float32 whatever it is given, if `single`."""

    class Written(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Tensor) -> Tensor:
            ctx.save_for_backward(*args)
            given = _cast(args, single)
            kept = formula.kept(*given)
            ctx.kept = [each.clone() for each in kept]  # an output that is kept has a graph
            return formula.y(kept, *given).to(args[0].dtype)

        @staticmethod
        def backward(ctx: Any, u: Tensor) -> Any:
            (u_cast,), given = _cast([u], single), _cast(ctx.saved_tensors, single)
            again = formula.kept(*given)
            kept = [ctx.kept[place] if place in keeps else each for place, each in enumerate(again)]
            gradients = formula.gradients(u_cast, kept, *given)
            gradients = tuple(
                g.sum_to_size(x.shape).to(u.dtype) for g, x in zip(gradients, ctx.saved_tensors, strict=True)
            )
            return gradients if len(gradients) > 1 else gradients[0]

    return Written


def _cast(tensors: Sequence[Tensor], single: bool) -> list[Tensor]:
    return [tensor.float() for tensor in tensors] if single else list(tensors)


class Layer(nn.Module):
    """A formula with its parameters. Without `apply`, in torch's own operations."""

    def __init__(self, formula: Formula, width: int, apply: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.formula, self.apply_ = formula, apply
        self.vectors = nn.ParameterList(0.5 + torch.rand(width) for _ in range(formula.parameters))

    def forward(self, x: Tensor) -> Tensor:
        if self.apply_ is not None:
            return self.apply_(x, *self.vectors)
        return self.formula.y(self.formula.kept(x, *self.vectors), x, *self.vectors)


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _rms_gradients(u: Tensor, kept: Tensors, x: Tensor, w: Tensor) -> Tensors:
    n = x * kept[0]
    return kept[0] * (u * w - n * _mean(u * w * n)), u * n


def _layer_norm_kept(x: Tensor, w: Tensor, b: Tensor) -> Tensors:
    mean = _mean(x)
    return mean, torch.rsqrt(_mean((x - mean).square()) + 1e-5)


def _layer_norm_gradients(u: Tensor, kept: Tensors, x: Tensor, w: Tensor, b: Tensor) -> Tensors:
    n, of_n = (x - kept[0]) * kept[1], u * w
    return kept[1] * (of_n - _mean(of_n) - n * _mean(of_n * n)), u * n, u


def _gate_gradients(u: Tensor, kept: Tensors, x: Tensor, w: Tensor) -> Tensors:
    s = kept[0]
    return u * w * s * (1 + x * (1 - s)), u * x * s


def _support(x: Tensor) -> tuple[Tensor]:
    """Which numbers of a sparsemax aren't zero."""
    ordered = x.detach().sort(-1, descending=True).values
    counts = torch.arange(1, x.shape[-1] + 1, device=x.device)
    smallest = ((1 + counts * ordered) > ordered.cumsum(-1)).sum(-1, keepdim=True)
    return ((x.detach() >= ordered.gather(-1, smallest - 1)).to(x),)


def _sparsemax(kept: Tensors, x: Tensor) -> Tensor:
    (s,) = kept
    return s * (x - ((s * x).sum(-1, keepdim=True) - 1) / s.sum(-1, keepdim=True))


FORMULAS = {
    "RMS norm": Formula(
        lambda x, w: (torch.rsqrt(_mean(x.square()) + 1e-6),), lambda k, x, w: x * k[0] * w, _rms_gradients, 1
    ),
    "layer norm": Formula(
        _layer_norm_kept,
        lambda k, x, w, b: (x - k[0]) * k[1] * w + b,
        _layer_norm_gradients,
        2,
        ((0,), (1,), (0, 1)),
    ),
    "softmax": Formula(
        lambda x: (x.softmax(-1),), lambda k, x: k[0], lambda u, k, x: (k[0] * (u - (k[0] * u).sum(-1, keepdim=True)),)
    ),
    "gate": Formula(lambda x, w: (x.sigmoid(),), lambda k, x, w: w * x * k[0], _gate_gradients, 1),
    "fast sine": Formula(lambda x: ((30 * x).cos(),), lambda k, x: (30 * x).sin(), lambda u, k, x: (30 * u * k[0],)),
    "leaky": Formula(
        lambda x: (1 - 0.9 * (x.detach() < 0).to(x),), lambda k, x: k[0] * x, lambda u, k, x: (u * k[0],), hidden=()
    ),
    "sparsemax": Formula(
        _support,
        _sparsemax,
        lambda u, k, x: (k[0] * (u - (k[0] * u).sum(-1, keepdim=True) / k[0].sum(-1, keepdim=True)),),
        hidden=(),
    ),
}
"""The last two are linear but for kinks, and what they keep has no derivative."""
