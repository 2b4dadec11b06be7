"""Pictures with labels: what is promised of them, how they are normalised, and batches of them.

Where the bytes of a picture come from is not this file's business: `PictureSource` hides memory and folders alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llqr_lab.data.augment import NOTHING, Augmentation, centred, cut_out, moved
from llqr_lab.data.batches import Batch, own_randomness
from llqr_lab.data.folder import DataError
from llqr_lab.data.rows import Rows, in_order


class PictureSource(Protocol):
    """Labelled pictures that can be had by their numbers."""

    @property
    def labels(self) -> Tensor:
        """int64, one for each picture."""
        ...

    def take(self, rows: Tensor) -> Tensor:
        """These pictures, uint8 NCHW."""
        ...


@dataclass(frozen=True)
class MemoryPictures:
    """Pictures that are all in memory."""

    images: Tensor
    """uint8 NCHW."""
    labels: Tensor

    def take(self, rows: Tensor) -> Tensor:
        return self.images[rows]


@dataclass(frozen=True)
class SomePictures:
    """Some of the pictures of another source."""

    source: PictureSource
    rows: Tensor

    @property
    def labels(self) -> Tensor:
        return self.source.labels[self.rows]

    def take(self, rows: Tensor) -> Tensor:
        return self.source.take(self.rows[rows])


def imbalanced(source: PictureSource, classes: int, ratio: float) -> SomePictures:
    """Class c keeps the first n ratio^(-c/(classes - 1)) of its n pictures, at least one: the last class a `ratio`-th."""
    if not ratio >= 1 or classes < 2:
        raise DataError(f"data.imbalance is how many times rarer the last class is than the first, not {ratio!r}")
    found = [(source.labels == label).nonzero()[:, 0] for label in range(classes)]
    shares = [ratio ** (-label / (classes - 1)) for label in range(classes)]
    kept = [rows[: max(1, round(len(rows) * share))] for rows, share in zip(found, shares, strict=True)]
    return SomePictures(source, torch.cat(kept).sort().values)


@dataclass(frozen=True)
class Normalisation:
    """Of pictures in 0 … 1, channel by channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @staticmethod
    def of(images: Tensor) -> Normalisation:
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


IMAGENET_NORMALISATION = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Pictures:
    """A data set of pictures."""

    train: PictureSource
    test: PictureSource
    classes: int
    normalisation: Normalisation
    class_names: tuple[str, ...] | None = None

    def training(self, size: int, seed: int, augmentation: Augmentation = NOTHING) -> TrainingPictures:
        """Training batches by the step's number."""
        return TrainingPictures(self.train, self.normalisation, size, seed, augmentation)

    def testing(self, size: int, crop: int | None = None) -> PicturesInOrder:
        """All test pictures in order, nothing random about them; with `crop`, the middle square of this side."""
        return PicturesInOrder(self.test, self.normalisation, size, crop)

    def training_in_order(self, size: int, crop: int | None = None) -> PicturesInOrder:
        """All training pictures as `testing` has the others: for a training loss that nothing random blurs."""
        return PicturesInOrder(self.train, self.normalisation, size, crop)


def pictures_in_memory(
    where: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    class_names: tuple[str, ...] | None = None,
) -> Pictures:
    """Pictures (uint8 NCHW) with labels, checked; `where` they are from is what errors name."""
    for part, (images, labels) in (("training", train), ("test", test)):
        check_pictures(where, part, images, labels, classes)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"{where}: training pictures are {_sides(train[0])} and test pictures {_sides(test[0])}; they must be alike"
        )
    if class_names is not None and len(class_names) != classes:
        raise DataError(f"{where}: there are {len(class_names)} names for {classes} classes")
    known, unseen = (MemoryPictures(images.contiguous(), labels.long()) for images, labels in (train, test))
    return Pictures(known, unseen, classes, Normalisation.of(known.images), class_names)


def check_pictures(where: str, part: str, images: Tensor, labels: Tensor, classes: int) -> None:
    """Whether these can be trained on; told before any training begins."""
    if images.dim() != 4 or images.dtype != torch.uint8:
        raise DataError(
            f"{where}: {part} pictures must be bytes with four sides, not {_type(images)} of {tuple(images.shape)}"
        )
    if images.numel() == 0:
        raise DataError(f"{where}: there are no {part} pictures, or they are empty: {tuple(images.shape)}")
    check_labels(where, part, labels, len(images), classes)


def check_labels(where: str, part: str, labels: Tensor, count: int, classes: int) -> None:
    if labels.dim() != 1 or labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise DataError(
            f"{where}: {part} labels must be integers in one row, not {_type(labels)} of {tuple(labels.shape)}"
        )
    if len(labels) != count:
        raise DataError(f"{where}: there are {count} {part} pictures and {len(labels)} labels")
    wide = labels.long()  # some integer types of torch have no minimum
    low, high = int(wide.min()), int(wide.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"{where}: {part} labels run from {low} to {high}; of {classes} classes they must be 0 to {classes - 1}"
        )


def _sides(images: Tensor) -> str:
    return " × ".join(str(side) for side in images.shape[1:])


def _type(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


class TrainingPictures:
    """Batches of augmented, normalised pictures; number k is made of (seed, k) alone."""

    def __init__(
        self,
        source: PictureSource,
        normalisation: Normalisation,
        size: int,
        seed: int,
        augmentation: Augmentation = NOTHING,
    ) -> None:
        self.source, self.normalisation, self.augmentation = source, normalisation, augmentation
        self.seed = seed
        self.rows = Rows(len(source.labels), size, seed)

    @property
    def steps_per_epoch(self) -> int:
        return self.rows.steps_per_epoch

    def __getitem__(self, step: int) -> Batch:
        rows = self.rows[step]
        pictures = self.source.take(rows).float() / 255
        with own_randomness("augment", self.seed, step):
            pictures = self.normalisation(moved(pictures, self.augmentation))
            pictures = cut_out(pictures, self.augmentation.cutout, self.augmentation.cutout_share)
        return Batch((pictures,), self.source.labels[rows])


class PicturesInOrder:
    """Batches of every picture once, in order and not augmented. The last one may be smaller."""

    def __init__(self, source: PictureSource, normalisation: Normalisation, size: int, crop: int | None = None) -> None:
        self.source, self.normalisation, self.crop = source, normalisation, crop
        self.pieces = list(in_order(len(source.labels), size))

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> Batch:
        piece = self.pieces[number]
        pictures = self.source.take(torch.arange(piece.start, piece.stop)).float() / 255
        return Batch((self.normalisation(centred(pictures, self.crop)),), self.source.labels[piece])

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))
