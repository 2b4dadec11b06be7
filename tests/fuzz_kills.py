"""A drawn run of the lab that is killed, or asked to stop, at drawn moments and resumed, held against one that wasn't."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from llqr_lab.experiments.config import Config
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.loop import StoppedError, train
from llqr_lab.experiments.presets import resolve
from ranks import PRELOADED

LONGEST = 240.0
PRESETS = {
    "grokking-add": 24,
    "grokking-divide": 24,
    "fashion-mlp": 20,
    "fashion-convnet": 14,
    "shakespeare-gpt-sgdm": 20,
    "shakespeare-gpt-adamw": 20,
    "multi30k-transformer-adamw": 8,
    "cifar10-resnet18-sgdm": 5,
    "cifar100-vgg16bn-sgdm": 5,
}
"""With their steps: a run takes half a second or so."""
METHODS = [
    "base",
    "default",
    "default",
    "kfac-ngd",
    "ekfac-newton",
    "diagonal-ngd",
    "ekfac-ngd",
    "kfac-newton",
]
STOPPED, FAILED = 3, 4
"""What a run ends with that was asked to stop, and one that couldn't go on. (Ctrl-C before it has begun is 1, of Python.)"""


def server() -> ForkServerContext:
    """Processes that have everything imported when they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run(config: Config, folder: Path, seconds: float) -> None:
    """A whole run; in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        train(config, RunFolder(folder), None, torch.device("cpu"), checkpoint_seconds=seconds)
    except (StoppedError, KeyboardInterrupt):  # the latter before it listens
        os._exit(STOPPED)
    except Exception:
        traceback.print_exc()
        os._exit(FAILED)


def kill(seed: int, known: Path) -> tuple[list[str], str, int]:
    """What differs, what was drawn, and how many signals came while it ran. `known` has the runs that weren't killed."""
    draw = random.Random(f"kills {seed}")
    preset, method = draw.choice(list(PRESETS)), draw.choice(METHODS)
    changes: dict[str, Any] = {"steps": PRESETS[preset], "evaluate_every": draw.choice([2, 3])}
    if method not in ("base", "default"):
        changes["llqr.every"] = draw.choice([2, 5])
    if draw.random() < 0.2 and method == "default":
        changes |= {"diagnostics.every": 4, "diagnostics.products": 2}
    config = resolve(preset, "smoke", method, draw.randint(0, 1), changes)
    context = server()
    whole, took = _unkilled(context, config, known)
    often = [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    signals = [draw.choice(often) for _ in range(draw.choice([1, 1, 2, 3]))]
    # a run that saves a checkpoint after every step, sometimes, or where it is asked to stop alone
    plan = [(number.name, draw.uniform(0, 1.1), draw.choice([0.0, 0.0, 0.1, 60.0])) for number in signals]
    told = f"{preset} {method} {config.seed} {changes}, {plan}"
    with tempfile.TemporaryDirectory() as folder:
        stopped = RunFolder(Path(folder, "stopped"))
        came: list[str] = []
        wrong = []
        for name, share, seconds in plan:
            process = context.Process(target=run, args=(config, stopped.path, seconds))
            process.start()
            process.join(share * took)
            if process.is_alive():
                came.append(name)
                os.kill(process.pid or 0, signal.Signals[name])
            process.join(LONGEST)
            if process.exitcode not in (0, STOPPED, -signal.Signals[name], 1 if name == "SIGINT" else 0):
                wrong.append(f"ended with {process.exitcode} after {name}")
        wrong += _ended(context, config, stopped)
        for log in ("metrics", "diagnostics"):
            mine, theirs = getattr(stopped, log), getattr(whole, log)
            if mine.exists() != theirs.exists() or (mine.exists() and mine.read_bytes() != theirs.read_bytes()):
                wrong.append(f"{log} differ")
        return wrong, f"{told}; came: {' '.join(came)}", len(came)


def _ended(context: ForkServerContext, config: Config, folder: RunFolder) -> list[str]:
    """Run to the end, and look at what there is then."""
    process = context.Process(target=run, args=(config, folder.path, 60.0))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
    if process.exitcode != 0 or not folder.done:
        return [f"the resumed run ended with {process.exitcode}"]
    left = [p.name for p in folder.path.iterdir() if p.name.endswith(".part")]
    edited = folder.edited(folder.read_result())
    return [f"{name} is left" for name in left] + [f"{name} isn't what the result says" for name in edited]


def _unkilled(context: ForkServerContext, config: Config, known: Path) -> tuple[RunFolder, float]:
    """The same run without a signal, and how long it took; made once."""
    name = "-".join([config.preset, config.method, str(config.seed), *config.changes]).replace("/", "_")
    folder = RunFolder(known / name)
    if not folder.done:
        shutil.rmtree(folder.path, ignore_errors=True)
        begun = time.monotonic()
        wrong = _ended(context, config, folder)
        assert not wrong, wrong
        (folder.path / "took").write_text(str(time.monotonic() - begun))
    return folder, float((folder.path / "took").read_text())
