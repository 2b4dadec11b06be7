"""What the page's script draws: curves as JSON, their numbers as the bytes of little-endian floats."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from llqr_lab.report.bands import Band
from llqr_lab.report.experiments import Experiment, Method
from llqr_lab.report.lines import Floats
from llqr_lab.report.runs import FoundRun
from llqr_lab.report.series import Column, Series, Steps

Encoded = dict[str, Any]


def payload(experiments: list[Experiment]) -> str:
    """JSON that is harmless inside a script element, whatever the runs are called."""
    text = json.dumps([_experiment(each) for each in experiments], allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def encoded(values: Floats | Steps) -> Encoded:
    """A number if all are the same, else single precision, or double where that would lose more than digits."""
    if len(values) and np.isfinite(values[0]) and (values == values[0]).all():
        return {"n": len(values), "c": float(values[0])}
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    extreme = len(sizes) and (sizes.max() > 1e38 or sizes.min() < 1e-37)
    whole = values.dtype == np.int64 and len(values) and values.max() > 2**24
    kind = "d" if extreme or whole else "f"
    return {kind: base64.b64encode(values.astype("<f8" if kind == "d" else "<f4").tobytes()).decode()}


def _experiment(experiment: Experiment) -> Encoded:
    curves = [_method(each, [(run, run.series) for run in each.runs], each.band) for each in experiment.methods]
    diagnostics = [
        _method(each, [(run, run.diagnostics) for run in each.runs], each.diagnostics_band, experiment.diagnostics)
        for each in experiment.methods
    ]
    return {
        "curves": {"metrics": experiment.metrics, "chosen": experiment.chosen, "methods": curves},
        "diagnostics": {"metrics": experiment.diagnostics, "chosen": "", "methods": diagnostics},
        "spectra": [_spectra(run) for run in experiment.runs if run.spectra],
    }


def _method(
    method: Method, runs: list[tuple[FoundRun, Series]], band: Band | None, wanted: list[str] | None = None
) -> Encoded:
    made: Encoded = {"label": method.label, "runs": [_run(run, series, wanted) for run, series in runs if len(series)]}
    if band is not None:
        made["band"] = {
            "width": band.width,
            "step": encoded(band.step),
            "metrics": {
                name: {part: encoded(values) for part, values in vars(spread).items()}
                for name, spread in band.spreads.items()
                if _drawn(name, wanted)
            },
        }
    return made


def _drawn(name: str, wanted: list[str] | None) -> bool:
    """Seconds are an axis; other times are in a table."""
    if name == "seconds":
        return True
    return name in wanted if wanted is not None else not name.endswith("_seconds")


def _run(run: FoundRun, series: Series, wanted: list[str] | None) -> Encoded:
    return {
        "seed": run.seed,
        "status": run.status,
        "points": series.points,
        "width": series.width if series.points > len(series) else 1,
        "step": encoded(series.step),
        "metrics": {
            name: _column(column, series.points > len(series))
            for name, column in series.columns.items()
            if _drawn(name, wanted)
        },
    }


def _column(column: Column, in_buckets: bool) -> Encoded:
    made = {"last": encoded(column.last)}
    return made | ({"low": encoded(column.low), "high": encoded(column.high)} if in_buckets else {})


def _spectra(run: FoundRun) -> Encoded:
    columns = run.diagnostics.columns
    return {
        "label": f"{run.method}, seed {run.seed}",
        "step": encoded(run.diagnostics.step),
        "blocks": [
            {"name": block, "quantiles": [encoded(columns[name].last) for name in names]}
            for block, names in run.spectra.items()
        ],
    }
