"""CIFAR-10 and CIFAR-100, and what stands in for the latter: small RGB pictures, 32 × 32.

Looked for in the data folder in this order: an .npz file, the folder of the original "binary version", its .tar.gz, and a
copy of the Hugging Face data set; then on the hub itself. The original "python version" is a pickle and never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llqr.errors import unknown
from llqr_lab.data.archives import tar_members
from llqr_lab.data.folder import VARIABLE, DataError, MissingDataError, data_file, data_folder, reading
from llqr_lab.data.hub import hub_parts
from llqr_lab.data.npz import check_npz, read_npz
from llqr_lab.data.pictures import Pictures, pictures_in_memory

SIDE = 32
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets: what its files are called and what is in them."""

    name: str
    classes: int
    binary: str
    """The folder of the binary version, in the archive too."""
    archive: str
    train: tuple[str, ...]
    test: str
    names: str
    """The file with the names of the classes."""
    labels: int
    """Bytes before each picture; the last of them is its class."""
    hub: str
    columns: tuple[str, str]

    @property
    def npz(self) -> str:
        return f"{self.name}.npz"

    @property
    def url(self) -> str:
        return f"https://www.cs.toronto.edu/~kriz/{self.archive}"

    @property
    def places(self) -> tuple[str, ...]:
        """Where it is looked for in the data folder."""
        return (self.npz, f"{self.binary}/", self.archive, f"{self.hub}/")

    @property
    def command(self) -> str:
        """What gets it."""
        return (
            f"curl -o FOLDER/{self.archive} {self.url} "
            f"(or hf download {self.hub} --repo-type dataset --local-dir FOLDER/{self.hub})"
        )


CIFAR10 = Cifar(
    "cifar10",
    10,
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test_batch.bin",
    "batches.meta.txt",
    1,
    "uoft-cs/cifar10",
    ("img", "label"),
)
CIFAR100 = Cifar(
    "cifar100",
    100,
    "cifar-100-binary",
    "cifar-100-binary.tar.gz",
    ("train.bin",),
    "test.bin",
    "fine_label_names.txt",
    2,
    "uoft-cs/cifar100",
    ("img", "fine_label"),
)
CIFARS = {known.name: known for known in (CIFAR10, CIFAR100)}

TINY_IMAGENET = "tiny_imagenet32_100c.npz"
TINY_SOURCE = "a subset of Tiny ImageNet at 32 × 32: github.com/DhanashriPalodkar/imageet32x32, made into this .npz"


def cifar(name: str, folder: Path | None = None) -> Pictures:
    """`cifar10` or `cifar100` (fine labels), from the data folder or else from the Hugging Face hub."""
    kind = _kind(name)
    try:
        return local_cifar(name, folder)
    except MissingDataError as missing:
        train, test = hub_parts(kind.hub, *kind.columns, f"Before that, {missing}")
        return _checked(kind, kind.hub, train, test, None)


def local_cifar(name: str, folder: Path | None = None) -> Pictures:
    """The same from the data folder alone."""
    kind = _kind(name)
    place, path = found_cifar(kind, folder)
    return _READERS[place](kind, path)


def found_cifar(kind: Cifar, folder: Path | None) -> tuple[str, Path]:
    """Which of the places it is in ("npz", "binary", "archive", "hub"), and the file or folder."""
    chosen = data_folder(folder)
    wanted = f"none of {', '.join(kind.places)}"
    if chosen is None:
        raise MissingDataError(
            f"no data folder was named, by --data FOLDER or {VARIABLE}; it may hold one of {', '.join(kind.places)}. "
            f"To get it: {kind.command}"
        )
    for place, name in zip(_READERS, kind.places, strict=True):
        path = chosen / name
        if path.is_dir() if name.endswith("/") else path.is_file():
            return place, path
    raise MissingDataError(
        f"{wanted} was found in '{chosen}'. To get it: {kind.command.replace('FOLDER', str(chosen))}"
    )


