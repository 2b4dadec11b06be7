"""VGG-16 with BatchNorm for 32 × 32 pictures (Simonyan & Zisserman 2015, configuration D)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from llqr_lab.models.pictures import initialise

FACTORS = (1, 2, 4, 8, 8)
"""Channels of the five stages, in multiples of the first one's 64."""


class VGG16BN(nn.Module):
    """Five stages of 3 × 3 convolutions (2, 2, 3, 3, 3 of them) with BatchNorm and ReLU, each before a 2 × 2 max-pool.

    The convolutions keep their biases. Of larger pictures than 32 × 32, of which 512 numbers are left, the mean is taken.
    Before the last linear layer come `hidden` others, each behind a dropout and before a ReLU, as wide as what is left: none
    is usual on CIFAR, two of them with a dropout of 0.5 are ImageNet's form.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        width: int = 64,
        convolutions: Sequence[int] = (2, 2, 3, 3, 3),
        hidden: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for factor, count in zip(FACTORS, convolutions, strict=True):
            for _ in range(count):
                after = factor * width
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2))
        self.features, layers = nn.Sequential(*layers), []
        for _ in range(hidden):
            layers += [nn.Dropout(dropout), nn.Linear(before, before), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(before, classes))
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]
