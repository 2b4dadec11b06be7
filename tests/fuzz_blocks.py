"""Blocks that drawn networks are made of: everyday layers, and what is awkward to differentiate in models that people train.

A block takes the shape of one example and gives a module with the shape that it returns. In `written_out()` blocks leave away
what should change nothing (checkpoints), and write plainly what torch's autograd isn't told right (formulas by hand).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from formulas import FORMULAS as WRITTEN
from formulas import Layer, written
from test_curvature import Silent, Square
from test_handwritten_formulas import Cut, Honest, Kept, Ramp, Rounded, Tripled

Shape = tuple[int, ...]
Made = tuple[nn.Module, Shape]
plainly = {"on": False}


@contextmanager
def written_out() -> Iterator[None]:
    plainly["on"] = True
    try:
        yield
    finally:
        plainly["on"] = False


class Draw:
    """The choices of one seed, and marks of what may be refused: random, batch (examples see each other), hiding,
    once (no second derivative in torch), norm; and float32, which rounds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.marks: set[str] = set()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def one(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def size(self, low: int = 2, high: int = 4) -> int:
        return self.rng.randint(low, high)


class Fn(nn.Module):
    """A function of the input and of some modules, with a name to print."""

    def __init__(self, name: str, function: Callable[..., Tensor], *inner: nn.Module) -> None:
        super().__init__()
        self.name, self.function, self.inner = name, function, nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.inner)

    def extra_repr(self) -> str:
        return self.name


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU, "gelu tanh": lambda: nn.GELU("tanh"), "silu": nn.SiLU,
    "mish": nn.Mish, "softplus": lambda: nn.Softplus(2.0), "relu": nn.ReLU, "relu6": nn.ReLU6, "elu": nn.ELU,
    "celu": lambda: nn.CELU(0.7), "selu": nn.SELU, "softsign": nn.Softsign, "logsigmoid": nn.LogSigmoid,
    "hardsigmoid": nn.Hardsigmoid, "hardswish": nn.Hardswish, "hardtanh": nn.Hardtanh, "leaky": lambda: nn.LeakyReLU(0.1),
    "prelu": nn.PReLU, "hardshrink": lambda: nn.Hardshrink(0.2), "softshrink": lambda: nn.Softshrink(0.2),
    "tanhshrink": nn.Tanhshrink, "threshold": lambda: nn.Threshold(0.1, 0.3), "softmax": lambda: nn.Softmax(-1),
    "log_softmax": lambda: nn.LogSoftmax(-1), "softmin": lambda: nn.Softmin(-1),
}  # fmt: skip
IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "relu_": F.relu_, "ReLU": lambda y: F.relu(y, inplace=True), "add_": lambda y: y.add_(0.3),
    "mul_": lambda y: y.mul_(0.7), "masked_fill_": lambda y: y.masked_fill_(y > 0.5, 0.3), "tanh_": torch.tanh_,
    "sigmoid_": torch.sigmoid_, "leaky_relu_": lambda y: F.leaky_relu_(y, 0.2), "elu_": F.elu_, "selu_": F.selu_,
    "celu_": F.celu_, "clamp_": lambda y: y.clamp_(-0.8, 0.8), "hardtanh_": F.hardtanh_,
    "silu_": lambda y: F.silu(y, inplace=True), "mish_": lambda y: F.mish(y, inplace=True),
    "hardswish_": lambda y: F.hardswish(y, inplace=True), "hardsigmoid_": lambda y: F.hardsigmoid(y, inplace=True),
    "relu6_": lambda y: F.relu6(y, inplace=True), "threshold_": lambda y: F.threshold_(y, 0.1, 0.2),
    "sin_": torch.sin_, "square_": torch.square_, "view mul_": lambda y: y[..., :1].mul_(2.0),
    "setitem": lambda y: y.__setitem__((..., 0), 0.5), "+= self": lambda y: y.__iadd__(y.detach()),
    "neg_ part": lambda y: y.chunk(2, -1)[0].neg_(), "zero_ part": lambda y: y[..., -1].zero_(),
}  # fmt: skip
FORMULAS: dict[Any, Callable[[Tensor], Tensor] | None] = {
    Cut: torch.square, Kept: torch.square, Tripled: lambda x: 3 * x, Honest: torch.square, Ramp: torch.relu, Rounded: None,
    Square: torch.square, Silent: torch.square,
}  # fmt: skip
SMOOTH = (F.gelu, F.silu, F.mish, F.softplus)

