"""Byte pair encoding: words as sequences of pieces that occur often.

A word is its letters, the last one marked by a space after it; then the commonest pair of neighbours becomes one piece, again
and again. No word holds a space, so gluing pieces together undoes it exactly, whatever the text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from llqr_lab.data.cache import kept

END = " "
"""After the last letter of a word."""
UNKNOWN = "  "
"""Stands for a letter that wasn't learned; no piece has two ends."""


class Subwords:
    """A code: its letters (the last ones of words too, with their mark) and its merges, in the order they are applied."""

    def __init__(self, letters: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        self.letters, self.merges = list(letters), [(first, second) for first, second in merges]
        pieces = [UNKNOWN, *letters, *(first + second for first, second in self.merges)]
        # dict.fromkeys: two merges may give the same piece by different ways.
        vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
        self._model: Any = models.BPE(vocabulary, self.merges, unk_token=UNKNOWN, end_of_word_suffix=END)
        self._known: dict[str, list[str]] = {}

    def split(self, words: str) -> list[str]:
        """Words with whitespace between them, as pieces; a letter that wasn't learned is UNKNOWN."""
        return [piece for word in words.split() for piece in self._word(word)]

    def _word(self, word: str) -> list[str]:
        # Every word is taken apart once: a corpus has many times more words than different ones.
        if word not in self._known:
            self._known[word] = [token.value for token in self._model.tokenize(word)]
        return self._known[word]


def join(pieces: Iterable[str]) -> str:
    """The words again, with one space between them."""
    return " ".join("".join(pieces).split())


def learn(text: Iterable[str], merges: int, least: int = 2) -> Subwords:
    """So many merges (fewer if no pair is left that occurs `least` times) from words with whitespace between them.

    Kept in the cache folder, under what it is learned from.
    """
    counts = Counter(word for line in text for word in line.split())
    settings = [merges, least, tokenizers.__version__, 1]
    found = kept("bpe", [settings, sorted(counts.items())], lambda: _learn(counts, merges, least), _fits)
    return Subwords(found["letters"], found["merges"])


def _learn(counts: Counter[str], merges: int, least: int) -> dict[str, list[Any]]:
    words = sorted(counts)
    letters = sorted({letter for word in words for letter in word}) + sorted({word[-1] + END for word in words})
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + merges,
        min_frequency=least,
        show_progress=False,
        end_of_word_suffix=END,
        # Pairs that occur equally often are merged in the order of the numbers of their pieces, and the trainer numbers last
        # letters in the order of a hash table, which is another in every process. Named beforehand, they keep ours.
        special_tokens=letters,
    )
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(((word + " ") * counts[word] for word in words), trainer)
    return {"letters": letters, "merges": _merges(tokenizer)}


def _merges(tokenizer: Any) -> list[list[str]]:
    return [list(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def _fits(found: Any) -> bool:
    """Letters, and merges of pieces that are there by then."""
    try:
        pieces = set(found["letters"])
        for first, second in found["merges"]:
            if first not in pieces or second not in pieces:
                return False
            pieces.add(first + second)
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(piece, str) for piece in pieces)
