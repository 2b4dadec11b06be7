"""Convolutional networks: small ones, ResNet, VGG, wide ResNet and PyramidNet."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional


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


def picture_net(pixels: int = 28, strides: Sequence[int] = (2, 2, 2), classes: int = 10) -> nn.Sequential:
    """3 × 3 convolutions of these strides and two linear layers, for grey pictures."""
    layers: list[nn.Module] = []
    side, channels = pixels, 1
    for i, stride in enumerate(strides):
        wider = 32 if i else 16
        layers += [nn.Conv2d(channels, wider, 3, stride, 1), nn.ReLU()]
        side, channels = -(-side // stride), wider
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, 64), nn.ReLU(), nn.Linear(64, classes))


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
        if self.stride != 1 and self.mean:  # places left over at the edge count, as they do for a padded convolution
            x = functional.avg_pool2d(x, self.stride, ceil_mode=True)
        elif self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(x, (0, 0, 0, 0, 0, self.new))


def stages_of(
    before: int, widths: Sequence[Sequence[int]], block: Callable[[int, int, int], nn.Module]
) -> nn.Sequential:
    """Stages of blocks that send on so many channels; each stage but the first begins with a stride of 2."""
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


# He et al. 2016

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
    with a stride of 2 before a 3 × 3 max-pool with another (`large`).
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        large: bool = False,
        shortcut: Shortcut = projection,
        *,
        classes: int = 10,
        width: int = 64,
        blocks: Sequence[int] = (2, 2, 2, 2),
    ) -> None:
        super().__init__()
        self.stem = convolution(3, width, 7, 2) if large else convolution(3, width)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        widths = [[block.expansion * width * 2**number] * count for number, count in enumerate(blocks)]
        self.stages = stages_of(width, widths, partial(block, shortcut=shortcut))
        self.head = nn.Linear(widths[-1][-1], classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stages(self.pool(functional.relu(self.norm(self.stem(x)))))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


ResNet18 = partial(ResNet, BasicBlock, False, projection)
"""Four stages of two basic blocks, with the stem for small pictures that is usual on CIFAR."""
ResNet20 = partial(ResNet, BasicBlock, False, PaddedShortcut, width=16, blocks=(3, 3, 3))
"""The CIFAR network of the paper (section 4.2): three stages of three basic blocks, shortcuts without parameters."""
ResNet50 = partial(ResNet, Bottleneck, True, projection, classes=1000, blocks=(3, 4, 6, 3))
"""Four stages of bottlenecks, for ImageNet."""


# Simonyan & Zisserman 2015, configuration D

FACTORS = (1, 2, 4, 8, 8)
"""Channels of the five stages, in multiples of the first one's 64."""


class VGG16BN(nn.Module):
    """Five stages of 3 × 3 convolutions (2, 2, 3, 3, 3 of them) with BatchNorm and ReLU, each before a 2 × 2 max-pool.

    The convolutions keep their biases. Of larger pictures than 32 × 32, of which 512 numbers are left, the mean is taken.
    Before the last linear layer come `hidden` others, each behind a dropout and before a ReLU, as wide as what is left: none
    is usual on CIFAR, two of them with a dropout of 0.5 are ImageNet's form.
    """

    def __init__(self, classes: int = 10, width: int = 64, hidden: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for factor, count in zip(FACTORS, (2, 2, 3, 3, 3), strict=True):
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


# Zagoruyko & Komodakis 2016: few, wide blocks whose BatchNorm and ReLU come first


class WideBlock(nn.Module):
    """y = x + F(a) with a = relu(norm(x)) and F of two 3 × 3 convolutions, BatchNorm and ReLU between them; where the shape
    changes, y = S(a) + F(a) with a 1 × 1 convolution S."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), convolution(before, after, 3, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(after), convolution(after, after)
        self.shortcut = None if stride == 1 and before == after else convolution(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = functional.relu(self.norm1(x))
        residual = self.conv2(functional.relu(self.norm2(self.conv1(active))))
        return residual + (x if self.shortcut is None else self.shortcut(active))  # type: ignore[no-any-return]


class WideResNet(nn.Module):
    """WRN-d-k: a stem of `width` channels and three stages of (d - 4)/6 blocks with width · k · (1, 2, 4) channels."""

    def __init__(self, classes: int = 10, depth: int = 28, factor: int = 10, width: int = 16) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if blocks < 1 or rest:
            raise ValueError(f"a wide ResNet has a depth of 10, 16, 22, 28, …, not {depth}")
        self.stem = convolution(3, width)
        widths = [[width * factor * 2**number] * blocks for number in range(3)]
        self.stages = stages_of(width, widths, WideBlock)
        self.norm, self.head = nn.BatchNorm2d(widths[-1][-1]), nn.Linear(widths[-1][-1], classes)
        initialise(self)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.stages(self.stem(x))))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


# Han et al. 2017: every block is a little wider than the one before

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
        self, classes: int = 10, depth: int = 110, alpha: float = 270, width: int = 16, bottleneck: bool = False
    ) -> None:
        super().__init__()
        each = 9 if bottleneck else 6
        blocks, rest = divmod(depth - 2, each)
        if blocks < 1 or rest:
            kind = "bottlenecks" if bottleneck else "basic blocks"
            raise ValueError(
                f"a PyramidNet of {kind} has a depth of {2 + each}, {2 + 2 * each}, …, 110, …, not {depth}"
            )
        self.stem, self.norm = convolution(3, width), nn.BatchNorm2d(width)
        grown = [width + alpha * k / (3 * blocks) for k in range(1, 3 * blocks + 1)]
        widths = [WIDER * round(each) for each in grown] if bottleneck else [math.floor(each) for each in grown]
        by_stage = [widths[:blocks], widths[blocks : 2 * blocks], widths[2 * blocks :]]
        self.stages = stages_of(width, by_stage, partial(PyramidBlock, bottleneck=bottleneck))
        self.last_norm, self.head = nn.BatchNorm2d(widths[-1]), nn.Linear(widths[-1], classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.last_norm(self.stages(self.norm(self.stem(x)))))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]