BLOCKS: dict[int, list[Callable[[Draw, Shape], Made]]] = {0: [], 1: [], 2: [], 3: []}
"""By the number of dimensions of an example; 0: also of a single one without a batch."""


def block(*ranks: int, times: int = 1) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        for rank in ranks:
            BLOCKS[rank] += [function] * times
        return function

    return add


def lin(d: Draw, before: int, after: int) -> nn.Linear:
    layer = nn.Linear(before, after, bias=d.chance(0.8))
    if d.chance(0.08):
        layer.requires_grad_(False)
    elif d.chance(0.06):
        layer.weight.requires_grad_(False)
    return layer


def activation(d: Draw) -> nn.Module:
    return ACTIVATIONS[d.one(*ACTIVATIONS)]()


@block(0, 1, 2, 3, times=3)
def linear(d: Draw, shape: Shape) -> Made:
    out = d.size()
    return lin(d, shape[-1], out), (*shape[:-1], out)


@block(0, 1, 2, 3, times=2)
def activated(d: Draw, shape: Shape) -> Made:
    return nn.Sequential(lin(d, shape[-1], shape[-1]), activation(d)), shape


def changed(d: Draw) -> tuple[str, Callable[[Tensor], Tensor]]:
    names = [d.one(*IN_PLACE) for _ in range(d.one(1, 1, 1, 2))]

    def change(y: Tensor) -> Tensor:
        for name in names:
            IN_PLACE[name](y)
        return y

    return " ".join(names), change


@block(0, 1, 2, 3, times=3)
def in_place(d: Draw, shape: Shape) -> Made:
    """A linear layer whose output is changed in place, or added to."""
    name, change = changed(d)
    layer, plus = lin(d, shape[-1], shape[-1]), d.chance(0.4)

    def run(x: Tensor, layer: nn.Module) -> Tensor:
        y = layer(x)
        if plus:
            y += x
        return change(y)

    return Fn(f"layer, {'+= x, ' if plus else ''}{name}", run, layer), shape


@block(0, 1, 2, 3, times=2)
def changed_input(d: Draw, shape: Shape) -> Made:
    """A layer, frozen or not, whose input is changed in place before an activation of its output."""
    layer, (name, change), smooth = lin(d, shape[-1], shape[-1]), changed(d), d.one(*SMOOTH)
    layer.requires_grad_(d.chance(0.1))

    def run(x: Tensor, layer: nn.Module) -> Tensor:
        x = x * 1.5
        y = layer(x)
        change(x)
        return smooth(y) + x

    return Fn(f"layer, input {name}, {smooth.__name__}", run, layer), shape


@block(0, 1, 2, 3)
def norm(d: Draw, shape: Shape) -> Made:
    if d.chance(0.2):
        return nn.RMSNorm(shape[-1], eps=1e-6), shape
    dims = shape[-d.size(1, len(shape)) :]
    if math.prod(dims) == 1:
        return nn.Tanh(), shape  # of one value there is nothing left but rounding
    return nn.LayerNorm(dims, elementwise_affine=d.chance(0.7), eps=d.one(1e-5, 0.1)), shape


@block(0, 1, 2, 3)
def residual(d: Draw, shape: Shape) -> Made:
    inner, _ = activated(d, shape)
    return Fn("x + inner(x)", lambda x, inner: x + inner(x), inner), shape


@block(0, 1, 2, 3)
def tied(d: Draw, shape: Shape) -> Made:
    """One layer used several times, or two with one weight."""
    layer = lin(d, shape[-1], shape[-1])
    other = nn.Linear(shape[-1], shape[-1])
    if d.chance(0.5):
        other.weight = layer.weight
        return nn.Sequential(layer, activation(d), other), shape
    return nn.Sequential(layer, activation(d), layer, nn.Tanh(), layer), shape


@block(0, 1, 2, 3)
def parametrized(d: Draw, shape: Shape) -> Made:
    layer = nn.Linear(shape[-1], shape[-1])
    how = d.one("old weight", "weight", "spectral", "orthogonal")
    if how == "old weight":
        return weight_norm(layer, dim=d.one(0, 1, None)), shape
    if how == "weight":
        return parametrizations.weight_norm(layer, dim=d.one(0, 1)), shape
    if how == "spectral":
        return parametrizations.spectral_norm(layer), shape
    return parametrizations.orthogonal(layer, orthogonal_map=d.one("matrix_exp", "cayley", "householder")), shape


