"""`llqr train`: one run, in its folder, with a bar."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llqr_lab.experiments.config import Config, ConfigError
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.loop import CHECKPOINT_SECONDS, Report, train

LINE_SECONDS = 20.0
"""Between lines of progress, where there is no terminal."""


def folder_of(runs: Path, config: Config) -> RunFolder:
    """Where the run of a configuration is: one folder for each preset, scale, method with its changes, and seed."""
    return RunFolder(runs / config.preset / config.scale / _name(config.label) / f"seed-{config.seed}")


def _name(label: str) -> str:
    """A folder's name: what systems don't take in one is replaced, and a long one ends in its hash."""
    plain = re.sub(r'[/\\:*?"<>|\s]', "_", label)
    if len(plain.encode()) <= 120:
        return plain
    return f"{plain[:80]}-{blake2b(label.encode(), digest_size=8).hexdigest()}"


def run(
    config: Config,
    runs: Path,
    data: Path | None,
    resume: bool,
    device: str = "auto",
    workers: int = 0,
    threads: int | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> dict[str, Any]:
    """Train, or say what came of it if it is done."""
    console = Console(stderr=True)
    folder = folder_of(runs, config)
    chosen = device_of(device)
    if threads:
        torch.set_num_threads(threads)
    # without this, numbers that are almost zero slow a step down by an order of magnitude
    torch.set_flush_denormal(True)
    folder.check(config, resume)
    if folder.done:
        _say(console, f"The run in '{folder.path}' is done.")
        return folder.read_result()
    _say(
        console,
        f"{config.preset} at scale {config.scale}, method {config.label}: {trained_by(config)}. In '{folder.path}'.",
    )
    with progress(console, f"{config.preset} {config.label}", resume) as report:
        return train(
            config,
            folder,
            data,
            chosen,
            workers,
            checkpoint_seconds,
            report,
            lambda message: _say(console, message, "yellow"),
        )


def _say(console: Console, message: str, style: str | None = None) -> None:
    console.print(message, style=style, highlight=False, markup=False, soft_wrap=True)


def trained_by(config: Config) -> str:
    """The optimizer of a run, in words."""
    base = config.base.name
    if config.default_llqr:
        return f"LLQR around {base}, nothing set"
    if config.llqr is not None:
        return f"the paper's LLQR around {base}"
    return f"{base} alone, without LLQR (--method default is with it)"


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()  # meta has no numbers
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        # torch says it with a RuntimeError where the name is none, and with an AssertionError where there is no such GPU
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None


@contextmanager
def progress(console: Console, title: str, resume: bool = False) -> Iterator[Report]:
    """A bar with the loss, the score, the refits and the time left; a line now and then where nobody watches."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    said: float | None = None
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, shown="")

        def report(step: int, steps: int, metrics: Mapping[str, Any]) -> None:
            nonlocal said
            if said is None:
                said = time.monotonic()
                if step:
                    _say(console, f"Going on after step {step:,} of {steps:,}.")
                elif resume:
                    _say(console, f"There is no checkpoint to go on from: beginning at step 0 of {steps:,}.")
            bar.update(task, completed=step, total=steps, shown=shown(metrics))
            if not console.is_terminal and time.monotonic() - said >= LINE_SECONDS:
                said = time.monotonic()
                _say(console, f"{title}: step {step:,} of {steps:,}, {shown(metrics)}")

        yield report


def shown(metrics: Mapping[str, Any]) -> str:
    """What a bar says of the metrics."""
    names = (
        ("train_loss", "loss {:.3g}"),
        ("test_accuracy", "test {:.1%}"),
        ("test_loss", "test loss {:.3g}"),
        ("valid_loss", "validation loss {:.3g}"),
        ("refits", "{} refits"),
    )
    return ", ".join(text.format(metrics[name]) for name, text in names if metrics.get(name) is not None)


def describe(result: Mapping[str, Any]) -> str:
    """A result in a line."""
    last = result["last"]
    numbers = [
        f"{name.replace('_', ' ')} {last[name]:.4g}"
        for name in ("train_loss", "valid_loss", "test_loss", "test_accuracy", "bleu")
        if last.get(name) is not None
    ]
    seconds = f"{result['steps']} steps in {result['seconds']:.1f} s"
    ended = "diverged, " if result["diverged"] else ""
    return f"{result['preset']} {result['method']} seed {result['seed']}: {ended}{', '.join(numbers)}; {seconds}"
