"""Arithmetic modulo a prime: every equation a ∘ b = c there is, part of them to learn from and the rest to find out."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import torch
from torch import Tensor

from llqr.errors import LLQRError, unknown
from llqr_lab.data.batches import mixed
from llqr_lab.data.split import Split

OPERATIONS: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, p: (a + b) % p,
    "subtract": lambda a, b, p: (a - b) % p,
    "multiply": lambda a, b, p: a * b % p,
    "divide": lambda a, b, p: a * pow(b, -1, p) % p,
    "exponentiate": lambda a, b, p: pow(a, b, p),
}


def modular_arithmetic(operation: str, prime: int = 97, fraction: float = 0.6, seed: int = 0) -> Split:
    """Inputs (N, 4) are the tokens [a, ∘, b, =], targets the numbers c; of all pairs, `fraction` are for training.

    Tokens are the numbers 0 … p - 1, then p for the operation and p + 1 for "=": `vocabulary(p)` of them. All pairs of
    numbers occur, but for division and powers those with b = 0. Powers take b as an ordinary number.
    """
    if not 0 < fraction < 1:
        raise LLQRError(f"the fraction of pairs to train on must lie between 0 and 1, and is {fraction}")
    inputs, targets = equations(operation, prime)
    train = round(fraction * len(targets))
    if not 0 < train < len(targets):
        raise LLQRError(f"a fraction of {fraction} of {len(targets)} pairs leaves nothing to train or to test on")
    # The split is of its own stream: the same seed elsewhere, say of a model's start, must have nothing to do with it.
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(mixed("modular split", seed)))
    known, rest = order[:train], order[train:]
    return Split(inputs[known], targets[known], inputs[rest], targets[rest])


def equations(operation: str, prime: int = 97) -> tuple[Tensor, Tensor]:
    """All of them, by a and then by b."""
    if operation not in OPERATIONS:
        raise unknown("operation", operation, OPERATIONS)
    if not is_odd_prime(prime):
        raise LLQRError(f"the modulus must be a prime of at least 3 (division needs it), and {prime} is not")
    apply = OPERATIONS[operation]
    pairs = [(a, b) for a in range(prime) for b in range(1 if operation in ("divide", "exponentiate") else 0, prime)]
    inputs = torch.tensor([[a, prime, b, prime + 1] for a, b in pairs])
    return inputs, torch.tensor([apply(a, b, prime) for a, b in pairs])


def vocabulary(prime: int = 97) -> int:
    """How many tokens there are: the numbers, the operation and the equals sign."""
    return prime + 2


def is_odd_prime(number: int) -> bool:
    return number >= 3 and all(number % divisor for divisor in range(2, isqrt(number) + 1))
