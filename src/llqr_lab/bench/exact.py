"""`llqr bench exact`: the Riccati recursion against the dense matrix, as networks get deeper, wider, and batches larger.

Both give the same step; the question is what it costs. In theory, with n = batch · width and P parameters a layer, the
recursion takes depth times some n × n and n × P matrices, and the dense way one matrix of (depth · P)².
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from llqr_lab.bench.chains import DAMPING, METHODS, Size, Step, prepare
from llqr_lab.bench.measure import growth_exponent, interleaved, median, one_thread, peak_memory, ratio, relative_error
from llqr_lab.figures.exact import draw
from llqr_lab.progress import bar
from llqr_lab.results import provenance, write_json
from llqr_lab.tables import show_table

Row = dict[str, Any]
Sweeps = Mapping[str, Sequence[Size]]

DENSE_LIMIT = 6000
"""Parameters above which the dense side is left out: H and its copies would take gigabytes, and its factor minutes."""
BUDGET = 10.0
"""Seconds after which a method isn't repeated further at a size."""
FITTED = 3
"""Growth exponents are fitted to this many of the largest sizes."""

FULL: Sweeps = {
    "depth": [Size(depth, 8, 4) for depth in (2, 4, 8, 16, 32, 64)],
    "width": [Size(4, width, 4) for width in (4, 8, 16, 32, 64)],
    "batch": [Size(4, 8, batch) for batch in (4, 16, 64, 256)],
}
QUICK: Sweeps = {
    "depth": [Size(2, 4, 2), Size(4, 4, 2)],
    "width": [Size(2, 4, 2)],
    "batch": [Size(2, 4, 2)],
}


def main(output: Path, figure: Path, seed: int, repeats: int, quick: bool) -> None:
    """Run, write the results and the figure, and print the tables."""
    sweeps = QUICK if quick else FULL
    with bar(repeats + len(_sizes(sweeps)), "measuring") as done:
        result = run(sweeps, seed, repeats, done)
    command = f"llqr bench exact --seed {seed} --repeats {repeats}{' --quick' if quick else ''}"
    write_json(output, {**provenance(command, seed), **result})
    draw(result, figure)
    console = Console()
    report(result, console)
    console.print(f"Wrote {output} and {figure}", highlight=False, soft_wrap=True)


def run(sweeps: Sweeps, seed: int, repeats: int, done: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Measure every size of the sweeps; `done` is called after each round of timings and each size's memory.

    All sizes take turns, not only both methods: the exponents compare one size with another.
    """
    sizes = _sizes(sweeps)
    with one_thread():
        jobs = {(method, size): prepare(method, size, seed) for size in sizes for method in _methods(size)}
        errors = {size: _difference(jobs, size) for size in sizes}
        samples = interleaved(jobs, repeats, BUDGET, done)
    measured: dict[Size, Row] = {}
    for size in sizes:
        peaks = peak_memory({method: (prepare, (method, size, seed)) for method in _methods(size)})
        times = {method: samples[method, size] for method in _methods(size)}
        measured[size] = _row(size, times, peaks, errors[size])
        done()
    rows = [{"sweep": sweep, **measured[size]} for sweep, members in sweeps.items() for size in members]
    return {
        "settings": {
            "network": "tanh layers of equal width, float64",
            "divergence": "KL",
            "damping": DAMPING,
            "threads": 1,
            "repeats": repeats,
            "dense_limit": DENSE_LIMIT,
        },
        "rows": rows,
        "growth": {sweep: _growth(sweep, [row for row in rows if row["sweep"] == sweep]) for sweep in sweeps},
    }


def _sizes(sweeps: Sweeps) -> list[Size]:
    """A size in two sweeps is measured once."""
    return list(dict.fromkeys(size for sizes in sweeps.values() for size in sizes))


def _methods(size: Size) -> list[str]:
    return ["riccati"] if size.parameters > DENSE_LIMIT else list(METHODS)


def _difference(jobs: Mapping[tuple[str, Size], Step], size: Size) -> float | None:
    """How far the two steps are apart; it runs every job once before the clock does."""
    steps = {method: jobs[method, size]() for method in _methods(size)}
    return relative_error(steps["riccati"], steps["dense"]) if "dense" in steps else None


def _row(size: Size, samples: dict[str, list[float]], memory: dict[str, int | None], error: float | None) -> Row:
    seconds = {method: median(samples.get(method, [])) for method in METHODS}
    peaks = {method: memory.get(method) for method in METHODS}
    return {
        **asdict(size),
        "parameters": size.parameters,
        "states": size.states,
        "seconds": seconds,
        "seconds_dense_over_riccati": ratio(seconds["dense"], seconds["riccati"]),
        "samples": samples,
        "peak_bytes": peaks,
        "peak_bytes_dense_over_riccati": ratio(peaks["dense"], peaks["riccati"]),
        "relative_error": error,
        "dense_skipped": None if "dense" in _methods(size) else f"over {DENSE_LIMIT} parameters",
    }


def _growth(sweep: str, rows: list[Row]) -> dict[str, Any]:
    """Exponents of the last sizes that each method was measured at."""
    exponents: dict[str, Any] = {}
    for quantity in ("seconds", "peak_bytes"):
        exponents[quantity] = {}
        for method in METHODS:
            last = [row for row in rows if row[quantity][method]][-FITTED:]
            exponent = growth_exponent([row[sweep] for row in last], [row[quantity][method] for row in last])
            exponents[quantity][method] = {"exponent": exponent, "sizes": [row[sweep] for row in last]}
    return exponents


def report(result: dict[str, Any], console: Console) -> None:
    """A table for each sweep, and the exponents."""
    for sweep in result["growth"]:
        show_table(console, _table(sweep, [row for row in result["rows"] if row["sweep"] == sweep]))
    for sweep, quantities in result["growth"].items():
        for quantity, name in (("seconds", "seconds"), ("peak_bytes", "peak memory")):
            parts = [
                f"{method} {sweep}^{found['exponent']:.2f} (at {_listed(found['sizes'])})"
                for method, found in quantities[quantity].items()
                if found["exponent"] is not None
            ]
            if parts:
                console.print(f"Growth of {name}: {', '.join(parts)}", highlight=False)
    for reason in sorted({row["dense_skipped"] for row in result["rows"] if row["dense_skipped"]}):
        console.print(f"–: dense side left out, {reason}", highlight=False)


def _table(sweep: str, rows: list[Row]) -> Table:
    fixed = ", ".join(f"{name} {rows[0][name]}" for name in ("depth", "width", "batch") if name != sweep)
    table = Table(
        title=f"By {sweep} ({fixed}); ratio: dense / Riccati; error: between the two",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    headers = [sweep, "para-\nmeters", "Riccati\n(s)", "dense\n(s)", "ratio"]
    for header in [*headers, "Riccati\n(MiB)", "dense\n(MiB)", "ratio", "error"]:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        mebibytes = {method: peak and peak / 2**20 for method, peak in row["peak_bytes"].items()}
        table.add_row(
            str(row[sweep]),
            str(row["parameters"]),
            _number(row["seconds"]["riccati"], ".4f"),
            _number(row["seconds"]["dense"], ".4f"),
            _number(row["seconds_dense_over_riccati"], ".2f"),
            _number(mebibytes["riccati"], ".1f"),
            _number(mebibytes["dense"], ".1f"),
            _number(row["peak_bytes_dense_over_riccati"], ".1f"),
            _number(row["relative_error"], ".0e"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))
