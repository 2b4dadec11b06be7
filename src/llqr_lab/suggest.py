"""What to say to a name that isn't known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(name: object, known: Iterable[object]) -> str:
    """ ": did you mean …? known are …", to put behind a message."""
    names = [str(each) for each in known]
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f": {f'did you mean {near[0]}? ' if near else ''}known are {', '.join(names)}"
