"""What a seed draws: a small model with its data, a base, an LLQR around it, and how it is trained."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from llqr import LLQR
from llqr.divergences import KL, L2
from llqr.paper import PaperLLQR
from llqr.solvers import ConjugateGradient, ScaleFree
from ranks_directions import OwnBase
from zoo import Attention

CLASSES, WORDS, LENGTH, ROWS = 3, 5, 4, 12
SPLITS = {1: [[12]], 2: [[6, 6], [5, 7], [10, 2]], 3: [[4, 4, 4], [3, 7, 2]]}
"""How ranks may divide the rows of a batch."""
STRUCTURES: list[Any] = ["scalar", "diagonal", "kfac", "ekfac", "dense", {"*.weight": "ekfac", "*": "diagonal"}]

# --- models: made of a few drawn sizes ---


class Layers(nn.Module):
    """Tokens, through an embedding and a module, to classes; the module may return more than its output."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(WORDS, width), inner, nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.inner(x, x, x)[0] if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)
        return self.head((x[0] if isinstance(x, tuple) else x).mean(1))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One layer that is used twice, and a scale of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.twice = nn.Linear(4, width), nn.Linear(width, width)
        self.scale, self.leave = nn.Parameter(torch.ones(width)), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).tanh()
        return self.leave(self.twice((self.twice(x) * self.scale).tanh()))  # type: ignore[no-any-return]


def linear(draw: random.Random, bias: bool = True, *more: nn.Module) -> nn.Sequential:
    widths = [4, *(draw.randint(2, 6) for _ in range(draw.randint(1, 3)))]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, bias), draw.choice([nn.Tanh, nn.GELU, nn.SiLU])(), *more]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES, bias))


def transposed(draw: random.Random) -> nn.Sequential:
    """Weights whose memory is that of their transposes."""
    model = linear(draw)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def convolution(draw: random.Random, *more: nn.Module) -> nn.Sequential:
    groups = draw.choice([1, 2])
    first = nn.Conv2d(2, 4, 3, padding=1, groups=groups, bias=draw.random() < 0.7)
    second = nn.Conv2d(4, 3, 2, stride=draw.choice([1, 2]))
    pool = nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(first, *more, nn.Tanh(), second, nn.SiLU(), pool, nn.Flatten(), nn.Linear(12, CLASSES))


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def words(draw: random.Random) -> nn.Sequential:
    width = draw.randint(2, 4)
    return nn.Sequential(nn.Embedding(WORDS, width), nn.Flatten(), nn.Linear(LENGTH * width, CLASSES))


def encoder(draw: random.Random, dropout: float = 0.0) -> nn.Module:
    return Layers(nn.TransformerEncoderLayer(4, 2, draw.randint(3, 6), dropout, batch_first=True), 4)


MODELS: dict[str, Callable[[random.Random], nn.Module]] = {
    "linear": linear,
    "no bias": lambda draw: linear(draw, False),
    "layer norm": lambda draw: nn.Sequential(nn.LayerNorm(4), *linear(draw)),
    "transposed": transposed,
    "shared": lambda draw: Shared(draw.randint(2, 5)),
    "convolution": convolution,
    "group norm": lambda draw: convolution(draw, nn.GroupNorm(2, 4)),
    "channels last": lambda draw: convolution(draw).to(memory_format=torch.channels_last),
    "embedding": words,
    "attention": lambda draw: Attention(words=WORDS),
    "tied": lambda draw: Attention(tied=True, words=WORDS),
    "multihead": lambda draw: Layers(nn.MultiheadAttention(4, 2, batch_first=True), 4),
    "encoder": encoder,
    "checkpointed": lambda draw: nn.Sequential(Checkpointed(linear(draw)), nn.Tanh(), nn.Linear(CLASSES, CLASSES)),
    "lstm": lambda draw: Layers(nn.LSTM(4, 4, batch_first=True), 4),
    "gru": lambda draw: Layers(nn.GRU(4, 4, draw.randint(1, 2), batch_first=True), 4),
}
BY_THEMSELVES: dict[str, Callable[[random.Random], nn.Module]] = {
    "batch norm": lambda draw: convolution(draw, nn.BatchNorm2d(4)),
    "dropout": lambda draw: linear(draw, True, nn.Dropout(0.3)),
    "spectral norm": lambda draw: nn.Sequential(spectral_norm(nn.Linear(4, 4)), *linear(draw)),
    "weight norm": lambda draw: nn.Sequential(weight_norm(nn.Linear(4, 4)), *linear(draw)),
    "dropout encoder": lambda draw: encoder(draw, 0.2),
}
"""Of these, ranks on parts of a batch don't compute what one process does on the whole."""
PICTURES = ("convolution", "group norm", "channels last", "batch norm")
FLAT = ("linear", "no bias", "layer norm", "transposed", "shared", "checkpointed")


