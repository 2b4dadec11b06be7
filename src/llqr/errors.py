"""The errors that llqr raises, each of a type of its own so that a caller can tell them apart.

All of them are `ValueError`s: what was asked for can't be done with what was given, and the message says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")


class LLQRError(ValueError):
    """Base of every error that llqr raises for values that it can't work with."""


class ChainError(LLQRError):
    """The stages don't form a chain that an LQR can be written along."""


class NotTwiceDifferentiableError(ChainError):
    """A stage has no second derivative, and the divergence asks for one."""


class NonFiniteError(LLQRError):
    """NaN or infinity in the inputs, the parameters, an activation or the loss."""


class DegenerateProblemError(LLQRError):
    """The quadratic model has no unique minimum. `stage` names where the recursion met it."""

    def __init__(self, message: str, stage: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class SingularProblemError(DegenerateProblemError):
    """H has (numerically) a null space: many minima, or none."""


class IndefiniteProblemError(DegenerateProblemError):
    """H has a negative eigenvalue: the model is unbounded below, its stationary point is a saddle."""


class RankError(LLQRError):
    """Another rank of a process group failed, can't be reached, or does something else than this one."""


class LLQRWarning(UserWarning):
    """Something that doesn't stop a training but shouldn't go unseen."""


def callers_level() -> int:
    """The `stacklevel` at which a warning points to the user's own code: past this library and torch's optimizer hooks."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "llqr",
        "torch",
        "contextlib",
    ):
        frame, level = frame.f_back, level + 1
    return level


def unknown(kind: str, name: object, options: Iterable[object]) -> LLQRError:
    """An error for a name that isn't there, with the nearest one that is."""
    known = [str(option) for option in options]
    near = get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(repr(option) for option in known[:20]) + (", …" if len(known) > 20 else "")
    return LLQRError(f"unknown {kind} {name!r}: {hint}known are {listed or 'none'}")


def check_one_of(kind: str, value: object, options: Collection[str]) -> None:
    if not isinstance(value, str) or value not in options:
        raise unknown(kind, value, options)


def meant(kind: str, value: Any, of: Any, names: Mapping[str, Callable[[], T]]) -> T:
    """The object of this class that a name stands for; an object stands for itself."""
    if isinstance(value, of):
        found: T = value
        return found
    if isinstance(value, type) and issubclass(value, of):
        raise LLQRError(f"the {kind} is a class; write {value.__name__}() to make one")
    if not isinstance(value, str) or value not in names:
        raise unknown(kind, value, names)
    return names[value]()
