"""Seconds of the first steps, of everybody on a task, in turns: what else a machine does then slows all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import torch

from llqr_lab.bench.measure import one_thread
from llqr_lab.experiments.config import Config
from llqr_lab.experiments.loop import Run
from llqr_lab.tasks.base import to_device
from llqr_lab.tasks.named import task_of

TURN = 25
"""Steps of a turn."""
TIMED = 200
"""Steps that are timed; what comes after costs as much as the later half of them, on average."""


def step_seconds(
    configs: Mapping[str, Config], data: Path | None, rounds: int, done: Callable[[], None], steps: int = TIMED
) -> dict[str, list[float]]:
    """Of each step its median over the rounds, on one thread by the processor's time.

    Every round begins anew, so that a step has its refit, or its new preconditioner, in each of them.
    """
    if not configs:
        return {}
    torch.set_flush_denormal(True)
    device = torch.device("cpu")
    spent: dict[str, list[list[float]]] = {name: [[] for _ in range(steps)] for name in configs}
    with one_thread():
        task = task_of(next(iter(configs.values())), data)
        for _ in range(rounds):
            runs = {name: Run(config, task, device) for name, config in configs.items()}
            for begin in range(0, steps, TURN):
                for name, run in runs.items():
                    for step in range(begin, min(begin + TURN, steps)):
                        before = run.seconds
                        run.advance(to_device(task.train[step], device))
                        spent[name][step].append(run.seconds - before)
                    done()
    return {name: [median(times) for times in each] for name, each in spent.items()}


def seconds_to(times: Sequence[float], steps: float) -> float:
    """The time of so many steps from the start."""
    known = min(round(steps), len(times))
    return sum(times[:known]) + (steps - known) * fmean(times[len(times) // 2 :])
