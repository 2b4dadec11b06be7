"""Other optimizers: torch's Muon; SOAP, Shampoo and SINGD from packages (the extra `peers`); our own K-FAC and AdaFisher.

Muon and SINGD are for some parameters only: AdamW takes the others, at the same learning rate, which is how they are used.
"""

import importlib
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from llqr_lab.errors import ConfigError, RunError
from llqr_lab.experiments.config import Base
from llqr_lab.experiments.presets import LARGEST_FACTOR

PRECONDITION_EVERY = 10
"""Steps between new preconditioners, of SOAP, Shampoo and SINGD alike: the default of two of them."""


class Several(Optimizer):
    """Optimizers as one, each with parameters of its own."""

    def __init__(self, parts: Iterable[Optimizer], resumable: bool = True) -> None:
        """`resumable`: their state is made of tensors and builtins, which alone a checkpoint gives back."""
        self.parts, self.resumable = list(parts), resumable
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return defaultdict(dict, {tensor: held for part in self.parts for tensor, held in part.state.items()})

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        """The parts have their own."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        parts = [part.state_dict() if self.resumable else {} for part in self.parts]
        return {"state": {}, "param_groups": [], "parts": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.resumable:
            names = " and ".join(type(part).__name__ for part in self.parts)
            raise RunError(f"a run by {names} can't go on where it was stopped: remove its folder and begin anew")
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class InFloat32(TorchFunctionMode):
    """Where bfloat16 is asked for, float32 is given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class MuonInFloat32(Muon):
    """torch's Muon, with its iteration in float32 on a processor. Most of these only emulate torch's bfloat16: there a step of
    an MLP takes 0.7 s in place of 0.03, which says nothing about Muon."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        on_processor = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        with InFloat32() if on_processor else nullcontext():
            return super().step(closure)  # type: ignore[no-untyped-call]


def muon(base: Base, model: nn.Module) -> Optimizer:
    """For the matrices of linear layers; embeddings with what they share, the last layer, convolutions, vectors are AdamW's."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside = {id(p) for module in (*layers[-1:], *tables) for p in module.parameters()}
    found = dict.fromkeys(p for module in layers for p in module.parameters(recurse=False))
    inside = [p for p in found if p.dim() == 2 and id(p) not in outside]
    if not inside:
        raise ConfigError("muon is for matrices inside a network, and this one has none")
    settings: dict[str, Any] = {"weight_decay": base.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    return Several([MuonInFloat32(inside, lr=base.lr, momentum=0.95, **settings), *_rest(base, model, inside)])


def soap(base: Base, model: nn.Module) -> Optimizer:
    kind = _imported("pytorch_optimizer", "SOAP")
    settings = {
        "betas": (0.95, 0.95),
        "weight_decay": base.weight_decay,
        "precondition_frequency": PRECONDITION_EVERY,
        "max_precondition_dim": LARGEST_FACTOR,
    }
    return Several([kind(model.parameters(), lr=base.lr, **settings)])


def shampoo(base: Base, model: nn.Module) -> Optimizer:
    """With blocks of 512 and step lengths taken from SGD's, as in large runs."""
    kind = _imported("pytorch_optimizer", "ScalableShampoo")
    settings = {"weight_decay": base.weight_decay, "preconditioning_compute_steps": PRECONDITION_EVERY}
    return Several([kind(model.parameters(), lr=base.lr, **settings)], resumable=False)


def singd(base: Base, model: nn.Module) -> Optimizer:
    """For linear layers and convolutions, but for those over a vocabulary. Losses of sequences are means over their positions
    too, which it wants to be told."""
    kind = _imported("singd.optim.optimizer", "SINGD")
    known = [module for module in model.modules() if isinstance(module, kind.SUPPORTED_MODULES)]
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    large = {words for words in vocabularies if words > LARGEST_FACTOR}
    inside = list(dict.fromkeys(p for m in known if len(m.weight) not in large for p in m.parameters()))
    if not inside:
        raise ConfigError("singd is for linear layers and convolutions, and this network has none inside")
    sequences = vocabularies and not getattr(model, "one_output", False)
    settings = {
        "weight_decay": base.weight_decay,
        "T": PRECONDITION_EVERY,
        "normalize_lr_cov": True,
        "loss_average": "batch+sequence" if sequences else "batch",
    }
    chosen = kind(model, params=inside, lr=base.lr, momentum=base.momentum, **settings)
    return Several([chosen, *_rest(base, model, inside)], resumable=False)


# K-FAC and AdaFisher, our own, from their published formulas: no package with a licence that we can use has them

LAYERS = (nn.Linear, nn.Conv2d)
NORMS = (nn.BatchNorm2d, nn.LayerNorm)


def sides(layer: Any, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """a and g at all places, (examples, places, numbers): the layer's gradient is Σ g aᵀ, with that of the bias at its end."""
    if isinstance(layer, nn.Conv2d):
        shape = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        a = functional.unfold(inputs, *shape).transpose(1, 2)  # type: ignore[arg-type]
        g = gradients.flatten(2).transpose(1, 2)
    else:
        a, g = (each.reshape(len(each), -1, each.shape[-1]) for each in (inputs, gradients))
    return (a if layer.bias is None else functional.pad(a, (0, 1), value=1.0)), g


Slopes = dict[Tensor, Tensor]
"""A tensor of its shape for each parameter."""


class OnLayers(Optimizer):
    """θ ← θ - lr · direction, from gradient + weight_decay · θ and what is known of each layer from every so-many-th step.

    Looked at is every linear layer and convolution: at its inputs a, with a 1 for the bias, and at the gradients g of each
    example's loss at its outputs. A convolution's are those of all T places, where a is the patch that it sees. With a mean
    over examples and sums over places,

        A = E[Σ_t a aᵀ],   G = E[Σ_t g gᵀ] / T,

    the layer's block of the Fisher matrix is about A ⊗ G (Martens & Grosse 2015; Grosse & Martens 2016). The gradients are
    those of the training labels. Other parameters are stepped by momentum alone, at the same rate.
    """

    every: int
    watched: tuple[type, ...]
    damping = 1e-3

    def __init__(self, model: nn.Module, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": 0}
        super().__init__(model.parameters(), settings)
        affine = (each for each in model.modules() if isinstance(getattr(each, "weight", None), nn.Parameter))
        whole = (each for each in affine if isinstance(each, self.watched) and getattr(each, "groups", 1) == 1)
        self.layers: list[Any] = list(whole)
        self.seen: list[tuple[Any, Tensor, Tensor]] = []
        alive = weakref.ref(self)

        def hook(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if (optimizer := alive()) is not None:
                optimizer.listen(layer, args[0].detach(), output)

        for layer in self.layers:
            layer.register_forward_hook(hook)

    def listen(self, layer: nn.Module, inputs: Tensor, output: Tensor) -> None:
        due = self.param_groups[0]["steps"] % self.every == 0
        own = any(layer is each for each in self.layers)  # not one of a copy of the model
        if due and own and output.requires_grad:
            output.register_hook(lambda gradient: self.seen.append((layer, inputs, gradient.detach())))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for layer, inputs, gradients in self.seen:
            # the loss is a mean over the batch: the gradient of each example's own is so many times that
            self.look(layer, inputs, gradients * len(gradients))
        self.seen = []
        group = self.param_groups[0]
        group["steps"] += 1
        slopes = {p: p.grad + group["weight_decay"] * p for p in group["params"] if p.grad is not None}
        for p, direction in self.directions(slopes).items():
            p.sub_(direction, alpha=group["lr"])
        return loss

    def known_layers(self, slopes: Slopes) -> list[Any]:
        """Those that something is known of, with all their parameters among these."""
        known = (layer for layer in self.layers if "G" in self.state[layer.weight])
        return [each for each in known if each.weight in slopes and (each.bias is None or each.bias in slopes)]

    def momentum(self, slopes: Slopes, share: float) -> Slopes:
        """b ← momentum · b + share · slope."""
        found = {}
        for p, slope in slopes.items():
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            found[p] = buffer.mul_(self.param_groups[0]["momentum"]).add_(slope, alpha=share)
        return found

    @abstractmethod
    def look(self, layer: Any, inputs: Tensor, gradients: Tensor) -> None:
        """At what a layer was given and got back, of each example's own loss."""

    @abstractmethod
    def directions(self, slopes: Slopes) -> Slopes: ...


class KFAC(OnLayers):
    """[W b] ← (G + √λ/π)⁻¹ [W b] (A + π√λ)⁻¹ of gradients, π² = mean(diag A) / mean(diag G): the damping λ of A ⊗ G in two
    factors. All of them together are then shortened to a norm of `clip`, and go into the momentum."""

    every, watched, clip = 10, LAYERS, 1.0

    def look(self, layer: Any, inputs: Tensor, gradients: Tensor) -> None:
        a, g = sides(layer, inputs, gradients)
        examples, places = a.shape[:2]
        a, g = a.flatten(0, 1), g.flatten(0, 1)
        factors = (a.T @ a / examples, g.T @ g / (examples * places))
        sizes = [float(factor.diagonal().mean()) for factor in factors]
        balance = (sizes[0] / sizes[1]) ** 0.5 if min(sizes) > 0 else 1.0
        root = self.damping**0.5
        for name, factor, shift in zip(("A", "G"), factors, (root * balance, root / balance), strict=True):
            damped = factor + shift * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
            self.state[layer.weight][name] = torch.cholesky_inverse(torch.linalg.cholesky(damped))

    def directions(self, slopes: Slopes) -> Slopes:
        for layer in self.known_layers(slopes):
            known, whole = self.state[layer.weight], slopes[layer.weight].flatten(1)
            if layer.bias is not None:
                whole = torch.cat((whole, slopes[layer.bias][:, None]), 1)
            whole = known["G"] @ whole @ known["A"]
            if layer.bias is not None:
                whole, slopes[layer.bias] = whole[:, :-1], whole[:, -1]
            slopes[layer.weight] = whole.reshape(layer.weight.shape)
        norm = float(torch.stack([slope.norm() for slope in slopes.values()]).norm())
        return self.momentum(slopes, min(1.0, self.clip / max(norm, 1e-12)))


class AdaFisher(OnLayers):
    """m̂ / F̃ with Adam's m̂, and F̃ = diag(A)' ⊗ diag(G)' + λ in the place of √v̂ (Gomes et al. 2025).

    Both diagonals are means over the looks, in which those before count γ and the new one 1 - γ; ' maps the least of their
    numbers to 0 and the largest to 1. Of a normalisation, whose inputs all have one size, F̃ = diag(G)' + λ. F̃ is 1 for what is
    in no such layer.
    """

    every, watched, memory = 100, (*LAYERS, *NORMS), 0.8

    def look(self, layer: Any, inputs: Tensor, gradients: Tensor) -> None:
        if isinstance(layer, NORMS):
            by_numbers = gradients.movedim(1, -1) if isinstance(layer, nn.BatchNorm2d) else gradients
            new = {"G": by_numbers.reshape(-1, layer.weight.numel()).square().mean(0)}
        else:
            new = {name: x.square().mean((0, 1)) for name, x in zip("AG", sides(layer, inputs, gradients), strict=True)}
        known = self.state[layer.weight]
        known |= {name: torch.lerp(x, known[name], self.memory) if name in known else x for name, x in new.items()}

    def directions(self, slopes: Slopes) -> Slopes:
        beta, steps = self.param_groups[0]["momentum"], self.param_groups[0]["steps"]
        means = {p: mean / (1 - beta**steps) for p, mean in self.momentum(slopes, 1 - beta).items()}
        for layer in self.known_layers(slopes):
            known, outputs = self.state[layer.weight], _from_0_to_1(self.state[layer.weight]["G"])
            fisher = outputs[:, None] * _from_0_to_1(known["A"]) if "A" in known else torch.stack((outputs, outputs), 1)
            fisher = fisher + self.damping
            if layer.bias is not None:
                fisher, bias = fisher[:, :-1], fisher[:, -1]
                means[layer.bias] = means[layer.bias] / bias.reshape(layer.bias.shape)
            elif "A" not in known:
                fisher = fisher[:, :1]
            means[layer.weight] = means[layer.weight] / fisher.reshape(layer.weight.shape)
        return means


def _from_0_to_1(x: Tensor) -> Tensor:
    return (x - x.min()) / (x.max() - x.min()).clamp_min(torch.finfo(x.dtype).tiny)


PEERS: Mapping[str, Callable[[Base, nn.Module], Optimizer]] = {
    "muon": muon,
    "soap": soap,
    "shampoo": shampoo,
    "singd": singd,
    "kfac": lambda base, model: KFAC(model, base.lr, base.momentum, base.weight_decay),
    "adafisher": lambda base, model: AdaFisher(model, base.lr, base.momentum, base.weight_decay),
}


def _rest(base: Base, model: nn.Module, taken: Iterable[nn.Parameter]) -> list[Optimizer]:
    others = {id(p) for p in taken}
    left = [p for p in model.parameters() if id(p) not in others]
    return [AdamW(left, lr=base.lr, betas=(0.9, base.beta2), weight_decay=base.weight_decay)] if left else []


def _imported(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{name} isn't installed ({error}): pip install -e './lab[peers]'") from error
