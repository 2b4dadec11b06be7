"""Pictures from an .npz file with x_train, y_train, x_test, y_test: bytes NHWC and labels."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llqr_lab.data.folder import DataError, reading
from llqr_lab.data.pictures import Pictures, pictures_in_memory

KEYS = ("x_train", "y_train", "x_test", "y_test")


def read_npz(path: Path, classes: int, side: int, source: str, class_names: tuple[str, ...] | None = None) -> Pictures:
    """RGB pictures of this side. Names of classes are taken from the file if it has `class_names`."""
    check_npz(path, side, source)
    with reading(path, source, zipfile.BadZipFile, zlib.error, ValueError), np.load(path, allow_pickle=False) as file:
        x_train, y_train, x_test, y_test = (file[key] for key in KEYS)
        if "class_names" in file.files:
            class_names = tuple(str(name) for name in file["class_names"])
    train, test = (
        (torch.from_numpy(images).permute(0, 3, 1, 2), _labels(path, labels, source))
        for images, labels in ((x_train, y_train), (x_test, y_test))
    )
    return pictures_in_memory(f"'{path}'", train, test, classes, class_names)


def _labels(path: Path, labels: np.ndarray[tuple[int, ...], np.dtype[np.generic]], source: str) -> Tensor:
    if labels.dtype.kind not in "iu":  # torch would have no type for some of the others
        raise DataError(f"labels in '{path}' are {labels.dtype}, not integers: get it again from {source}")
    return torch.from_numpy(labels.astype(np.int64))


def check_npz(path: Path, side: int, source: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays, which say whether the file is whole and of the right kind, without the arrays."""
    shapes = {}
    with reading(path, source, zipfile.BadZipFile, zlib.error, ValueError), zipfile.ZipFile(path) as archive:
        missing = [key for key in KEYS if f"{key}.npy" not in archive.namelist()]
        if missing:
            raise DataError(f"'{path}' has no {', '.join(missing)}: get it again from {source}")
        for key in KEYS:
            with archive.open(f"{key}.npy") as file:
                version = np.lib.format.read_magic(file)
                header = (
                    np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                )
                shape, _, kind = header(file)
            shapes[key] = shape
            if key.startswith("x") and (shape[1:] != (side, side, 3) or kind != np.uint8):
                raise DataError(
                    f"{key} in '{path}' is {kind} of {shape}, not bytes of (pictures, {side}, {side}, 3): "
                    f"get it again from {source}"
                )
    return shapes
