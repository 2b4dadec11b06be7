"""Promise: the library is `llqr.minimal`, which can be read in one go: the same numbers, over refits, to 1e-9."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from llqr import LLQR
from llqr.divergences import KL
from llqr.minimal import MinimalLLQR, apply, categorical, damped_inverse, fit_along_gradient, identity, kl
from llqr.structures import Kronecker
from loops import STRUCTURES

STEPS = 17
REFITS = 14
"""Among these steps: 0 to 10, 12, 14, 16."""
Loss = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """An embedding and a norm, which are the base's, and linear maps over (batch, time, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.qkv, self.out, self.head = nn.Linear(6, 18, bias=False), nn.Linear(6, 6), nn.Linear(6, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        heads = (t.unflatten(2, (2, 3)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, 2))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return torch.as_tensor(self.head(x + self.out(attended.transpose(1, 2).flatten(2))))


class Residual(nn.Module):
    """The same two layers twice, with a side that is inverted by its leading eigenvectors."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.head = nn.Linear(4, 200), nn.Linear(200, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.narrow(self.wide(x).relu())
        return torch.as_tensor(self.head(x))


def convnet() -> nn.Module:
    """Strides, groups, dilation, padding of three kinds, BatchNorm, and activations that overwrite a layer's output."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, (3, 2), padding="same", groups=3, dilation=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, padding=(0, 1), padding_mode="circular"),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3))


def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 9, bias=False))


def tokens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pictures(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(12, 2, 8, 8, generator=g), torch.randint(3, (12,), generator=g)


def in_many_units(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """The last input is always zero."""
    units = torch.tensor([1e-3, 1.0, 30.0, 1.0, 0.0])
    return units * torch.randn(16, 5, generator=g), torch.randint(3, (16,), generator=g)


def sequences(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """More places than are looked at."""
    return torch.randint(7, (110, 10), generator=g), torch.randint(7, (110, 10), generator=g)


def curves(g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(20, 9, generator=g)
    return x, x


def points(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(24, 4, generator=g), torch.randint(3, (24,), generator=g)


Task = tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[Tensor, Tensor]], Loss]
TASKS: dict[str, Task] = {
    "MLP": (mlp, in_many_units, functional.cross_entropy),
    "convnet": (convnet, pictures, functional.cross_entropy),
    "attention": (Attention, sequences, tokens_loss),
    "autoencoder": (autoencoder, curves, functional.mse_loss),
    "residual": (Residual, points, functional.cross_entropy),
}
BASES: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, dampening": lambda p: SGD(p, lr=0.05, momentum=0.5, dampening=0.3),
    "SGD, plain": lambda p: SGD(p, lr=0.05),
    "AdamW": lambda p: AdamW(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    "RMSprop": lambda p: RMSprop(p, lr=0.003, weight_decay=0.01),
}


def gaussian(output: Tensor, generator: torch.Generator) -> Tensor:
    """Slopes of ½‖y - x_N‖², a mean over all numbers, for y drawn around x_N: the Fisher matrix of Gaussians is 1."""
    return torch.randn(output.shape, dtype=output.dtype, generator=generator) / output.numel() ** 0.5


def batches(data: Callable[[torch.Generator], tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = data(generator)
        yield (x.double() if x.is_floating_point() else x), (y.double() if y.is_floating_point() else y)


def trained(model: nn.Module, optimizer: Any, data: Any, loss: Loss) -> dict[str, Tensor]:
    for number, (x, y) in enumerate(batches(data)):
        optimizer.zero_grad()
        (loss(model(x), y) * (20 if number == 15 else 1)).backward()  # a step that is made shorter
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("divergence", [None, "ngd"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("task", TASKS)
def test_default(task: str, base: str, divergence: str | None) -> None:
    """Parameters, A and G after 17 steps, 14 of them with a refit; drawn gradients share the generator's seed."""
    make, data, loss = TASKS[task]
    torch.manual_seed(0)
    model = make().double()
    small, alone = copy.deepcopy(model), copy.deepcopy(model)
    family = "gaussian" if task == "autoencoder" else "categorical"
    optimizer = LLQR(BASES[base](model.parameters()), model, None if divergence is None else KL(family))
    draw = None if divergence is None else gaussian if task == "autoencoder" else categorical
    whole = trained(model, optimizer, data, loss)
    reference = MinimalLLQR(BASES[base](small.parameters()), small, draw)
    minimal = trained(small, reference, data, loss)
    plain = trained(alone, BASES[base](alone.parameters()), data, loss)
    assert optimizer.stats.refits == REFITS
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    assert sorted(optimizer.blocks) == sorted(f"{name}.weight" for name in layers)
    for name, layer in zip(layers, reference.layers, strict=True):
        moments = optimizer.blocks[f"{name}.weight"].moments
        assert (moments["columns"] - layer.A).norm() <= 1e-9 * layer.A.norm(), name
        assert (moments["rows"] - layer.G).norm() <= 1e-9 * layer.G.norm(), name
    for name, p in whole.items():
        assert (p - minimal[name]).norm() <= 1e-9 * p.norm(), name
        if name.rpartition(".")[0] in layers:
            assert (p - plain[name]).norm() > 1e-4 * p.norm(), name


def test_long_sides() -> None:
    """Also where M has no leading directions."""
    noise = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    M = torch.eye(300).double() + 0.003 * (noise + noise.mT)
    inverse = Kronecker().closed_form({"rows": M}, 0.3**2)
    whole = torch.diag_embed(inverse["diagonal of C"]) - inverse["C"] @ inverse["C"].mT
    torch.testing.assert_close(whole, damped_inverse(M, 0.3), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_paper(structure: str, divergence: str) -> None:
    """Algorithm 1 with the paper's hyperparameters: U ← β U + (1 - β) fit at every third step; the base steps with U g."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)).double()
    small = copy.deepcopy(model)
    optimizer = LLQR.paper(SGD(model.parameters(), 0.1, momentum=0.9), model, divergence, structure, every=3)
    base, parameters = SGD(small.parameters(), 0.1, momentum=0.9), dict(small.named_parameters())
    beta = 0.95 if divergence == "ngd" else 0.9
    u = {name: identity(structure, p.detach()) for name, p in parameters.items()}
    for number in range(7):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(10, 1, 4, 4, generator=generator).double(), torch.randint(3, (10,), generator=generator)
        x = x if divergence == "newton" else 3 * x  # gradients of J that are clipped

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        def loss(at: dict[str, Tensor], x: Tensor = x, y: Tensor = y) -> Tensor:
            return functional.cross_entropy(functional_call(small, at, (x,)), y)

        optimizer.step(closure)
        here = {name: p.detach().clone() for name, p in parameters.items()}
        if number % 3 == 0:
            distance = kl(small, x) if divergence == "ngd" else loss
            new = fit_along_gradient(loss, distance, here, structure)
            u = {name: {key: beta * t + (1 - beta) * new[name][key] for key, t in b.items()} for name, b in u.items()}
        for name, g in grad(loss)(here).items():
            parameters[name].grad = apply(u[name], g)
        base.step()
    assert optimizer.stats.refits == 3
    assert optimizer.preconditioner is not None
    torch.testing.assert_close(optimizer.preconditioner.blocks, u, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dict(model.named_parameters()), parameters, rtol=1e-9, atol=1e-12)


def test_unknown_structures_are_refused() -> None:
    with pytest.raises(ValueError, match="ekfac or dense, not 'kfak'"):
        identity("kfak", torch.zeros(2, 2))
