"""`llqr sweep`: many runs, as many at a time as there are cores, skipping what is done and going on with what isn't."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from llqr_lab.errors import check_names
from llqr_lab.experiments.collect import collected, which
from llqr_lab.experiments.command import describe, folder_of, parse_values
from llqr_lab.experiments.config import Config, flat
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.presets import BARE, PRESETS, known_preset, resolve
from llqr_lab.results import say

ABLATIONS: dict[str, dict[str, list[Any]]] = {
    "damping": {"llqr.damping": [0.0, 0.01, 0.1, 1.0]},
    "inner": {"llqr.steps": [10, 25, 50], "llqr.every": [1, 4], "llqr.solver.lr": [0.001, 0.005, 0.02]},
    "ema": {"llqr.ema": [0.0, 0.5, 0.85, 0.95]},
    # the paper's has no EMA, and an inner learning rate that falls; what each of them does by itself is seen too
    "warm-start": {"llqr.warm_start": [True], "llqr.ema": [0.0, 0.95], "llqr.solver.schedule": ["constant", "cosine"]},
    "solver": {"llqr.solver.name": ["sgdm", "adam", "cg"]},
}
"""The grids of the paper's ablations; periods are multiples of the preset's own."""
ABLATED = "ekfac-ngd"
"""The method that they are of."""


def planned_runs(
    presets: Sequence[str],
    scale: str,
    methods: Sequence[str],
    seeds: Sequence[int],
    ablation: str,
    changes: Sequence[str],
) -> list[Config]:
    """The runs of a sweep; presets may be ["all"], and methods are those of the preset's table where none are named."""
    check_names(filter(None, [ablation]), ABLATIONS, "ablation")
    by_hand = dict(map(parse_values, changes))
    found = []
    for preset in PRESETS if list(presets) == ["all"] else presets:
        usual = (ABLATED,) if ablation else known_preset(preset).methods
        grid = ablation_grid(ablation, preset, scale) if ablation else {}
        found += configurations(preset, scale, methods or usual, seeds, {**grid, **by_hand})
    return found


def ablation_grid(ablation: str, preset: str, scale: str) -> dict[str, list[Any]]:
    """The settings of an ablation of a preset."""
    own = resolve(preset, scale, ABLATED, 0).llqr
    assert own is not None  # an ablation is of the paper's LLQR
    return {k: [n * own.every for n in v] if k == "llqr.every" else v for k, v in ABLATIONS[ablation].items()}


def configurations(
    preset: str, scale: str, methods: Iterable[str], seeds: Iterable[int], grid: Mapping[str, list[Any]]
) -> list[Config]:
    """Each method with each seed and each point of the grid; what the preset has anyway isn't changed."""
    found: dict[tuple[str, int], Config] = {}
    for seed, method, point in itertools.product(seeds, methods, points(grid)):
        present = resolve(preset, scale, method, seed).settings
        own = {name: value for name, value in point.items() if method not in BARE or not name.startswith("llqr.")}
        own = {name: value for name, value in own.items() if name not in present or present[name] != value}
        config = resolve(preset, scale, method, seed, own)
        found.setdefault((config.label, seed), config)
    return list(found.values())


def points(grid: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def sweep(
    wanted: Sequence[Config], runs: Path, data: Path | None, jobs: int, device: str, known: Path | None = None
) -> bool:
    """Run what isn't in the file of known results; whether all came to their end."""
    console = Console()
    kept = {which(each): each for each in collected(known)} if known else {}
    waiting = []
    for config in wanted:
        folder = folder_of(runs, config)
        folder.check(config, resume=True)
        before = kept.get((config.preset, config.scale, config.label, config.seed))
        if folder.done:
            say(console, f"done before: {describe(folder.read_result())}")
        elif before and flat(before.get("settings", {})) == config.settings:
            say(console, f"done before: {describe(before)}")
        else:
            waiting.append((config, folder))
    running: dict[subprocess.Popen[bytes], tuple[Config, RunFolder]] = {}
    whole = True
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no run outlives the sweep
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                config, folder = waiting.pop(0)
                running[_started(folder, _arguments(config, runs, data, device), jobs)] = config, folder
            time.sleep(0.2)
            for process in [each for each in running if each.poll() is not None]:
                config, folder = running.pop(process)
                if folder.done:
                    say(console, describe(folder.read_result()))
                else:
                    whole = False
                    why = folder.last_words() or "no word why"
                    run = f"{config.preset} {config.label} seed {config.seed}"
                    say(console, f"failed: {run}: {why} ({folder.log})", "red")
    finally:
        for process in running:
            process.terminate()
    return whole


def _arguments(config: Config, runs: Path, data: Path | None, device: str) -> list[str]:
    return [
        "train",
        config.preset,
        f"--scale={config.scale}",
        f"--method={config.method}",
        f"--seed={config.seed}",
        f"--runs={runs}",
        f"--device={device}",
        "--resume",
        *([f"--data={data}"] if data else []),
        *(f"--set={change}" for change in config.changes),
    ]


def _started(folder: RunFolder, arguments: list[str], jobs: int) -> subprocess.Popen[bytes]:
    """A process of its own, with its share of the cores, so that seeds and methods don't disturb each other; with
    OMP_NUM_THREADS, if that is set."""
    folder.path.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
    with folder.log.open("ab") as log:
        command = [sys.executable, "-m", "llqr_lab", *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)
