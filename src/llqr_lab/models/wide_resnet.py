"""Wide residual networks (Zagoruyko & Komodakis 2016): few, wide blocks whose BatchNorm and ReLU come first."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.models.pictures import convolution, initialise, stages_of


class WideBlock(nn.Module):
    """y = x + F(a) with a = relu(norm(x)); where the shape changes, y = S(a) + F(a) with a 1 × 1 convolution S.

    F is a 3 × 3 convolution, BatchNorm, ReLU, dropout and a 3 × 3 convolution.
    """

    def __init__(self, before: int, after: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), convolution(before, after, 3, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(after), convolution(after, after)
        self.dropout = nn.Dropout(dropout)
        self.shortcut = None if stride == 1 and before == after else convolution(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = functional.relu(self.norm1(x))
        residual = self.conv2(self.dropout(functional.relu(self.norm2(self.conv1(active)))))
        return residual + (x if self.shortcut is None else self.shortcut(active))  # type: ignore[no-any-return]


class WideResNet(nn.Module):
    """WRN-d-k: a stem of `width` channels and three stages of (d - 4)/6 blocks with width · k · (1, 2, 4) channels."""

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        depth: int = 28,
        factor: int = 10,
        width: int = 16,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if blocks < 1 or rest:
            raise ValueError(f"a wide ResNet has a depth of 10, 16, 22, 28, …, not {depth}")
        self.stem = convolution(channels, width)
        widths = [[width * factor * 2**number] * blocks for number in range(3)]
        self.stages = stages_of(width, widths, partial(WideBlock, dropout=dropout))
        self.norm, self.head = nn.BatchNorm2d(widths[-1][-1]), nn.Linear(widths[-1][-1], classes)
        initialise(self)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.stages(self.stem(x))))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]
