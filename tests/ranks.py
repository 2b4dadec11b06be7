"""Several processes on gloo: a function run on every rank, and what it returned on each."""

from __future__ import annotations

import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.tensorboard",
    "sklearn.datasets",
    "kornia.augmentation",
    "llqr.distributed.checkpoint",
    "llqr_lab.experiments.loop",
]
"""Imported once, before the first process is forked: all tests share one server."""
LONGEST = 240.0
"""Seconds for all that one call does; a deadlock ends here at the latest."""


def on_ranks(size: int, folder: Path, job: Callable[..., Any], *args: Any, may_die: bool = False) -> list[Any]:
    """What `job(*args)` returns on each of `size` ranks (tensors and builtins); None of a rank that died, if that may be.

    The processes are forked off a server that has imported torch and the library once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folder.mkdir(parents=True, exist_ok=True)
    started = [
        context.Process(target=_work, args=(rank, size, str(folder), job, args), daemon=True) for rank in range(size)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + LONGEST
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank, process in enumerate(started) if process.is_alive()]
    for process in started:
        if process.is_alive():
            process.kill()
    assert not stuck, f"ranks {stuck} of {size} didn't come to an end"
    found: list[Any] = []
    for rank in range(size):
        told = folder / f"failed-{rank}"
        assert not told.exists(), f"rank {rank} of {size}:\n{told.read_text()}"
        result = folder / f"{rank}.pt"
        assert result.exists() or may_die, f"rank {rank} of {size} died"
        found.append(torch.load(result, weights_only=True) if result.exists() else None)
    return found


def _work(rank: int, size: int, folder: str, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/meeting", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        torch.manual_seed(0)
        result = job(*args)
        torch.save(result, f"{folder}/{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"failed-{rank}").write_text(traceback.format_exc())
        raise
