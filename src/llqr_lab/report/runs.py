"""Runs as they are found: finished, diverged, running, stopped, failed, or not readable."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llqr_lab.experiments.collect import Result, checked, collected
from llqr_lab.experiments.config import flat, toml
from llqr_lab.experiments.folder import RunError, RunFolder
from llqr_lab.report.lines import Row, chunks, column, flattened
from llqr_lab.report.series import Series

BUDGET, FEWEST, MOST = 40_000, 200, 2_000
"""Points of all curves of a metric together, and of the curve of one run."""
DIAGNOSTICS_BUDGET, DIAGNOSTICS_FEWEST, DIAGNOSTICS_MOST = 4_000, 20, 200
"""The same of diagnostics, which have many numbers at each point."""

FINISHED, DIVERGED, RUNNING, STOPPED, FAILED, UNREADABLE = (
    "finished",
    "diverged",
    "running",
    "stopped",
    "failed",
    "unreadable",
)
ERROR = re.compile(r"^\s*(Error:|[\w.]*(Error|Exception|Interrupt)\b)")
"""The last line of a log that tells of a failure."""
NAMES = ("preset", "scale", "method", "changes", "seed")
"""What says which run it is, and isn't a setting."""


@dataclass
class FoundRun:
    preset: str
    scale: str
    method: str
    """With what was changed by hand."""
    seed: int
    status: str
    notes: list[str]
    settings: dict[str, str]
    result: Result | None
    series: Series
    last: dict[str, Any]
    """What was measured last."""
    diagnostics: Series
    spectra: dict[str, list[str]] = field(default_factory=dict)
    """For each block of U the columns of the diagnostics that are its quantiles, from the smallest."""

    @property
    def progress(self) -> str:
        """How far it came, of how far it should."""
        done = int(self.series.step[-1]) if len(self.series) else 0
        planned = self.settings.get("steps", "0")
        if self.result is not None or not planned.isdecimal() or int(planned) <= done:
            epochs = self.settings.get("epochs", "")
            epoch = self.last.get("epoch")
            if self.result is None and isinstance(epoch, float) and epochs not in ("", "0.0"):
                return f"{done:,} ({epoch:.3g} of {float(epochs):g} epochs)"
            return f"{done:,}"
        return f"{done:,} of {int(planned):,}"

    @property
    def seconds(self) -> float | None:
        """Of training."""
        value = self.last.get("seconds")
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    @property
    def ended(self) -> bool:
        return self.status == FINISHED


def found_runs(sources: Sequence[Path]) -> Iterator[FoundRun]:
    """All runs under folders and in files of results, each once; an error where there are none."""
    folders: dict[Path, RunFolder] = {}
    kept: list[Result] = []
    for source in sources:
        if source.is_file():
            kept += collected(source)
            continue
        if not source.is_dir():
            raise RunError(f"there is no '{source}': name folders of runs, or files of results")
        try:
            under = sorted({path.parent for path in source.rglob("config.toml")})
        except OSError as error:
            raise RunError(f"'{source}' can't be searched for runs ({error})") from None
        if not under:
            raise RunError(
                f"there are no runs in '{source}': a run is a folder with a config.toml, as `llqr train` makes it"
            )
        folders |= {path.resolve(): RunFolder(path) for path in under}
    count = len(folders) + len(kept)
    if not count:
        raise RunError("there are no runs in what was named: make some with `llqr train` or `llqr sweep`")
    limits = (
        _share(BUDGET, count, FEWEST, MOST),
        _share(DIAGNOSTICS_BUDGET, count, DIAGNOSTICS_FEWEST, DIAGNOSTICS_MOST),
    )
    seen = set()
    for folder in folders.values():
        run = _of_folder(folder, *limits)
        seen.add((run.preset, run.scale, run.method, run.seed))
        yield run
    for result in kept:
        # of a run that is there whole, what was kept says nothing new
        if (result["preset"], result["scale"], result["method"], result["seed"]) not in seen:
            yield _of_result(result)