def tiny_imagenet32(folder: Path | None = None) -> Pictures:
    """A hundred classes of Tiny ImageNet at 32 × 32. It has the shape of CIFAR-100 and is not CIFAR-100."""
    return read_npz(data_file(folder, TINY_IMAGENET, TINY_SOURCE), 100, SIDE, TINY_SOURCE)


def check_cifar(kind: Cifar, folder: Path | None) -> str:
    """What is there, by names, sizes and headers alone; an error if that isn't right."""
    place, path = found_cifar(kind, folder)
    if place == "npz":
        shapes = check_npz(path, SIDE, kind.url)
        return f"'{path}': {shapes['x_train'][0]:,} + {shapes['x_test'][0]:,} pictures"
    if place == "binary":
        for name in (*kind.train, kind.test):
            with reading(path / name, kind.url):
                _check_size(kind, f"'{path / name}'", (path / name).stat().st_size)
    return f"'{path}'"


def _kind(name: str) -> Cifar:
    if name not in CIFARS:
        raise unknown("data set", name, CIFARS)
    return CIFARS[name]


def _from_npz(kind: Cifar, path: Path) -> Pictures:
    return read_npz(path, kind.classes, SIDE, kind.url, CIFAR10_NAMES if kind is CIFAR10 else None)


def _from_binary(kind: Cifar, path: Path) -> Pictures:
    contents = {}
    for name in (*kind.train, kind.test):
        with reading(path / name, kind.url):
            contents[name] = (path / name).read_bytes()
    names = (path / kind.names).read_text(encoding="utf-8") if (path / kind.names).is_file() else ""
    return _from_bytes(kind, path, contents, names)


def _from_archive(kind: Cifar, path: Path) -> Pictures:
    wanted = {f"{kind.binary}/{name}": name for name in (*kind.train, kind.test, kind.names)}
    members = tar_members(path, wanted, kind.url)
    contents = {wanted[member]: content for member, content in members.items()}
    return _from_bytes(kind, path, contents, contents.pop(kind.names).decode("utf-8", errors="replace"))


def _from_hub_folder(kind: Cifar, path: Path) -> Pictures:
    train, test = hub_parts(path, *kind.columns, f"To get it again: {kind.command}")
    return _checked(kind, f"'{path}'", train, test, None)


_READERS: dict[str, Callable[[Cifar, Path], Pictures]] = {
    "npz": _from_npz,
    "binary": _from_binary,
    "archive": _from_archive,
    "hub": _from_hub_folder,
}


def _from_bytes(kind: Cifar, path: Path, contents: dict[str, bytes], names: str) -> Pictures:
    parts = {name: _rows(kind, f"{name} in '{path}'", content) for name, content in contents.items()}
    train = [parts[name] for name in kind.train]
    images, labels = (torch.cat([part[i] for part in train]) for i in (0, 1))
    listed = tuple(line.strip() for line in names.splitlines() if line.strip())
    return _checked(kind, f"'{path}'", (images, labels), parts[kind.test], listed or None)


def _rows(kind: Cifar, where: str, content: bytes) -> tuple[Tensor, Tensor]:
    """Each row is the labels and then 3 × 32 × 32 bytes."""
    _check_size(kind, where, len(content))
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, kind.labels + 3 * SIDE**2)
    return rows[:, kind.labels :].reshape(-1, 3, SIDE, SIDE), rows[:, kind.labels - 1].long()


def _check_size(kind: Cifar, where: str, size: int) -> None:
    row = kind.labels + 3 * SIDE**2
    if size == 0 or size % row:
        raise DataError(f"{where} has {size:,} bytes, not some rows of {row:,}: get it again from {kind.url}")


def _checked(
    kind: Cifar, where: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], names: tuple[str, ...] | None
) -> Pictures:
    if train[0].shape[1:] != (3, SIDE, SIDE):
        raise DataError(f"{where}: pictures are {tuple(train[0].shape[1:])}, not 3 × {SIDE} × {SIDE}")
    return pictures_in_memory(where, train, test, kind.classes, names or (CIFAR10_NAMES if kind is CIFAR10 else None))
