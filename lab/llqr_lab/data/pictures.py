"""Pictures with labels: what is promised of them, how they are normalised and augmented, and batches of them.

Random changes are by kornia, a batch at a time. All random numbers are torch's own on the CPU: `own_randomness` decides.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from llqr.errors import LLQRError
from llqr_lab.data.batches import Batch, Rows, own_randomness
from llqr_lab.errors import DataError


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
    cutout: int = 0
    """The side of a square of zeros, as DeVries & Taylor (2017) have it; see `cut_out`."""
    cutout_share: float = 1.0

    def __post_init__(self) -> None:
        if self.cutout % 2 or self.cutout < 0:
            raise LLQRError(f"a square to cut out has an even side (it is centred on a pixel), not {self.cutout}")
        if not 0 < self.cutout_share <= 1:
            raise LLQRError(f"the share of pictures with a square is above 0 and at most 1, not {self.cutout_share}")
        if self.reflect and not self.padding:
            raise LLQRError("pictures that aren't padded have nothing to mirror at their sides: leave out reflect")


NOTHING = Augmentation()


def crop_and_flip(pictures: Tensor, augmentation: Augmentation) -> Tensor:
    """Cropped and flipped: for pictures as they are, in 0 … 1, so that zeros that come in at the sides are black."""
    # importing kornia takes seconds that runs without augmentation shouldn't pay for
    if augmentation.padding or augmentation.size:
        from kornia.augmentation import RandomCrop

        height, width = pictures.shape[-2:]
        size, sides = augmentation.size, "reflect" if augmentation.reflect else "constant"
        padding, out = augmentation.padding or None, (size or height, size or width)
        pictures = RandomCrop(out, padding, padding_mode=sides, cropping_mode="slice")(pictures)
    if augmentation.flip:
        from kornia.augmentation import RandomHorizontalFlip

        pictures = RandomHorizontalFlip(p=0.5)(pictures)
    return pictures


def cut_out(pictures: Tensor, side: int, share: float = 1.0) -> Tensor:
    """A square of zeros in each picture, or in a share of them: for normalised pictures, so that zero is the mean.

    Every pixel y is as likely to be its centre, and it covers y - side/2 … y + side/2 - 1: part of it may lie outside. kornia's
    RandomErasing has squares inside only, hence the picture is widened for it, by side/2 before and side/2 - 1 behind.
    """
    if side == 0:
        return pictures
    from kornia.augmentation import RandomErasing

    height, width = pictures.shape[-2:]
    before, behind = side // 2, side // 2 - 1
    wide = nn.functional.pad(pictures, (before, behind, before, behind))
    part = side**2 / wide[0, 0].numel()
    erased: Tensor = RandomErasing(scale=(part, part), ratio=(1.0, 1.0), value=0.0, p=share)(wide)
    return erased[..., before : before + height, before : before + width]


def centre_crop(pictures: Tensor, size: int | None) -> Tensor:
    """The middle of each picture, as evaluation takes it; None: the whole."""
    if size is None:
        return pictures
    height, width = pictures.shape[-2:]
    top, left = (height - size) // 2, (width - size) // 2
    return pictures[..., top : top + size, left : left + size]


@dataclass(frozen=True)
class MemoryPictures:
    """Pictures that are all in memory."""

    images: Tensor
    """uint8 NCHW."""
    labels: Tensor

    def take(self, rows: Tensor) -> Tensor:
        return self.images[rows]


@dataclass(frozen=True)
class FilePictures:
    """Pictures in files, each decoded and made a square of the same side when it is asked for."""

    read: Callable[[str], bytes]
    names: tuple[str, ...]
    """A million of them, and strings are smaller than paths."""
    labels: Tensor
    side: int
    fit: str

    def take(self, rows: Tensor) -> Tensor:
        names = [self.names[row] for row in rows.tolist()]
        return torch.stack([square_picture(self.read(name), name, self.side, self.fit) for name in names])


def square_picture(content: bytes, name: str, side: int, fit: str) -> Tensor:
    """One picture as 3 × side × side bytes, grey ones with three equal channels."""
    try:
        with Image.open(BytesIO(content)) as file:
            picture = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"'{name}' isn't a picture that can be read ({error}): replace it or remove it") from error
    width, height = picture.size
    cut = min(width, height)
    left, top = (width - cut) / 2, (height - cut) / 2
    box = (left, top, left + cut, top + cut) if fit == "shorter" else (0, 0, width, height)
    if picture.size != (side, side):
        picture = picture.resize((side, side), Image.Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


PictureSource = MemoryPictures | FilePictures
"""Labelled pictures that can be had by their numbers: as many `labels`, and `take`."""


def imbalanced(source: PictureSource, classes: int, ratio: float) -> MemoryPictures:
    """Class c keeps the first n ratio^(-c/(classes - 1)) of its n pictures, at least one: the last class a `ratio`-th."""
    if not ratio >= 1 or classes < 2:
        raise DataError(f"data.imbalance is how many times rarer the last class is than the first, not {ratio!r}")
    found = [(source.labels == label).nonzero()[:, 0] for label in range(classes)]
    shares = [ratio ** (-label / (classes - 1)) for label in range(classes)]
    kept = [rows[: max(1, round(len(rows) * share))] for rows, share in zip(found, shares, strict=True)]
    chosen = torch.cat(kept).sort().values
    return MemoryPictures(source.take(chosen), source.labels[chosen])


@dataclass(frozen=True)
class Normalisation:
    """Of pictures in 0 … 1, channel by channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @staticmethod
    def of(images: Tensor) -> "Normalisation":
        """What makes each channel of these uint8 pictures have mean 0 and deviation 1."""
        means, deviations = [], []
        levels = torch.arange(256, dtype=torch.float64) / 255
        for channel in images.unbind(1):
            # Counting the 256 levels is exact, and needs no copy of the pictures in floating point.
            share = torch.bincount(channel.reshape(-1), minlength=256).double() / channel.numel()
            mean = float(share @ levels)
            variance = float(share @ (levels - mean) ** 2)
            means.append(mean)
            # A channel that shows nothing stays zero.
            deviations.append(variance**0.5 if variance > 1e-12 else 1.0)
        return Normalisation(tuple(means), tuple(deviations))

    def __call__(self, pictures: Tensor) -> Tensor:
        mean, deviation = (torch.tensor(values).reshape(-1, 1, 1) for values in (self.mean, self.deviation))
        return (pictures - mean) / deviation


