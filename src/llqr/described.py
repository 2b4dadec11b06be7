"""How divergences, structures and solvers that people write themselves are shown."""

from __future__ import annotations


class Described:
    """An object that is shown as a call with its options: it reads well in `print(optimizer)` and in errors, and the ranks of a
    process group, which compare what they do by its words, see the same."""

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"
