"""Data sets of pictures: scikit-learn's digits, Fashion-MNIST, CIFAR and what stands in for it, ImageNet and a sample of it."""

import gzip
import math
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llqr.errors import LLQRError
from llqr_lab.data.batches import Split
from llqr_lab.data.files import data_folder, data_path, reading, tar_members
from llqr_lab.data.pictures import Augmentation, FilePictures, Normalisation, Pictures, pictures_in_memory, reduced
from llqr_lab.errors import DataError, check_names


def digits(train: int = 1400) -> Split:
    """The 1,797 digits of scikit-learn, 1 × 8 × 8, scaled alike; the first `train` of an order that is always the same to learn
    from."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    inputs, targets = torch.as_tensor(images).reshape(-1, 1, 8, 8)[order].float(), torch.as_tensor(labels)[order].long()
    inputs = (inputs - inputs[:train].mean()) / inputs[:train].std()
    return Split(inputs[:train], targets[:train], inputs[train:], targets[train:])


# Fashion-MNIST

FASHION_SOURCE = "https://github.com/zalandoresearch/fashion-mnist/tree/master/data/fashion"
FASHION_FILES = tuple(
    f"fashion_mnist/{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


def fashion(folder: Path | None = None) -> Pictures:
    """Fashion-MNIST from its four original files: 60,000 + 10,000 grey pictures of clothes, 28 × 28, ten classes."""
    paths = [data_path(folder, name, FASHION_SOURCE) for name in FASHION_FILES]
    contents = [read_idx(path) for path in paths]
    train, test = ((images.unsqueeze(1), labels) for images, labels in zip(contents[::2], contents[1::2], strict=True))
    return pictures_in_memory(f"Fashion-MNIST from {FASHION_SOURCE}", train, test, 10)


def read_idx(path: Path) -> Tensor:
    """A gzipped IDX file of bytes: two zeros, the type (8: unsigned byte), the number of sides, the sides, the numbers."""
    with reading(path, FASHION_SOURCE), gzip.open(path) as file:
        content = file.read()
    count = content[3] if len(content) > 3 else 0
    sides = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(count)]
    header = 4 + 4 * len(sides)
    if content[:3] != b"\0\0\x08" or not math.prod(sides) or len(content) != header + math.prod(sides):
        raise DataError(f"'{path}' isn't an IDX file of bytes: get it again from {FASHION_SOURCE}")
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(sides)


# CIFAR, and a hundred classes of Tiny ImageNet that stand in for CIFAR-100

SIDE = 32


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets: what is in the original "binary version". The "python version" is a pickle and never read."""

    classes: int
    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    labels: int
    """Bytes before each picture; the last of them is its class."""

    @property
    def source(self) -> str:
        return f"https://www.cs.toronto.edu/~kriz/{self.archive}"

    def rows(self, where: str, content: bytes) -> tuple[Tensor, Tensor]:
        """Pictures and classes. Each row is the labels and then 3 × 32 × 32 bytes."""
        row = self.labels + 3 * SIDE**2
        if not content or len(content) % row:
            size = f"{len(content):,} bytes, not some rows of {row:,}"
            raise DataError(f"{where} has {size}: get it again from {self.source}")
        table = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, row)
        return table[:, self.labels :].reshape(-1, 3, SIDE, SIDE), table[:, self.labels - 1].long()


