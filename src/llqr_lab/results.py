"""What every result carries: how it was made and on what, so that it can be made again and judged."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def provenance(command: str, seed: int) -> dict[str, Any]:
    """The command, the seed, the versions and the size of the machine; nothing that names the machine or a path on it."""
    return {
        "command": command,
        "seed": seed,
        "versions": {"llqr": version("llqr"), "python": platform.python_version(), "torch": str(torch.__version__)},
        "cores": _cores(),
        "memory_bytes": _memory_bytes(),
    }


def read_json(text: str | bytes) -> Any:
    """JSON of a run, or of anyone: whole numbers beyond all counts become floats, which can be shown."""
    return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else float(digits)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write strict JSON (no NaN), whole or not at all."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _cores() -> int | None:
    """The cores that this process may use, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
