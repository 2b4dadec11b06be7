"""Seconds a step, of everybody on a task, in turns: what else a machine does at the time then slows all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, median

import torch

from llqr_lab.experiments.config import Config
from llqr_lab.experiments.loop import Run
from llqr_lab.tasks.base import to_device
from llqr_lab.tasks.named import task_of

PERIOD = 50
"""Steps of a turn: LLQR refits once in it, and others renew their preconditioners five times."""


def step_seconds(
    configs: Mapping[str, Config], data: Path | None, rounds: int, done: Callable[[], None], period: int = PERIOD
) -> dict[str, float]:
    """The mean over a turn of each step's median over the rounds, on one thread by the processor's time; one round warms up.

    Steps differ (some begin with a refit), and what disturbs one of them doesn't disturb the same one of the next turn.
    """
    if not configs:
        return {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        device = torch.device("cpu")
        task = task_of(next(iter(configs.values())), data)
        runs = {name: Run(config, task, device) for name, config in configs.items()}
        spent: dict[str, list[list[float]]] = {name: [[] for _ in range(period)] for name in configs}
        for number in range(rounds + 1):
            for name, run in runs.items():
                for place, times in enumerate(spent[name]):
                    before = run.seconds
                    run.advance(to_device(task.train[number * period + place], device))
                    if number:
                        times.append(run.seconds - before)
                done()
        return {name: fmean(map(median, times)) for name, times in spent.items()}
    finally:
        torch.set_num_threads(threads)