BATCHES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFARS = {
    "cifar10": Cifar(10, "cifar-10-binary.tar.gz", "cifar-10-batches-bin", BATCHES, "test_batch.bin", 1),
    "cifar100": Cifar(100, "cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), "test.bin", 2),
}


def cifar(name: str, folder: Path | None = None) -> Pictures:
    """CIFAR-10, or CIFAR-100 with its fine labels, from cifar10.npz or the original archive in the data folder."""
    kind, chosen = CIFARS[name], data_folder(folder)
    if chosen is not None and (chosen / f"{name}.npz").is_file():
        return _pictures_of_npz(chosen / f"{name}.npz", kind.classes, kind.source)
    path = data_path(folder, kind.archive, f"{kind.source} (or put an {name}.npz there)")
    wanted = [f"{kind.folder}/{file}" for file in (*kind.train, kind.test)]
    members = tar_members(path, wanted.__contains__, kind.source)
    if missing := sorted({*wanted} - members.keys()):
        raise DataError(f"'{path}' holds no file {', '.join(missing)}: get it again from {kind.source}")
    parts = {file: kind.rows(f"{file} in '{path}'", content) for file, content in members.items()}
    test = parts.pop(f"{kind.folder}/{kind.test}")
    images, labels = (torch.cat([parts[f"{kind.folder}/{file}"][i] for file in kind.train]) for i in (0, 1))
    return pictures_in_memory(f"'{path}'", (images, labels), test, kind.classes)


TINY_IMAGENET = "tiny_imagenet32_100c.npz"
TINY_SOURCE = "a subset of Tiny ImageNet at 32 × 32: github.com/DhanashriPalodkar/imageet32x32, made into this .npz"


def tiny_imagenet32(folder: Path | None = None) -> Pictures:
    """A hundred classes of Tiny ImageNet at 32 × 32. It has the shape of CIFAR-100 and is not CIFAR-100."""
    return _pictures_of_npz(data_path(folder, TINY_IMAGENET, TINY_SOURCE), 100, TINY_SOURCE)


KEYS = ("x_train", "y_train", "x_test", "y_test")


def _pictures_of_npz(path: Path, classes: int, source: str) -> Pictures:
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
        if images.shape[1:] != (SIDE, SIDE, 3) or images.dtype != np.uint8:
            shape = f"{images.dtype} of {images.shape}, not bytes of (pictures, {SIDE}, {SIDE}, 3)"
            raise DataError(f"{key} in '{path}' is {shape}: get it again from {source}")
        if labels.dtype.kind not in "iu":
            raise DataError(f"labels in '{path}' are {labels.dtype}, not integers: get it again from {source}")
        parts.append((torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels.astype(np.int64))))
    train, test = parts
    return pictures_in_memory(f"'{path}'", train, test, classes)


# folders of class folders of pictures, as ImageNet comes: train/<class>/*.JPEG and val/<class>/*.JPEG

IMAGENET_SOURCE = "https://image-net.org/download (ILSVRC 2012, after signing up), as train/<class>/ and val/<class>/"
IMAGENETTE, IMAGENETTE_FOLDER = "imagenette_sample.tar", "imagenette_sample/"
IMAGENETTE_SOURCE = "a sample of github.com/thunderInfy/imagenette, as imagenette_sample/{train,val}/<class>/*.JPEG"
IMAGENET_NORMALISATION = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp")


def imagenet(folder: Path | None = None, side: int = 256, fit: str = "shorter") -> Pictures:
    root = data_path(folder, "imagenet", IMAGENET_SOURCE)
    names = glob("train/*/*", root_dir=root) + glob("val/*/*", root_dir=root)
    return pictures_in_files(f"'{root}'", names, partial(_content, root), side, fit)


def _content(root: Path, name: str) -> bytes:
    return (root / name).read_bytes()


def imagenette(folder: Path | None = None, side: int = 256, fit: str = "shorter") -> Pictures:
    """Ten classes of ImageNet from `imagenette_sample.tar` in the data folder; what isn't a regular file isn't looked at."""
    path = data_path(folder, IMAGENETTE, IMAGENETTE_SOURCE)
    contents = tar_members(path, lambda name: name.startswith(IMAGENETTE_FOLDER), IMAGENETTE_SOURCE)
    held = {name.removeprefix(IMAGENETTE_FOLDER): content for name, content in contents.items()}
    return pictures_in_files(f"'{path}'", held, held.__getitem__, side, fit)


