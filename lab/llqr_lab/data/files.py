"""Files of data sets: where they are, reading them without trust, and where to keep what is made from them."""

import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llqr_lab.errors import DataError, MissingDataError

VARIABLE = "LLQR_DATA"
WHOLE = {"cifar10": 50_000, "cifar100": 50_000, "imagenet": 1_281_167, "iwslt14": 160_239, "multi30k": 29_000}
"""How much there is to learn from in these, of which the files at hand may be a part."""


def data_folder(folder: Path | None) -> Path | None:
    """The folder given, or else the one that LLQR_DATA names, or else none."""
    return folder or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)


def data_path(folder: Path | None, name: str, source: str) -> Path:
    """The file or folder of this name in the data folder."""
    chosen = data_folder(folder)
    if chosen is None:
        where = f"say where the data is, by --data FOLDER or {VARIABLE}; wanted there"
        raise MissingDataError(f"{where}: {name}, from {source}")
    if not (chosen / name).exists():
        raise MissingDataError(f"there is no {name} in '{chosen}': put it there, from {source}")
    return chosen / name


@contextmanager
def reading(path: Path, source: str, *errors: type[Exception]) -> Iterator[None]:
    """Errors of a reader, as one that names the file and says where to get it again."""
    caught: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, *errors)
    try:
        yield
    except caught as error:
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DataError(f"'{path}' can't be read ({told}): get it again from {source}") from error


def tar_members(path: Path, wanted: Callable[[str], bool], source: str) -> dict[str, bytes]:
    """The contents of regular files in an archive, by their names; others aren't looked at."""
    found: dict[str, bytes] = {}
    with reading(path, source, tarfile.TarError), tarfile.open(path) as archive:
        for member in archive:
            if member.isreg() and wanted(member.name) and (file := archive.extractfile(member)):
                found[member.name] = file.read()
    return found


KEYS = ("x_train", "y_train", "x_test", "y_test")


def read_npz(path: Path, side: int, source: str) -> list[tuple[Tensor, Tensor]]:
    """Training and test pictures (uint8 NCHW) with labels, of an .npz with bytes NHWC."""
    with (
        reading(path, source, zipfile.BadZipFile, ValueError),
        path.open("rb") as content,
        np.load(content, allow_pickle=False) as file,
    ):
        missing = [key for key in KEYS if key not in file.files]
        if missing:
            raise DataError(f"'{path}' has no {', '.join(missing)}: get it again from {source}")
        arrays = [file[key] for key in KEYS]
    parts = []
    for key, images, labels in zip(KEYS[::2], arrays[::2], arrays[1::2], strict=True):
        if images.shape[1:] != (side, side, 3) or images.dtype != np.uint8:
            shape = f"{images.dtype} of {images.shape}, not bytes of (pictures, {side}, {side}, 3)"
            raise DataError(f"{key} in '{path}' is {shape}: get it again from {source}")
        if labels.dtype.kind not in "iu":
            raise DataError(f"labels in '{path}' are {labels.dtype}, not integers: get it again from {source}")
        parts.append((torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels.astype(np.int64))))
    return parts
