"""Runs as they are found: finished, diverged, running, stopped, failed, or not readable; and their curves."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llqr_lab.errors import RunError
from llqr_lab.experiments.collect import Result, checked, collected, which
from llqr_lab.experiments.config import flat, toml
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.results import read_json

Floats = NDArray[np.float64]
Columns = dict[str, Floats]
"""Numbers by the name of what was measured, as many of each: NaN where it wasn't measured, infinite where it wasn't finite."""
ERROR = re.compile(r"^\s*(Error:|[\w.]*(Error|Exception|Interrupt)\b)")
"""The last line of a log that tells of a failure."""
NAMES = ("preset", "scale", "method", "changes", "seed")
STATUSES = ("finished", "diverged", "running", "stopped", "failed", "unreadable")
FINISHED, DIVERGED, RUNNING, STOPPED, FAILED, UNREADABLE = STATUSES


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
    metrics: Columns
    last: dict[str, Any]
    diagnostics: Columns

    @property
    def progress(self) -> str:
        done = int(self.metrics["step"][-1]) if self.metrics else 0
        planned = self.settings.get("steps", "0")
        if self.result is None and planned.isdecimal() and int(planned) > done:
            return f"{done:,} of {int(planned):,}"
        return f"{done:,}"

    def number(self, *names: str) -> float | None:
        """The first of these that the result has, or else what was measured last."""
        for name in names:
            for place in (self.result or {}, self.last):
                found = number(place.get(name))
                if math.isfinite(found):
                    return found
        return None


def found_runs(sources: Sequence[Path]) -> Iterator[FoundRun]:
    """All runs under folders and in files of results, each once; an error where there are none."""
    folders: dict[Path, RunFolder] = {}
    kept: list[Result] = []
    for source in sources:
        if source.is_file():
            kept += collected(source)
        elif not source.is_dir():
            raise RunError(f"there is no '{source}': name folders of runs, or files of results")
        else:
            under = sorted({path.parent for path in source.rglob("config.toml")})
            folders |= {path.resolve(): RunFolder(path) for path in under}
    if not folders and not kept:
        raise RunError("there are no runs in what was named: a run is a folder with a config.toml, by `llqr train`")
    seen = set()
    for folder in folders.values():
        run = _of_folder(folder)
        seen.add((run.preset, run.scale, run.method, run.seed))
        yield run
    for result in kept:  # of a run that is there whole, what was kept says nothing new
        if which(result) not in seen:
            yield _of_result(result)


def _of_folder(folder: RunFolder) -> FoundRun:
    notes: list[str] = []
    metrics, times, diagnostics = (_rows(path, notes) for path in (folder.metrics, folder.times, folder.diagnostics))
    # the seconds of a line that can't be read are passed over with it
    paired = [(row, times[place] if place < len(times) else None) for place, row in enumerate(metrics)]
    rows = [{**(seconds or {}), **row} for row, seconds in paired if row is not None and _is_step(row.get("step"))]
    if len(rows) < len(metrics):
        notes.append(f"{len(metrics) - len(rows):,} lines of metrics couldn't be read and are left out")
    measured = columns(rows)
    for name, values in measured.items():
        if count := int(np.isinf(values).sum()):
            notes.append(f"{name} wasn't a finite number {count:,} {'time' if count == 1 else 'times'}")
    settings, status = {}, STOPPED
    try:  # a run of another version may have settings that this one doesn't know
        settings = tomllib.loads(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"config.toml can't be read ({error})")
        status = UNREADABLE
    result = _result(folder, notes)
    if result is not None and (edited := folder.edited(result)):
        notes.append(f"{' and '.join(edited)} isn't what the run wrote: edited, or damaged")
    looks = [row for row in diagnostics if row is not None and _is_step(row.get("step"))]
    troubles = [f"diagnostics at step {row['step']:,}: {row['trouble']}" for row in looks if row.get("trouble")]
    notes += troubles[:1] + [f"and {len(troubles) - 1:,} more such troubles"] * (len(troubles) > 1)
    if result is not None:
        status = DIVERGED if result["diverged"] else FINISHED
    elif folder.done:
        status = UNREADABLE
    elif status == STOPPED and folder.running:
        status = RUNNING
    elif status == STOPPED and ERROR.match(words := folder.last_words()):
        notes.append(words.strip())
        status = FAILED
    last = {**(rows[-1] if rows else {}), **(result or {}).get("last", {})}
    plain = _plain(settings)
    diagnosed = columns(list(map(flattened, looks)))
    return FoundRun(*_named(folder, settings), status, notes, plain, result, measured, last, diagnosed)


def _of_result(result: Result) -> FoundRun:
    """A run of which only the result was kept, with a thinned curve."""
    curve = result["curve"]
    rows = [dict(zip(curve, values, strict=True)) for values in zip(*curve.values(), strict=True)]
    kept = result.get("settings") or {name: result[name] for name in ("model", "data", "batch")}
    settings = _plain(kept)
    status, notes = DIVERGED if result["diverged"] else FINISHED, ["its curve was thinned when the result was kept"]
    metrics = columns([row for row in rows if _is_step(row.get("step"))])
    return FoundRun(*which(result), status, notes, settings, result, metrics, result["last"], {})


def _rows(path: Path, notes: list[str]) -> list[dict[str, Any] | None]:
    """The lines of a file; None for one that isn't a JSON object. A last line without an end isn't there yet."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    except OSError as error:
        notes.append(f"{path.name} can't be read ({error.strerror})")
        return []

    def row(line: bytes) -> dict[str, Any] | None:
        with suppress(ValueError, RecursionError):
            if isinstance(found := read_json(line), dict):
                return found
        return None

    return list(map(row, lines))


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def number(value: object) -> float:
    """What isn't a finite number is infinite; what is no number at all, or isn't there, is NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if math.isfinite(value) else math.inf


def columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """The numbers in rows by their names, null as a number that isn't finite; in the order of steps, of each the last."""
    rows = [row for _, row in sorted({row["step"]: row for row in rows}.items())]
    names = dict.fromkeys(name for row in rows for name in row)
    found = {
        name: np.array([math.inf if row.get(name, 0) is None else number(row.get(name)) for row in rows])
        for name in names
    }
    return {name: values for name, values in found.items() if not np.isnan(values).all()}


