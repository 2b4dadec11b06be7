"""Random changes of training pictures, a batch at a time, by kornia.

All random numbers are torch's own on the CPU, so that `own_randomness` decides what happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor, nn

from llqr.errors import LLQRError


@dataclass(frozen=True)
class Augmentation:
    """What is done to training pictures, in this order."""

    size: int | None = None
    """The side of the pictures that come out; None: as those that go in."""
    padding: int = 0
    """Pixels on each side, of which a random crop takes some in: a shift by at most so many."""
    reflect: bool = False
    """What comes in at the sides is the picture mirrored, not zeros."""
    flip: bool = False
    """Left and right are swapped in half of the pictures."""
    cutout: int = 0
    """The side of a square of zeros, as DeVries & Taylor (2017) have it; see `cut_out`."""
    cutout_share: float = 1.0
    """The share of pictures that have one."""

    def __post_init__(self) -> None:
        if self.cutout % 2 or self.cutout < 0:
            raise LLQRError(f"a square to cut out has an even side (it is centred on a pixel), not {self.cutout}")
        if not 0 < self.cutout_share <= 1:
            raise LLQRError(
                f"the share of pictures with a square cut out is above 0 and at most 1, not {self.cutout_share}"
            )
        if self.padding < 0 or (self.size is not None and self.size < 1):
            raise LLQRError(f"a crop has a side of at least 1 and no negative padding: {self}")
        if self.reflect and not self.padding:
            raise LLQRError("pictures that aren't padded have nothing to mirror at their sides: leave out reflect")


NOTHING = Augmentation()
CIFAR = Augmentation(padding=4, flip=True)


def moved(pictures: Tensor, augmentation: Augmentation) -> Tensor:
    """Cropped and flipped: for pictures as they are, in 0 … 1, so that zeros that come in at the sides are black."""
    height, width = pictures.shape[-2:]
    size = (augmentation.size, augmentation.size) if augmentation.size else (height, width)
    # kornia would stretch a picture that is too small, without a word.
    if size[0] > height + 2 * augmentation.padding or size[1] > width + 2 * augmentation.padding:
        raise LLQRError(f"a crop of {size[0]} × {size[1]} doesn't fit into a picture of {height} × {width}")
    for step in _moves(augmentation, size, size == (height, width)):
        pictures = step(pictures)
    return pictures


@lru_cache(maxsize=16)
def _moves(augmentation: Augmentation, size: tuple[int, int], same_size: bool) -> tuple[nn.Module, ...]:
    # Importing kornia takes seconds that runs without augmentation shouldn't pay for.
    from kornia.augmentation import RandomCrop, RandomHorizontalFlip

    steps: list[nn.Module] = []
    if augmentation.padding or not same_size:
        steps.append(
            RandomCrop(
                size,
                padding=augmentation.padding or None,
                padding_mode="reflect" if augmentation.reflect else "constant",
                cropping_mode="slice",
            )
        )
    if augmentation.flip:
        steps.append(RandomHorizontalFlip(p=0.5))
    return tuple(steps)


def cut_out(pictures: Tensor, side: int, share: float = 1.0) -> Tensor:
    """A square of zeros in each picture, or in a share of them: for normalised pictures, so that zero is the mean.

    Every pixel y is as likely to be its centre, and it covers y - side/2 … y + side/2 - 1: part of it may lie outside of
    the picture. kornia's RandomErasing has squares inside only, hence the picture is widened for it, by side/2 before and
    side/2 - 1 behind.
    """
    if side == 0:
        return pictures
    height, width = pictures.shape[-2:]
    before, behind = side // 2, side // 2 - 1
    wide = nn.functional.pad(pictures, (before, behind, before, behind))
    erased: Tensor = _eraser(side, share, wide.shape[-2], wide.shape[-1])(wide)
    return erased[..., before : before + height, before : before + width]


@lru_cache(maxsize=16)
def _eraser(side: int, pictures: float, height: int, width: int) -> nn.Module:
    from kornia.augmentation import RandomErasing

    share = side**2 / (height * width)
    eraser: nn.Module = RandomErasing(scale=(share, share), ratio=(1.0, 1.0), value=0.0, p=pictures)
    return eraser


def centred(pictures: Tensor, size: int | None) -> Tensor:
    """The middle of each picture, as evaluation takes it; None: the whole."""
    if size is None:
        return pictures
    height, width = pictures.shape[-2:]
    if size > min(height, width):
        raise LLQRError(f"a crop of {size} × {size} doesn't fit into a picture of {height} × {width}")
    top, left = (height - size) // 2, (width - size) // 2
    return pictures[..., top : top + size, left : left + size]
