"""Totals over all the blocks of U, wherever they are held: what a solver asks for where it needs one number for all of them."""

from __future__ import annotations

from typing import Protocol


class Totals(Protocol):
    """Numbers of the blocks that are here, made into those of all blocks. Everyone who holds some gets the same answers."""

    def sums(self, values: list[float]) -> list[float]:
        """Each summed up."""

    def norms(self, values: list[float]) -> list[float]:
        """From norms of the part that is here to those of all."""

    def least(self, value: float) -> float: ...

    def most(self, value: float) -> float: ...


class Alone:
    """All the blocks are here."""

    def sums(self, values: list[float]) -> list[float]:
        return values

    def norms(self, values: list[float]) -> list[float]:
        return values

    def least(self, value: float) -> float:
        return value

    def most(self, value: float) -> float:
        return value


ALONE = Alone()


def totals_of(model: object) -> Totals:
    """How a quadratic model takes totals: one that holds a part of the parameters says so by its `totals`."""
    totals: Totals = getattr(model, "totals", ALONE)
    return totals