@dataclass(frozen=True)
class Pictures:
    """A data set of pictures."""

    train: PictureSource
    test: PictureSource
    classes: int
    normalisation: Normalisation

    def training(self, size: int, seed: int, augmentation: Augmentation = NOTHING) -> "TrainingPictures":
        return TrainingPictures(self, size, seed, augmentation)

    def testing(self, size: int, crop: int | None = None) -> "PicturesInOrder":
        """All test pictures in order, nothing random about them; with `crop`, the middle square of this side."""
        return PicturesInOrder(self.test, self.normalisation, size, crop)


def pictures_in_memory(where: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], classes: int) -> Pictures:
    """Pictures (uint8 NCHW) with labels, checked before any training; `where` they are from is what errors name."""
    for part, (images, labels) in (("training", train), ("test", test)):
        wrong = ""
        if images.dim() != 4 or images.dtype != torch.uint8 or images.numel() == 0:
            wrong = f"{part} pictures must be bytes with four sides, not {images.dtype} of {tuple(images.shape)}"
        elif labels.shape != images.shape[:1] or labels.dtype not in (torch.uint8, torch.int64):
            wrong = f"{len(images)} {part} pictures must have a whole number each, not {labels.dtype} of {tuple(labels.shape)}"
        elif int(labels.min()) < 0 or int(labels.max()) >= classes:
            wanted = f"of {classes} classes they must be 0 to {classes - 1}"
            wrong = f"{part} labels run from {int(labels.min())} to {int(labels.max())}; {wanted}"
        if wrong:
            raise DataError(f"{where}: {wrong}")
    if train[0].shape[1:] != test[0].shape[1:]:
        shapes = [" × ".join(map(str, images.shape[1:])) for images, _ in (train, test)]
        raise DataError(f"{where}: training pictures are {shapes[0]} and test pictures {shapes[1]}; they must be alike")
    known, unseen = (MemoryPictures(images.contiguous(), labels.long()) for images, labels in (train, test))
    return Pictures(known, unseen, classes, Normalisation.of(known.images))


def reduced(pictures: Pictures, side: int) -> Pictures:
    """Pictures in memory with squares of pixels averaged, so that the side is this; normalised anew."""
    parts = [cast(MemoryPictures, each) for each in (pictures.train, pictures.test)]
    before = parts[0].images.shape[-1]
    if side == before:
        return pictures
    if side < 1 or before % side:
        raise DataError(f"pictures of {before} pixels can be averaged to a divisor of that, not to {side}: data.pixels")
    small = [nn.functional.avg_pool2d(each.images.float(), before // side).round().byte() for each in parts]
    train, test = (MemoryPictures(images, each.labels) for images, each in zip(small, parts, strict=True))
    return Pictures(train, test, pictures.classes, Normalisation.of(train.images))


class TrainingPictures:
    """Batches of augmented, normalised pictures; number k is made of (seed, k) alone."""

    def __init__(self, data: Pictures, size: int, seed: int, augmentation: Augmentation) -> None:
        self.source, self.normalisation, self.augmentation = data.train, data.normalisation, augmentation
        self.seed, self.rows = seed, Rows(len(data.train.labels), size, seed)
        self.steps_per_epoch = self.rows.steps_per_epoch

    def __getitem__(self, step: int) -> Batch:
        rows = self.rows[step]
        pictures = self.source.take(rows).float() / 255
        with own_randomness("augment", self.seed, step):
            pictures = self.normalisation(crop_and_flip(pictures, self.augmentation))
            pictures = cut_out(pictures, self.augmentation.cutout, self.augmentation.cutout_share)
        return Batch((pictures,), self.source.labels[rows])


@dataclass(frozen=True)
class PicturesInOrder:
    """Batches of every picture once, in order and not augmented. The last one may be smaller."""

    source: PictureSource
    normalisation: Normalisation
    size: int
    crop: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        for rows in torch.split(torch.arange(len(self.source.labels)), self.size):
            pictures = self.source.take(rows).float() / 255
            yield Batch((self.normalisation(centre_crop(pictures, self.crop)),), self.source.labels[rows])
