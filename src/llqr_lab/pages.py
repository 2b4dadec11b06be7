"""Pages of the documentation that results are written into, between two marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llqr_lab.experiments.folder import RunError
from llqr_lab.results import write_text

END = "<!-- the end of it -->"


def begin(command: str) -> str:
    return f"<!-- written by {command}: what is below is overwritten -->"


def write(page: Path, command: str, body: str) -> None:
    """Put what a command found in its place on a page."""
    text = page.read_text(encoding="utf-8") if page.is_file() else f"{begin(command)}\n{END}\n"
    write_text(page, filled(text, command, body, page))


def check(page: Path, command: str) -> None:
    """Raise before the work is done for what `write` would raise for after it."""
    if page.is_dir() or not page.absolute().parent.is_dir():
        raise RunError(f"'{page}' can't be written: it is a folder, or its own folder isn't there")
    if page.is_file():
        filled(page.read_text(encoding="utf-8"), command, "", page)


def filled(text: str, command: str, body: str, page: Path) -> str:
    before, mark, rest = text.partition(begin(command))
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise RunError(f"'{page}' has no place for results: two lines, '{begin(command)}' and '{END}'")
    return f"{before}{mark}\n\n{body}\n{END}{after}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown; the first row is the header."""
    header, *rest = rows
    lines = [header, ["---"] * len(header), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
