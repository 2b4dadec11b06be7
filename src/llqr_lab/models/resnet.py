"""ResNet-18 for small pictures: a 3 × 3 stem without max-pooling, as is usual for 32 × 32 ones."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages; each but the first begins with a stride of 2."""


class BasicBlock(nn.Module):
    """y = relu(F(x) + S(x)): F is two 3 × 3 convolutions with BatchNorm; S is the identity, or a 1 × 1 convolution with
    BatchNorm where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(residual + self.shortcut(x))


class ResNet18(nn.Module):
    """A stem, four stages of two blocks, the mean over the picture, and a linear classifier."""

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, WIDTHS[0], 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTHS[0])
        stages, before = [], WIDTHS[0]
        for number, width in enumerate(WIDTHS):
            stages.append(
                nn.Sequential(BasicBlock(before, width, 1 if number == 0 else 2), BasicBlock(width, width, 1))
            )
            before = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stages(functional.relu(self.norm(self.stem(x))))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]

    def _initialise(self) -> None:
        """He's normal weights, by what a convolution sends on."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
