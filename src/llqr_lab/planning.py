"""`llqr plan`: what `llqr.plan` finds for one of the lab's networks."""

from __future__ import annotations

from llqr import plan
from llqr_lab.models.named import example


def show(network: str, batch: int, seed: int, repeats: int) -> None:
    """Measure, and print."""
    model, inputs, _ = example(network, batch, seed)
    print(f"{network}, batch {batch}\n{plan(model, inputs, repeats=repeats)}")
