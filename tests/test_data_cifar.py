"""Promise: CIFAR is read the same from each of its forms, and what is wrong with a file is told before training."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from llqr.errors import LLQRError
from llqr_lab.data.catalogue import data_set
from llqr_lab.data.cifar import CIFAR10, CIFAR10_NAMES, CIFARS, Cifar, cifar, local_cifar, tiny_imagenet32
from llqr_lab.data.folder import DataError, MissingDataError
from llqr_lab.data.pictures import MemoryPictures, Pictures

Arrays = dict[str, np.ndarray]


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
    place = folder / kind.binary
    place.mkdir(parents=True)
    share = len(parts["x_train"]) // len(kind.train)
    for number, name in enumerate(kind.train):
        some = slice(number * share, (number + 1) * share)
        (place / name).write_bytes(rows(kind, parts["x_train"][some], parts["y_train"][some]))
    (place / kind.test).write_bytes(rows(kind, parts["x_test"], parts["y_test"]))
    (place / kind.names).write_text("\n".join(f"class {number}" for number in range(kind.classes)) + "\n\n")
    return place


def write_archive(kind: Cifar, folder: Path, parts: Arrays) -> Path:
    place = write_binary(kind, folder / "unpacked", parts)
    path = folder / kind.archive
    with tarfile.open(path, "w:gz") as archive:
        archive.add(place, kind.binary)
    return path


def write_parquet(kind: Cifar, folder: Path, parts: Arrays) -> Path:
    """As the data set on the hub is laid out."""
    datasets = pytest.importorskip("datasets")
    place = folder / kind.hub
    (place / "data").mkdir(parents=True)
    image, label = kind.columns
    features = datasets.Features({image: datasets.Image(), label: datasets.Value("int64")})
    for part in ("train", "test"):
        content = {image: list(parts[f"x_{part}"]), label: parts[f"y_{part}"].tolist()}
        made = datasets.Dataset.from_dict(content, features=features)
        made.to_parquet(place / "data" / f"{part}-00000-of-00001.parquet")
    return place


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


@pytest.fixture(autouse=True)
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_HUB_OFFLINE=1 sets it, which is read when huggingface_hub is imported; the caches are the test's own."""
    monkeypatch.delenv("LLQR_DATA", raising=False)
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))


@pytest.mark.parametrize("name", CIFARS)
def test_the_npz_the_binary_folder_and_the_archive_hold_the_same(tmp_path: Path, name: str) -> None:
    kind = CIFARS[name]
    parts = arrays(kind)
    for form in ("npz", "binary", "archive"):
        folder = tmp_path / form
        folder.mkdir()
        if form == "npz":
            np.savez(folder / kind.npz, **parts)
        else:
            {"binary": write_binary, "archive": write_archive}[form](kind, folder, parts)
        data = cifar(name, folder)
        assert_holds(data, kind, parts)
        if form != "npz":
            assert data.class_names is not None
            assert data.class_names[3] == "class 3"
        assert data_set(name).check(folder).state == "found"
        assert data_set(name).check(folder, thorough=True).detail.startswith("10 + 4 pictures")


@pytest.mark.parametrize("name", CIFARS)
def test_a_copy_of_the_hugging_face_data_set_holds_the_same(tmp_path: Path, name: str) -> None:
    kind = CIFARS[name]
    parts = arrays(kind)
    write_parquet(kind, tmp_path, parts)
    assert_holds(cifar(name, tmp_path), kind, parts)


def test_names_of_classes(tmp_path: Path) -> None:
    parts = arrays(CIFAR10)
    np.savez(tmp_path / "cifar10.npz", **parts)
    assert cifar("cifar10", tmp_path).class_names == CIFAR10_NAMES
    np.savez(tmp_path / "cifar10.npz", **parts, class_names=np.array([f"my {i}" for i in range(10)]))
    names = cifar("cifar10", tmp_path).class_names
    assert names is not None
    assert names[9] == "my 9"


def test_tiny_imagenet_goes_by_its_own_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "tiny_imagenet32_100c.npz", **arrays(CIFARS["cifar100"]))
    assert tiny_imagenet32(tmp_path).classes == 100
    with pytest.raises(MissingDataError, match=r"cifar100\.npz"):
        local_cifar("cifar100", tmp_path)
    assert data_set("tiny-imagenet32").check(tmp_path).state == "found"


