"""Promise: CIFAR is read the same from each of its forms, and what is wrong with a file is told before training."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from llqr_lab.data.picture_sets import CIFARS, Cifar, cifar, tiny_imagenet32
from llqr_lab.data.pictures import MemoryPictures, Pictures
from llqr_lab.errors import DataError

Arrays = dict[str, np.ndarray]
CIFAR10 = CIFARS["cifar10"]


def arrays(kind: Cifar) -> Arrays:
    """Ten training pictures and four to test on, NHWC."""
    random = np.random.default_rng(0)
    parts: Arrays = {}
    for part, count in (("train", 10), ("test", 4)):
        parts[f"x_{part}"] = random.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)
        parts[f"y_{part}"] = random.integers(kind.classes, size=count, dtype=np.uint8)
    return parts


def rows(kind: Cifar, images: np.ndarray, labels: np.ndarray) -> bytes:
    """As the binary version has them: a coarse label (of CIFAR-100 alone), the label, then the three colours in turn."""
    coarse = [255] * (kind.labels - 1)
    return b"".join(
        bytes([*coarse, label]) + image.transpose(2, 0, 1).tobytes()
        for image, label in zip(images, labels, strict=True)
    )


def write_binary(kind: Cifar, folder: Path, parts: Arrays) -> Path:
    place = folder / kind.folder
    place.mkdir(parents=True)
    share = len(parts["x_train"]) // len(kind.train)
    for number, name in enumerate(kind.train):
        some = slice(number * share, (number + 1) * share)
        (place / name).write_bytes(rows(kind, parts["x_train"][some], parts["y_train"][some]))
    (place / kind.test).write_bytes(rows(kind, parts["x_test"], parts["y_test"]))
    return place


def write_archive(kind: Cifar, folder: Path, parts: Arrays) -> Path:
    place = write_binary(kind, folder / "unpacked", parts)
    path = folder / kind.archive
    with tarfile.open(path, "w:gz") as archive:
        archive.add(place, kind.folder)
    return path


def memory(data: Pictures) -> tuple[MemoryPictures, MemoryPictures]:
    assert isinstance(data.train, MemoryPictures)
    assert isinstance(data.test, MemoryPictures)
    return data.train, data.test


def assert_holds(data: Pictures, kind: Cifar, parts: Arrays) -> None:
    for source, part in zip(memory(data), ("train", "test"), strict=True):
        assert source.images.dtype == torch.uint8
        assert np.array_equal(source.images.permute(0, 2, 3, 1).numpy(), parts[f"x_{part}"])
        assert source.labels.dtype == torch.int64
        assert source.labels.tolist() == parts[f"y_{part}"].tolist()
    assert data.classes == kind.classes


@pytest.mark.parametrize("name", CIFARS)
def test_the_npz_and_the_archive_hold_the_same(tmp_path: Path, name: str) -> None:
    kind = CIFARS[name]
    parts = arrays(kind)
    for form in ("npz", "archive"):
        folder = tmp_path / form
        folder.mkdir()
        if form == "npz":
            np.savez(folder / f"{name}.npz", **parts)
        else:
            write_archive(kind, folder, parts)
        assert_holds(cifar(name, folder), kind, parts)


def test_tiny_imagenet_goes_by_its_own_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "tiny_imagenet32_100c.npz", **arrays(CIFARS["cifar100"]))
    assert tiny_imagenet32(tmp_path).classes == 100
    with pytest.raises(DataError, match=r"cifar100\.npz"):
        cifar("cifar100", tmp_path)


def test_what_is_nowhere_is_told_with_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        cifar("cifar10", tmp_path)
    for told in ("cifar10.npz", "cifar-10-binary.tar.gz", str(tmp_path), CIFAR10.source):
        assert told in str(caught.value)
    with pytest.raises(DataError, match="LLQR_DATA"):
        cifar("cifar10")


def changed(**changes: np.ndarray | None) -> Arrays:
    parts = {**arrays(CIFAR10), **changes}
    return {key: value for key, value in parts.items() if value is not None}


BAD_ARRAYS: dict[str, tuple[Arrays, str]] = {
    "no labels": (changed(y_train=None), "has no y_train"),
    "floats": (changed(x_train=np.zeros((10, 32, 32, 3))), "float64"),
    "channels first": (changed(x_train=np.zeros((10, 3, 32, 32), np.uint8)), "not bytes of"),
    "nothing": (
        changed(x_test=np.zeros((0, 32, 32, 3), np.uint8), y_test=np.zeros(0, int)),
        "four sides, not torch.uint8 of .0,",
    ),
    "counts": (changed(y_test=np.arange(3)), "4 test pictures must have a whole number each"),
    "label": (changed(y_test=np.array([0, 1, 2, 10])), "from 0 to 10"),
    "float labels": (changed(y_test=np.zeros(4)), "not integers"),
    "text labels": (changed(y_test=np.array(["a"] * 4)), "not integers"),
    "column": (changed(y_test=np.zeros((4, 1), int)), "a whole number each"),
    "pickled": (changed(y_test=np.array([0, 1, 2, 3], dtype=object)), "allow_pickle=False"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_refused(tmp_path: Path, case: str) -> None:
    parts, message = BAD_ARRAYS[case]
    path = tmp_path / "cifar10.npz"
    np.savez(path, **parts)
    with pytest.raises(DataError, match=message) as caught:
        cifar("cifar10", tmp_path)
    assert str(path) in str(caught.value)


def test_a_half_written_npz_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cifar10.npz"
    np.savez(path, **arrays(CIFAR10))
    whole = path.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2], b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(DataError, match="get it again"):
            cifar("cifar10", tmp_path)
    path.write_bytes(whole[:5000] + bytes(3000) + whole[8000:])  # the directory is whole and the content isn't
    with pytest.raises(DataError, match="get it again"):
        cifar("cifar10", tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0" * 3072])
def test_rows_that_are_cut_short_are_told(content: bytes) -> None:
    with pytest.raises(DataError, match=r"data_batch_3 has .* bytes, not some rows of 3,073"):
        CIFAR10.rows("data_batch_3", content)


def test_labels_beyond_the_classes_are_told(tmp_path: Path) -> None:
    parts = arrays(CIFAR10)
    parts["y_test"][0] = 10
    write_archive(CIFAR10, tmp_path, parts)
    with pytest.raises(DataError, match="of 10 classes"):
        cifar("cifar10", tmp_path)


def rewritten(path: Path, change: str) -> None:
    """The archive with test_batch.bin left out, or as a link, beside a member that wants to get out of the folder."""
    with tarfile.open(path) as old:
        members = [(member, old.extractfile(member)) for member in old.getmembers()]
        with tarfile.open(fileobj=(made := io.BytesIO()), mode="w:gz") as new:
            for member, content in members:
                if member.name.endswith("test_batch.bin") and change != "outside":
                    if change == "left out":
                        continue
                    member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/hostname", 0
                    content = None
                new.addfile(member, content)
            if change == "outside":
                new.addfile(tarfile.TarInfo("../outside.bin"))
    path.write_bytes(made.getvalue())


def test_archives_are_not_trusted(tmp_path: Path) -> None:
    parts = arrays(CIFAR10)
    for change, message in (("left out", r"holds no .*test_batch\.bin"), ("a link", r"holds no .*test_batch\.bin")):
        (tmp_path / change).mkdir()
        rewritten(write_archive(CIFAR10, tmp_path / change, parts), change)
        with pytest.raises(DataError, match=message):
            cifar("cifar10", tmp_path / change)
    (tmp_path / "in").mkdir()
    path = write_archive(CIFAR10, tmp_path / "in", parts)
    rewritten(path, "outside")
    assert_holds(cifar("cifar10", tmp_path / "in"), CIFAR10, parts)  # nothing but the named members is looked at
    assert not (tmp_path / "outside.bin").exists()
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(DataError, match="get it again"):
        cifar("cifar10", tmp_path / "in")
