"""Files of data sets: where they are, reading them without trust, and where to keep what is made from them."""

import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llqr_lab.errors import DataError

VARIABLE = "LLQR_DATA"
WHOLE = {"cifar10": 50_000, "cifar100": 50_000, "imagenet": 1_281_167, "iwslt14": 160_239, "multi30k": 29_000}
"""How much there is to learn from in these, of which the files at hand may be a part."""


def data_folder(folder: Path | None) -> Path | None:
    """The folder given, or else the one that LLQR_DATA names, or else none."""
    return folder or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)


def data_path(folder: Path | None, name: str, source: str) -> Path:
    chosen = data_folder(folder)
    if chosen is None:
        where = f"say where the data is, by --data FOLDER or {VARIABLE}; wanted there"
        raise DataError(f"{where}: {name}, from {source}")
    if not (chosen / name).exists():
        raise DataError(f"there is no {name} in '{chosen}': put it there, from {source}")
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
