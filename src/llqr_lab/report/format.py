"""Numbers and names as people read them."""

from __future__ import annotations

import json
import math
from typing import Any


def number(value: Any) -> str:
    """With five digits, or as it is."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value)
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def seconds(value: float, longest: float) -> str:
    """In the unit that suits the longest time of a table: seconds, minutes or hours."""
    for size, per, unit in ((5400.0, 3600.0, "h"), (300.0, 60.0, "min")):
        if longest >= size:
            return f"{value / per:.1f} {unit}"
    return f"{value:.{1 if longest >= 10 else 3}f} s"


def named(name: str) -> str:
    """A metric's name for people."""
    return name.replace("_", " ")
