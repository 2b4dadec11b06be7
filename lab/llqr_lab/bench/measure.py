"""What the benchmarks measure with, on a machine that others use too: threads, seconds, memory; and how they find a rate."""

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

Job = Callable[[], object]


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on a single thread: when something else takes one of the cores, threads that wait for each other slow down tenfold
    and more."""
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
    """Linux's VmHWM. (ru_maxrss is handed down from the process that spawned this one.)"""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


# learning rates

WIDEN = 3.0
"""The factor between rates; where the best is the first or the last of a grid, one more is tried beyond it, and so on."""
WIDEST = 3
Key = TypeVar("Key")


def widened(
    grids: Mapping[Key, Sequence[float]],
    ends_at: Callable[[Mapping[Key, Sequence[float]]], Mapping[Key, dict[float, float]]],
) -> dict[Key, dict[float, float]]:
    """How each ends at the rates of its grid, and at those beyond it while the best is the first or the last."""
    found: dict[Key, dict[float, float]] = {key: {} for key in grids}
    coming = grids
    for _ in range(1 + WIDEST):
        for key, ends in ends_at(coming).items():
            found[key] |= ends
        coming = {key: more for key in coming if (more := one_more(found[key]))}
    return found


def one_more(ends: Mapping[float, float]) -> list[float]:
    """A rate beyond the best of these ends where that is the first or the last; to two digits, as a folder's name has it."""
    best = min(ends, key=lambda rate: ends[rate])
    if ends[best] == math.inf or best not in (min(ends), max(ends)):
        return []
    return [rounded(best / WIDEN if best == min(ends) else best * WIDEN)]


def rounded(rate: float) -> float:
    """To two digits: three times 0.3 is 0.9."""
    return float(f"{rate:.2g}")
