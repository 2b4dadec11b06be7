"""K-FAC and AdaFisher, our own, from their published formulas: no package with a licence that we can use has them.

Both look at every linear layer and convolution: at its inputs a, with a 1 for the bias, and at the gradients g of each
example's loss at its outputs. A convolution's are those of all T places, where a is the patch that it sees. With a mean over
examples and sums over places,

    A = E[Σ_t a aᵀ],   G = E[Σ_t g gᵀ] / T,

the layer's block of the Fisher matrix is about A ⊗ G (Martens & Grosse 2015; Grosse & Martens 2016). The gradients are those of
the training labels. Other parameters are stepped by momentum alone, at the same rate.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

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
    """θ ← θ - lr · direction, from gradient + weight_decay · θ and what is known of each layer: at every so-many-th step its
    inputs and gradients are looked at."""

    usual: int
    """Steps between looks, where nothing else is said."""
    watched: tuple[type, ...]

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 1e-3,
        every: int | None = None,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": 0}
        super().__init__(model.parameters(), settings)
        self.damping, self.every = damping, every or self.usual
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

    usual, watched, clip = 10, LAYERS, 1.0

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

    usual, watched, memory = 100, (*LAYERS, *NORMS), 0.8

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
