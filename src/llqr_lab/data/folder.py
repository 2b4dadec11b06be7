"""Where data sets are that don't come with a package."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "LLQR_DATA"


class MissingDataError(Exception):
    """A data set isn't there; the message says where it is looked for and where it can be had."""


def data_file(folder: Path | None, name: str, source: str) -> Path:
    """The file of this name in the data folder: the one given, or else the one that LLQR_DATA names."""
    chosen = folder or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if chosen is None:
        raise MissingDataError(
            f"say where the data is, by --data FOLDER or {VARIABLE}; wanted there: {name}, from {source}"
        )
    path = chosen / name
    if not path.is_file():
        raise MissingDataError(f"there is no {name} in '{chosen}': put it there, from {source}")
    return path
