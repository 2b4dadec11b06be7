"""Every data set: what it is, where it is looked for, where it can be had, and whether it is there."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from llqr.errors import unknown
from llqr_lab.data import cifar, fashion, imagefolder
from llqr_lab.data.archives import count_files
from llqr_lab.data.characters import SHAKESPEARE, SOURCE, shakespeare
from llqr_lab.data.folder import DataError, MissingDataError, data_file, data_subfolder, reading
from llqr_lab.data.npz import check_npz
from llqr_lab.data.pictures import Pictures


class Status(NamedTuple):
    state: Literal["found", "missing", "broken"]
    detail: str
    """What was found, or else what is wrong and what to do."""


@dataclass(frozen=True)
class DataSet:
    name: str
    what: str
    size: str
    licence: str
    """As its source states it."""
    places: tuple[str, ...]
    """Where it is looked for in the data folder; more than one: any of them will do, or all, as `every` says."""
    get: str
    """A command or an address."""
    look: Callable[[Path | None], str]
    """Looks at names, sizes and headers."""
    load: Callable[[Path | None], str]
    """Reads everything."""
    every: bool = True

    def check(self, folder: Path | None, thorough: bool = False) -> Status:
        """Nothing is fetched, and nothing is raised: what is wrong is part of the answer."""
        try:
            return Status("found", (self.load if thorough else self.look)(folder))
        except MissingDataError as error:
            return Status("missing", str(error))
        except (DataError, OSError) as error:
            return Status("broken", str(error))


class Row(NamedTuple):
    """A line of the table of data sets."""

    name: str
    what: str
    size: str
    licence: str
    places: str
    get: str
    state: str
    detail: str


def rows(folder: Path | None) -> list[Row]:
    """All data sets with what a cheap look at the data folder tells."""
    return [
        Row(d.name, d.what, d.size, d.licence, (", " if d.every else " or ").join(d.places), d.get, *d.check(folder))
        for d in CATALOGUE.values()
    ]


def data_set(name: str) -> DataSet:
    if name not in CATALOGUE:
        raise unknown("data set", name, CATALOGUE)
    return CATALOGUE[name]


def _nothing_needed(folder: Path | None) -> str:
    return "needs no files"


def _counted(pictures: Pictures) -> str:
    return f"{len(pictures.train.labels):,} + {len(pictures.test.labels):,} pictures of {pictures.classes} classes"


def _look_at_gzips(names: tuple[str, ...], source: str, folder: Path | None) -> str:
    for name in names:
        path = data_file(folder, name, source)
        with reading(path, source), path.open("rb") as file:
            if file.read(2) != b"\x1f\x8b":
                raise DataError(f"'{path}' isn't a gzip file: get it again from {source}")
    return f"{len(names)} files"


def _load_pairs(names: tuple[str, ...], source: str, folder: Path | None) -> str:
    """Files come in twos that must have as many lines."""
    counts = []
    for name in names:
        path = data_file(folder, name, source)
        with (
            reading(path, source, zlib.error, UnicodeDecodeError),
            gzip.open(path, "rt", encoding="utf-8", newline="\n") as file,
        ):
            counts.append(sum(1 for _ in file))
    for first, second, lines, others in zip(names[::2], names[1::2], counts[::2], counts[1::2], strict=True):
        if lines != others or not lines:
            raise DataError(f"{first} has {lines:,} lines and {second} has {others:,}: get both again from {source}")
    return " + ".join(f"{lines:,}" for lines in counts[::2]) + " pairs of sentences"


def _look_at_tiny_imagenet(folder: Path | None) -> str:
    path = data_file(folder, cifar.TINY_IMAGENET, cifar.TINY_SOURCE)
    shapes = check_npz(path, cifar.SIDE, cifar.TINY_SOURCE)
    return f"{shapes['x_train'][0]:,} + {shapes['x_test'][0]:,} pictures"


def _look_at_imagenette(folder: Path | None) -> str:
    path = data_file(folder, imagefolder.IMAGENETTE, imagefolder.IMAGENETTE_SOURCE)
    return f"{count_files(path, imagefolder.IMAGENETTE_SOURCE):,} pictures"


def _look_at_imagenet(folder: Path | None) -> str:
    root = data_subfolder(folder, imagefolder.IMAGENET_FOLDER, imagefolder.IMAGENET_SOURCE)
    return f"{len(imagefolder.class_folders(root)):,} classes"


def _load_folders(load: Callable[[Path | None], Pictures], folder: Path | None) -> str:
    pictures = load(folder)
    imagefolder.check_every_picture(pictures)
    return _counted(pictures)


def _look_at_text(folder: Path | None) -> str:
    path = data_file(folder, SHAKESPEARE, SOURCE)
    if not path.stat().st_size:
        raise DataError(f"'{path}' is empty: get it again from {SOURCE}")
    return f"{path.stat().st_size:,} bytes"


def _load_text(folder: Path | None) -> str:
    text = shakespeare(folder)
    return f"{len(text.train) + len(text.test):,} characters, {len(text.vocabulary)} different ones"


def _cifar(kind: cifar.Cifar, what: str) -> DataSet:
    return DataSet(
        kind.name,
        what,
        f"50,000 + 10,000 pictures, 32 × 32, {kind.classes} classes; 170 MB",
        "none stated; the authors ask to be cited (Krizhevsky 2009)",
        kind.places,
        kind.command,
        partial(cifar.check_cifar, kind),
        lambda folder: _counted(cifar.local_cifar(kind.name, folder)),
        every=False,
    )


def _pairs(name: str, what: str, size: str, licence: str, folder: str, parts: tuple[str, ...], source: str) -> DataSet:
    files = tuple(f"{folder}/{part}.{language}.gz" for part in parts for language in ("de", "en"))
    look, load = partial(_look_at_gzips, files, source), partial(_load_pairs, files, source)
    return DataSet(name, what, size, licence, files, source, look, load)


CATALOGUE: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        DataSet(
            "digits",
            "handwritten digits, 8 × 8",
            "1,797 pictures, 10 classes",
            "BSD-3-Clause (scikit-learn, which they come with)",
            (),
            "comes with scikit-learn",
            _nothing_needed,
            _nothing_needed,
        ),
        DataSet(
            "modular",
            "arithmetic modulo a prime: add, subtract, multiply, divide, exponentiate",
            "9,409 equations modulo 97 (9,312 for division)",
            "none needed",
            (),
            "made by llqr itself",
            _nothing_needed,
            _nothing_needed,
        ),
        DataSet(
            "fashion",
            "Fashion-MNIST: clothes in grey, 28 × 28",
            "60,000 + 10,000 pictures, 10 classes; 30 MB",
            "MIT",
            fashion.FILES,
            "https://github.com/zalandoresearch/fashion-mnist/tree/master/data/fashion",
            partial(_look_at_gzips, fashion.FILES, fashion.SOURCE),
            lambda folder: _counted(fashion.fashion_pictures(folder)),
        ),
        _cifar(cifar.CIFAR10, "CIFAR-10: small pictures of things and animals"),
        _cifar(cifar.CIFAR100, "CIFAR-100: small pictures, fine labels"),
        DataSet(
            "tiny-imagenet32",
            "a hundred classes of Tiny ImageNet at 32 × 32; not CIFAR-100",
            "7,000 + 1,500 pictures; 24 MB",
            "none stated; ImageNet's terms: non-commercial research",
            (cifar.TINY_IMAGENET,),
            cifar.TINY_SOURCE,
            _look_at_tiny_imagenet,
            lambda folder: _counted(cifar.tiny_imagenet32(folder)),
        ),
        DataSet(
            "imagenet",
            "ImageNet (ILSVRC 2012)",
            "1,281,167 + 50,000 pictures, 1,000 classes; 150 GB",
            "ImageNet's terms: non-commercial research",
            ("imagenet/train/<class>/*.JPEG", "imagenet/val/<class>/*.JPEG"),
            imagefolder.IMAGENET_SOURCE,
            _look_at_imagenet,
            partial(_load_folders, imagefolder.imagenet),
        ),
        DataSet(
            "imagenette",
            "a sample of ten ImageNet classes",
            "1,000 + 300 pictures; 15 MB",
            "none stated; ImageNet's terms: non-commercial research",
            (imagefolder.IMAGENETTE,),
            imagefolder.IMAGENETTE_SOURCE,
            _look_at_imagenette,
            partial(_load_folders, imagefolder.imagenette),
        ),
        DataSet(
            "shakespeare",
            "Shakespeare, character by character",
            "1,115,394 characters, 65 different ones",
            "MIT (the repository it is from)",
            (SHAKESPEARE,),
            SOURCE,
            _look_at_text,
            _load_text,
        ),
        _pairs(
            "multi30k",
            "Multi30k: captions of pictures in German and English, raw",
            "29,000 + 1,014 + 1,000 + 1,000 pairs of sentences",
            "non-commercial research and education, as its README says",
            "multi30k_de_en",
            ("train", "val", "test_2016_flickr", "test_2017_flickr"),
            "https://github.com/multi30k/dataset/tree/master/data/task1/raw",
        ),
        _pairs(
            "iwslt14",
            "IWSLT14: TED talks in German and English, tokenised and in lower case",
            "160,239 + 7,283 + 6,750 pairs of sentences; a file may hold fewer",
            "CC BY-NC-ND (TED talks)",
            "iwslt14_de_en",
            ("train", "valid", "test"),
            "fairseq's examples/translation/prepare-iwslt14.sh, gzipped before its BPE: "
            "https://raw.githubusercontent.com/facebookresearch/fairseq/main/examples/translation/prepare-iwslt14.sh",
        ),
    )
}