def test_what_is_nowhere_is_told_at_once_and_with_what_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.perf_counter()
    with pytest.raises(MissingDataError) as caught:
        cifar("cifar10", tmp_path)
    assert time.perf_counter() - begun < 5
    for told in ("uoft-cs/cifar10", "cifar10.npz", "cifar-10-batches-bin", str(tmp_path), CIFAR10.url, "hf download"):
        assert told in str(caught.value)
    with pytest.raises(MissingDataError, match="LLQR_DATA"):
        cifar("cifar10")
    # With a network that fails, the hub is asked once, and load_dataset with its many retries isn't even called.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no such host")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    monkeypatch.setattr("datasets.load_dataset", lambda *_: pytest.fail("it was known to be in vain"))
    with pytest.raises(MissingDataError, match="no such host"):
        cifar("cifar10", tmp_path)


def test_a_hugging_face_folder_without_data_is_told(tmp_path: Path) -> None:
    (tmp_path / CIFAR10.hub).mkdir(parents=True)
    with pytest.raises(DataError, match="holds no data set that can be read"):
        cifar("cifar10", tmp_path)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(LLQRError, match="did you mean 'cifar10'"):
        cifar("cifar-10", tmp_path)


def changed(**changes: np.ndarray | None) -> Arrays:
    parts = {**arrays(CIFAR10), **changes}
    return {key: value for key, value in parts.items() if value is not None}


BAD_ARRAYS: dict[str, tuple[Arrays, str]] = {
    "no labels": (changed(y_train=None), "has no y_train"),
    "floats": (changed(x_train=np.zeros((10, 32, 32, 3))), "float64"),
    "channels first": (changed(x_train=np.zeros((10, 3, 32, 32), np.uint8)), "not bytes of"),
    "nothing": (changed(x_test=np.zeros((0, 32, 32, 3), np.uint8), y_test=np.zeros(0, int)), "no test pictures"),
    "counts": (changed(y_test=np.arange(3)), "4 test pictures and 3 labels"),
    "label": (changed(y_test=np.array([0, 1, 2, 10])), "from 0 to 10"),
    "float labels": (changed(y_test=np.zeros(4)), "not integers"),
    "text labels": (changed(y_test=np.array(["a"] * 4)), "not integers"),
    "column": (changed(y_test=np.zeros((4, 1), int)), "in one row"),
    "names": (changed(class_names=np.array(["a", "b"])), "2 names for 10 classes"),
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
    assert data_set("cifar10").check(tmp_path, thorough=True).state == "broken"


def test_a_half_written_npz_is_told_by_the_cheap_look_already(tmp_path: Path) -> None:
    path = tmp_path / "cifar10.npz"
    np.savez(path, **arrays(CIFAR10))
    whole = path.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2], b"\x80\x04N."):
        path.write_bytes(content)
        status = data_set("cifar10").check(tmp_path)
        assert status.state == "broken"
        assert str(path) in status.detail
        with pytest.raises(DataError, match="get it again"):
            cifar("cifar10", tmp_path)
    path.write_bytes(whole[:5000] + bytes(3000) + whole[8000:])  # the directory is whole and the content isn't
    with pytest.raises(DataError, match="get it again"):
        cifar("cifar10", tmp_path)


def test_binary_files_that_are_cut_short_or_missing_are_told(tmp_path: Path) -> None:
    place = write_binary(CIFAR10, tmp_path, arrays(CIFAR10))
    whole = (place / "data_batch_3.bin").read_bytes()
    for content in (whole[:-1], b""):
        (place / "data_batch_3.bin").write_bytes(content)
        assert data_set("cifar10").check(tmp_path).state == "broken"
        with pytest.raises(DataError, match="data_batch_3"):
            cifar("cifar10", tmp_path)
    (place / "data_batch_3.bin").unlink()
    assert data_set("cifar10").check(tmp_path).state == "broken"
    with pytest.raises(DataError, match="data_batch_3"):
        cifar("cifar10", tmp_path)


def test_labels_beyond_the_classes_in_a_binary_file_are_told(tmp_path: Path) -> None:
    place = write_binary(CIFAR10, tmp_path, arrays(CIFAR10))
    content = bytearray((place / "test_batch.bin").read_bytes())
    content[0] = 10
    (place / "test_batch.bin").write_bytes(content)
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
    for change, message in (("left out", r"holds no .*test_batch\.bin"), ("a link", "isn't a regular file")):
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
