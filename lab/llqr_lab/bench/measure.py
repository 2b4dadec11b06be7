"""Memory and threads: what the benchmarks measure with, on a machine that others use too."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

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


def step_seconds(
    begin: Callable[[], Mapping[str, Callable[[int], float]]],
    rounds: int,
    steps: int,
    turn: int,
    done: Callable[[], None],
) -> dict[str, list[float]]:
    """Of each step of several trainings the median of its seconds over the rounds. They take turns of some steps.

    `begin` gives what makes each one's step of a number. Every round begins anew, so that a step has its refit, or its new
    preconditioner, in each of them.
    """
    spent: dict[str, list[list[float]]] = {}
    for _ in range(rounds):
        trainings = begin()
        own: dict[str, list[float]] = {name: [] for name in trainings}
        for first in range(0, steps, turn):
            for name, step in trainings.items():
                own[name] += map(step, range(first, min(first + turn, steps)))
        for name, seconds in own.items():
            spent.setdefault(name, []).append(seconds)
        done()
    return {name: list(map(median, zip(*each, strict=True))) for name, each in spent.items()}


def peak_memory(prepare: Callable[..., Job], *arguments: Any) -> tuple[int | None, Any]:
    """By how many bytes a job raises the resident memory of a process of its own at its peak, and what it returns.

    `prepare` makes the job in a newly spawned process; what that takes isn't counted. None where the system doesn't tell.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak, prepare, arguments).result()


def _peak(prepare: Callable[..., Job], arguments: tuple[Any, ...]) -> tuple[int | None, Any]:
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        # large blocks go back to the system when they are freed: otherwise what the preparation freed is kept, and a job that
        # fits into that seems to need nothing
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(option, 2**16)
    with one_thread():
        job = prepare(*arguments)
        with suppress(OSError):  # where Linux lets us, a new peak begins at what is resident now
            Path("/proc/self/clear_refs").write_text("5")
        before = peak_resident()
        result = job()
        after = peak_resident()
    # Linux counts resident pages roughly, so that a job that takes next to nothing can seem to give some back
    return None if before is None or after is None else max(0, after - before), result


def peak_resident() -> int | None:
    """VmHWM rather than ru_maxrss where there is one: the latter is handed down from the process that spawned this one."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if os.name != "posix":
        return None
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
