"""Archives are read, never trusted: members by exact names, regular files only, and nothing outside the folder meant."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path, PurePosixPath

from llqr_lab.data.folder import DataError, cache_folder, reading


def tar_members(path: Path, names: Collection[str], source: str) -> dict[str, bytes]:
    """The contents of these members; others aren't looked at."""
    found: dict[str, bytes] = {}
    with reading(path, source, tarfile.TarError, zlib.error), tarfile.open(path) as archive:
        for member in archive:
            if member.name not in names:
                continue
            found[member.name] = _content(archive, member, path, source)
            if len(found) == len(names):
                break
    missing = sorted(set(names) - found.keys())
    if missing:
        raise DataError(f"'{path}' holds no {', '.join(missing)}: get it again from {source}")
    return found


def unpacked(path: Path, source: str) -> Path:
    """The cache folder with this archive's `top/part/class/picture` files, unpacked there unless they are already.

    The folder's name has the archive's hash in it, so another archive of the same name gets another folder. It appears
    all at once when everything is there: a run that is stopped midway leaves no half of it.
    """
    with reading(path, source):
        target = cache_folder() / f"{path.stem}-{sha256(path.read_bytes()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    with reading(cache_folder(), "nowhere: it must be a folder that can be written; LLQR_CACHE names another"):
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=target.parent))
    try:
        _unpack(path, made, source)
        try:
            made.rename(target)
        except OSError:
            # Another process was first; its folder has the same hash and thus the same files.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def count_files(path: Path, source: str) -> int:
    """How many files a plain tar has, by their headers alone; an error if it is cut short."""
    with reading(path, source, tarfile.TarError), tarfile.open(path, "r:") as archive:
        members = archive.getmembers()
    # Behind the last header a cut goes unnoticed by tarfile.
    end = max((member.offset_data + member.size for member in members), default=0)
    if not members or path.stat().st_size < end:
        raise DataError(f"'{path}' is empty or cut short: get it again from {source}")
    return sum(member.isreg() for member in members)


def _unpack(path: Path, folder: Path, source: str) -> None:
    with reading(path, source, tarfile.TarError), tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isdir():
                continue
            parts = PurePosixPath(member.name).parts
            if len(parts) != 4 or ".." in parts or any(set(part) & set("\\:\0") for part in parts) or parts[0] == "/":
                raise DataError(
                    f"'{path}' holds {member.name!r}, which isn't a picture in a class folder: get it again from {source}"
                )
            content = _content(archive, member, path, source)
            place = folder.joinpath(*parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as file:  # x: a name that occurs twice is an error
                file.write(content)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, source: str) -> bytes:
    file = archive.extractfile(member) if member.isreg() else None
    if file is None:
        raise DataError(f"{member.name!r} in '{path}' isn't a regular file: get the archive again from {source}")
    content = file.read()
    if len(content) != member.size:
        raise DataError(f"{member.name!r} in '{path}' is cut short: get the archive again from {source}")
    return content
