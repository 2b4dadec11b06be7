"""PyramidNet (Han et al. 2017): every block is a little wider than the one before."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.models.pictures import PaddedShortcut, convolution, initialise, stages_of

WIDER = 4
"""Times the channels inside of a bottleneck that it sends on."""


class PyramidBlock(nn.Module):
    """y = F(x) + S(x). F begins and ends with a BatchNorm, with BatchNorm and ReLU between its convolutions: two of 3 × 3, or
    in a bottleneck 1 × 1, 3 × 3 and 1 × 1, the last with four times the channels. S is the identity, with zeros for the
    channels that are new and the mean of 2 × 2 places where the picture shrinks."""

    def __init__(self, before: int, after: int, stride: int, bottleneck: bool = False) -> None:
        super().__init__()
        inside = after // WIDER
        widths = (before, inside, inside, after) if bottleneck else (before, after, after)
        kernels = ((1, 1), (3, stride), (1, 1)) if bottleneck else ((3, stride), (3, 1))
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, widths))
        self.convolutions = nn.ModuleList(
            convolution(*pair, *kernel) for pair, kernel in zip(pairwise(widths), kernels, strict=True)
        )
        self.shortcut = PaddedShortcut(before, after, stride, mean=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norms[0](x)
        for number, each in enumerate(self.convolutions):
            hidden = self.norms[number + 1](each(functional.relu(hidden) if number else hidden))
        return hidden + self.shortcut(x)  # type: ignore[no-any-return]


class PyramidNet(nn.Module):
    """A stem of `width` channels and three stages of n = (depth - 2)/6 blocks, or (depth - 2)/9 bottlenecks.

    Block k = 1 … N = 3n has ⌊width + α k / N⌋ channels, so that the last has width + α; a bottleneck has four times as many, of
    the nearest whole number. The stem has a BatchNorm and no ReLU, and the last block both before the mean over the picture and
    the linear classifier.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        depth: int = 110,
        alpha: float = 270,
        width: int = 16,
        bottleneck: bool = False,
    ) -> None:
        super().__init__()
        each = 9 if bottleneck else 6
        blocks, rest = divmod(depth - 2, each)
        if blocks < 1 or rest:
            kind = "bottlenecks" if bottleneck else "basic blocks"
            raise ValueError(
                f"a PyramidNet of {kind} has a depth of {2 + each}, {2 + 2 * each}, …, 110, …, not {depth}"
            )
        self.stem, self.norm = convolution(channels, width), nn.BatchNorm2d(width)
        grown = [width + alpha * k / (3 * blocks) for k in range(1, 3 * blocks + 1)]
        widths = [WIDER * round(each) for each in grown] if bottleneck else [math.floor(each) for each in grown]
        by_stage = [widths[:blocks], widths[blocks : 2 * blocks], widths[2 * blocks :]]
        self.stages = stages_of(width, by_stage, partial(PyramidBlock, bottleneck=bottleneck))
        self.last_norm, self.head = nn.BatchNorm2d(widths[-1]), nn.Linear(widths[-1], classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.last_norm(self.stages(self.norm(self.stem(x)))))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]
