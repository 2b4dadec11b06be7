"""Text as characters, each to be foretold from those before it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llqr.errors import LLQRError
from llqr_lab.data.batches import Batch, mixed
from llqr_lab.data.folder import DataError, data_file, reading
from llqr_lab.data.rows import in_order

SHAKESPEARE = "text/tinyshakespeare.txt"
SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


@dataclass(frozen=True)
class Characters:
    """A text as numbers of characters; the first nine tenths are to learn from."""

    vocabulary: tuple[str, ...]
    """All characters of the whole text, sorted; a token is a place in it."""
    train: Tensor
    """int64, as all tokens."""
    test: Tensor
    where: str

    def training(self, size: int, context: int, seed: int) -> CharacterBatches:
        """Random windows of the training part, by the step's number."""
        return CharacterBatches(self._long_enough(self.train, "training", context), size, context, seed)

    def testing(self, size: int, context: int) -> list[Batch]:
        """The test part in windows that don't overlap, in order; an incomplete last window is left out."""
        tokens = self._long_enough(self.test, "test", context)
        windows = (len(tokens) - 1) // context
        inputs, targets = (tokens[i : i + windows * context].reshape(windows, context) for i in (0, 1))
        return [Batch((inputs[rows],), targets[rows]) for rows in in_order(windows, size)]

    def text(self, tokens: Tensor) -> str:
        return "".join(self.vocabulary[token] for token in tokens.tolist())

    def _long_enough(self, tokens: Tensor, part: str, context: int) -> Tensor:
        if context < 1:
            raise LLQRError(f"a context has at least one character, not {context}")
        if len(tokens) <= context:
            raise DataError(
                f"the {part} part of '{self.where}' has {len(tokens)} characters, too few for a context of {context} "
                "and the one after it: take a longer text or a shorter context"
            )
        return tokens


class CharacterBatches:
    """Windows at random places: (size, context) tokens and the ones that come next."""

    def __init__(self, tokens: Tensor, size: int, context: int, seed: int) -> None:
        if size < 1:
            raise LLQRError(f"a batch of {size} holds nothing")
        self.tokens, self.size, self.context, self.seed = tokens, size, context, seed

    @property
    def steps_per_epoch(self) -> int:
        """As many as show about as many characters as there are; at least one."""
        return max(1, len(self.tokens) // (self.size * self.context))

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"steps are counted from 0, and this is {step}")
        generator = torch.Generator().manual_seed(mixed("windows", self.seed, step))
        starts = torch.randint(len(self.tokens) - self.context, (self.size,), generator=generator)
        windows = self.tokens[starts[:, None] + torch.arange(self.context + 1)]
        return Batch((windows[:, :-1],), windows[:, 1:])


def shakespeare(folder: Path | None = None) -> Characters:
    """A megabyte of Shakespeare from `text/tinyshakespeare.txt` in the data folder."""
    return characters(data_file(folder, SHAKESPEARE, SOURCE))


def characters(path: Path) -> Characters:
    """Any text file in UTF-8."""
    with reading(path, "where it came from, as UTF-8 text", UnicodeDecodeError):
        # Not read_text: it would make one character of the two that end a line on Windows.
        text = path.read_bytes().decode("utf-8")
    if not text:
        raise DataError(f"'{path}' is empty: a text is wanted, such as {SOURCE}")
    return characters_of(text, str(path))


def characters_of(text: str, where: str) -> Characters:
    """Any text; `where` it is from is what errors name."""
    vocabulary = tuple(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(vocabulary)}
    tokens = torch.tensor([numbers[character] for character in text])
    known = len(tokens) * 9 // 10
    return Characters(vocabulary, tokens[:known], tokens[known:], where)
