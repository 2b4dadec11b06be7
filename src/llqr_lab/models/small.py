"""Small networks for benchmarks and demonstrations: CNNs and MLPs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def convnet(classes: int = 10) -> nn.Sequential:
    """Four 3 × 3 convolutions with BatchNorm, for 32 × 32 pictures."""

    def layer(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*layer(3, 32, 1), *layer(32, 64, 2), *layer(64, 64, 1), *layer(64, 128, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def mlp(classes: int = 10, inputs: int = 784, width: int = 512, layers: int = 2) -> nn.Sequential:
    """Linear layers with ReLUs between them, `layers` of them hidden: 784-512-512-10, for 28 × 28 pictures."""
    sizes = [inputs, *[width] * layers]
    hidden = [part for size, wider in pairwise(sizes) for part in (nn.Linear(size, wider), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], classes))


def picture_mlp(classes: int = 10, pixels: int = 28, width: int = 512, layers: int = 2) -> nn.Sequential:
    """The same for grey pictures as they come."""
    return nn.Sequential(nn.Flatten(), *mlp(classes, pixels**2, width, layers))


def picture_net(
    pixels: int = 28,
    strides: Sequence[int] = (2, 2, 2),
    classes: int = 10,
    norm: bool = False,
    dropout: float = 0.0,
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