def _share(budget: int, count: int, fewest: int, most: int) -> int:
    return min(max(budget // count, fewest), most)


def _of_folder(folder: RunFolder, limit: int, diagnostics_limit: int) -> FoundRun:
    notes: list[str] = []
    try:
        series, last, unread = _measured(folder, limit)
    except OSError as error:
        series, last, unread = Series(limit), {}, 0
        notes.append(f"metrics.jsonl or times.jsonl can't be read ({error.strerror})")
    if unread:
        notes.append(f"{unread:,} {'line' if unread == 1 else 'lines'} couldn't be read and are left out")
    for name, count in series.not_finite.items():
        notes.append(f"{name} wasn't a finite number {count:,} {'time' if count == 1 else 'times'}")
    settings = _settings(folder, notes)
    result = _result(folder, notes)
    if edited := folder.edited(result):
        notes.append(f"{' and '.join(edited)} isn't what the run wrote: edited, or damaged")
    status = _status(folder, result, notes)
    diagnostics, spectra = _diagnostics(folder.diagnostics, diagnostics_limit, notes)
    preset, scale, method, seed = _named(folder, settings)
    plain = {name: _told(value) for name, value in flat(settings).items() if name not in NAMES}
    return FoundRun(
        preset,
        scale,
        method,
        seed,
        status,
        notes,
        plain,
        result,
        series,
        {**last, **(result or {}).get("last", {})},
        diagnostics,
        spectra,
    )


def _settings(folder: RunFolder, notes: list[str]) -> dict[str, Any]:
    """What config.toml has; a run of another version may have settings that this one doesn't know."""
    try:
        return tomllib.loads(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"config.toml can't be read ({error})")
        return {}


def _result(folder: RunFolder, notes: list[str]) -> Result | None:
    if not folder.done:
        return None
    try:
        return checked({**folder.read_result(), "curve": {}})
    except (RunError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        notes.append(f"result.json isn't whole ({error}): remove it, and resume the run")
        return None


def _status(folder: RunFolder, result: Result | None, notes: list[str]) -> str:
    if result is not None:
        return DIVERGED if result["diverged"] else FINISHED
    if folder.done or any(note.startswith("config.toml") for note in notes):
        return UNREADABLE
    if folder.running:
        return RUNNING
    words = folder.last_words()
    if ERROR.match(words):
        notes.append(words.strip())
        return FAILED
    return STOPPED


def _named(folder: RunFolder, settings: dict[str, Any]) -> tuple[str, str, str, int]:
    """Which run it is: by its settings, or by its folder where they don't say."""
    parents = [*(part.name for part in (folder.path, *folder.path.parents)), "", "", "", ""]
    preset, scale, method = (
        str(settings.get(name) or parents[above]) for name, above in (("preset", 3), ("scale", 2), ("method", 1))
    )
    changes = settings.get("changes")
    label = "+".join((method, *map(str, changes))) if isinstance(changes, list) else method
    seed = settings.get("seed")
    if not isinstance(seed, int):
        seed = int(digits.group()) if (digits := re.search(r"\d{1,9}$", parents[0])) else 0
    return preset, scale, label or "run", seed


def _measured(folder: RunFolder, limit: int) -> tuple[Series, dict[str, Any], int]:
    """What was measured, the last of it, and how many lines couldn't be read."""
    series = Series(limit)
    last: dict[str, Any] = {}
    unread = 0
    times = (row for chunk in chunks(folder.times) for row in chunk)
    for chunk in chunks(folder.metrics):
        rows: list[Row] = []
        for metrics in chunk:
            seconds = next(times, None)  # those of a broken line are passed over with it
            if metrics is None or not _is_step(metrics.get("step")):
                unread += 1
            else:
                rows.append({**seconds, **metrics} if seconds else metrics)
        if rows:
            _add(series, rows)
            last = dict(rows[-1])
    return series, last, unread


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _add(series: Series, rows: Sequence[Row]) -> None:
    steps = np.array([row["step"] for row in rows], np.int64)
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    columns = {name: values for name in names if (values := column(rows, name)) is not None}
    series.add(steps, columns)


def _diagnostics(path: Path, limit: int, notes: list[str]) -> tuple[Series, dict[str, list[str]]]:
    """Its numbers, whatever they are called and however deep they lie, and which of them are U's spectra."""
    series = Series(limit)
    spectra: dict[str, list[str]] = {}
    troubles = []
    for chunk in chunks(path):
        rows = [row for row in chunk if row is not None and _is_step(row.get("step"))]
        if rows:
            # which quantiles the spectra have is the same in all lines
            _add(series, [flattened({name: row[name] for name in row if name != "quantiles"}) for row in rows])
        troubles += [f"diagnostics at step {row['step']:,}: {row['trouble']}" for row in rows if row.get("trouble")]
        for row in rows:
            blocks = row.get("spectra")
            for block, quantiles in (blocks if isinstance(blocks, dict) else {}).items():
                if isinstance(quantiles, list) and len(quantiles) > len(spectra.get(block, ())):
                    spectra[block] = [f"spectra.{block}.{number}" for number in range(len(quantiles))]
    notes += troubles[:1] + [f"and {len(troubles) - 1:,} more such troubles"] * (len(troubles) > 1)
    numbers = set(series.names)
    known = {block: [name for name in names if name in numbers] for block, names in spectra.items()}
    return series, {block: names for block, names in known.items() if names}


def _told(value: Any) -> str:
    """A setting as it is written, words without quotes."""
    return value if isinstance(value, str) else toml(value)


def _of_result(result: Result) -> FoundRun:
    """A run of which only the result was kept, with a thinned curve."""
    series = Series(MOST)
    curve = [dict(zip(result["curve"], values, strict=True)) for values in zip(*result["curve"].values(), strict=True)]
    rows = [row for row in curve if _is_step(row.get("step"))]
    if rows:
        _add(series, rows)
    kept = flat(result.get("settings", {})) or {name: result[name] for name in ("model", "data", "batch")}
    settings = {name: _told(value) for name, value in kept.items() if name not in NAMES}
    return FoundRun(
        result["preset"],
        result["scale"],
        result["method"],
        result["seed"],
        DIVERGED if result["diverged"] else FINISHED,
        ["its curve was thinned when the result was kept"],
        settings,
        result,
        series,
        result["last"],
        Series(1),
    )
