"""`llqr plan`: the table of `llqr.plan` for one of the lab's networks."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from llqr import Plan, plan
from llqr_lab.models.named import example


def show(network: str, batch: int, seed: int, repeats: int, every: int, steps: int) -> None:
    """Measure, and print the table and the advice."""
    model, inputs, _ = example(network, batch, seed)
    report(plan(model, inputs, every=every, steps=steps, repeats=repeats), f"{network}, batch {batch}", Console())


def report(found: Plan, title: str, console: Console) -> None:
    table = Table(
        title=f"{title}: costs in training steps (forward and backward, {1000 * found.train_seconds:.3g} ms)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"~ counted, not timed. Inner steps of a refit: {found.steps}; a curvature product takes {found.product:.2f}.",
        caption_justify="left",
    )
    for header in ("structure", "U", "apply", "refit", f"overhead,\na refit every {found.every}"):
        table.add_column(header, justify="left" if header == "structure" else "right", no_wrap=True)
    for name in found.costs:
        table.add_row(*found.row(name))
    console.print(table)
    console.print(f"Advised: structure={found.advised!r}", highlight=False, markup=False)
    console.print(found.why, highlight=False, markup=False)
    for name, reason in found.where.items():
        console.print(f"  {name}: {reason}", highlight=False, markup=False)
