"""Errors that a person can do something about: each message says what is wrong and what to do. They import nothing heavy."""

from collections.abc import Iterable
from difflib import get_close_matches


class LabError(Exception):
    """Any of those below; a command prints its message without a traceback."""


class ConfigError(LabError):
    """A setting that doesn't exist or can't be."""


class RunError(LabError):
    """A run or a result that can't be made, or can't be read."""


class DataError(LabError):
    """Data that can't be used; the message names the file."""


def suggestion(name: object, known: Iterable[object]) -> str:
    """ ": did you mean …? known are …", to put after a message about a name that isn't known."""
    names = [str(each) for each in known]
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f": {f'did you mean {near[0]}? ' if near else ''}known are {', '.join(names)}"


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise for the first name that isn't known."""
    listed = list(known)
    for name in names:
        if name not in listed:
            raise ConfigError(f"there is no {what} '{name}'{suggestion(name, listed)}")
