"""Numbers given for named parts of a model: one for all, or a mapping from module and parameter names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from llqr.errors import LLQRError, unknown

PerLayer = float | Mapping[str, float] | Mapping[int, float] | Mapping[str | int, float]


def per_parameter(value: PerLayer, parameters: Iterable[str], modules: Iterable[str], kind: str) -> dict[str, float]:
    """The number that each parameter gets.

    A key names a parameter or a module that holds it; the longest that fits wins, and what no key names gets 0.
    An integer key is the module's place in `modules`.
    """
    names, places = list(parameters), list(modules)
    if not isinstance(value, Mapping):
        number = _number(value, kind)
        return dict.fromkeys(names, number)
    given: dict[str, float] = {}
    for key, entry in value.items():
        name = _place(key, places, kind)
        if not any(_holds(name, parameter) for parameter in names) and name not in places:
            raise unknown(f"module or parameter in {kind}", key, [*places, *names])
        if name in given:
            raise LLQRError(f"{kind} names {name!r} twice")
        given[name] = _number(entry, f"{kind} of {key!r}")
    by_length = sorted(given, key=len, reverse=True)
    return {parameter: next((given[name] for name in by_length if _holds(name, parameter)), 0.0) for parameter in names}


def _place(key: str | int, places: list[str], kind: str) -> str:
    if not isinstance(key, int):
        return key
    if not 0 <= key < len(places):
        raise LLQRError(f"{kind} names place {key}, but there are {len(places)} (0 to {len(places) - 1})")
    return places[key]


def _holds(module: str, parameter: str) -> bool:
    return parameter == module or parameter.startswith(module + ".")


def _number(value: object, kind: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise LLQRError(f"{kind} is a finite number, zero or more, or a mapping from names to such; not {value!r}")
    return float(value)
