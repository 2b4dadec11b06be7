"""Residual networks of He et al. 2016: ResNet-18 and ResNet-20 for small pictures, ResNet-50 for ImageNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.models.pictures import PaddedShortcut, convolution, initialise, stages_of

Shortcut = Callable[[int, int, int], nn.Module]
"""From channels before, channels after and stride to S, where the shape changes."""


def projection(before: int, after: int, stride: int) -> nn.Module:
    """S as a 1 × 1 convolution with BatchNorm."""
    return nn.Sequential(convolution(before, after, 1, stride), nn.BatchNorm2d(after))


class BasicBlock(nn.Module):
    """y = relu(F(x) + S(x)): F is two 3 × 3 convolutions with BatchNorm; S is the identity, or a shortcut where the shape
    changes."""

    expansion = 1
    """Channels out, for each of the width inside."""

    def __init__(self, before: int, after: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(before, after, 3, stride), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = convolution(after, after), nn.BatchNorm2d(after)
        same = stride == 1 and before == after
        self.shortcut = nn.Sequential() if same else shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(residual + self.shortcut(x))


class Bottleneck(nn.Module):
    """y = relu(F(x) + S(x)): F is 1 × 1, 3 × 3 and 1 × 1 convolutions with BatchNorm, the last four times as wide.

    The stride is in the 3 × 3 convolution ("v1.5"); in the paper it is in the first one, which skips three places of four.
    """

    expansion = 4

    def __init__(self, before: int, after: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        width = after // self.expansion
        self.conv1, self.norm1 = convolution(before, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = convolution(width, after, 1), nn.BatchNorm2d(after)
        same = stride == 1 and before == after
        self.shortcut = nn.Sequential() if same else shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.conv1(x)))
        residual = self.norm3(self.conv3(functional.relu(self.norm2(self.conv2(hidden)))))
        return functional.relu(residual + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of blocks, the mean over the picture, and a linear classifier.

    Stage i has blocks[i] blocks, width · 2^i wide inside. The stem is a 3 × 3 convolution (for small pictures), or a 7 × 7 one
    with a stride of 2 before a 3 × 3 max-pool with another (`large`). With `zero_gains` the last BatchNorm of every F begins
    with gain 0, so that each block begins as relu(S(x)).
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        width: int,
        classes: int,
        channels: int,
        large: bool = False,
        shortcut: Shortcut = projection,
        zero_gains: bool = False,
    ) -> None:
        super().__init__()
        self.stem = convolution(channels, width, 7, 2) if large else convolution(channels, width)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        widths = [[block.expansion * width * 2**number] * count for number, count in enumerate(blocks)]
        self.stages = stages_of(width, widths, partial(block, shortcut=shortcut))
        self.head = nn.Linear(widths[-1][-1], classes)
        initialise(self)
        if zero_gains:
            self._close_blocks()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stages(self.pool(functional.relu(self.norm(self.stem(x)))))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]

    def _close_blocks(self) -> None:
        for module in self.modules():
            if isinstance(module, (BasicBlock, Bottleneck)):
                last = module.norm3 if isinstance(module, Bottleneck) else module.norm2
                nn.init.zeros_(last.weight)


class ResNet18(ResNet):
    """Four stages of two basic blocks, with the stem for small pictures that is usual on CIFAR."""

    def __init__(
        self, classes: int = 10, channels: int = 3, width: int = 64, blocks: Sequence[int] = (2, 2, 2, 2)
    ) -> None:
        super().__init__(BasicBlock, blocks, width, classes, channels)


class ResNet20(ResNet):
    """The CIFAR network of the paper (section 4.2): three stages of three basic blocks, shortcuts without parameters."""

    def __init__(
        self, classes: int = 10, channels: int = 3, width: int = 16, blocks: Sequence[int] = (3, 3, 3)
    ) -> None:
        super().__init__(BasicBlock, blocks, width, classes, channels, shortcut=PaddedShortcut)


class ResNet50(ResNet):
    """Four stages of bottlenecks, for ImageNet; with `large=False`, the same behind the stem for small pictures."""

    def __init__(
        self,
        classes: int = 1000,
        channels: int = 3,
        width: int = 64,
        blocks: Sequence[int] = (3, 4, 6, 3),
        large: bool = True,
        zero_gains: bool = False,
    ) -> None:
        super().__init__(Bottleneck, blocks, width, classes, channels, large, zero_gains=zero_gains)
