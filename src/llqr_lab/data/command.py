"""`llqr data`: the table of data sets, or one of them looked at thoroughly."""

from __future__ import annotations

from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from llqr.errors import LLQRError
from llqr_lab.data.catalogue import data_set, rows
from llqr_lab.data.folder import VARIABLE, data_folder
from llqr_lab.tables import show_table

COLOURS = {"found": "green", "missing": "yellow", "broken": "red"}


def show(folder: Path | None) -> None:
    console = Console()
    chosen = data_folder(folder)
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("data set", "what", "size", "licence", ""):
        table.add_column(header, overflow="fold")
    found = rows(folder)
    for row in found:
        table.add_row(row.name, row.what, row.size, row.licence, f"[{COLOURS[row.state]}]{row.state}[/]")
    show_table(console, table)
    where = f"in '{chosen}'" if chosen else f"nowhere: name a data folder by --data FOLDER or {VARIABLE}"
    console.print(f"Looked for {where}.", highlight=False, markup=False, soft_wrap=True)
    for row in found:
        if row.state != "found":
            # what is missing is told by what to do about it, what is broken by what is wrong
            told = f"wanted: {row.places}; get it: {row.get}" if row.state == "missing" else row.detail
            console.print(f"  {row.name}: {told}", highlight=False, markup=False, soft_wrap=True)


def check(name: str, folder: Path | None) -> None:
    """Read all of one data set; a failure is the command's failure."""
    try:
        chosen = data_set(name)
    except LLQRError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    state, detail = chosen.check(folder, thorough=True)
    typer.echo(f"{name}: {state}. {detail}", err=state != "found")
    if state != "found":
        raise typer.Exit(1)
