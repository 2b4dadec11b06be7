"""`llqr train`: one run, in its folder."""

import re
import time
import tomllib
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from llqr_lab.errors import ConfigError
from llqr_lab.experiments.config import Config, read
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.loop import Report, train
from llqr_lab.experiments.presets import PRESETS, resolve
from llqr_lab.results import say, show_table, simple_table

LINE_SECONDS = 10.0
"""Between lines of progress."""


def list_presets() -> None:
    table = simple_table(None, "preset", "what", "methods", left=("what", "methods"))
    for name, preset in PRESETS.items():
        table.add_row(name, preset.summary, ", ".join(preset.methods))
    show_table(Console(), table)


def configuration(target: str, scale: str | None, method: str | None, seed: int | None, changes: list[str]) -> Config:
    """Of a preset's name, or of a file, whose runs never pass for a preset's."""
    path, by_hand = Path(target), dict(map(parse_change, changes))
    if path.suffix != ".toml":
        return resolve(target, scale or "cpu", method or "base", seed or 0, by_hand)
    if scale or method:
        raise ConfigError(f"--{'scale' if scale else 'method'} is for presets; '{path}' has its own settings")
    if not path.is_file():
        raise ConfigError(f"there is no file '{path}'")
    config = read(path)
    named = {"preset": path.stem, "scale": "own", "method": "own", "changes": []}
    return config.changed({**named, "seed": config.seed if seed is None else seed}).by_hand(by_hand)


def parse_change(text: str) -> tuple[str, Any]:
    """A name and a value of TOML from name=value; what isn't TOML is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {text}: write it as name=value, such as llqr.every=100")
    return name, _value(value)


def parse_values(text: str) -> tuple[str, list[Any]]:
    """A name and one value or several, with commas between."""
    name, _ = parse_change(text)
    listed = text.partition("=")[2]
    several = _value(f"[{listed}]")
    return name, several if isinstance(several, list) else [_value(each.strip()) for each in listed.split(",")]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def folder_of(runs: Path, config: Config) -> RunFolder:
    """Where the run of a configuration is: one folder for each preset, scale, method with its changes, and seed."""
    # what systems don't take in a folder's name is replaced, and a long one ends in its hash
    name = re.sub(r'[/\\:*?"<>|\s]', "_", config.label)
    if len(name.encode()) > 120:
        name = f"{name[:80]}-{blake2b(config.label.encode(), digest_size=8).hexdigest()}"
    return RunFolder(runs / config.preset / config.scale / name / f"seed-{config.seed}")


def run(
    config: Config, runs: Path, data: Path | None, resume: bool, device: str, workers: int, checkpoint_seconds: float
) -> dict[str, Any]:
    """Train, or say what came of it if it is done."""
    console = Console(stderr=True)
    folder = folder_of(runs, config)
    chosen = device_of(device)
    # without this, numbers that are almost zero slow a step down by an order of magnitude
    torch.set_flush_denormal(True)
    folder.check(config, resume)
    if folder.done:
        say(console, f"The run in '{folder.path}' is done.")
        return folder.read_result()
    how = f"{config.base.name} alone, without LLQR (--method default is with it)"
    if config.default_llqr:
        how = f"LLQR around {config.base.name}, nothing set"
    elif config.llqr is not None:
        how = f"the paper's LLQR around {config.base.name}"
    say(console, f"{config.preset} at scale {config.scale}, method {config.label}: {how}. In '{folder.path}'.")
    report = progress(console, f"{config.preset} {config.label}", resume)
    warn = lambda message: say(console, message, "yellow")  # noqa: E731
    return train(config, folder, data, chosen, workers, checkpoint_seconds, report, warn)


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()  # meta has no numbers
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        # torch says it with a RuntimeError where the name is none, and with an AssertionError where there is no such GPU
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None


def progress(console: Console, title: str, resume: bool = False) -> Report:
    """Where a run begins; then now and then the loss, the score and the refits."""
    said: float | None = None

    def report(step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        nonlocal said
        if said is None:
            said = time.monotonic()
            if step:
                say(console, f"Going on after step {step:,} of {steps:,}.")
            elif resume:
                say(console, f"There is no checkpoint to go on from: beginning at step 0 of {steps:,}.")
        elif time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            say(console, f"{title}: step {step:,} of {steps:,}, {shown(metrics)}")

    return report


def shown(metrics: Mapping[str, Any]) -> str:
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
