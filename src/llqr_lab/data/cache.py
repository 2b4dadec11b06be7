"""Where things are kept that take a while to make and can be made again."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from llqr_lab.data.folder import cache_folder

T = TypeVar("T")


def kept(kind: str, made_from: Any, make: Callable[[], T], fits: Callable[[Any], bool]) -> T:
    """What `make` gives, as JSON in the cache folder under a hash of all that it is made from.

    A file that isn't whole, or whose content doesn't fit, is made again and replaced. A folder that can't be written to
    costs the time of making it, and nothing else.
    """
    digest = blake2b(json.dumps(made_from, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = cache_folder() / f"{kind}-{digest}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if fits(found):
            return found  # type: ignore[no-any-return]
    except (OSError, ValueError):
        pass
    made = make()
    with suppress(OSError):
        _replace(path, json.dumps(made, ensure_ascii=False))
    return made


def _replace(path: Path, text: str) -> None:
    """Whoever reads sees the whole old file or the whole new one, also when two processes write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
