"""What the commands train, sweep, table and figure do with what they are given."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from llqr.errors import LLQRError
from llqr_lab.data.folder import DataError
from llqr_lab.experiments.collect import Result, collected
from llqr_lab.experiments.collect import save as save_results
from llqr_lab.experiments.config import Config, ConfigError, read
from llqr_lab.experiments.folder import RunError
from llqr_lab.experiments.presets import PRESETS, SCALES, known_preset, resolve
from llqr_lab.suggest import suggestion
from llqr_lab.tables import show_table

ALL = "all"
"""For `llqr sweep`, in the place of presets."""


@contextmanager
def told() -> Iterator[None]:
    """Errors that a person can do something about, without a traceback."""
    try:
        yield
    except (ConfigError, RunError, DataError, LLQRError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


def list_presets() -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("preset", "what", "methods"):
        table.add_column(header, overflow="fold")
    for name, preset in PRESETS.items():
        table.add_row(name, preset.summary, ", ".join(preset.methods))
    show_table(Console(), table)


def configuration(target: str, scale: str | None, method: str | None, seed: int | None, changes: list[str]) -> Config:
    """Of a preset's name, or of a file, whose runs never pass for a preset's."""
    path = Path(target)
    by_hand = dict(map(change, changes))
    if path.suffix != ".toml":
        return resolve(target, scale or "cpu", method or "base", seed or 0, by_hand)
    if scale or method:
        raise ConfigError(f"--{'scale' if scale else 'method'} is for presets; '{path}' has its own settings")
    if not path.is_file():
        raise ConfigError(f"there is no file '{path}'")
    config = read(path)
    named = {"preset": path.stem, "scale": "own", "method": "own", "changes": []}
    return config.changed({**named, "seed": config.seed if seed is None else seed}).by_hand(by_hand)


def change(text: str) -> tuple[str, Any]:
    """A name and a value of TOML from name=value; what isn't TOML is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {text}: write it as name=value, such as llqr.every=100")
    return name, _value(value)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def train(
    config: Config,
    runs: Path,
    data: Path | None,
    resume: bool,
    device: str,
    workers: int,
    threads: int | None,
    checkpoint_seconds: float,
    context: typer.Context,
) -> None:
    from llqr_lab.experiments.command import describe, run
    from llqr_lab.experiments.stopping import StoppedError

    try:
        result = run(config, runs, data, resume, device, workers, threads, checkpoint_seconds)
    except StoppedError as stopped:
        typer.echo(f"The run was {stopped}. To go on:\n  {_again(context)}", err=True)
        raise typer.Exit(128 + stopped.number) from None
    typer.echo(describe(result))


