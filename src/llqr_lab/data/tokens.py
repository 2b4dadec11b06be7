"""From sentences to words and back (Moses), and from pieces to numbers and back (a dictionary for each language)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from sacremoses import MosesDetokenizer, MosesTokenizer

from llqr_lab.data.cache import kept
from llqr_lab.data.subwords import END, join

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
START, PAD, STOP, UNKNOWN = range(4)


class Words:
    """Sentences of a language as words with spaces between them, by the rules of Moses: punctuation apart, `'` as `&apos;`.

    `tokenised` says that the text comes like that, and isn't to be cut again. Lowercasing comes last, as in fairseq's recipe.
    """

    def __init__(self, language: str, lowercase: bool = True, tokenised: bool = False) -> None:
        self.language, self.lowercase = language, lowercase
        self._tokenizer = None if tokenised else MosesTokenizer(language)
        self._detokenizer = MosesDetokenizer(language)

    def split(self, sentence: str) -> str:
        words: str = sentence if self._tokenizer is None else self._tokenizer.tokenize(sentence, return_str=True)
        words = " ".join(words.split())
        return words.lower() if self.lowercase else words

    def split_all(self, sentences: Sequence[str]) -> list[str]:
        """Each of them split. Moses takes seconds for a corpus, so what it gives is kept in the cache folder."""
        if self._tokenizer is None:
            return [self.split(sentence) for sentence in sentences]

        def fits(found: Any) -> bool:
            return isinstance(found, list) and len(found) == len(sentences) and all(isinstance(s, str) for s in found)

        settings = [self.language, self.lowercase, version("sacremoses"), 1]
        return kept("words", [settings, list(sentences)], lambda: [self.split(s) for s in sentences], fits)

    def join(self, words: str) -> str:
        """The sentence as one would write it; what lowercasing took is gone."""
        return str(self._detokenizer.detokenize(words.split()))


class Dictionary:
    """Pieces by number: <s> 0, <pad> 1, </s> 2, <unk> 3, then the pieces of the training text from the commonest on.

    fairseq's order, without the made-up words by which it fills up to a multiple of eight. A text that holds "<pad>" can't be
    mistaken for padding: the four are never looked up.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self._numbers = {piece: number for number, piece in enumerate(self.pieces, len(SPECIAL))}

    @classmethod
    def of(cls, text: Iterable[Sequence[str]]) -> Dictionary:
        """All pieces of a text, equally common ones by the alphabet."""
        counts = Counter(piece for pieces in text for piece in pieces)
        return cls(sorted(counts, key=lambda piece: (-counts[piece], piece)))

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.pieces)

    def encode(self, pieces: Iterable[str]) -> list[int]:
        """The numbers, and </s>."""
        return [*(self._numbers.get(piece, UNKNOWN) for piece in pieces), STOP]

    def decode(self, numbers: Iterable[int]) -> str:
        """The words up to the first </s>. What isn't known is the word <unk>; <s> and <pad> are nothing."""
        pieces = []
        for number in numbers:
            if number == STOP:
                break
            if number == UNKNOWN:
                pieces.append(SPECIAL[UNKNOWN] + END)
            elif number >= len(SPECIAL):
                pieces.append(self.pieces[number - len(SPECIAL)])
        return join(pieces)
