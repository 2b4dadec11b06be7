"""Promise: translation batches hold every pair once an epoch, fit their size, and depend on seed and step alone."""

from __future__ import annotations

import gzip
import random
from itertools import islice
from pathlib import Path

import pytest
import torch

from llqr_lab.data.batches import Batches, stream
from llqr_lab.data.translation import (
    PAD,
    START,
    STOP,
    Part,
    Translation,
    TranslationBatches,
    all_batches,
    cleaned,
    parallel_text,
    real_tokens,
)
from llqr_lab.data.translation import prepared as translated
from llqr_lab.tasks import bleu

PAIRS = {
    "ein": "a",
    "mann": "man",
    "hund": "dog",
    "frau": "woman",
    "kind": "child",
    "geht": "walks",
    "läuft": "runs",
    "steht": "stands",
    "spielt": "plays",
    "im": "in",
    "auf": "on",
    "dem": "the",
    "rasen": "lawn",
    ".": ".",
}
GERMAN, ENGLISH = list(PAIRS), list(PAIRS.values())


def sentences(count: int, seed: int) -> tuple[list[str], list[str]]:
    draw = random.Random(seed)
    chosen = [[draw.randrange(len(GERMAN)) for _ in range(draw.randint(3, 12))] for _ in range(count)]
    german, english = (
        [" ".join(words[i] for i in line).capitalize() for line in chosen] for words in (GERMAN, ENGLISH)
    )
    return german, english


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    place = tmp_path / "multi30k_de_en"
    place.mkdir()
    for seed, (part, count) in enumerate((("train", 200), ("val", 20), ("test_2016_flickr", 20))):
        german, english = sentences(count, seed)
        if part == "train":
            german, english = [*german, "Ein Hund ."], [*english, "A dog " * 10]
        for language, lines in (("de", german), ("en", english)):
            (place / f"{part}.{language}.gz").write_bytes(gzip.compress("".join(f"{x}\n" for x in lines).encode()))
    return tmp_path


@pytest.fixture
def prepared(corpus: Path) -> Translation:
    return translated(parallel_text("multi30k", corpus), merges=40)


def test_numbers_and_text_again(prepared: Translation) -> None:
    assert (len(prepared.train.source), prepared.examples) == (200, 201)
    assert len(prepared.source) > 4
    assert prepared.target.decode(prepared.train.target[0]) == " ".join(sentences(200, 0)[1][0].lower().split())
    for part in (prepared.valid, prepared.test):
        assert len(part.source) == len(part.target) == len(part.references) == 20
        assert all(sentence[-1] == STOP and max(sentence) < len(prepared.source) for sentence in part.source)
        # References are raw: case and spaces are as they came.
        assert part.references[0][0].isupper() or part.references[0][0] == "."
        score, signature = bleu([prepared.text(sentence) for sentence in part.target], part.references)
        assert score > 99.99
        assert "case:lc" in signature


def test_cleaning(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("a b", "a b c"), ("a b", "a b c d"), ("a", ""), ("a b c d", "a b c d")]
    assert cleaned(pairs) == [pairs[0], pairs[3]]
    monkeypatch.setattr("llqr_lab.data.translation.LONGEST", 3)
    assert cleaned(pairs) == pairs[:1]
    with pytest.raises(ValueError, match="no training pair"):
        cleaned([("a", "")])


def test_batches_are_padded_pairs(prepared: Translation) -> None:
    part = Part([[5, 6, 7, STOP], [8, STOP]], [[9, STOP], [5, 6, STOP]], [])
    (((source, target_in), target_out),) = all_batches(part, 100)
    order = [0, 1] if source[0, 0] == 5 else [1, 0]
    assert source[order].tolist() == [[5, 6, 7, STOP], [8, STOP, PAD, PAD]]
    assert target_in[order].tolist() == [[START, 9, PAD], [START, 5, 6]]
    assert target_out[order].tolist() == [[9, STOP, PAD], [5, 6, STOP]]
    assert real_tokens((source, target_in))[order].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_an_epoch_holds_every_pair_once(prepared: Translation) -> None:
    batches: Batches = TranslationBatches(prepared.train, 120, seed=3)
    pairs = sorted(zip(prepared.train.source, prepared.train.target, strict=True))
    for epoch in (0, 1):
        found = []
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        for (source, target_in), target_out in stream(batches, steps):
            assert (
                max(source.numel(), target_out.numel(), len(source) * max(source.shape[1], target_out.shape[1])) <= 120
            )
            assert target_in.shape == target_out.shape
            assert torch.equal(target_in != PAD, target_out != PAD)
            for one, other in zip(source.tolist(), target_out.tolist(), strict=True):
                found.append(([n for n in one if n != PAD], [n for n in other if n != PAD]))
        assert sorted(found) == pairs


def test_batches_are_functions_of_seed_and_step(prepared: Translation) -> None:
    batches, again, other = (TranslationBatches(prepared.train, 120, seed) for seed in (3, 3, 4))
    count = batches.steps_per_epoch

    def said(batches: TranslationBatches, step: int) -> list[list[list[int]]]:
        (source, target_in), target_out = batches[step]
        return [source.tolist(), target_in.tolist(), target_out.tolist()]

    forwards = [said(batches, step) for step in range(2 * count)]
    torch.manual_seed(5)
    assert forwards == [said(again, step) for step in reversed(range(2 * count))][::-1]
    assert forwards[:count] != forwards[count:]
    assert sorted(forwards[:count]) == sorted(forwards[count:])  # the same groups, in another order
    assert forwards[:count] != [said(other, step) for step in range(count)]
    ahead = list(islice(stream(batches, range(count - 1, count + 1), workers=1), 2))
    assert [[*(each.tolist() for each in batch.inputs), batch.targets.tolist()] for batch in ahead] == forwards[
        count - 1 : count + 1
    ]


def test_a_sentence_too_long_for_any_batch(prepared: Translation) -> None:
    with pytest.raises(ValueError, match="doesn't fit into a batch of 5"):
        TranslationBatches(prepared.train, 5, 0)


def test_a_corpus_that_comes_tokenised(tmp_path: Path) -> None:
    place = tmp_path / "iwslt14_de_en"
    place.mkdir()
    for part in ("train", "valid", "test"):
        (place / f"{part}.de").write_text("ein hund , er &apos;s da .\n" * 3)
        (place / f"{part}.en").write_text("a dog , he &apos;s here .\n" * 3)
    data = translated(parallel_text("iwslt14", tmp_path), merges=100)
    assert data.test.references == ["a dog, he's here."] * 3
    assert data.text(data.test.target[0]) == "a dog, he's here."
    assert "&apos;s " in data.target.pieces  # the entity is one word, not cut at its ends
