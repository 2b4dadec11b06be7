"""What the command line takes, checked before any work, so that no result is computed and then lost."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from llqr_lab.errors import ConfigError, LabError

PICTURES = (".png", ".pdf", ".svg")
RESULTS = Path("results")
"""Where a command writes that isn't told where, in the folder that one is in; it is made if it isn't there."""


def writable_file(path: Path | None) -> Path | None:
    """A file that can be written: its folder is there, and nothing in the way."""
    if path is None:
        return None
    folder = path.parent
    if folder == RESULTS:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
    if not folder.is_dir():
        raise typer.BadParameter(f"the folder '{folder}' doesn't exist; make it first, or name another")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"'{path}' can't be written: it is a folder, or there is no permission")
    return path


def writable_picture(path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"'{path}' doesn't end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    return writable_file(path)


Scale = Annotated[str, typer.Option(help="paper, mini (minutes), cpu (hours on two cores) or smoke (seconds).")]
Data = Annotated[Path | None, typer.Option(help="The folder with data sets; else LLQR_DATA.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto takes a GPU where there is one.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]
Seeds = Annotated[str, typer.Option(help="Seeds: 0-4, or 0,1,7. Learning rates are chosen with the first.")]
Runs = Annotated[Path, typer.Option(help="The folder of runs; what is there isn't repeated.")]
Sources = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUNS...", help="Folders of runs, or files of results that `llqr table --save` wrote."),
]
Jobs = Annotated[int, typer.Option(min=1, help="Runs at a time; else one for each core.", show_default=False)]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch; else its own choice.")]
Output = Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")]
Picture = Annotated[Path, typer.Option(callback=writable_picture, help="The picture to write.")]
Page = Annotated[
    Path | None, typer.Option(callback=writable_file, help="Write the tables into this page too, between its marks.")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting: --set llqr.every=100. Give it again for more.")
]


@contextmanager
def without_traceback() -> Iterator[None]:
    """Errors that a person can do something about, without a traceback; as a decorator of a command."""
    try:
        yield
    except Exception as error:
        from llqr.errors import LLQRError  # it takes torch to import

        if not isinstance(error, LabError | LLQRError):
            raise
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda function: app.command(name)(without_traceback()(function))


def name_list(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def seed_list(text: str) -> list[int]:
    """[0, 1, 2, 7] of "0-2,7"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        fine = first.isdecimal() and (last.isdecimal() if dash else True)
        if not fine or not int(first) <= int(last or first) < 2**32 or int(last or first) - int(first) > 10_000:
            raise ConfigError(f"'{text}' aren't seeds: write 0-4, or 0,1,7")
        found += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(found))
