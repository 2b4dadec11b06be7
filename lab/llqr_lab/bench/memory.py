"""`llqr bench memory`: the peak memory of a curvature product, whole, in chunks of examples, and in segments of layers.

Each way runs in a process of its own, on one thread: the quadratic model is built, the gradient included, and a product is
taken. What the process holds before (network, batch, direction) isn't counted. Seconds are of the processor, for one more
product.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from llqr import QuadraticModel
from llqr_lab.bench.measure import peak_memory
from llqr_lab.models.convolutional import PyramidNet, ResNet50
from llqr_lab.results import provenance, say, show_table, simple_table, write_json

PARTS = 4
"""Chunks of a batch."""
WAYS = ("whole", "examples", "segments")
DIVERGENCES = ("ngd", "newton")
SEGMENTS = ("stages.*.*",)
"""The residual blocks of both networks."""


class Subject(NamedTuple):
    network: Callable[[], nn.Module]
    pixels: int
    batch: int


SUBJECTS = {
    "pyramidnet110": Subject(lambda: PyramidNet(bottleneck=True), 32, 16),
    "resnet50": Subject(ResNet50, 224, 8),
    "tiny": Subject(lambda: PyramidNet(depth=20, alpha=12, bottleneck=True), 32, 16),
}
"""As the presets have them; the last to see that it works."""


def main(names: Sequence[str], output: Path, seed: int) -> None:
    """Run, write the results, and print the table."""
    rows = [run(name, seed) for name in names]
    command = f"llqr bench memory {' '.join(names)} --seed {seed}"
    settings = {"threads": 1, "dtype": "float32", "chunks": PARTS, "segments": list(SEGMENTS)}
    write_json(output, {**provenance(command, seed), "settings": settings, "networks": rows})
    console = Console()
    for row in rows:
        report(row, console)
    say(console, f"Wrote {output}")


def run(name: str, seed: int) -> dict[str, Any]:
    subject = SUBJECTS[name]
    jobs = {("training step", ""): (None, "whole"), **{(d, way): (d, way) for d in DIVERGENCES for way in WAYS}}
    rows = []
    for (divergence, way), asked in jobs.items():
        peak, seconds = peak_memory(prepared, name, seed, *asked)
        rows.append({"product": divergence, "way": way, "peak_bytes": peak, "seconds": seconds})
    count = sum(parameter.numel() for parameter in subject.network().parameters())
    return {"network": name, "batch": subject.batch, "pixels": subject.pixels, "parameters": count, "rows": rows}


def prepared(name: str, seed: int, divergence: str | None, way: str) -> Callable[[], float]:
    subject = SUBJECTS[name]
    torch.manual_seed(seed)
    model = subject.network().eval()  # as in the paper's refits
    inputs = torch.randn(subject.batch, 3, subject.pixels, subject.pixels)
    targets, loss_fn = torch.randint(10, (subject.batch,)), nn.CrossEntropyLoss()
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def timed(work: Callable[[], object]) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    def job() -> float:
        if divergence is None:
            return timed(lambda: loss_fn(model(inputs), targets).backward())
        chunk = subject.batch // PARTS if way == "examples" else None
        segments = SEGMENTS if way == "segments" else ()
        q = QuadraticModel.build(model, inputs, targets, loss_fn, divergence, 0.0, chunk, segments=segments)
        q.curvature(direction)  # the first one looks at the model's formulas too
        return timed(lambda: q.curvature(direction))

    return job


def report(row: dict[str, Any], console: Console) -> None:
    title = f"{row['network']}, {row['parameters'] / 1e6:.1f} million parameters, batch {row['batch']}"
    table = simple_table(title, "product", "way", "peak (MiB)", "seconds", left=["way"])
    for each in row["rows"]:
        peak = "" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 2**20:.0f}"
        table.add_row(each["product"], each["way"], peak, f"{each['seconds']:.2f}")
    show_table(console, table)