def flattened(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers in tables in a row as dotted names; without the spectra, which are many for each step."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict) and name != "spectra":
            found |= flattened(value, f"{prefix}{name}.")
        elif not isinstance(value, dict | list | str) and name != "trouble":
            found[prefix + name] = value
    return found


def _result(folder: RunFolder, notes: list[str]) -> Result | None:
    if not folder.done:
        return None
    try:
        return checked({**folder.read_result(), "curve": {}})
    except (RunError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        notes.append(f"result.json isn't whole ({error}): remove it, and resume the run")
        return None


def _named(folder: RunFolder, settings: dict[str, Any]) -> tuple[str, str, str, int]:
    """Which run it is: by its settings, or by its folder where they don't say."""
    parents = [*(part.name for part in (folder.path, *folder.path.parents)), "", "", "", ""]
    preset, scale, method = (
        str(settings.get(name) or parents[above]) for name, above in (("preset", 3), ("scale", 2), ("method", 1))
    )
    changes = settings.get("changes")
    label = "+".join((method, *map(str, changes))) if isinstance(changes, list) else method
    seed = settings.get("seed")
    return preset, scale, label or "run", seed if isinstance(seed, int) else 0


def _plain(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings by dotted names, as they are written, words without quotes; without those that say which run it is."""
    known = {name: value for name, value in flat(settings).items() if name not in NAMES}
    return {name: value if isinstance(value, str) else toml(value) for name, value in known.items()}


def curve(runs: Sequence[Columns], name: str, limit: int) -> dict[str, list[float | None]] | None:
    """A metric of several seeds, or of one run: step, mean seconds, mean, smallest and largest, in at most `limit` points.
    Where there are more steps, a point is the last of its bucket, with the smallest and the largest: no spike is lost."""
    known = [run for run in runs if name in run]
    if not known:
        return None
    steps = np.unique(np.concatenate([run["step"][~np.isnan(run[name])] for run in known]))

    def table(column: str) -> Floats:
        found = np.full((len(known), len(steps)), np.nan)
        for row, run in zip(found, known, strict=True):
            values = run.get(column, np.full(len(run["step"]), np.nan))
            here = ~np.isnan(run[name]) & np.isfinite(values)
            row[np.searchsorted(steps, run["step"][here])] = values[here]
        return found

    values, seconds = table(name), table("seconds")
    ends = np.unique(np.linspace(0, len(steps), min(limit, len(steps)) + 1).astype(int))
    starts, last = ends[:-1], ends[1:] - 1
    low, high = np.fmin.reduce(values), np.fmax.reduce(values)
    drawn = {
        "step": steps[last],
        "seconds": _mean(seconds)[last],
        "mean": _mean(values)[last],
        "low": np.fmin.reduceat(low, starts),
        "high": np.fmax.reduceat(high, starts),
    }
    return {
        key: [float(f"{each:.6g}") if math.isfinite(each) else None for each in each_of]
        for key, each_of in drawn.items()
    }


def _mean(values: Floats) -> Floats:
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(known, values, 0.0).sum(axis=0) / np.where(known.any(axis=0), known.sum(axis=0), np.nan)
    return mean
