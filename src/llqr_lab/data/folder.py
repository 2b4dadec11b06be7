"""Where data sets are that don't come with a package, and where to put what is made from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "LLQR_DATA"
CACHE_VARIABLE = "LLQR_CACHE"


class DataError(Exception):
    """Data that can't be used; the message names the file and says what to do."""


class MissingDataError(DataError):
    """A data set isn't there; the message says where it is looked for and where it can be had."""


def data_folder(folder: Path | None) -> Path | None:
    """The folder given, or else the one that LLQR_DATA names, or else none."""
    return folder or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)


def data_file(folder: Path | None, name: str, source: str) -> Path:
    """The file of this name in the data folder."""
    chosen = _chosen(folder, name, source)
    if not (chosen / name).is_file():
        raise MissingDataError(f"there is no {name} in '{chosen}': put it there, from {source}")
    return chosen / name


def data_subfolder(folder: Path | None, name: str, source: str) -> Path:
    """The folder of this name in the data folder."""
    chosen = _chosen(folder, name, source)
    if not (chosen / name).is_dir():
        raise MissingDataError(f"there is no folder {name} in '{chosen}': put it there, from {source}")
    return chosen / name


def _chosen(folder: Path | None, name: str, source: str) -> Path:
    chosen = data_folder(folder)
    if chosen is None:
        raise MissingDataError(
            f"say where the data is, by --data FOLDER or {VARIABLE}; wanted there: {name}, from {source}"
        )
    return chosen


def cache_folder() -> Path:
    """Where unpacked archives go, because a data folder may be read-only: LLQR_CACHE, or else ~/.cache/llqr."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "llqr"


@contextmanager
def reading(path: Path, source: str, *errors: type[Exception]) -> Iterator[None]:
    """Errors of a reader, as one that names the file and says where to get it again."""
    caught: tuple[type[Exception], ...] = (OSError, EOFError, *errors)
    try:
        yield
    except caught as error:
        raise DataError(f"'{path}' can't be read ({_told(error)}): get it again from {source}") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