@block(1, 2, 3, times=2)
def dropout(d: Draw, shape: Shape) -> Made:
    d.marks.add("random")
    kinds = [nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout]
    drop = d.one(*kinds, *([nn.Dropout1d] if len(shape) == 2 else [nn.Dropout2d] if len(shape) == 3 else []))(0.4)
    if d.chance(0.2):
        return nn.Sequential(lin(d, shape[-1], shape[-1]), d.one(nn.Dropout(0.4, inplace=True), nn.RReLU())), shape
    if d.chance(0.4):
        order = [*range(len(shape), 0, -1), 0]

        def permuted(x: Tensor, drop: nn.Module) -> Tensor:
            return drop(x.permute(order)).permute(order)

        return Fn("permuted", permuted, drop), shape
    return drop, shape


@block(1, 2, 3, times=2)
def checkpointed(d: Draw, shape: Shape) -> Made:
    inner, after = d.one(*[b for b in BLOCKS[len(shape)] if b is not checkpointed])(d, shape)
    reentrant = d.chance(0.4)

    def run(x: Tensor, inner: nn.Module) -> Tensor:
        if plainly["on"] or not x.requires_grad:
            return inner(x)
        return checkpoint(inner, x, use_reentrant=reentrant)

    return Fn("checkpoint", run, inner), after


@block(0, 1, 2, 3)
def by_hand(d: Draw, shape: Shape) -> Made:
    if d.chance(0.5):
        return everyday_formula(d, shape)
    function = d.one(*FORMULAS)
    if function not in (Honest, Ramp, Rounded):
        d.marks.add("hiding")

    def run(x: Tensor) -> Tensor:
        plain = FORMULAS[function] if plainly["on"] else None
        return function.apply(x) if plain is None else plain(x)

    return Fn(function.__name__, run), shape


def everyday_formula(d: Draw, shape: Shape) -> Made:
    """Norms, gates and the like; right, or with numbers kept from the forward pass; perhaps in float32 inside."""
    name = d.one(*WRITTEN)
    formula = WRITTEN[name]
    keeps, single = d.one((), *formula.hidden), d.chance(0.3)
    d.marks |= {"hiding"} if keeps else set()
    d.marks |= {"float32"} if single else set()
    layer = Layer(formula, shape[-1], None)

    def run(x: Tensor, layer: nn.Module) -> Tensor:
        layer.apply_ = None if plainly["on"] else written(formula, keeps, single).apply
        return layer(x)

    return Fn(f"{name}, keeps {keeps}{', float32' if single else ''}", run, layer), shape


@block(0, 1, 2, 3)
def hooked(d: Draw, shape: Shape) -> Made:
    """Hooks on what a layer returns: on the tensor, on the module, on its node of the graph."""
    layer, smooth, how = lin(d, shape[-1], shape[-1]), d.one(*SMOOTH), d.one("tensor", "module", "node", "full")
    if how == "module":
        layer.register_forward_hook(lambda module, args, y: y * 0.9)
    if how == "full":
        layer.register_full_backward_hook(lambda module, inputs, outputs: None)

    def run(x: Tensor, layer: nn.Module) -> Tensor:
        y = layer(x)
        if how == "tensor" and y.requires_grad:
            y.register_hook(lambda u: u * 0.5)
        if how == "node" and y.grad_fn is not None:
            y.grad_fn.register_prehook(lambda us: tuple(u * 2 for u in us))
        return smooth(y) * 1.0

    return Fn(f"hook: {how}, {smooth.__name__}", run, layer), shape


@block(1, 2, 3)
def drawing(d: Draw, shape: Shape) -> Made:
    """A model that draws from some stream, one number for all examples."""
    d.marks.add("random")
    made = Fn("", lambda x: x)
    made.torchs = torch.Generator().manual_seed(1)  # type: ignore[assignment]
    made.pythons, made.numpys = random.Random(1), np.random.default_rng(1)  # type: ignore[assignment]
    made.name = d.one("torch", "random", "numpy", "generator", "Random", "numpy generator")
    draws: dict[str, Callable[[], float]] = {
        "torch": lambda: float(torch.rand(())),
        "random": random.random,
        "numpy": np.random.rand,
        "generator": lambda: float(torch.rand((), generator=made.torchs)),  # type: ignore[arg-type]
        "Random": made.pythons.random,
        "numpy generator": made.numpys.random,
    }
    made.function = lambda x: x * (0.5 + draws[made.name]())
    return made, shape


