"""Pairs of sentences: two text files, line by line, or the same from the hub."""

from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from llqr_lab.data.folder import VARIABLE, MissingDataError


@dataclass(frozen=True)
class Corpus:
    """Where a corpus is to be had, and what has been done to it already."""

    name: str
    folder: str
    """Its folder in the data folder, with {train,valid,val,test,test_2016_flickr}.LANGUAGE, plain or .gz."""
    languages: tuple[str, str]
    tokenised: bool
    """Moses-tokenised (with its entities) and lowercased where it comes from: there is no raw text to score against."""
    origin: str
    hub: str | None = None


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            "multi30k",
            "multi30k_de_en",
            ("de", "en"),
            False,
            "github.com/multi30k/dataset (data/task1/raw)",
            "bentrevett/multi30k",
        ),
        Corpus("iwslt14", "iwslt14_de_en", ("de", "en"), True, "fairseq's prepare-iwslt14.sh, before its BPE"),
    )
}

PARTS = {"train": ("train",), "valid": ("valid", "val"), "test": ("test", "test_2016_flickr")}
HUB_PARTS = {"train": "train", "valid": "validation", "test": "test"}


class Pairs(NamedTuple):
    source: list[str]
    target: list[str]
    dropped: int = 0
    """Pairs left out because a side was empty."""


class ParallelText(NamedTuple):
    """The three parts of a corpus.

    A training pair with an empty side teaches nothing and is dropped. In the other two parts it is an error: without it the
    scores would be of another test set, and with it of a sentence that nobody translated.
    """

    corpus: Corpus
    train: Pairs
    valid: Pairs
    test: Pairs


def parallel_text(name: str, folder: Path | None = None) -> ParallelText:
    """A corpus from its folder in the data folder (`folder`, or LLQR_DATA) or, where there is no such folder, from the hub."""
    if name not in CORPORA:
        raise ValueError(f"there is no corpus {name!r}; there are {', '.join(CORPORA)}")
    corpus = CORPORA[name]
    chosen = folder or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if chosen is not None and (chosen / corpus.folder).is_dir():
        parts = {part: _from_files(chosen / corpus.folder, corpus, part) for part in PARTS}
    elif corpus.hub is None:
        raise MissingDataError(_wanted(corpus, chosen))
    else:
        parts = _from_hub(corpus, chosen)
    return ParallelText(corpus, **parts)


def read_lines(path: Path, origin: str) -> list[str]:
    """The lines of a UTF-8 text file, gzipped if its name says so. A line ends at a line feed and nowhere else."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"'{path}' can't be read whole ({error}): get it again from {origin}") from error
    try:
        # "-sig": a byte order mark isn't part of the first word.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MissingDataError(f"'{path}' isn't UTF-8 ({error}): convert it, or get it again from {origin}") from error
    if not text.strip():
        raise MissingDataError(f"'{path}' is empty: get it again from {origin}")
    # Not splitlines(): other characters it takes for line ends occur within sentences, and would move the two sides apart.
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def paired(source: list[str], target: list[str], names: tuple[str, str], keep_all: bool) -> Pairs:
    """Line by line, checked; pairs with an empty side are dropped or, with `keep_all`, refused."""
    if len(source) != len(target):
        raise MissingDataError(
            f"'{names[0]}' has {len(source)} lines and '{names[1]}' has {len(target)}: they aren't translations of each "
            "other line by line; get both again, from the same place"
        )
    empty = [number for number, pair in enumerate(zip(source, target, strict=True), 1) if not all(pair)]
    if len(empty) == len(source):
        raise MissingDataError(f"'{names[0]}' and '{names[1]}' have no pair of sentences: get both again")
    if empty and keep_all:
        raise MissingDataError(
            f"line {empty[0]} of '{names[0]}' or '{names[1]}' is empty ({len(empty)} such lines): what is scored has to be "
            "whole; get both again, or take the line out of both"
        )
    whole = [pair for pair in zip(source, target, strict=True) if all(pair)]
    return Pairs([pair[0] for pair in whole], [pair[1] for pair in whole], len(empty))


def _from_files(folder: Path, corpus: Corpus, part: str) -> Pairs:
    # Both sides are of the first name that either of them has: valid.de never goes with val.en.
    names = [n for n in PARTS[part] if any(_file(folder, n, language) for language in corpus.languages)]
    paths = [_file(folder, names[0], language) if names else None for language in corpus.languages]
    for path, language in zip(paths, corpus.languages, strict=True):
        if path is None:
            wanted = " or ".join(f"{n}.{language}{end}" for n, end in product(names[:1] or PARTS[part], ("", ".gz")))
            raise MissingDataError(f"there is no {wanted} in '{folder}': put it there, from {corpus.origin}")
    source, target = (path for path in paths if path is not None)
    lines = read_lines(source, corpus.origin), read_lines(target, corpus.origin)
    return paired(*lines, (str(source), str(target)), keep_all=part != "train")


def _file(folder: Path, part: str, language: str) -> Path | None:
    candidates = (folder / f"{part}.{language}{end}" for end in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def _from_hub(corpus: Corpus, chosen: Path | None) -> dict[str, Pairs]:
    try:
        # Here and not above: it takes a second to import, and files don't need it.
        from datasets import load_dataset

        found = load_dataset(corpus.hub)
        sides = {
            part: [[str(text).strip() for text in found[split][language]] for language in corpus.languages]
            for part, split in HUB_PARTS.items()
        }
    except Exception as error:  # the hub's libraries raise errors of many kinds, and all are the same news
        offline = "; HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise MissingDataError(
            f"{_wanted(corpus, chosen)}. It couldn't be had from the hub either ({error}{offline}); where there is a "
            f"network, this puts it into the hub's cache: python -c \"import datasets; datasets.load_dataset('{corpus.hub}')\""
        ) from error
    return {
        part: paired(
            source,
            target,
            (f"{corpus.hub} {part} {corpus.languages[0]}", f"{corpus.hub} {part} {corpus.languages[1]}"),
            keep_all=part != "train",
        )
        for part, (source, target) in sides.items()
    }


def _wanted(corpus: Corpus, chosen: Path | None) -> str:
    files = ", ".join(f"{names[0]}.{language}.gz" for names in PARTS.values() for language in corpus.languages)
    if chosen is None:
        place = f"say where the data is, by --data FOLDER or {VARIABLE}; wanted there: a folder {corpus.folder}"
    else:
        place = f"there is no folder {corpus.folder} in '{chosen}': put one there"
    return f"{place} with {files} (or without .gz; or named val and test_2016_flickr), from {corpus.origin}"
