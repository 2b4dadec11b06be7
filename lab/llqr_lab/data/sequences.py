"""Sequences of tokens: text as characters, each to be predicted from those before it; and arithmetic modulo a prime."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import torch
from torch import Tensor

from llqr.errors import LLQRError, unknown
from llqr_lab.data.batches import Batch, Split, mixed, tensor_batches_in_order
from llqr_lab.data.files import data_path, reading
from llqr_lab.errors import DataError

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

    def training(self, size: int, context: int, seed: int) -> "CharacterBatches":
        return CharacterBatches(self._long_enough(self.train, "training", context), size, context, seed)

    def testing(self, size: int, context: int) -> list[Batch]:
        """The test part in windows that don't overlap, in order; an incomplete last window is left out."""
        tokens = self._long_enough(self.test, "test", context)
        windows = (len(tokens) - 1) // context
        inputs, targets = (tokens[i : i + windows * context].reshape(windows, context) for i in (0, 1))
        return tensor_batches_in_order(inputs, targets, size)

    def _long_enough(self, tokens: Tensor, part: str, context: int) -> Tensor:
        if not 1 <= context < len(tokens):
            found = f"the {part} part of '{self.where}' has {len(tokens)} characters"
            raise DataError(f"{found}: a context is at least one of them and leaves one after it, and is not {context}")
        return tokens


class CharacterBatches:
    """Windows at random places: (size, context) tokens and the ones that come next."""

    def __init__(self, tokens: Tensor, size: int, context: int, seed: int) -> None:
        self.tokens, self.size, self.context, self.seed = tokens, size, context, seed
        self.steps_per_epoch = max(1, len(tokens) // (size * context))
        """As many as show about as many characters as there are."""

    def __getitem__(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(mixed("windows", self.seed, step))
        starts = torch.randint(len(self.tokens) - self.context, (self.size,), generator=generator)
        windows = self.tokens[starts[:, None] + torch.arange(self.context + 1)]
        return Batch((windows[:, :-1],), windows[:, 1:])


def shakespeare(folder: Path | None = None) -> Characters:
    """A megabyte of Shakespeare from `text/tinyshakespeare.txt` in the data folder."""
    return characters(data_path(folder, SHAKESPEARE, SOURCE))


def characters(path: Path) -> Characters:
    with reading(path, "where it came from, as UTF-8 text", UnicodeDecodeError):
        # Not read_text: it would make one character of the two that end a line on Windows.
        text = path.read_bytes().decode("utf-8")
    if not text:
        raise DataError(f"'{path}' is empty: a text is wanted, such as {SOURCE}")
    return characters_of(text, str(path))


def characters_of(text: str, where: str) -> Characters:
    vocabulary = tuple(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(vocabulary)}
    tokens = torch.tensor([numbers[character] for character in text])
    known = len(tokens) * 9 // 10
    return Characters(vocabulary, tokens[:known], tokens[known:], where)


OPERATIONS: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, p: (a + b) % p,
    "subtract": lambda a, b, p: (a - b) % p,
    "multiply": lambda a, b, p: a * b % p,
    "divide": lambda a, b, p: a * pow(b, -1, p) % p,
    "exponentiate": lambda a, b, p: pow(a, b, p),
}


def modular_arithmetic(operation: str, prime: int = 97, fraction: float = 0.6, seed: int = 0) -> Split:
    """Inputs (N, 4) are the tokens [a, ∘, b, =], targets the numbers c; of all pairs, `fraction` are for training.

    Tokens are the numbers 0 … p - 1, then p for the operation and p + 1 for "=": p + 2 of them. All pairs of
    numbers occur, but for division and powers those with b = 0. Powers take b as an ordinary number.
    """
    inputs, targets = equations(operation, prime)
    train = round(fraction * len(targets))
    if not 0 < train < len(targets):
        raise LLQRError(f"a fraction of {fraction} of {len(targets)} pairs leaves nothing to train or to test on")
    # The split is of its own stream: the same seed elsewhere, say of a model's start, must have nothing to do with it.
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(mixed("modular split", seed)))
    known, rest = order[:train], order[train:]
    return Split(inputs[known], targets[known], inputs[rest], targets[rest])


def equations(operation: str, prime: int = 97) -> tuple[Tensor, Tensor]:
    if operation not in OPERATIONS:
        raise unknown("operation", operation, OPERATIONS)
    if prime < 3 or not all(prime % divisor for divisor in range(2, isqrt(prime) + 1)):
        raise LLQRError(f"the modulus must be a prime of at least 3 (division needs it), and {prime} is not")
    apply = OPERATIONS[operation]
    pairs = [(a, b) for a in range(prime) for b in range(1 if operation in ("divide", "exponentiate") else 0, prime)]
    inputs = torch.tensor([[a, prime, b, prime + 1] for a, b in pairs])
    return inputs, torch.tensor([apply(a, b, prime) for a, b in pairs])
