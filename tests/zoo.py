"""Small models of the kinds that people train, in float64, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 3


class Attention(nn.Module):
    """Embedding, fused causal attention, GELU MLP, residuals, LayerNorm; the output layer tied to the embedding if asked."""

    def __init__(self, tied: bool = False, words: int = 5, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Sequential(nn.Linear(width, 6), nn.GELU(), nn.Linear(6, width))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.head(x + self.mix(x))  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4))
        self.leave = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
        x = self.enter(x) + shift
        return {"answer": self.leave((x + self.inner(x)).tanh()), "other": x}


def convolution() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, 2, 1, bias=False),
        nn.BatchNorm2d(3),
        nn.SiLU(inplace=True),
        nn.Conv2d(3, 4, 2, groups=1),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    return model


class Shapes(nn.Module):
    """Convolutions in one and three dimensions, dilated and grouped; functions with options; norms over two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(2, 4, 2, dilation=2, groups=2)
        self.three = nn.Conv3d(1, 2, 2, stride=(1, 2, 1), padding=(0, 1, 0))
        self.norm = nn.LayerNorm((2, 3), eps=0.1)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.one(x), approximate="tanh").reshape(len(x), 1, 2, 4, 3)
        x = functional.softplus(self.three(x), beta=2.0).mean((2, 3))
        x = self.norm(torch.cat((x, x[..., :1]), -1))
        return self.last(x.flatten(1))  # type: ignore[no-any-return]


class InPlace(nn.Module):
    """In-place functions whose inputs are read again, a bare LayerNorm before one, and parameters that are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 4)
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.norm = nn.LayerNorm(4, elementwise_affine=False)
        self.leave = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        y = functional.silu(x, inplace=True)
        x = functional.linear(x + y, self.a + self.b)
        return self.leave(self.norm(x).mul_(2.0).sin_())  # type: ignore[no-any-return]


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=-100)


Case = tuple[nn.Module, Any, Tensor, Callable[[Tensor, Tensor], Tensor]]


def cases() -> dict[str, Case]:
    """name → (model, inputs, targets, loss)."""
    torch.manual_seed(1)
    tokens, following = torch.randint(5, (4, 3)), torch.randint(5, (4, 3))
    labels = torch.randint(CLASSES, (4,))
    return {
        "attention": (Attention().double(), tokens, following, token_loss),
        "tied": (Attention(tied=True).double(), tokens, following, token_loss),
        "convolution": (
            convolution().double().eval(),
            torch.randn(4, 2, 5, 5).double(),
            labels,
            functional.cross_entropy,
        ),
        "batch statistics": (
            convolution().double(),
            torch.randn(4, 2, 5, 5).double(),
            labels,
            functional.cross_entropy,
        ),
        "shapes": (Shapes().double(), torch.randn(4, 2, 8).double(), labels, functional.cross_entropy),
        "in place": (InPlace().double(), torch.randn(4, 3).double(), labels, functional.cross_entropy),
        "residual": (
            Residual().double(),
            {"x": torch.randn(4, 3).double(), "shift": torch.randn(4, 4).double()},
            labels,
            functional.cross_entropy,
        ),
    }


def pick(output: Any) -> Tensor:
    return output["answer"] if isinstance(output, dict) else output
