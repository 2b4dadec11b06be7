"""Fashion-MNIST from its four original files: 60,000 + 10,000 pictures of clothes, 28 × 28, ten classes."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import torch
from torch import Tensor

from llqr_lab.data.folder import MissingDataError, data_file
from llqr_lab.data.split import Split, standardised

SOURCE = "github.com/zalandoresearch/fashion-mnist (data/fashion)"


def fashion_mnist(folder: Path | None = None) -> Split:
    """1 × 28 × 28 pictures in float32. The files are those of `fashion_mnist/` in the data folder."""
    train, test = (
        (
            read_idx(data_file(folder, f"fashion_mnist/{part}-images-idx3-ubyte.gz", SOURCE)).float().unsqueeze(1)
            / 255,
            read_idx(data_file(folder, f"fashion_mnist/{part}-labels-idx1-ubyte.gz", SOURCE)).long(),
        )
        for part in ("train", "t10k")
    )
    return standardised(train, test)


def read_idx(path: Path) -> Tensor:
    """A gzipped IDX file of bytes: two zeros, the type (8: unsigned byte), the number of sides, the sides, the numbers."""
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise MissingDataError(f"'{path}' isn't a whole gzip file ({error}): get it again from {SOURCE}") from error
    sides = [
        int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(content[3] if len(content) > 3 else 0)
    ]
    header = 4 + 4 * len(sides)
    if content[:3] != b"\0\0\x08" or len(content) != header + math.prod(sides):
        raise MissingDataError(f"'{path}' isn't an IDX file of bytes: get it again from {SOURCE}")
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(sides)
