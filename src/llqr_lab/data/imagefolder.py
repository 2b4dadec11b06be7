"""Folders of class folders of pictures, as ImageNet comes: train/<class>/*.JPEG and val/<class>/*.JPEG.

Nothing is decoded until a batch asks for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from llqr.errors import LLQRError, unknown
from llqr_lab.data.archives import unpacked
from llqr_lab.data.folder import DataError, data_file, data_subfolder
from llqr_lab.data.pictures import IMAGENET_NORMALISATION, Pictures

ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
PARTS = ("train", "val")
FITS = ("shorter", "stretch")

IMAGENET_FOLDER = "imagenet"
IMAGENET_SOURCE = "https://image-net.org/download (ILSVRC 2012, after signing up), as train/<class>/ and val/<class>/"
IMAGENETTE = "imagenette_sample.tar"
IMAGENETTE_SOURCE = "a sample of github.com/thunderInfy/imagenette, as imagenette_sample/{train,val}/<class>/*.JPEG"


@dataclass(frozen=True)
class FilePictures:
    """Pictures in files, each made a square of the same side when it is asked for."""

    root: Path
    names: tuple[str, ...]
    """Paths below the root; a million of them, and strings are smaller than paths."""
    labels: Tensor
    side: int
    fit: str

    def take(self, rows: Tensor) -> Tensor:
        return torch.stack([square_picture(self.root / self.names[row], self.side, self.fit) for row in rows.tolist()])


def imagenet(folder: Path | None = None, side: int = 256, fit: str = "shorter") -> Pictures:
    """ImageNet from `imagenet/` in the data folder."""
    return image_folder(data_subfolder(folder, IMAGENET_FOLDER, IMAGENET_SOURCE), side, fit)


def imagenette(folder: Path | None = None, side: int = 256, fit: str = "shorter") -> Pictures:
    """Ten classes of ImageNet from `imagenette_sample.tar` in the data folder, unpacked into the cache folder."""
    root = unpacked(data_file(folder, IMAGENETTE, IMAGENETTE_SOURCE), IMAGENETTE_SOURCE)
    return image_folder(root / Path(IMAGENETTE).stem, side, fit)


def image_folder(root: Path, side: int = 256, fit: str = "shorter") -> Pictures:
    """Pictures of side × side bytes, RGB, normalised by ImageNet's constants; classes are numbered by their sorted names.

    `fit="shorter"` scales the shorter side to `side` and takes the middle of the longer one; `"stretch"` scales both.
    """
    if fit not in FITS:
        raise unknown("fit", fit, FITS)
    if side < 1:
        raise LLQRError(f"pictures have a side of at least 1 pixel, not {side}")
    classes = class_folders(root)
    train, val = (_listed(root / part, classes, side, fit) for part in PARTS)
    return Pictures(train, val, len(classes), IMAGENET_NORMALISATION, classes)


def class_folders(root: Path) -> tuple[str, ...]:
    """The sorted names of the classes, which must be the same for training and validation."""
    train, val = (_subfolders(root / part) for part in PARTS)
    if train != val:
        alone = sorted(set(train) ^ set(val))
        raise DataError(
            f"'{root}': the classes of train ({len(train)}) and val ({len(val)}) differ, by "
            f"{', '.join(alone[:5])}{', …' if len(alone) > 5 else ''}; both need a folder for each class"
        )
    return train


def _subfolders(part: Path) -> tuple[str, ...]:
    if not part.is_dir():
        raise DataError(f"there is no folder '{part}': pictures are looked for in train/<class>/ and val/<class>/")
    with os.scandir(part) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"there is no class folder in '{part}'")
    return tuple(names)


def _listed(part: Path, classes: tuple[str, ...], side: int, fit: str) -> FilePictures:
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        # Sorted, because the order that a folder lists its files in differs from one machine to the next.
        files = sorted(file for file in os.listdir(part / name) if is_picture(file))
        if not files:
            raise DataError(f"there is no picture in '{part / name}' ({', '.join(ENDINGS)}): fill it or remove it")
        names += [f"{name}/{file}" for file in files]
        labels += [label] * len(files)
    return FilePictures(part, tuple(names), torch.tensor(labels), side, fit)


def is_picture(name: str) -> bool:
    """By its ending; names with a dot in front are leftovers of file systems."""
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def square_picture(path: Path, side: int, fit: str) -> Tensor:
    """One picture as 3 × side × side bytes, greyscale ones with three equal channels."""
    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"'{path}' isn't a picture that can be read ({error}): replace it or remove it") from error
    width, height = picture.size
    if fit == "shorter":
        cut = min(width, height)
        left, top = (width - cut) / 2, (height - cut) / 2
        box = (left, top, left + cut, top + cut)
    else:
        box = (0, 0, width, height)
    if picture.size != (side, side):
        picture = picture.resize((side, side), Image.Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def check_every_picture(pictures: Pictures) -> None:
    """Decodes all of them: for a check that may take its time."""
    for source in (pictures.train, pictures.test):
        assert isinstance(source, FilePictures)
        for name in source.names:
            square_picture(source.root / name, 1, "stretch")
