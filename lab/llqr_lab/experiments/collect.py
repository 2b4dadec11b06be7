"""Results of many runs: from their folders, or from the one small file that is kept of them."""

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llqr_lab.errors import RunError, check_names
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.presets import SCALES
from llqr_lab.results import read_json, write_text

POINTS = 200
SMOOTH = 3
"""Records that a training loss is the mean of."""

Result = dict[str, Any]
"""What result.json has, with the run's curve."""


def which(result: Result) -> tuple[str, str, str, int]:
    """What tells one run from another: preset, scale, method with its changes, seed."""
    return result["preset"], result["scale"], result["method"], result["seed"]


def collected(*sources: Path) -> list[Result]:
    """The finished runs under folders and in files that `save` wrote, in one order: of a run that is in several, the last."""
    found = {which(each): each for source in sources for each in _in(source)}
    return [found[name] for name in sorted(found)]


def _in(source: Path) -> list[Result]:
    broken = (ValueError, KeyError, TypeError, AttributeError)
    if source.is_file():
        try:
            return [checked(each) for each in read_json(source.read_text(encoding="utf-8"))["runs"]]
        except broken as error:
            raise RunError(f"'{source}' isn't a file of results ({error!r}): `llqr table --save` writes one") from None
    if not source.is_dir():
        raise RunError(f"there is no '{source}': name the folder of runs, or a file of results")
    found = []
    for folder in (RunFolder(path.parent) for path in sorted(source.rglob("result.json"))):
        try:
            settings = tomllib.loads(folder.config.read_text(encoding="utf-8")) if folder.begun else {}
            result = folder.read_result()
            if edited := folder.edited(result):
                which_files = f"{' and '.join(edited)} of the run in '{folder.path}'"
                raise RunError(f"{which_files} isn't what the run wrote: it was edited, or damaged. Make the run again")
            found.append(checked({**result, "settings": settings, "curve": curve(folder.read_metrics())}))
        except broken as error:
            raise RunError(f"the result of '{folder.path}' isn't whole ({error!r}): remove it, and resume") from None
    return found


def selected_results(sources: Sequence[Path], presets: str = "", scale: str = "") -> list[Result]:
    """The finished runs of presets with one of these words in their names, at a scale; an error where there are none."""
    check_names(filter(None, [scale]), SCALES, "scale")
    wanted = [each for each in collected(*sources) if scale in ("", each["scale"])]
    found = [each for each in wanted if any(part in each["preset"] for part in presets.split(","))]
    if not found:
        named = " and ".join(f"'{source}'" for source in sources)
        raise RunError(f"no finished runs in {named} that fit: make some with `llqr train` or `llqr sweep`")
    return found


NEEDED: dict[type | tuple[type, ...], tuple[str, ...]] = {
    str: ("preset", "scale", "method", "score", "model", "data", "clock"),
    int: ("batch", "seed", "steps"),
    (int, float): ("seconds",),
    bool: ("diverged",),
    dict: ("last", "curve"),
}


def checked(result: Any) -> Result:
    """A result with all that tables and figures ask for."""
    for kind, names in NEEDED.items():
        for name in names:
            if not isinstance(result[name], kind):
                raise ValueError(f"{name} is {result[name]!r}")
    for name in ("examples", "whole"):
        if not isinstance(result.get(name), int | None):
            raise ValueError(f"{name} is {result[name]!r}")
    if value(result) is not None and result["score"] == "steps_to_target":
        float(result["seconds_to_target"])
    if result["steps"] < 1 or len({len(column) for column in result["curve"].values()}) > 1:
        raise ValueError("no steps, or columns of unequal length")
    return dict(result)


def save(results: list[Result], path: Path) -> None:
    """A line for each run; without the checksums of its logs, which aren't kept."""
    kept = [{name: held for name, held in each.items() if name != "checksums"} for each in results]
    try:
        lines = [json.dumps(each, allow_nan=False, ensure_ascii=False, separators=(",", ":")) for each in kept]
        write_text(path, '{"runs": [\n' + ",\n".join(lines) + "\n]}\n")
    except ValueError as error:
        raise RunError(f"the results can't be kept ({error}): a run has numbers that aren't finite") from None


def curve(lines: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Every so-many-th line, the last one always, by the name of what was measured; of a float six digits."""
    stride = max(1, math.ceil(len(lines) / POINTS))
    kept = [line for number, line in enumerate(lines, 1) if number % stride == 0 or number == len(lines)]
    names = ("step", "seconds", "train_loss", "train_accuracy", "valid_loss", "test_loss", "test_accuracy", "refits")
    rows = [{name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in line.items()} for line in kept]
    return {name: [row.get(name) for row in rows] for name in names if any(name in row for row in rows)}


def value(result: Result) -> float | None:
    """The score of a run, which is at its end; None where it diverged or never got there."""
    found = result.get(result["score"], result["last"].get(result["score"]))
    return None if result["diverged"] or found is None else float(found)


def smoothed(result: Result) -> list[float | None]:
    """The training loss at each record: the mean of the last three, so that nobody is there by a lucky batch."""
    losses = result["curve"]["train_loss"]
    windows = (losses[max(0, last - SMOOTH + 1) : last + 1] for last in range(len(losses)))
    return [None if None in window else sum(window) / len(window) for window in windows]


def last_loss(result: Result) -> float | None:
    return None if result["diverged"] else smoothed(result)[-1]


def reached_at(result: Result, target: float, along: str = "step") -> float | None:
    """The step (or second) at which the training loss was this low for the first time; None if never."""
    places = zip(result["curve"][along], smoothed(result), strict=True)
    return next((place for place, loss in places if place is not None and loss is not None and loss <= target), None)


class Summary(NamedTuple):
    mean: float
    error: float | None
    """The standard error; None for a single seed."""


def summary(values: Iterable[float]) -> Summary | None:
    known = list(values)
    if not known:
        return None
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return Summary(mean, None)
    variance = math.fsum((each - mean) ** 2 for each in known) / (len(known) - 1)
    return Summary(mean, math.sqrt(variance / len(known)))
