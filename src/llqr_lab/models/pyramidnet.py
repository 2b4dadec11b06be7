"""PyramidNet (Han et al. 2017): every block is a little wider than the one before."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.models.pictures import PaddedShortcut, convolution, initialise, stages_of


class PyramidBlock(nn.Module):
    """y = F(x) + S(x): F is BatchNorm, 3 × 3 convolution, BatchNorm, ReLU, 3 × 3 convolution, BatchNorm; S is the identity,
    with zeros for the channels that are new and the mean of 2 × 2 places where the picture shrinks."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), convolution(before, after, 3, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(after), convolution(after, after)
        self.norm3 = nn.BatchNorm2d(after)
        self.shortcut = PaddedShortcut(before, after, stride, mean=True)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.conv2(functional.relu(self.norm2(self.conv1(self.norm1(x)))))
        return self.norm3(residual) + self.shortcut(x)  # type: ignore[no-any-return]


class PyramidNet(nn.Module):
    """A stem of `width` channels and three stages of n = (depth - 2)/6 blocks.

    Block k = 1 … N = 3n has ⌊width + α k / N⌋ channels, so that the last has width + α. The stem has a BatchNorm and no ReLU,
    and the last block both before the mean over the picture and the linear classifier.
    """

    def __init__(
        self, classes: int = 10, channels: int = 3, depth: int = 110, alpha: float = 270, width: int = 16
    ) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if blocks < 1 or rest:
            raise ValueError(f"a PyramidNet of basic blocks has a depth of 8, 14, 20, …, 110, …, not {depth}")
        self.stem, self.norm = convolution(channels, width), nn.BatchNorm2d(width)
        widths = [math.floor(width + alpha * k / (3 * blocks)) for k in range(1, 3 * blocks + 1)]
        by_stage = [widths[:blocks], widths[blocks : 2 * blocks], widths[2 * blocks :]]
        self.stages = stages_of(width, by_stage, PyramidBlock)
        self.last_norm, self.head = nn.BatchNorm2d(widths[-1]), nn.Linear(widths[-1], classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.last_norm(self.stages(self.norm(self.stem(x)))))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]
