"""`llqr scaling`: what U costs on many ranks, counted on paper: memory per rank, bytes of a step and a refit, and their time.

The formulas are those of docs/scaling.md, with P the bytes of the parameters, U those of the preconditioner, and K curvature
products a refit; tests compare them with the bytes that ranks really send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

from rich.console import Console

from llqr.structures import Diagonal, EigenKronecker, Kronecker, Structure
from llqr_lab.results import say, show_table, simple_table

Shapes = Mapping[str, tuple[int, ...]]
Way = Literal["ddp", "fsdp"]
STRUCTURES: dict[str, Structure] = {"diagonal": Diagonal(), "kfac": Kronecker(), "ekfac": EigenKronecker()}
ITEM = 4
"""Bytes of a number."""
LEFT = ("structure", "by")
RIGHT = ("U", "step", "U g", "messages", "refit", "messages", "products", "overhead")


def seven_billion() -> dict[str, tuple[int, ...]]:
    """The shapes of a language model of 6.7 billion parameters: 32 layers of width 4096, 11008 inside, 32000 words."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (32000, 4096), "head": (32000, 4096), "norm": (4096,)}
    for layer in range(32):
        shapes |= {f"{layer}.{name}": (4096, 4096) for name in ("query", "key", "value", "out")}
        shapes |= {f"{layer}.{name}": (11008, 4096) for name in ("gate", "up")}
        shapes |= {f"{layer}.down": (4096, 11008), f"{layer}.norm1": (4096,), f"{layer}.norm2": (4096,)}
    return shapes


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank."""

    parameters: int
    u: int
    step: int
    """Sent and received for U g, a step."""
    product: int
    """A curvature product."""
    refit: int
    multiplications: int
    """Multiplications and additions of U g, a step; not bytes."""


def count(shapes: Shapes, structure: Structure, way: Way, products: int, item: int = ITEM) -> Counted:
    """What goes through a rank; a message that all ranks get, or that sums over all of them, counts once.

    Every rank holds all of U and fits it. The first rank's gradient goes to all, P, and a product is summed over the ranks, P.
    Under FSDP2 a step gathers the gradients, P, and a refit the parameters and the gradients.
    """
    p = sum(item * prod(shape) for shape in shapes.values())
    u = sum(structure.memory(shape, item) for shape in shapes.values())
    work = sum(multiplications(structure, shape) for shape in shapes.values())
    gathered = p if way == "fsdp" else 0
    return Counted(p, u, gathered, p, (products + 1) * p + 2 * gathered, work)


def multiplications(structure: Structure, shape: Sequence[int]) -> int:
    """Multiplications and additions in the matrix products of U x; what goes number by number isn't counted."""
    if len(shape) < 2 or not isinstance(structure, (Kronecker, EigenKronecker)):
        return 0
    times = 2 if isinstance(structure, EigenKronecker) else 1  # into the basis, and back
    factors = list(structure.sizes(shape).items())
    return times * prod(shape) * sum(size[0] for name, size in factors if name != "s" and len(size) == 2)


BANDWIDTH, ARITHMETIC, SINGLE = 50e9, 400e12, 50e12
"""Of a rank: bytes a second; operations a second as reached in training, and in float32, in which U acts."""
TOKENS, EVERY, STEPS = 4_000_000, 500, 25
"""Of a training step on all ranks; steps between refits; inner steps of a refit."""


def show(ranks: Sequence[int]) -> None:
    """Print the table for the network of 6.7 billion parameters, sharded by FSDP2 or replicated by DDP.

    A training step takes six operations for each parameter and token; the products of a refit are on the batch of a step.
    """
    shapes, products = seven_billion(), STEPS + 1  # one for where it begins
    numbers = sum(prod(shape) for shape in shapes.values())
    title = f"{numbers / 1e9:.1f} billion parameters in float32, {TOKENS:,} tokens a step"
    table = simple_table(title, "ranks", *LEFT, *RIGHT, left=LEFT)
    ways: tuple[Way, ...] = ("fsdp", "ddp")
    for size, (name, structure), way in product(ranks, STRUCTURES.items(), ways):
        train = 6 * numbers * TOKENS / (size * ARITHMETIC)
        found = count(shapes, structure, way, products)
        sending = found.step / BANDWIDTH, found.refit / BANDWIDTH
        apply, work = 2 * found.multiplications / SINGLE, products * train * 4 / 3
        overhead = (apply + sending[0] + (sending[1] + work) / EVERY) / train
        figures = [gigabytes(found.u), f"{train:.2f} s", f"{apply:.3f} s"]
        figures += [f"{sending[0]:.3f} s", gigabytes(found.refit), f"{sending[1]:.0f} s", f"{work:.0f} s"]
        table.add_row(str(size), name, way, *figures, f"{100 * overhead:.0f}%")
    console = Console()
    show_table(console, table)
    machine = (
        f"{BANDWIDTH / 1e9:g} GB/s, {ARITHMETIC / 1e12:g} Tflop/s in training and {SINGLE / 1e12:g} in float32 per rank"
    )
    say(
        console,
        f"{machine}; a refit of {STEPS} steps every {EVERY}. Seconds of messages are their bytes over the bandwidth.",
    )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count < 1e12 else f"{count / 1e12:.3g} TB"