def batch(model: str, loss: str, number: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """The batch of a number, in float64."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (rows, LENGTH + 1), generator=draw)
    classes = torch.randint(CLASSES, (rows,), generator=draw)
    if model in ("attention", "tied"):
        return tokens[:, :-1], tokens[:, 1:]
    if model in PICTURES:
        x = torch.randn(rows, 2, 5, 5, generator=draw, dtype=torch.float64)
    else:
        x = torch.randn(rows, 4, generator=draw, dtype=torch.float64)
    of_floats = model in (*PICTURES, *FLAT, "dropout", "spectral norm", "weight norm")
    y = functional.one_hot(classes, CLASSES).double() if loss == "squares" else classes
    return x if of_floats else tokens[:, :-1], y


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return functional.mse_loss(output, targets.to(output.dtype))
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


# --- bases ---

TORCH: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgdm": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "dampened": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.2}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.02, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"lr": 0.02}),
    "adamax": (torch.optim.Adamax, {"lr": 0.02}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
BY_GRADIENTS = ("sgd", "sgdm", "dampened", "nesterov")
IN_SINGLE = ("nadam", "asgd")
"""Torch loads what these keep in float32 in the dtype of the parameters: in another one they don't go on as they would have,
with or without LLQR."""
ONE_PROCESS = (*IN_SINGLE, "rprop")
"""The last steps by the signs of gradients, also of those that are rounding alone."""
ONE_CYCLE = ("sgdm", "nesterov", "adam", "adamw", "nadam", "radam")
"""Bases whose momentum a schedule may change."""


def rarely(step: int) -> bool:
    """A schedule of refits as a function."""
    return step % 3 == 1


@dataclass(frozen=True)
class Draw:
    """What is trained how. `llqr` are the options of LLQR, `base_options` those that are drawn for the base."""

    seed: int
    model: str
    loss: str
    base: str
    base_options: dict[str, Any]
    paper: bool
    llqr: dict[str, Any]
    closures: bool
    micro: int
    """Batches whose gradients a step adds up."""
    steps: int
    groups: bool
    """Two groups of parameters."""
    frozen: bool
    """The first trained tensor isn't."""
    clip: bool
    clears: str = "optimizer"
    """Who clears gradients: the optimizer, the model, or the model by zeros."""
    scheduler: str | None = None
    dtype: torch.dtype = torch.float64
    autocast: bool = False
    thaw: int = 0
    """From this step on, the frozen tensor is trained; 0 is never."""
    rows: list[int] = field(default_factory=lambda: [ROWS])
    """Of each rank."""
    extra: dict[str, Any] = field(default_factory=dict)
    """How it is saved, and what else only some of the runs draw."""


def drawn(kind: str, seed: int, sizes: tuple[int, ...] = (1,)) -> Draw:
    """The draw of a seed, for runs of a kind, on one process or on ranks."""
    draw = random.Random(f"{kind} {seed}")
    alone = sizes == (1,)
    model = draw.choice([*MODELS, *BY_THEMSELVES] if alone else list(MODELS))
    of_floats = model in (*FLAT, *PICTURES)
    loss = "squares" if of_floats and draw.random() < 0.2 else "classes"
    paper = draw.random() < 0.4
    llqr = _of_paper(draw, loss) if paper else _of_default(draw, loss)
    asked = getattr(llqr.get("divergence"), "needs_loss", False) or llqr.get("divergence") in ("newton", "gauss-newton")
    one_call = llqr.get("divergence") == "gauss-newton" or (asked and not paper)
    base = draw.choice([*TORCH, "own"] if alone else [name for name in [*TORCH, "own"] if name not in ONE_PROCESS])
    options = _base_options(draw, base, alone)
    if alone and paper and base in BY_GRADIENTS:
        options = {**options, "lr": 0.01}  # U g can be long
    precision = draw.choice([torch.float32, torch.float32, torch.float64, torch.float64, torch.bfloat16])
    # torch's fused SGD steps by other numbers than its own in bfloat16
    single = base in IN_SINGLE or ("fused" in options and base in BY_GRADIENTS)
    return Draw(
        seed,
        model,
        loss,
        base,
        options,
        paper,
        llqr,
        closures=asked or draw.random() < 0.25,
        micro=1 if one_call else draw.choice([1, 1, 2, 3]),
        steps=draw.randint(4, 9) if alone else draw.randint(3, 5),
        groups=draw.random() < 0.25,
        frozen=draw.random() < 0.15,
        clip=draw.random() < 0.15,
        clears=draw.choice(["optimizer", "optimizer", "model", "zeros"]),
        scheduler=_scheduler(draw, base),
        dtype=torch.float64 if not alone else torch.float32 if single else precision,
        autocast=alone and not asked and model not in ("lstm", "gru") and draw.random() < 0.1,
        thaw=draw.randint(0, 4) if alone and "fused" not in options else 0,  # torch's fused SGD can't
        rows=draw.choice(SPLITS[draw.choice(sizes)]),
        extra={"random": draw.getrandbits(32)},
    )


def _of_default(draw: random.Random, loss: str) -> dict[str, Any]:
    measures: list[Any] = [None, None, None, "gauss-newton", "newton"]
    if loss == "classes":
        measures += ["ngd", "renyi", "reverse-kl", KL(reduction="sum"), KL() + L2(0.3)]
    every = draw.choice([None, 1, 2, 3, 4, rarely])
    return {"divergence": draw.choice(measures), "structure": draw.choice(STRUCTURES), "every": every}


def _of_paper(draw: random.Random, loss: str) -> dict[str, Any]:
    family = "gaussian" if loss == "squares" else "categorical"
    measures: list[Any] = [KL(family), KL(family, reduction="sum"), KL(family) + L2(0.1), "gauss-newton", "newton"]
    divergence = draw.choice([*measures, "newton"])
    found: dict[str, Any] = {
        "divergence": divergence,
        "structure": draw.choice(STRUCTURES),
        "every": draw.choice([1, 2, 3, rarely]),
        "steps": draw.randint(1, 4),
        "solver": draw.choice([None, ScaleFree(), ScaleFree(), ConjugateGradient()]),
        "warm_start": draw.random() < 0.3,
        "ema": draw.choice([None, 0.0, 0.5]),
    }
    return found | ({"damping": 0.5} if divergence == "newton" else {})


def _base_options(draw: random.Random, base: str, alone: bool) -> dict[str, Any]:
    if base == "own":
        return {}
    kind, _ = TORCH[base]
    ways = [{}, {"foreach": True}, {"foreach": False}, *([{"fused": True}] if kind in FUSED else [])]
    options: dict[str, Any] = draw.choice(ways)
    if not alone and kind not in (torch.optim.SGD, torch.optim.ASGD):
        options = {**options, "eps": 1e-4}  # a gradient of rounding alone, as of a key's bias, isn't blown up
    return options


def _scheduler(draw: random.Random, base: str) -> str | None:
    return draw.choice([None, None, "step", "cosine", "plateau", *(["one cycle"] if base in ONE_CYCLE else [])])


# --- what is made of a draw, and trained ---


@dataclass
class Trained:
    """`called` is the model, in its wrapper if it has one."""

    model: nn.Module
    called: nn.Module
    optimizer: LLQR | PaperLLQR
    scheduler: Any = None


def bare_model(draw: Draw, other: int = 0) -> nn.Module:
    """The model of a draw; with other weights, if they are to be loaded."""
    torch.manual_seed(draw.seed + other)
    made = {**MODELS, **BY_THEMSELVES}[draw.model](random.Random(draw.seed)).to(draw.dtype)
    if draw.frozen:
        next(made.parameters()).requires_grad_(False)
    return made


def optimized(draw: Draw, model: nn.Module, called: nn.Module) -> Trained:
    """With a base, LLQR around it, and a scheduler."""
    parameters: list[Any] = list(model.parameters())
    if draw.groups and len(parameters) > 1:
        parameters = [{"params": parameters[1::2], "lr": 0.03}, {"params": parameters[::2]}]
    if draw.base == "own":
        base: torch.optim.Optimizer = OwnBase(parameters, lr=0.05)
    else:
        kind, options = TORCH[draw.base]
        base = kind(parameters, **{**options, **draw.base_options})
    optimizer = (LLQR.paper if draw.paper else LLQR)(base, called, **draw.llqr)
    return Trained(model, called, optimizer, _made_scheduler(draw, optimizer))


def _made_scheduler(draw: Draw, optimizer: torch.optim.Optimizer) -> Any:
    if draw.scheduler == "step":
        return lr_scheduler.StepLR(optimizer, 2, 0.5)
    if draw.scheduler == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, 6)
    if draw.scheduler == "one cycle":
        return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12)
    return None if draw.scheduler is None else lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
