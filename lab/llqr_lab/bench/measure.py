"""Memory, threads and growth: what the benchmarks measure with, on a machine that others use too."""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Job = Callable[[], object]


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on a single thread.

    Small matrices gain little from more, and when something else takes one of the cores, threads that wait for each other
    slow down tenfold and more.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def growth_exponent(sizes: Sequence[float], values: Sequence[float | None]) -> float | None:
    """The slope of a least-squares line through (log size, log value); None with fewer than two points.

    What isn't positive is left out: memory that was given back in between can make a job seem to take less than none.
    """
    points = [
        (math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True) if value and value > 0
    ]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """‖found - truth‖ / ‖truth‖ over all the parameters together."""
    assert found.keys() == truth.keys()
    apart = torch.stack([(found[name] - truth[name]).norm() for name in truth]).norm()
    return float(apart / torch.stack([part.norm() for part in truth.values()]).norm())


def peak_memory(preparations: Mapping[str, tuple[Callable[..., Job], tuple[Any, ...]]]) -> dict[str, int | None]:
    """By how many bytes each job raises the resident memory of a process of its own, at its peak.

    Each is given as a function and its arguments, which prepare the job in a newly spawned process; what the preparation
    takes isn't counted. None where the system doesn't tell.
    """
    found: dict[str, int | None] = {}
    with ProcessPoolExecutor(len(preparations), mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {name: pool.submit(_peak, *preparation) for name, preparation in preparations.items()}
        for name, future in waiting.items():
            found[name] = future.result()
    return found


def _peak(prepare: Callable[..., Job], arguments: tuple[Any, ...]) -> int | None:
    _give_back_freed_memory()
    with one_thread():
        job = prepare(*arguments)
        _forget_peak()
        before = _peak_resident()
        job()
        after = _peak_resident()
    # Linux counts resident pages roughly, so that a job that takes next to nothing can seem to give some back
    return None if before is None or after is None else max(0, after - before)


def _give_back_freed_memory() -> None:
    """Have the C library return large blocks to the system when they are freed.

    Otherwise it keeps what the preparation freed, and a job that fits into that seems to need nothing.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):
            largest_kept = 2**16
            for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
                library.mallopt(option, largest_kept)


def _forget_peak() -> None:
    """Where Linux lets us, begin a new peak at what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_resident() -> int | None:
    """VmHWM rather than ru_maxrss where there is one: the latter is handed down from the process that spawned this one."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if os.name != "posix":
        return None
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
