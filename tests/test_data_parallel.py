"""Promise: pairs of sentences are read line by line as they are, and what is broken is named, with what to do about it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from llqr_lab.data.translation import cleaned, parallel_text, prepared
from llqr_lab.errors import DataError


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
    assert text.train == [("a", "x"), ("b", "y"), ("c", "z")]
    assert len(text.valid) == len(text.test) == 2


def test_plain_files_and_the_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte order mark, Windows line ends and no last line feed are no part of sentences; other separators are."""
    place = tmp_path / "iwslt14_de_en"
    place.mkdir()
    for part in ("train", "valid", "test"):
        (place / f"{part}.de").write_bytes("\ufeffeins\r\nzwei\u2028drei".encode())
        (place / f"{part}.en").write_bytes(b"one\ntwo\n")
    monkeypatch.setenv("LLQR_DATA", str(tmp_path))
    text = parallel_text("iwslt14")
    assert text.valid == [("eins", "one"), ("zwei\u2028drei", "two")]


def test_empty_lines_go_from_training_and_are_refused_elsewhere(tmp_path: Path) -> None:
    folder = write(tmp_path, train_de=["a", "", "c", "d"], train_en=["x", "y", " ", "z"])
    text = parallel_text("multi30k", folder)
    assert cleaned(text.train) == [("a", "x"), ("d", "z")]
    assert prepared(text, merges=10).examples == 4
    (folder / "multi30k_de_en" / "val.en.gz").write_bytes(gzip.compress(b"one\n\n"))
    with pytest.raises(DataError, match=r"line 2 of .*val\.de\.gz' or .*val\.en\.gz' is empty"):
        parallel_text("multi30k", folder)


def test_unequal_sides(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.de\.gz' has 3 lines and '.*train\.en\.gz' has 2"):
        parallel_text("multi30k", write(tmp_path, train_de=["a", "b", "c"]))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"")[:], "is empty"),
        (gzip.compress(b"\n \n"), "is empty"),
        (gzip.compress(b"ein hund\n" * 100)[:-12], "can't be read"),
        (b"ein hund\n", "can't be read"),
        (gzip.compress("ein Bär\n".encode("latin-1")), "can't be read"),
    ],
    ids=["nothing", "white space", "half of it", "not gzip", "not UTF-8"],  # the bytes hold the time of day
)
def test_broken_files(tmp_path: Path, content: bytes, says: str) -> None:
    write(tmp_path)
    (tmp_path / "multi30k_de_en" / "train.de.gz").write_bytes(content)
    with pytest.raises(DataError, match=rf"train\.de\.gz' {says}.* from .*github"):
        parallel_text("multi30k", tmp_path)


def test_bytes_in_the_middle_of_a_gzip_file_that_are_wrong(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "multi30k_de_en" / "train.de.gz"
    whole = bytearray(gzip.compress(b"ein hund und noch ein anderer hund\n" * 3))
    whole[15:20] = b"\xff" * 5
    path.write_bytes(whole)
    with pytest.raises(DataError, match="can't be read"):
        parallel_text("multi30k", tmp_path)


def test_a_side_that_is_missing(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "multi30k_de_en" / "val.en.gz").unlink()
    with pytest.raises(DataError, match=r"there is no val\.en or val\.en\.gz in"):
        parallel_text("multi30k", tmp_path)


def test_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLQR_DATA", raising=False)
    with pytest.raises(DataError, match=r"LLQR_DATA; wanted there: iwslt14_de_en, from fairseq"):
        parallel_text("iwslt14")
    with pytest.raises(DataError, match=r"there is no multi30k_de_en in"):
        parallel_text("multi30k", tmp_path)
