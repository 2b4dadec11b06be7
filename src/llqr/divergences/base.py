"""What every divergence is: a weighted sum of terms, and how such sums are written."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from llqr.described import Described
from llqr.errors import LLQRError, unknown

if TYPE_CHECKING:
    from llqr.divergences import Term

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class BasePoint:
    """What ψ_N is expanded around: the output at θ_k, the mean loss ℓ(x_N), and a weight for each variable if they differ."""

    output: Tensor
    loss: Callable[[Tensor], Tensor]
    weights: Tensor | None = None


class Divergence(Described, ABC):
    """A weighted sum of terms, each at one place of the network.

    `flat` says whether ∇D vanishes at θ_k through every activation: then p_i = 0, and only Q blocks remain.
    """

    flat: bool = True

    @abstractmethod
    def terms(self) -> Iterator[tuple[float, Term]]:
        """The terms with their weights."""

    def __add__(self, other: Divergence) -> Divergence:
        if not isinstance(other, Divergence):
            return NotImplemented
        return Sum(((1.0, self), (1.0, other)))

    def __radd__(self, other: object) -> Divergence:
        return self if other == 0 else NotImplemented  # so that sum() works

    def __mul__(self, factor: float) -> Divergence:
        if isinstance(factor, Divergence) or not isinstance(factor, (int, float)):
            return NotImplemented
        if not 0 < factor < math.inf:
            raise LLQRError(f"a divergence is multiplied by a positive number, not {factor!r}")
        return Sum(((float(factor), self),))

    __rmul__ = __mul__


class Sum(Divergence):
    """Σ weight · divergence."""

    def __init__(self, parts: tuple[tuple[float, Divergence], ...]) -> None:
        self.parts = parts
        self.flat = all(part.flat for _, part in parts)

    def terms(self) -> Iterator[tuple[float, Term]]:
        for weight, part in self.parts:
            for inner, term in part.terms():
                yield weight * inner, term

    def __repr__(self) -> str:
        return " + ".join(
            f"{part!r}"
            if weight == 1
            else f"{weight:g} * ({part!r})"
            if isinstance(part, Sum)
            else f"{weight:g} * {part!r}"
            for weight, part in self.parts
        )


def check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise unknown("reduction", reduction, ("mean", "sum"))
