"""Promise: folders of pictures are read a batch at a time, archives are read and never unpacked."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from llqr.errors import LLQRError
from llqr_lab.data.batches import stream
from llqr_lab.data.picture_sets import (
    fashion,
    imagenet,
    imagenette,
    pictures_in_files,
    read_idx,
)
from llqr_lab.data.pictures import Augmentation, FilePictures, Pictures, square_picture
from llqr_lab.errors import ConfigError, DataError


def picture(seed: int, width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8))


def write_folder(root: Path, classes: tuple[str, ...] = ("n02", "n01"), train: int = 3, val: int = 2) -> Path:
    for part, count in (("train", train), ("val", val)):
        for number, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                picture(10 * number + i, mode="L" if i == 1 else "RGB").save(root / part / name / f"p_{i}.JPEG")
    return root


def made(root: Path, side: int = 16, fit: str = "shorter") -> Pictures:
    names = [str(path.relative_to(root)) for path in root.rglob("*.*")]
    return pictures_in_files(f"'{root}'", names, lambda name: (root / name).read_bytes(), side, fit)


def test_classes_are_numbered_by_sorted_names_and_files_come_in_order(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "train" / "n01" / "notes.txt").write_text("not a picture")
    (tmp_path / "train" / "n01" / ".hidden.JPEG").write_text("not one either")
    data = made(tmp_path)
    assert data.classes == 2
    assert isinstance(data.train, FilePictures)
    assert data.train.names == tuple(f"train/n0{c}/p_{i}.JPEG" for c in (1, 2) for i in range(3))
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert [batch.targets.tolist() for batch in data.testing(3)] == [[0, 0, 1], [1]]


def test_pictures_become_squares(tmp_path: Path) -> None:
    wide = np.zeros((32, 64, 3), np.uint8)
    wide[:, :16], wide[:, 16:48], wide[:, 48:] = 10, 100, 200
    path = tmp_path / "wide.png"
    Image.fromarray(wide).save(path)
    middle, all_of_it = (square_picture(path.read_bytes(), "wide.png", 32, fit) for fit in ("shorter", "stretch"))
    assert middle.shape == all_of_it.shape == (3, 32, 32)
    assert middle.unique().tolist() == [100]  # the middle of the longer side, not scaled
    assert [int(all_of_it[0, 16, x]) for x in (2, 16, 30)] == [10, 100, 200]
    assert square_picture(path.read_bytes(), "wide.png", 64, "shorter").shape == (3, 64, 64)
    picture(0, mode="L").save(tmp_path / "grey.jpg")
    grey = square_picture((tmp_path / "grey.jpg").read_bytes(), "grey.jpg", 8, "shorter")
    assert torch.equal(grey[0], grey[1])
    assert torch.equal(grey[0], grey[2])


def test_batches_are_functions_of_the_step_with_and_without_workers(tmp_path: Path) -> None:
    data = made(write_folder(tmp_path))
    batches = data.training(2, 0, Augmentation(size=12, flip=True))
    assert batches.steps_per_epoch == 3
    alone, helped = list(stream(batches, range(1, 5))), list(stream(batches, range(1, 5), workers=2))
    for one, other in zip(alone, helped, strict=True):
        assert one.inputs[0].shape == (2, 3, 12, 12)
        assert torch.equal(one.inputs[0], other.inputs[0])
        assert torch.equal(one.targets, other.targets)
    assert next(iter(data.testing(4, crop=12))).inputs[0].shape == (4, 3, 12, 12)


def test_imagenet_is_looked_for_in_its_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"image-net\.org"):
        imagenet(tmp_path)
    write_folder(tmp_path / "imagenet")
    assert imagenet(tmp_path).training(1, 0, Augmentation(size=224, flip=True))[0].inputs[0].shape == (1, 3, 224, 224)


def test_pictures_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "imagenet")
    whole = (root / "val" / "n01" / "p_1.JPEG").read_bytes()
    for content in (b"", b"no picture", whole[: len(whole) // 2]):
        (root / "val" / "n01" / "p_1.JPEG").write_bytes(content)
        with pytest.raises(DataError, match=r"n01.p_1\.JPEG"):
            list(imagenet(tmp_path, side=8).testing(2))


def test_folders_that_are_not_right_are_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"are looked for in train/CLASS/ and val/CLASS/$"):
        made(tmp_path)
    root = write_folder(tmp_path / "a")
    for file in (root / "val" / "n02").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"those of n02 are in one alone"):
        made(root)
    with pytest.raises(ConfigError, match="did you mean shorter"):
        made(root, fit="short")
    with pytest.raises(LLQRError, match="at least 1"):
        made(root, side=0)


def test_imagenette_is_read_from_its_archive_and_from_nowhere_else(tmp_path: Path) -> None:
    link = tarfile.TarInfo("imagenette_sample/train/n01/link.JPEG")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    with tarfile.open(tmp_path / "imagenette_sample.tar", "w") as archive:
        archive.add(write_folder(tmp_path / "made"), "imagenette_sample")
        archive.addfile(tarfile.TarInfo("../train/n01/up.JPEG"))
        archive.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    data, other = imagenette(tmp_path, side=8), made(tmp_path / "made", side=8)
    assert [len(source.labels) for source in (data.train, data.test)] == [6, 4]
    for one, another in ((data.train, other.train), (data.test, other.test)):
        rows = torch.arange(len(one.labels))
        assert torch.equal(one.labels, another.labels)
        assert torch.equal(one.take(rows), another.take(rows))
    assert sorted(tmp_path.rglob("*")) == before


def test_archives_that_are_broken_are_told(tmp_path: Path) -> None:
    data = tmp_path / "imagenette_sample.tar"
    with tarfile.open(data, "w") as archive:
        archive.add(write_folder(tmp_path / "made"), "imagenette_sample")
    for content in (b"", b"no archive", data.read_bytes()[:7000]):
        data.write_bytes(content)
        with pytest.raises(DataError, match="imagenette"):
            imagenette(tmp_path)


def write_idx(path: Path, values: torch.Tensor) -> None:
    path.parent.mkdir(exist_ok=True)
    sides = b"".join(side.to_bytes(4, "big") for side in values.shape)
    path.write_bytes(gzip.compress(b"\0\0\x08" + bytes([values.dim()]) + sides + bytes(values.flatten().tolist())))


def test_fashion_mnist_is_read_from_its_four_files(tmp_path: Path) -> None:
    images = {part: torch.randint(256, (n, 28, 28)) for part, n in (("train", 6), ("t10k", 3))}
    for part, values in images.items():
        write_idx(tmp_path / "fashion_mnist" / f"{part}-images-idx3-ubyte.gz", values)
        write_idx(tmp_path / "fashion_mnist" / f"{part}-labels-idx1-ubyte.gz", torch.arange(len(values)))
    ((pictures, *_), labels) = next(iter(fashion(tmp_path).testing(10)))
    assert labels.tolist() == [0, 1, 2]
    train, test = (images[part].float() / 255 for part in ("train", "t10k"))
    expected = (test - train.mean()) / train.std(correction=0)
    torch.testing.assert_close(pictures[:, 0], expected, rtol=1e-5, atol=1e-5)
    write_idx(tmp_path / "fashion_mnist" / "train-labels-idx1-ubyte.gz", torch.arange(5))
    with pytest.raises(DataError, match="6 training pictures must have a whole number each"):
        fashion(tmp_path)


BROKEN = {
    "empty": b"",
    "not gzip": b"not gzip",
    "too short": gzip.compress(b"\0\0\x08\1\0\0\0\5abc", mtime=0),
    "no header": gzip.compress(b"\1\2", mtime=0),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_told(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "broken.gz"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(DataError, match="get it again"):
        read_idx(path)
