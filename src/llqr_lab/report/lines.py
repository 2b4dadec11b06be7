"""JSON lines as columns of numbers, a chunk at a time, whatever may be in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from llqr_lab.results import read_json

Floats = NDArray[np.float64]
Row = Mapping[str, Any]

CHUNK = 4096
"""Lines that are in memory at a time."""
NOT_FINITE = math.inf
"""In a column, what was measured and isn't a finite number (null, NaN, Infinity); NaN is what wasn't measured."""


def chunks(path: Path) -> Iterator[list[Row | None]]:
    """The lines of a file; None for one that isn't a JSON object. A last line without an end isn't there yet."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while lines := _whole(file):
            yield _parsed(lines)


def _whole(file: IO[bytes]) -> list[bytes]:
    lines = list(islice(file, CHUNK))
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def _parsed(lines: list[bytes]) -> list[Row | None]:
    """All at once, which is faster; one by one where something is wrong."""
    try:
        rows = read_json(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines) and all(type(row) is dict for row in rows):
            return list(rows)
    except (ValueError, RecursionError):
        pass
    return [_object(line) for line in lines]


def _object(line: bytes) -> Row | None:
    try:
        found = read_json(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def column(rows: Sequence[Row], name: str) -> Floats | None:
    """What the rows have by a name; None if none of it is a number."""
    found = [row.get(name, _ABSENT) for row in rows]
    if {type(each) for each in found} <= {int, float}:
        try:
            values = np.array(found, np.float64)
        except OverflowError:  # an integer beyond all floats
            values = np.array([_number(each) for each in found])
        values[~np.isfinite(values)] = NOT_FINITE
        return values
    values = np.array([_number(each) for each in found])
    return None if np.isnan(values).all() else values


_ABSENT = object()


def _number(value: object) -> float:
    if value is None:
        return NOT_FINITE
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else NOT_FINITE
    except OverflowError:
        return NOT_FINITE


DEPTH = 5
"""Of tables in tables that are looked into."""


def flattened(row: Row, prefix: str = "", depth: int = DEPTH) -> dict[str, Any]:
    """Tables and lists in a row as dotted names: {"cosine": {"sgd": 0.1}, "q": [1]} is {"cosine.sgd": 0.1, "q.0": 1}."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, list):
            value = {str(number): each for number, each in enumerate(value)}
        if isinstance(value, dict):
            found |= flattened(value, f"{prefix}{name}.", depth - 1) if depth else {}
        else:
            found[prefix + name] = value
    return found
