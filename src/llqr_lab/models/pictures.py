"""What the convolutional networks share: convolutions that keep the picture's size, shortcuts, the first weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional


def convolution(before: int, after: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution padded so that the stride alone shrinks the picture, without the bias that a BatchNorm would take out."""
    return nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)


class PaddedShortcut(nn.Module):
    """S(x) = (x at every stride-th place, 0): the identity on the channels that there are, and zeros for the new ones.

    It has no parameters (option A of He et al. 2016). With `mean` each place is the mean of the stride × stride around it,
    as in Han et al. 2017.
    """

    def __init__(self, before: int, after: int, stride: int, mean: bool = False) -> None:
        super().__init__()
        self.new, self.stride, self.mean = after - before, stride, mean

    def forward(self, x: Tensor) -> Tensor:
        if self.stride != 1:
            # places left over at the edge count, as they do for a padded convolution
            x = (
                functional.avg_pool2d(x, self.stride, ceil_mode=True)
                if self.mean
                else x[:, :, :: self.stride, :: self.stride]
            )
        return functional.pad(x, (0, 0, 0, 0, 0, self.new))


def stages_of(
    before: int, widths: Sequence[Sequence[int]], block: Callable[[int, int, int], nn.Module]
) -> nn.Sequential:
    """Stages of blocks that send on so many channels; each stage but the first begins with a stride of 2.

    `block` is called with the channels before, the channels after and the stride.
    """
    stages = []
    for number, stage_widths in enumerate(widths):
        blocks = []
        for place, after in enumerate(stage_widths):
            blocks.append(block(before, after, 2 if number > 0 and place == 0 else 1))
            before = after
        stages.append(nn.Sequential(*blocks))
    return nn.Sequential(*stages)


def initialise(model: nn.Module) -> None:
    """He's normal weights for convolutions, N(0, 2 / (k² · channels out)): by what a convolution sends on. No biases."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
