"""`llqr bench ranks`: what a step between refits takes on several processes, where U is whole on each and where it is divided.

Every rank trains the same small network by DDP (U on all ranks, or `shard=True`) and by FSDP2, on gloo, in turns in the same
processes; a round is as long as its slowest rank. What is told is the time of `optimizer.step()` over that of the base alone,
and the bytes of U that a rank holds. Ranks share one machine here, and messages go through its memory: a cluster has slower
messages, and accelerators for U g.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llqr import LLQR
from llqr.paper import PaperLLQR
from llqr_lab.bench.measure import interleaved, median, ratio
from llqr_lab.results import provenance, write_json
from llqr_lab.tables import show_table

STRUCTURES = ("diagonal", "kfac", "ekfac")
WAYS = ("base", "ddp", "ddp, shard", "fsdp")
DEPTH, BATCH, LATER = 4, 8, 10**9
"""Layers, examples a rank, and the step of the next refit."""


def main(output: Path, ranks: Sequence[int], width: int, seed: int, repeats: int) -> None:
    """Run, write the results, and print the table."""
    rows = [row for size in ranks for row in run(size, width, seed, repeats)]
    listed = "".join(f" --ranks {size}" for size in ranks)
    command = f"llqr bench ranks --width {width} --seed {seed} --repeats {repeats}{listed}"
    settings = {"layers": DEPTH, "width": width, "repeats": repeats, "backend": "gloo", "threads": 1}
    write_json(output, {**provenance(command, seed), "settings": settings, "rows": rows})
    console = Console()
    report(rows, console)
    console.print(f"Wrote {output}", highlight=False, soft_wrap=True)


def run(size: int, width: int, seed: int, repeats: int) -> list[dict[str, Any]]:
    """What the ranks of a group found, which they write to files."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, size, folder, width, seed, repeats) for rank in range(size)]
        started = [context.Process(target=_work, args=arguments) for arguments in given]
        for process in started:
            process.start()
        for process in started:
            process.join()
        return rows_of([torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)])


def rows_of(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each structure, from what each rank measured."""
    rows = []
    for structure in STRUCTURES:
        seconds, held = {}, {}
        for way in WAYS:
            rounds = zip(*(rank[structure][way]["seconds"] for rank in found), strict=True)
            seconds[way] = median([max(times) for times in rounds])
            held[way] = max(rank[structure][way]["held"] for rank in found)
        rows.append(
            {
                "ranks": len(found),
                "structure": structure,
                "base_seconds": seconds["base"],
                "ways": {w: {"step": ratio(seconds[w], seconds["base"]), "held_bytes": held[w]} for w in WAYS[1:]},
            }
        )
    return rows


def _work(rank: int, size: int, folder: str, width: int, seed: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    torch.save(measured(width, seed, repeats), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def measured(width: int, seed: int, repeats: int) -> dict[str, Any]:
    """Seconds and bytes on this rank, by structure and way."""
    found = {}
    for structure in STRUCTURES:
        made = {way: _optimizer(way, structure, width, seed) for way in WAYS}
        seconds = interleaved({way: _step_of(optimizer) for way, optimizer in made.items()}, repeats + 1)
        found[structure] = {
            way: {"seconds": seconds[way][1:], "held": _held(optimizer)}  # the first round makes what later ones reuse
            for way, optimizer in made.items()
        }
    return found


def _optimizer(way: str, structure: str, width: int, seed: int) -> torch.optim.Optimizer:
    """With gradients in place, and U fitted."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers)
    called: nn.Module = model
    if way == "fsdp":
        fully_shard(model)
    else:
        called = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if way != "base":
        shard = {"ddp": False, "ddp, shard": True, "fsdp": None}[way]
        optimizer = LLQR.paper(optimizer, called, structure=structure, every=LATER, steps=1, shard=shard)
    generator = torch.Generator().manual_seed(seed + 1 + dist.get_rank())
    called(torch.randn(BATCH, width, generator=generator)).log_softmax(1)[:, 0].mean().backward()
    optimizer.step()
    return optimizer


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """A step, begun by all ranks at once. The gradients stay: how long it takes doesn't depend on them."""

    def step() -> None:
        dist.barrier()
        optimizer.step()

    return step


def _held(optimizer: torch.optim.Optimizer) -> int:
    return optimizer.memory_usage()["preconditioner"] if isinstance(optimizer, PaperLLQR) else 0


def report(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="optimizer.step() over the base's, and U a rank", title_justify="left", box=box.SIMPLE_HEAD)
    for header in ("ranks", "structure", *WAYS[1:]):
        table.add_column(header, justify="left" if header == "structure" else "right", no_wrap=True)
    for row in rows:
        cells = [f"{way['step']:.1f}, {way['held_bytes'] / 2**20:.1f} MiB" for way in row["ways"].values()]
        table.add_row(str(row["ranks"]), row["structure"], *cells)
    show_table(console, table)