@block(1, 2, 3)
def whole_batch(d: Draw, shape: Shape) -> Made:
    """Examples that see each other, or a branch that all of them take."""
    d.marks.add("batch")
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "branch": lambda x: x.tanh() if x.square().mean() > 0.3 else x,
        "centred": lambda x: x - x.mean(0),
        "scaled": lambda x: x / (1 + x.square().mean()),
        "branch by size": lambda x: x.tanh() if len(x) > 2 else x,
        "max": lambda x: x / (1 + x.abs().amax()),
    }
    name = d.one(*ways)
    return Fn(name, ways[name]), shape


@block(1, 2, 3)
def distances(d: Draw, shape: Shape) -> Made:
    """Distances to learned points; torch has no second derivative of its kernel."""
    d.marks.add("once")
    points, p = nn.Linear(shape[-1], 3, bias=False), d.one(2.0, 2.0, 1.5)

    def run(x: Tensor, points: Any) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if plainly["on"]:
            away = (rows[:, None] - points.weight).abs().pow(p).sum(-1).pow(1 / p)
        else:
            away = torch.cdist(rows, points.weight, p)
        return away.reshape(*x.shape[:-1], 3)

    return Fn(f"cdist {p}", run, points), (*shape[:-1], 3)


@block(1, 2)
def row_by_row(d: Draw, shape: Shape) -> Made:
    """A layer on each row of the batch by itself."""
    (name, change), layer = changed(d), lin(d, shape[-1], shape[-1])

    def run(x: Tensor, layer: nn.Module) -> Tensor:
        return torch.stack([change(layer(row)) for row in x])

    return Fn(f"rows, {name}", run, layer), shape


@block(1, 2, 3)
def gradient(d: Draw, shape: Shape) -> Made:
    """A gradient in the forward pass."""
    layer, smooth = lin(d, shape[-1], shape[-1]), d.one(*SMOOTH, torch.tanh)

    def run(x: Tensor, layer: nn.Module) -> Tensor:
        with torch.enable_grad():
            leaf = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(smooth(layer(leaf)).sum(), leaf, create_graph=True)
        return x + slope

    return Fn(f"x + gradient of {smooth.__name__}", run, layer), shape


class Counting(nn.Module):
    """A buffer that every forward pass changes, and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return x * self.calls  # type: ignore[no-any-return]


@block(1, 2, 3)
def counted(d: Draw, shape: Shape) -> Made:
    return Counting(), shape


@block(1, 2, 3)
def mixed(d: Draw, shape: Shape) -> Made:
    """Operations that aren't layers."""
    width = shape[-1]
    ways: dict[str, tuple[Callable[..., Tensor], list[nn.Module], int]] = {
        "glu": (lambda x, a: F.glu(a(x)), [lin(d, width, 2 * width)], width),
        "bilinear": (lambda x, a: a(x, x.tanh()), [nn.Bilinear(width, width, 3)], 3),
        "normalize": (lambda x, a: F.normalize(a(x) + 0.3, dim=-1), [lin(d, width, width)], width),
        "cumsum": (lambda x: x.cumsum(-1), [], width),
        "sort": (lambda x: x.sort(-1).values, [], width),
        "cat": (lambda x, a: torch.cat((x, a(x)), -1)[..., 1:], [lin(d, width, 2)], width + 1),
        "einsum": (lambda x, a: torch.einsum("...i,ji->...j", x, a.weight), [nn.Linear(width, 3)], 3),
        "gate": (lambda x, a: x * a(x).sigmoid(), [lin(d, width, width)], width),
        "where": (lambda x: torch.where(x > 0, x, x.exp() - 1), [], width),
        "logsumexp": (lambda x: x - x.logsumexp(-1, keepdim=True), [], width),
        "std": (lambda x: x / (0.1 + x.var(-1, correction=0, keepdim=True)).sqrt(), [], width),
        "fft": (lambda x: torch.fft.rfft(x).real, [], width // 2 + 1),
        "detached": (lambda x, a: a(x) * x.detach(), [lin(d, width, width)], width),
    }
    name = d.one(*ways)
    function, inner, out = ways[name]
    return Fn(name, function, *inner), (*shape[:-1], out)