def _again(context: typer.Context) -> str:
    """The command that was given, with --resume."""
    words = ["llqr", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name == "resume":
            continue
        value = context.params[name]
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [str(each)] if parameter.param_type_name == "argument" else [parameter.opts[0], str(each)]
    return shlex.join([*words, "--resume"])


def sweep(
    presets: list[str],
    scale: str,
    methods: str,
    seeds: str,
    ablation: str,
    changes: list[str],
    jobs: int | None,
    data: Path | None,
    runs: Path,
    device: str,
    dry: bool,
) -> None:
    from llqr_lab.experiments.sweep import ABLATIONS, configurations
    from llqr_lab.experiments.sweep import sweep as run_all

    if ablation and ablation not in ABLATIONS:
        raise ConfigError(f"there is no ablation '{ablation}'{suggestion(ablation, ABLATIONS)}")
    own, grid = ABLATIONS[ablation] if ablation else ((), {})
    chosen = tuple(filter(None, methods.split(","))) or own
    grid = {**grid, **dict(map(_values, changes))}
    wanted = [
        each
        for preset in (PRESETS if presets == [ALL] else presets)
        for each in configurations(preset, scale, chosen or known_preset(preset).methods, numbers(seeds), grid)
    ]
    console = Console()
    if dry:
        for config, _ in wanted:
            console.print(
                f"{config.preset} {config.scale} {config.label} seed {config.seed}", highlight=False, markup=False
            )
        return
    if not run_all(wanted, runs, data, jobs or os.cpu_count() or 1, device, console):
        raise typer.Exit(1)


def _values(text: str) -> tuple[str, list[Any]]:
    """A name and one value or several, with commas between."""
    name, _ = change(text)
    values = text.partition("=")[2]
    several = _value(f"[{values}]")
    return name, several if isinstance(several, list) else [_value(each.strip()) for each in values.split(",")]


def numbers(text: str) -> list[int]:
    """[0, 1, 2, 7] of "0-2,7"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        fine = first.isdecimal() and (last.isdecimal() if dash else True)
        if not fine or not int(first) <= int(last or first) < 2**32 or int(last or first) - int(first) > 10_000:
            raise ConfigError(f"'{text}' aren't seeds: write 0-4, or 0,1,7")
        found += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(found))


def table(source: Path, presets: str, scale: str, save: Path | None, page: Path | None) -> None:
    from llqr_lab.experiments.reproduction import write
    from llqr_lab.experiments.table import show

    results = [
        each
        for each in collected(source)
        if any(part in each["preset"] for part in presets.split(",")) and (not scale or each["scale"] == _known(scale))
    ]
    if not results:
        raise RunError(f"no finished runs in '{source}' that fit: make some with `llqr train` or `llqr sweep`")
    if save:
        save_results(results, save)
    if page:
        write(page, results)
    show(results, Console())


def _known(scale: str) -> str:
    if scale not in SCALES:
        raise ConfigError(f"there is no scale '{scale}'{suggestion(scale, SCALES)}")
    return scale


def figure(kind: str, presets: list[str], methods: str, source: Path, scale: str, output: Path) -> None:
    from llqr_lab.experiments.sweep import ABLATIONS
    from llqr_lab.figures import experiments as figures
    from llqr_lab.figures.mathematics import DRAWN

    kinds = ("curves", "grokking", *ABLATIONS, *DRAWN)
    if kind not in kinds:
        raise ConfigError(f"there is no figure '{kind}'{suggestion(kind, kinds)}")
    if kind == "grokking" and presets:
        raise ConfigError("the figure 'grokking' has all of its operations: leave out the preset")
    if kind in DRAWN:
        if presets:
            raise ConfigError(f"the figure '{kind}' is of no preset's runs: leave out the preset")
        DRAWN[kind](output)
        typer.echo(f"Wrote {output}")
        return
    if kind in ABLATIONS and len(presets) > 1:
        raise ConfigError(f"the figure '{kind}' is of one preset")
    for preset in presets or ([""] if kind != "grokking" else []):
        known_preset(preset)
    names = tuple(filter(None, methods.split(",")))
    results = [
        each
        for each in collected(source)
        if each["scale"] == _known(scale) and (not names or each["method"].partition("+")[0] in names)
    ]
    if kind == "curves":
        groups = [[each for each in _plain(results) if each["preset"] == preset] for preset in presets]
        figures.curves([_some(group, name, scale) for group, name in zip(groups, presets, strict=True)], output)
    elif kind == "grokking":
        chosen = [each for each in _plain(results) if each["preset"].startswith("grokking-")]
        figures.boxes(_some(chosen, "grokking", scale), output)
    else:
        usual, grid = ABLATIONS[kind]
        chosen = [each for each in results if each["preset"] == presets[0]]
        figures.ablation(_some(chosen, presets[0], scale), methods_swept(chosen, usual), grid, output)
    typer.echo(f"Wrote {output}")


def _plain(results: list[Result]) -> list[Result]:
    """Without those whose settings were changed by hand."""
    return [each for each in results if "+" not in each["method"]]


def _some(results: list[Result], what: str, scale: str) -> list[Result]:
    if not results:
        raise RunError(f"no finished runs of {what} at scale {scale}: make them with `llqr sweep`")
    return results


def methods_swept(results: list[Result], usual: tuple[str, ...]) -> tuple[str, ...]:
    """The methods that an ablation was run with: the usual ones, or those that are there."""
    found = dict.fromkeys(each["method"].partition("+")[0] for each in results if "+" in each["method"])
    return tuple(found) or usual
