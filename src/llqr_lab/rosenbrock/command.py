"""`llqr rosenbrock`: the paper's toy example, with the numbers beside the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from llqr_lab.bench.measure import one_thread
from llqr_lab.figures.rosenbrock import draw_losses, draw_paths
from llqr_lab.progress import bar
from llqr_lab.results import provenance, write_json
from llqr_lab.rosenbrock.experiment import CONVERGED, FULL, PAPER, QUICK, RATES, Outcome, Plan, Setting, run
from llqr_lab.rosenbrock.follow import Run
from llqr_lab.tables import show_table

POINTS = 40
"""How many iterations of a run are kept in the results."""
DIVERGED = -1e6
"""The share of the best J below which a fit is said to diverge."""


def main(output: Path, loss_figure: Path, paths_figure: Path, quick: bool) -> None:
    """Run, write the results and the figures, and print the tables."""
    plan = QUICK if quick else FULL
    with one_thread(), bar(plan.parts, "descending") as done:
        outcome = run(plan, done)
    command = f"llqr rosenbrock{' --quick' if quick else ''}"
    write_json(output, {**provenance(command, seed=0), **record(plan, outcome)})
    draw_losses(plan, outcome, loss_figure)
    draw_paths(plan, outcome, paths_figure)
    console = Console()
    report(plan, outcome, console)
    console.print(f"Wrote {output}, {loss_figure} and {paths_figure}", highlight=False, soft_wrap=True)


def record(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """The results as JSON."""
    return {
        "settings": {
            "function": "(1 - x)² + 100 (y - x²)², float64, no line search, nothing random",
            "classic": {**_setting(plan.classic), "solver": repr(CONVERGED), "steps": 25},
            "valley": {**_setting(plan.valley), "solver": repr(PAPER), "steps": plan.inner_steps},
            "sgdm_rates": list(RATES),
        },
        "newton_minus_riccati": outcome.disagreement,
        "classic": [_run(name, path, plan.classic) for name, path in outcome.classic.items()],
        "valley": [_run(name, path, plan.valley) for name, path in outcome.valley.items()],
        "scan": [
            {
                "structure": structure,
                "start": list(start),
                "every": every,
                "reached": path.reached(plan.classic.target),
                "diverged_at": path.iterations if path.diverged else None,
            }
            for structure, start, every, path in outcome.scan
        ],
        "fits": [{"solver": name, "at": place, "share": _rounded(value)} for name, place, value in outcome.fits],
    }


def report(plan: Plan, outcome: Outcome, console: Console) -> None:
    """The tables."""
    headings = {
        "classic": "U fitted to convergence",
        "valley": f"U fitted by the paper's SGDM(lr=1e-4), {plan.inner_steps} steps",
    }
    for name, heading in headings.items():
        setting: Setting = getattr(plan, name)
        show_table(console, _table(heading, setting, getattr(outcome, name)))
    console.print(
        f"Newton and Riccati iterates differ by at most {outcome.disagreement:.1e}; cosine: with Newton's step at the "
        "same point, mean over the path; indefinite: share of the path where the Hessian is",
        highlight=False,
    )
    show_table(console, _scan(plan, outcome))
    show_table(console, _fits(outcome))


def _table(heading: str, setting: Setting, runs: dict[str, Run]) -> Table:
    title = f"{heading}; from {setting.start} at rate {setting.rate:g}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for header in (f"iterations\nto {_power(setting.target)}", "final\nloss", "mean\ncosine", "inde-\nfinite"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, path in runs.items():
        numbers = (f"{path.losses[-1]:.2g}", f"{path.mean_cosine:.4f}", f"{path.indefinite:.0%}")
        table.add_row(name, _iterations(path, setting.target), *numbers)
    return table


def _scan(plan: Plan, outcome: Outcome) -> Table:
    goal = f"Iterations to {_power(plan.classic.target)} at rate {plan.classic.rate:g}"
    title = f"{goal}, by refit period; U fitted to convergence; –: diverges"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("U, start", no_wrap=True)
    rows: dict[str, list[str]] = {}
    for structure, start, _, path in outcome.scan:
        cell = "–" if path.diverged else str(path.reached(plan.classic.target) or f"> {path.iterations}")
        rows.setdefault(f"{structure}, {start}", []).append(cell)
    for every in plan.scan_periods:
        table.add_column(str(every), justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _fits(outcome: Outcome) -> Table:
    title = "What one fit of two scalars reaches of the best J (1: Newton's step; below 0: worse than no step)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("solver", no_wrap=True)
    rows: dict[str, dict[str, str]] = {}
    for solver, place, value in outcome.fits:
        rows.setdefault(solver, {})[place] = "diverges" if value < DIVERGED else f"{value:.4g}"
    for place in next(iter(rows.values())):
        table.add_column(place, justify="right")
    for solver, cells in rows.items():
        table.add_row(solver, *cells.values())
    return table


def _iterations(path: Run, target: float) -> str:
    reached = path.reached(target)
    if reached is not None:
        return str(reached)
    return f"diverged at {path.iterations}" if path.diverged else f"not in {path.iterations}"


def _setting(setting: Setting) -> dict[str, Any]:
    return {"start": list(setting.start), "rate": setting.rate, "most": setting.most, "target": setting.target}


def _run(name: str, path: Run, setting: Setting) -> dict[str, Any]:
    last = path.iterations - 1
    kept = sorted({round(last * i / POINTS) for i in range(POINTS + 1)})
    return {
        "method": name,
        "iterations": path.iterations,
        "reached": path.reached(setting.target),
        "diverged": path.diverged,
        "final_loss": _rounded(path.losses[-1]),
        "mean_cosine": _rounded(path.mean_cosine),
        "indefinite": _rounded(path.indefinite),
        "series": {
            "iteration": kept,
            "x": [_rounded(float(path.points[i][0])) for i in kept],
            "y": [_rounded(float(path.points[i][1])) for i in kept],
            "loss": [_rounded(path.losses[i]) for i in kept],
            "cosine": [_rounded(path.cosines[i]) for i in kept],
        },
    }


def _power(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def _rounded(value: float) -> float:
    """Five digits."""
    return float(f"{value:.5g}")
