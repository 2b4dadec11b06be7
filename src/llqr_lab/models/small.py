"""Small networks for benchmarks and demonstrations: a transformer of the grokking task's size, CNNs, an MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention and a GELU MLP, each behind a LayerNorm, with residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Tokens in, the logits of what follows the last one out (as for a ∘ b = ?)."""

    def __init__(self, words: int = 99, length: int = 4, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(tokens) + self.position)
        return self.head(self.norm(hidden[:, -1]))  # type: ignore[no-any-return]


def convnet(classes: int = 10) -> nn.Sequential:
    """Four 3 × 3 convolutions with BatchNorm, for 32 × 32 pictures."""

    def layer(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*layer(3, 32, 1), *layer(32, 64, 2), *layer(64, 64, 1), *layer(64, 128, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def mlp(classes: int = 10) -> nn.Sequential:
    """784-512-512-10, for 28 × 28 pictures."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, classes))


def picture_net(
    pixels: int, strides: tuple[int, ...], classes: int = 10, norm: bool = False, dropout: float = 0.0
) -> nn.Sequential:
    """3 × 3 convolutions of these strides and two linear layers, for grey pictures; with BatchNorm or dropout if wanted."""
    layers: list[nn.Module] = []
    side, channels, kernel = pixels, 1, 3
    for i, stride in enumerate(strides):
        wider = 32 if i else 16
        layers += [nn.Conv2d(channels, wider, kernel, stride, kernel // 2), *([nn.BatchNorm2d(wider)] if norm else [])]
        layers.append(nn.ReLU())
        side, channels = -(-side // stride), wider
    layers += [nn.Flatten(), nn.Linear(channels * side * side, 64), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(64, classes))
