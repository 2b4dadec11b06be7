"""Which parameter gets which structure: a name, an object, or a mapping from name patterns to either."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

from llqr.errors import LLQRError, unknown
from llqr.structures.base import Structure
from llqr.structures.dense import Dense
from llqr.structures.diagonal import Diagonal
from llqr.structures.eigen_kronecker import EigenKronecker
from llqr.structures.kronecker import Kronecker
from llqr.structures.scalar import Scalar

NAMES: dict[str, Callable[[], Structure]] = {
    "scalar": Scalar,
    "diagonal": Diagonal,
    "kfac": Kronecker,
    "ekfac": EigenKronecker,
    "dense": Dense,
}

WILD = frozenset("*?[")

StructureSpec = str | Structure | Mapping[str, str | Structure]


def resolve(structure: str | Structure) -> Structure:
    """The structure that a name stands for; a structure stands for itself."""
    if isinstance(structure, Structure):
        return structure
    if isinstance(structure, type) and issubclass(structure, Structure):
        raise LLQRError(f"the structure is a class; write {structure.__name__}() to make one")
    if not isinstance(structure, str) or structure not in NAMES:
        raise unknown("structure", structure, NAMES)
    return NAMES[structure]()


def assign(structure: StructureSpec, names: Collection[str]) -> dict[str, Structure]:
    """The structure of each parameter.

    In a mapping, a key is a parameter's name, a module's name (all it holds), or a pattern with * and ? for either. The first
    that matches wins, each has to match something, and nothing may be left over: a last "*" takes the rest.
    """
    if not isinstance(structure, Mapping):
        return dict.fromkeys(names, resolve(structure))
    answering = {name: [name, *_holders(name)] for name in names}
    known = dict.fromkeys(answer for answers in answering.values() for answer in answers)
    resolved = {pattern: resolve(entry) for pattern, entry in structure.items()}
    wild = [pattern for pattern in structure if isinstance(pattern, str) and not WILD.isdisjoint(pattern)]
    for pattern in structure:
        if not isinstance(pattern, str):
            raise LLQRError(f"a mapping of structures has name patterns for keys; {pattern!r} is not a string")
        if not (any(fnmatchcase(answer, pattern) for answer in known) if pattern in wild else pattern in known):
            raise unknown("parameter or module in the mapping of structures", pattern, list(known))
    order = {pattern: place for place, pattern in enumerate(resolved)}
    assigned: dict[str, Structure] = {}
    for name, answers in answering.items():
        # names are looked up, so that a model with many parameters, each by its name, isn't matched pattern by pattern
        matching = [answer for answer in answers if answer in order and answer not in wild]
        matching += [pattern for pattern in wild if any(fnmatchcase(answer, pattern) for answer in answers)][:1]
        if matching:
            assigned[name] = resolved[min(matching, key=order.__getitem__)]
    missing = [name for name in names if name not in assigned]
    if missing:
        listed = ", ".join(repr(name) for name in missing[:10]) + (", …" if len(missing) > 10 else "")
        raise LLQRError(f'no pattern of the structures matches {listed}: add a last "*" that says what the rest gets')
    return assigned


def owner(name: str) -> str:
    """The module that owns a parameter: the name up to the last dot."""
    return name.rpartition(".")[0]


def _holders(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]
