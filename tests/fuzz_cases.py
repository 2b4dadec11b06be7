"""What one seed of the fuzz draws: a network with its batch, loss, divergence and options."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fuzz_blocks import Draw, Shape
from fuzz_layers import beginning, body, ending
from fuzz_truth import Of, classes, coins, numbers
from llqr.divergences import KL, Divergence, GaussNewton, Newton, Renyi, ReverseKL
from llqr.divergences.families import Categorical, Gaussian


class Network(nn.Module):
    """Blocks in a row, with a second input perhaps, and an output in some container."""

    def __init__(self, blocks: Sequence[nn.Module], container: str) -> None:
        super().__init__()
        self.blocks, self.container = nn.Sequential(*blocks), container

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        y = self.blocks(x if extra is None else x + 0.5 * extra)
        containers = {"tuple": (x, y), "dict": {"logits": y}, "answer": {"answer": y}}
        return SimpleNamespace(logits=y) if self.container == "object" else containers.get(self.container, y)

    def extra_repr(self) -> str:
        return f"returns: {self.container}"


SELECTORS: dict[str, Callable[[Any], Tensor]] = {"tuple": lambda out: out[1], "answer": lambda out: out["answer"]}


@dataclass
class Case:
    """What one seed has drawn."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Callable[[Tensor, Any], Tensor]
    plain: Of
    divergence: Divergence
    terms: list[tuple[float, Callable[[Tensor, Tensor], Tensor] | None]]
    """Weights and ψ(output, base) of the divergence; None for the loss with all its curvature."""
    marks: set[str]
    options: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    single: bool = False
    """The library is given it in float32; the truth is that of the same numbers in float64."""

    def select(self, output: Any) -> Tensor:
        if isinstance(output, (tuple, dict)):
            return list(output.values() if isinstance(output, dict) else output)[-1]
        return output if isinstance(output, Tensor) else output.logits

    def run(self) -> Tensor:
        x = self.inputs
        args, named = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
        args, named = [a.clone() for a in args], {name: a.clone() for name, a in named.items()}
        return self.select(self.model(*args, **named))

    def given(self) -> list[Tensor]:
        """The inputs, in a row."""
        if isinstance(self.inputs, dict):
            return list(self.inputs.values())
        return list(self.inputs) if isinstance(self.inputs, tuple) else [self.inputs]

    def convert(self, dtype: torch.dtype) -> Case:
        """The same numbers in another precision."""

        def to(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(dtype) if value.is_floating_point() else value
            if isinstance(value, dict):
                return {name: to(part) for name, part in value.items()}
            return tuple(map(to, value)) if isinstance(value, tuple) else value

        self.model.to(dtype)
        self.inputs, self.targets, self.options = to(self.inputs), to(self.targets), to(self.options)
        return self

    def __str__(self) -> str:
        shapes = [tuple(tensor.shape) for tensor in self.given()]
        options = {name: value for name, value in self.options.items() if name not in ("weights", "gradient", "output")}
        about = f"{self.divergence!r}, {options}, in float32: {self.single}, "
        about += f"training {self.model.training}, marks {sorted(self.marks)}"
        return f"{self.model}\ninputs {shapes}, {about}"


def made(seed: int) -> Case:
    """The network of a seed, with all that goes with it."""
    d = Draw(seed)
    torch.manual_seed(seed)
    single, batch = d.chance(0.04), d.size(1, 5)
    x, first, shape = beginning(d, batch, single)
    middle, shape = body(d, shape, single)
    family = d.one("categorical", "categorical", "gaussian", "bernoulli")
    kind = d.one("example", "steps", "along 1") if family == "categorical" else "example"
    last, after = ending(d, shape, kind, d.size(), single)
    whole = after if single else (batch, *after)
    dim = 1 if kind == "along 1" and len(after) > 1 else -1
    if family == "categorical":
        loss, targets, plain = classes(d, whole, dim)
    else:
        loss, targets, plain = (numbers if family == "gaussian" else coins)(d, whole)
    container = d.one("tensor", "tensor", "tensor", "tuple", "dict", "answer", "object")
    model = Network([*first, *middle, *last], container).double()
    with torch.no_grad():
        for parameter in model.parameters():  # many begin at zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.train(d.chance(0.5))
    if d.chance(0.15):
        d.one(*model.modules()).eval()
    divergence, terms, weights = measured(d, family, dim, whole, plain, single)
    case = Case(model, x, targets, loss, plain, divergence, terms, d.marks)
    case.names = [name for name, p in model.named_parameters() if p.requires_grad]
    case.options = optional(d, case, batch, single)
    if weights is not None:
        case.options["weights"] = weights
    if container in SELECTORS:
        case.options["output"] = SELECTORS[container]
    weak = "batch" in d.marks and "chunk_size" in case.options  # below √eps of the output it isn't seen in float32
    if "random" not in d.marks and not weak and d.chance(0.25):  # masks of another precision are others
        d.marks.add("float32")
        case.single = True
        case.convert(torch.float32).convert(torch.float64)
    return case


def measured(
    d: Draw, family: str, dim: int, whole: Shape, plain: Of, single: bool
) -> tuple[Divergence, list[Any], Tensor | None]:
    """A divergence, and what it is, written out."""
    reduction, variance = d.one("mean", "mean", "sum"), d.one(1.0, 0.3)
    given: Any = {"categorical": Categorical(dim), "gaussian": Gaussian(variance), "bernoulli": family}[family]
    variables = [n for i, n in enumerate(whole) if family != "categorical" or i != dim % len(whole)]
    kind = d.one("KL", "KL", "KL", "GN", "GN", "Newton", "Newton", "Newton", "Rényi", "reverse", "mixture")
    weights = None
    if kind in ("KL", "reverse") and not single and d.chance(0.2):
        weights = torch.rand(variables, dtype=torch.float64) * (torch.rand(variables) < 0.7)
        weights.view(-1)[0] = 0.5
    total: Any = 1.0 if reduction == "sum" else torch.ones(variables).sum() if weights is None else weights.sum()

    def log_p(x: Tensor) -> Tensor:
        x = torch.stack((x, torch.zeros_like(x)), -1) if family == "bernoulli" else x.movedim(dim, -1)
        return x - x.logsumexp(-1, keepdim=True)

    def kl(q: Tensor, p: Tensor) -> Tensor:
        each = (p - q).square() / (2 * variance)
        if family != "gaussian":
            each = (log_p(p).exp() * (log_p(p) - log_p(q))).sum(-1)
        return (each if weights is None else each * weights).sum() / total

    def renyi(q: Tensor, p: Tensor) -> Tensor:
        if family == "gaussian":
            return 0.7 * kl(q, p)
        return ((0.7 * log_p(p) + 0.3 * log_p(q)).exp().sum(-1).log() / (0.7 - 1)).sum() / total

    def loss(x: Tensor, k: Tensor) -> Tensor:
        return plain(x)

    kinds: dict[str, tuple[Divergence, list[Any]]] = {
        "KL": (KL(given, reduction), [(1.0, kl)]),
        "GN": (GaussNewton(), [(1.0, loss)]),
        "Newton": (Newton(), [(1.0, None)]),
        "Rényi": (Renyi(0.7, given, reduction), [(1.0, renyi)]),
        "reverse": (ReverseKL(given, reduction), [(1.0, lambda q, p: kl(p, q))]),
        "mixture": (0.5 * Newton() + 2 * KL(given, reduction) + GaussNewton(), [(0.5, None), (2.0, kl), (1.0, loss)]),
    }
    return *kinds[kind], weights


def optional(d: Draw, case: Case, batch: int, single: bool) -> dict[str, Any]:
    """Damping, chunks, modes, a second input, a part of the parameters, a known gradient, a closure."""
    options: dict[str, Any] = {"damping": d.one(0.0, 0.1, 2.0)}
    if d.chance(0.45):
        options["chunk_size"] = d.size(1, batch + 1)
    if d.chance(0.25):
        options["training"] = d.chance(0.5)
    if d.chance(0.1) and len(case.names) > 1:
        case.names = options["only"] = [name for name in case.names if d.chance(0.6)] or case.names[:1]
    if d.chance(0.1):
        options["damping"] = {name: d.one(0.0, 0.3) for name in case.names}
    if case.inputs.is_floating_point() and not single and d.chance(0.25):
        shared = d.chance(0.4)
        extra = torch.randn(case.inputs.shape[1:] if shared else case.inputs.shape, dtype=torch.float64)
        if shared and len(extra) == batch:
            if d.chance(0.5):
                options["shared"] = ["extra"]
            else:
                case.marks.add("batch")
        case.inputs = {"x": case.inputs, "extra": extra} if shared or d.chance(0.5) else (case.inputs, extra)
    elif d.chance(0.1):
        case.inputs = {"x": case.inputs}
    if isinstance(case.divergence, (KL, Renyi, ReverseKL)) and d.chance(0.05):
        held = dict(case.model.named_parameters())
        options["gradient"] = {name: torch.ones_like(held[name]) for name in case.names}
    if isinstance(case.divergence, Newton) and "chunk_size" not in options and d.chance(0.1):
        options["closure"] = lambda: case.loss(case.run(), case.targets)
    return options


def streams(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
