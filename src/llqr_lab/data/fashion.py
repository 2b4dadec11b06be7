"""Fashion-MNIST from its four original files: 60,000 + 10,000 pictures of clothes, 28 × 28, ten classes."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from llqr_lab.data.folder import DataError, data_file, reading
from llqr_lab.data.pictures import Pictures, pictures_in_memory
from llqr_lab.data.split import Split, standardised

SOURCE = "github.com/zalandoresearch/fashion-mnist (data/fashion)"
CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
PARTS = ("train", "t10k")
FILES = tuple(f"fashion_mnist/{part}-{kind}-ubyte.gz" for part in PARTS for kind in ("images-idx3", "labels-idx1"))


def fashion_mnist(folder: Path | None = None) -> Split:
    """1 × 28 × 28 pictures in float32. The files are those of `fashion_mnist/` in the data folder."""
    train, test = ((images.float() / 255, labels.long()) for images, labels in (_part(folder, part) for part in PARTS))
    return standardised(train, test)


def fashion_pictures(folder: Path | None = None) -> Pictures:
    """The same pictures as bytes, for batches that augment them."""
    train, test = (_part(folder, part) for part in PARTS)
    return pictures_in_memory("Fashion-MNIST", train, test, len(CLASS_NAMES), CLASS_NAMES)


def _part(folder: Path | None, part: str) -> tuple[Tensor, Tensor]:
    paths = [data_file(folder, name, SOURCE) for name in FILES if f"/{part}-" in name]
    images, labels = (read_idx(path) for path in paths)
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise DataError(
            f"'{paths[0]}' and '{paths[1]}' don't belong together, with sides {tuple(images.shape)} and "
            f"{tuple(labels.shape)}: get both again from {SOURCE}"
        )
    return images.unsqueeze(1), labels


def read_idx(path: Path) -> Tensor:
    """A gzipped IDX file of bytes: two zeros, the type (8: unsigned byte), the number of sides, the sides, the numbers."""
    with reading(path, SOURCE, zlib.error), gzip.open(path) as file:
        content = file.read()
    sides = [
        int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(content[3] if len(content) > 3 else 0)
    ]
    header = 4 + 4 * len(sides)
    if content[:3] != b"\0\0\x08" or not math.prod(sides) or len(content) != header + math.prod(sides):
        raise DataError(f"'{path}' isn't an IDX file of bytes: get it again from {SOURCE}")
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(sides)
