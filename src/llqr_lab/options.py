"""Checks of what the command line is given, made before any work, so that no result is computed and then lost."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from llqr_lab.suggest import suggestion

PICTURES = (".png", ".pdf", ".svg")
NETWORKS = ("mlp", "convnet", "resnet18", "transformer")
"""Those of models/named.py, which takes torch to import."""
SUBJECTS = ("digits", "digits-batchnorm", "digits-dropout", "fashion", "shakespeare", *NETWORKS)
"""Those of compare/subjects.py."""
BASES = ("sgdm", "adamw")

Scale = Annotated[str, typer.Option(help="paper, cpu (hours on two cores) or smoke (seconds).")]
Data = Annotated[Path | None, typer.Option(help="The folder with data sets; else LLQR_DATA.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto takes a GPU where there is one.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]


def known_network(name: str) -> str:
    if name not in NETWORKS:
        raise typer.BadParameter(f"no network is called '{name}'{suggestion(name, NETWORKS)}")
    return name


def known_subject(name: str) -> str:
    if name not in SUBJECTS:
        raise typer.BadParameter(f"nothing to compare on is called '{name}'{suggestion(name, SUBJECTS)}")
    return name


def known_base(name: str) -> str:
    if name not in BASES:
        raise typer.BadParameter(f"no base is called '{name}'{suggestion(name, BASES)}")
    return name


def step_numbers(text: str) -> str:
    """Numbers of steps in increasing order, with commas between."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) != len(parts) or numbers != sorted(set(numbers)):
        raise typer.BadParameter(f"'{text}' isn't a list of increasing numbers of steps, such as 0,10,100")
    return ",".join(map(str, numbers))


RESULTS = Path("results")
"""Where a command writes that isn't told where, in the folder that one is in; it is made if it isn't there."""


def writable_file(path: Path) -> Path:
    """A file that can be written: its folder is there, and nothing in the way."""
    folder = path.parent
    if folder == RESULTS:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
    if not folder.exists():
        raise typer.BadParameter(f"the folder '{folder}' doesn't exist; make it first, or name another")
    if not folder.is_dir():
        raise typer.BadParameter(f"'{folder}' is a file, not a folder")
    if path.is_dir():
        raise typer.BadParameter(f"'{path}' is a folder; give the name of a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"'{path}' can't be written: no permission")
    return path


def writable_picture(path: Path) -> Path:
    """A writable file with the ending of a picture format."""
    if path.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"'{path}' doesn't end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    return writable_file(path)


def positive_number(value: float) -> float:
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value!r} isn't a positive number")
    return value
