"""What every result carries, and how commands show theirs: JSON and text files, pages, tables, progress bars."""

import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from llqr_lab.errors import RunError


def provenance(command: str, seed: int) -> dict[str, Any]:
    """The command, the seed, the versions and the size of the machine; nothing that names the machine or a path on it."""
    return {
        "command": command,
        "seed": seed,
        "versions": {"llqr": version("llqr"), "python": platform.python_version(), "torch": str(torch.__version__)},
        # in a container a process may use fewer cores than the machine has
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def read_json(text: str | bytes) -> Any:
    """JSON of a run, or of anyone: whole numbers beyond all counts become floats, which can be shown."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write strict JSON (no NaN), whole or not at all; lists of numbers on one line."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    text = re.sub(r"\[\s+[-\d.eE+,\snul]+\]", lambda found: " ".join(found[0].split()), text)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there whole or not at all."""
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


# pages of the documentation that results are written into, between two marks

END = "<!-- the end of it -->"


def page_mark(command: str) -> str:
    return f"<!-- written by {command}: what is below is overwritten -->"


def write_page(page: Path, command: str, body: str) -> None:
    """Put what a command found in its place on a page."""
    text = page.read_text(encoding="utf-8") if page.is_file() else f"{page_mark(command)}\n{END}\n"
    write_text(page, filled_page(text, command, body, page))


def check_page(page: Path | None, command: str) -> None:
    """Raise before the work is done for what `write_page` would raise for after it."""
    if page is None:
        return
    if page.is_dir() or not page.absolute().parent.is_dir():
        raise RunError(f"'{page}' can't be written: it is a folder, or its own folder isn't there")
    if page.is_file():
        filled_page(page.read_text(encoding="utf-8"), command, "", page)


def filled_page(text: str, command: str, body: str, page: Path) -> str:
    before, mark, rest = text.partition(page_mark(command))
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise RunError(f"'{page}' has no place for results: two lines, '{page_mark(command)}' and '{END}'")
    return f"{before}{mark}\n\n{body}\n{END}{after}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the header."""
    header, *rest = rows
    lines = [header, ["---"] * len(header), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# the terminal


def simple_table(title: str | None, *headers: str, left: Sequence[str] = ()) -> Table:
    """Numbers on the right; the first column, and those named in `left`, on the left."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, header in enumerate(headers):
        named = place == 0 or header in left
        table.add_column(header, justify="left" if named else "right", no_wrap=place == 0 or not named)
    return table


def show_table(console: Console, table: Table) -> None:
    """As wide as it takes: numbers that are cut off are none. A narrow terminal breaks the lines."""
    before, console.width = console.width, max(console.width, 200)
    console.print(table)
    console.width = before


def say(console: Console, message: str, style: str | None = None) -> None:
    """A line as it is, whatever is in it."""
    console.print(message, style=style, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def bar(total: int, description: str) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, and only where someone watches; calling what it gives moves it by one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
