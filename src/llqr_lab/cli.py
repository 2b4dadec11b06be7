"""The command line of the lab."""

from importlib.metadata import version
from typing import Annotated

import typer

app = typer.Typer(name="llqr", no_args_is_help=True, add_completion=False)
bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure the methods against each other.")
app.add_typer(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llqr {version('llqr')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Layerwise LQR for geometry-aware optimization of deep networks."""
