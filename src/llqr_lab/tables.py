"""How tables are printed: whole."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDEST = 1000


def show_table(console: Console, table: Table) -> None:
    """In as many columns as it takes: numbers that are cut off are none. A narrow terminal breaks the lines."""
    before, wide = console.width, console.options.update(max_width=WIDEST)
    for column in table.columns:
        if column.no_wrap:
            cells = (column.header, *column.cells)
            column.min_width = max(Measurement.get(console, wide, each).maximum for each in cells)
    console.width = max(before, Measurement.get(console, wide, table).minimum)
    console.print(table)
    console.width = before
