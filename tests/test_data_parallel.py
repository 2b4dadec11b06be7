"""Promise: pairs of sentences are read line by line as they are, and what is broken is named, with what to do about it."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llqr_lab.data.folder import MissingDataError
from llqr_lab.data.parallel import parallel_text


def write(folder: Path, **files: list[str]) -> Path:
    """A data folder with Multi30k in it: train_de=[...] goes to train.de.gz; two pairs where nothing is given."""
    place = folder / "multi30k_de_en"
    place.mkdir()
    for part in ("train", "val", "test_2016_flickr"):
        for language in ("de", "en"):
            lines = files.get(f"{part}_{language}", ["Ein Hund .", "Zwei Hunde ."])
            (place / f"{part}.{language}.gz").write_bytes(gzip.compress("".join(f"{x}\n" for x in lines).encode()))
    return folder


def test_gzipped_pairs_in_their_order(tmp_path: Path) -> None:
    text = parallel_text("multi30k", write(tmp_path, train_de=["a", "b", "c"], train_en=["x", "y", "z"]))
    assert (text.train.source, text.train.target, text.train.dropped) == (["a", "b", "c"], ["x", "y", "z"], 0)
    assert len(text.valid.source) == len(text.test.target) == 2


def test_plain_files_and_the_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte order mark, Windows line ends and no last line feed are no part of sentences; other separators are."""
    place = tmp_path / "iwslt14_de_en"
    place.mkdir()
    for part in ("train", "valid", "test"):
        (place / f"{part}.de").write_bytes("\ufeffeins\r\nzwei\u2028drei".encode())
        (place / f"{part}.en").write_bytes(b"one\ntwo\n")
    monkeypatch.setenv("LLQR_DATA", str(tmp_path))
    text = parallel_text("iwslt14")
    assert text.valid.source == ["eins", "zwei\u2028drei"]
    assert text.test.target == ["one", "two"]


def test_empty_lines_go_from_training_and_are_refused_elsewhere(tmp_path: Path) -> None:
    folder = write(tmp_path, train_de=["a", "", "c", "d"], train_en=["x", "y", " ", "z"])
    train = parallel_text("multi30k", folder).train
    assert (train.source, train.target, train.dropped) == (["a", "d"], ["x", "z"], 2)
    (folder / "multi30k_de_en" / "val.en.gz").write_bytes(gzip.compress(b"one\n\n"))
    with pytest.raises(MissingDataError, match=r"line 2 of .*val\.de\.gz' or .*val\.en\.gz' is empty"):
        parallel_text("multi30k", folder)


def test_unequal_sides(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"train\.de\.gz' has 3 lines and '.*train\.en\.gz' has 2"):
        parallel_text("multi30k", write(tmp_path, train_de=["a", "b", "c"]))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"")[:], "is empty"),
        (gzip.compress(b"\n \n"), "is empty"),
        (gzip.compress(b"ein hund\n" * 100)[:-12], "can't be read whole"),
        (b"ein hund\n", "can't be read whole"),
        (gzip.compress("ein Bär\n".encode("latin-1")), "isn't UTF-8"),
    ],
    ids=["nothing", "white space", "half of it", "not gzip", "not UTF-8"],  # the bytes hold the time of day
)
def test_broken_files(tmp_path: Path, content: bytes, says: str) -> None:
    write(tmp_path)
    (tmp_path / "multi30k_de_en" / "train.de.gz").write_bytes(content)
    with pytest.raises(MissingDataError, match=rf"train\.de\.gz' {says}.* from github"):
        parallel_text("multi30k", tmp_path)


def test_bytes_in_the_middle_of_a_gzip_file_that_are_wrong(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "multi30k_de_en" / "train.de.gz"
    whole = bytearray(gzip.compress(b"ein hund und noch ein anderer hund\n" * 3))
    whole[15:20] = b"\xff" * 5
    path.write_bytes(whole)
    with pytest.raises(MissingDataError, match="can't be read whole"):
        parallel_text("multi30k", tmp_path)


def test_a_side_that_is_missing(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "multi30k_de_en" / "val.en.gz").unlink()
    with pytest.raises(MissingDataError, match=r"there is no val\.en or val\.en\.gz in"):
        parallel_text("multi30k", tmp_path)


def test_no_such_corpus_and_no_place() -> None:
    with pytest.raises(ValueError, match="there are multi30k, iwslt14"):
        parallel_text("wmt14")


def test_without_files_and_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLQR_DATA", raising=False)
    with pytest.raises(MissingDataError, match=r"LLQR_DATA; wanted there: a folder iwslt14_de_en with train\.de\.gz"):
        parallel_text("iwslt14")

    def unreachable(name: str) -> None:
        raise ConnectionError(f"couldn't reach {name}")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MissingDataError, match=r"put one there .*HF_HUB_OFFLINE is set.*load_dataset\('bentrevett"):
        parallel_text("multi30k", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDataError, match="import of datasets halted"):
        parallel_text("multi30k", tmp_path)


def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = {"de": ["Ein Hund.\n", "Zwei."], "en": ["A dog.", "Two."]}
    found = {"train": {"de": ["a", ""], "en": ["x", "y"]}, "validation": split, "test": split}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name: found))
    text = parallel_text("multi30k", tmp_path)
    assert (text.train.source, text.train.dropped) == (["a"], 1)
    assert text.test.source == ["Ein Hund.", "Zwei."]