def pictures_in_files(
    where: str, names: Iterable[str], read: Callable[[str], bytes], side: int = 256, fit: str = "shorter"
) -> Pictures:
    """Pictures of side × side bytes, RGB, normalised by ImageNet's constants; classes are numbered by their sorted names.

    Names are train/CLASS/FILE and val/CLASS/FILE. `fit="shorter"` scales the shorter side to `side` and takes the middle of
    the longer one; `"stretch"` scales both.
    """
    check_names([fit], ("shorter", "stretch"), "fit")
    if side < 1:
        raise LLQRError(f"pictures have a side of at least 1 pixel, not {side}")
    found: dict[str, list[tuple[str, str]]] = {"train": [], "val": []}
    for part, label, file in sorted(name.split("/") for name in names if name.count("/") == 2):
        if part in found and file.lower().endswith(ENDINGS) and not file.startswith("."):
            found[part].append((label, f"{part}/{label}/{file}"))
    classes, others = ({label for label, _ in part} for part in found.values())
    if classes != others or not classes:
        alone = f", and those of {', '.join(sorted(classes ^ others)[:5])} are in one alone" if classes ^ others else ""
        raise DataError(
            f"{where}: pictures ({', '.join(ENDINGS)}) are looked for in train/CLASS/ and val/CLASS/{alone}"
        )
    numbers = {label: number for number, label in enumerate(sorted(classes))}

    def in_files(some: list[tuple[str, str]]) -> FilePictures:
        labels = torch.tensor([numbers[label] for label, _ in some])
        return FilePictures(read, tuple(name for _, name in some), labels, side, fit)

    return Pictures(in_files(found["train"]), in_files(found["val"]), len(numbers), IMAGENET_NORMALISATION)


def random_pictures(
    classes: int = 10, pixels: int = 16, train: int = 128, test: int = 64, channels: int = 3
) -> Pictures:
    """Made up, so that every experiment can be tried with nothing at hand: each class is a pattern of its own, with noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(256, (classes, channels, pixels, pixels), generator=generator).float()

    def part(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (count,), generator=generator)
        noise = 64 * torch.randn(count, channels, pixels, pixels, generator=generator)
        return (patterns[labels] + noise).clamp(0, 255).byte(), labels

    return pictures_in_memory("generated pictures", part(train), part(test), classes)


# by the names that configurations have for them; docs/experiments.md lists them, with sources and licences

CROPPED: dict[str, Callable[[Path | None], Pictures]] = {
    "cifar10": partial(cifar, "cifar10"),
    "cifar100": partial(cifar, "cifar100"),
    "tiny-imagenet32": tiny_imagenet32,
}
"""Of 32 × 32 pixels or averaged to fewer, cropped with padding and flipped in training."""
SCALED: dict[str, Callable[..., Pictures]] = {"imagenet": imagenet, "imagenette": imagenette}
"""Of any size: brought to 8/7 of the wanted side, then cropped and flipped in training."""


def pictures(
    name: str, folder: Path | None, pixels: int = 0, **options: Any
) -> tuple[Pictures, Augmentation, int | None]:
    """The pictures, what training does to them, and the side of the crop that is tested on."""
    if name in SCALED:
        side = pixels or 224
        return SCALED[name](folder, side=side * 8 // 7, **options), Augmentation(size=side, flip=True), side
    if name == "random-pictures":
        made = random_pictures(pixels=pixels or 16, **options)
        return made, Augmentation(padding=2, flip=True), None
    if name not in (*CROPPED, "fashion"):
        check_names([name], [*CROPPED, "fashion", *SCALED, "random-pictures"], "data set of pictures")
    if options or (pixels and name == "fashion"):
        given = ", ".join(["pixels"] * bool(pixels) + list(options))
        raise DataError(f"{name} has a size of its own: leave out {given}")
    if name == "fashion":
        return fashion(folder), Augmentation(), None
    side = pixels or SIDE
    return reduced(CROPPED[name](folder), side), Augmentation(padding=side // 8, flip=True), None
