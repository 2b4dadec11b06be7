"""`llqr bench exact-training`: small networks fitted by exact steps, and by Adam, L-BFGS and SOAP: error by seconds.

Every optimizer has the same processor time on one thread, and is shown with the best setting of its grid (by the least error at
the end). A second part times one exact step as the network gets wider and deeper and the residuals more.
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import NullFormatter
from rich.console import Console

from llqr import Exact
from llqr.errors import LLQRError
from llqr_lab.bench.exact_problems import EQUATIONS, PROBLEMS, Problem, grid, poisson
from llqr_lab.bench.measure import one_thread
from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing
from llqr_lab.results import bar, provenance, say, show_table, simple_table, write_json

Step = Callable[[], object]
GRIDS: dict[str, tuple[float, ...]] = {
    "Adam": (1e-3, 3e-3, 1e-2),
    "L-BFGS": (10, 100),
    "SOAP": (3e-3, 1e-2),
    "Exact": (0,),
}
"""Learning rates; of L-BFGS how many steps it remembers; of Exact nothing."""
SECONDS = {"poisson": 12.0, "heat": 12.0, "burgers": 25.0, "regression": 5.0, "autoencoder": 5.0}
ROUGH, FINE = 1e-3, 1e-5
"""The errors that seconds are counted to: the best of the others to the first, Exact to the second."""
SIZES: dict[str, list[dict[str, int]]] = {
    "width": [{"width": width} for width in (8, 16, 32, 64, 128)],
    "residuals": [{"count": count} for count in (200, 400, 800, 1600, 3200)],
    "depth": [{"depth": depth} for depth in (1, 2, 4, 8, 16)],
}
MOST_SECONDS = 20.0
"""A method that took as long at a size isn't timed at larger ones."""


def stepper(name: str, setting: float, problem: Problem) -> Step:
    parameters = list(problem.model.parameters())
    optimizer: torch.optim.Optimizer
    if name == "Exact":
        exact = Exact(problem.model)
        return lambda: exact.step(problem.residuals)
    if name == "L-BFGS":
        optimizer = torch.optim.LBFGS(parameters, history_size=int(setting), line_search_fn="strong_wolfe")
    elif name == "SOAP":
        from pytorch_optimizer import SOAP

        optimizer = SOAP(parameters, lr=setting, weight_decay=0.0)
    else:
        optimizer = torch.optim.Adam(parameters, lr=setting)

    def closure() -> float:
        optimizer.zero_grad()
        loss = problem.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    return lambda: optimizer.step(closure)


Curve = dict[str, list[float]]


def train(problem: Problem, step: Step, seconds: float, curve: Curve) -> Iterator[None]:
    """Seconds of processor time, steps, loss and error, at times that grow by a tenth; looking at them isn't counted. It pauses
    after each of them, so that all optimizers of a problem can be run in turns, whatever else the machine does."""
    spent, steps, due = 0.0, 0, 0.0
    while True:
        if spent >= due or spent >= seconds:
            seen = {"seconds": spent, "steps": steps, "loss": float(problem.loss().detach()), "error": problem.error()}
            for key, value in seen.items():
                curve.setdefault(key, []).append(value)
            due = max(1.1 * spent, 0.05)
            if spent >= seconds or not math.isfinite(seen["loss"]):
                return
            yield
        begun = time.process_time()
        step()
        spent += time.process_time() - begun
        steps += 1


def trained(name: str, seconds: float, seed: int) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    going: list[Iterator[None]] = []
    for optimizer, settings in GRIDS.items():
        for setting in settings:
            problem = PROBLEMS[name](seed)
            stepper(optimizer, setting, PROBLEMS[name](seed))()  # what torch loads at its first step isn't timed
            curve = curves[f"{name}/{optimizer}/{setting:g}"] = {}
            going.append(train(problem, stepper(optimizer, setting, problem), seconds, curve))
    while going:
        going = [run for run in going if next(run, going) is None]
    return curves


def reached(curve: Curve, error: float) -> float | None:
    return next((s for s, e in zip(curve["seconds"], curve["error"], strict=True) if e <= error), None)


def best(runs: dict[str, Any], problem: str, name: str) -> tuple[str, Curve]:
    """The run of an optimizer that ends with the least error, and its key."""
    own = {key: run for key, run in runs.items() if key.startswith(f"{problem}/{name}/")}
    key = min(own, key=lambda key: own[key]["error"][-1] if math.isfinite(own[key]["error"][-1]) else math.inf)
    return key, own[key]


def cost(options: dict[str, int], method: str, seed: int) -> dict[str, Any]:
    """Seconds of one exact step of Poisson's problem, the second one."""
    problem = poisson(seed, **options)
    optimizer = Exact(problem.model, method=method)  # type: ignore[arg-type]
    optimizer.step(problem.residuals)
    begun = time.process_time()
    optimizer.step(problem.residuals)
    return {
        **options,
        "method": method,
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "residuals": sum(residual.numel() for residual in problem.residuals()),
        "seconds": time.process_time() - begun,
        "taken": optimizer.stats.method,
    }


def main(output: Path, figure: Path, pages: Path | None, seed: int, share: float) -> None:
    command = f"llqr bench exact-training --seed {seed} --share {share:g}"
    result: dict[str, Any] = {**provenance(command, seed), "runs": {}, "costs": {}}
    with one_thread(), bar(len(PROBLEMS) + len(SIZES), "training") as done:
        for name in PROBLEMS:
            result["runs"] |= trained(name, share * SECONDS[name], seed)
            done()
        for sweep, sizes in SIZES.items():
            result["costs"][sweep] = costs(sizes[: max(1, round(share * len(sizes)))], seed, share * MOST_SECONDS)
            done()
    result["summary"] = {name: summary(result["runs"], name) for name in PROBLEMS}
    write_json(output, result)
    draw(result, figure)
    if pages is not None:
        with one_thread():
            draw_pages(result, pages, seed)
    report(result)
    say(Console(), f"Wrote {output} and {figure}")


def costs(sizes: list[dict[str, int]], seed: int, most: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        for options in sizes:
            try:
                rows.append(cost(options, method, seed))
            except LLQRError:  # beyond its memory
                break
            if rows[-1]["seconds"] > most:
                break
    return rows


def summary(runs: dict[str, Any], problem: str) -> dict[str, Any]:
    """For each optimizer the setting, the error at the end and the seconds to both errors."""
    found: dict[str, Any] = {}
    for name in GRIDS:
        key, curve = best(runs, problem, name)
        ends = {what: curve[what][-1] for what in ("steps", "loss", "error")}
        seconds = {"seconds_to_rough": reached(curve, ROUGH), "seconds_to_fine": reached(curve, FINE)}
        found[name] = {"setting": key.rpartition("/")[2], **ends, **seconds}
    return found


def report(result: dict[str, Any]) -> None:
    console = Console()
    headers = ("problem", "optimizer", "setting", "steps", "loss", "error", f"s to {ROUGH:g}", f"s to {FINE:g}")
    title = "Best of each grid, the same processor time for all"
    table = simple_table(title, *headers, left=("optimizer", "setting"))
    for problem, rows in result["summary"].items():
        for name, row in rows.items():
            seconds = ["–" if row[k] is None else f"{row[k]:.1f}" for k in ("seconds_to_rough", "seconds_to_fine")]
            ends = (f"{row['steps']:.0f}", f"{row['loss']:.1e}", f"{row['error']:.1e}")
            table.add_row(problem, name, row["setting"], *ends, *seconds)
    show_table(console, table)
    for sweep, rows in result["costs"].items():
        own = [row for row in rows if row["method"] == "auto"]
        told = (f"{r['parameters']} × {r['residuals']}: {r['seconds']:.2f} s ({r['taken']})" for r in own)
        say(console, f"One exact step by {sweep}, parameters × residuals: {', '.join(told)}")


# figures

LINES = {"Exact": (BLUE, "-"), "Adam": (ORANGE, "--"), "L-BFGS": (GREEN, "-."), "SOAP": (GREY, ":")}
STEPS = 60
METHODS = {"dual": (BLUE, "o"), "primal": (ORANGE, "s"), "cg": (GREEN, "^"), "auto": (PINK, "x")}


def draw(result: dict[str, Any], path: Path) -> None:
    with drawing(path, 12, 7) as figure:
        panels = figure.subplots(2, 3)
        for axes, problem in zip(panels[0], EQUATIONS, strict=True):
            curves(axes, result, problem, "error")
            axes.set_title(problem.capitalize())
        panels[0][0].set_ylabel("relative error of the solution")
        panels[0][0].legend()
        for axes, (sweep, rows) in zip(panels[1], result["costs"].items(), strict=True):
            for method, (colour, marker) in METHODS.items():
                own = [row for row in rows if row["method"] == method]
                places = [row["residuals"] if sweep == "residuals" else row["parameters"] for row in own]
                how = {"color": colour, "marker": marker, "linestyle": "none" if method == "auto" else "-"}
                axes.plot(places, [row["seconds"] for row in own], label=method, **how)
            along = "residuals" if sweep == "residuals" else "parameters"
            axes.set(xscale="log", yscale="log", title=f"one step, by {sweep}", xlabel=along)
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
        panels[1][0].set_ylabel("seconds of one core")
        panels[1][0].legend()


def curves(axes: Any, result: dict[str, Any], problem: str, quantity: str) -> None:
    for name in GRIDS:
        colour, line = LINES[name]
        curve = best(result["runs"], problem, name)[1]
        axes.plot(curve["seconds"], curve[quantity], color=colour, linestyle=line, label=name)
    axes.set(xscale="log", yscale="log", xlabel="seconds of one core")


def draw_pages(result: dict[str, Any], folder: Path, seed: int) -> None:
    """For each problem: what some exact steps come to, where it is wrong, and the loss of all optimizers by seconds."""
    for name, make in PROBLEMS.items():
        problem = make(seed)
        optimizer = Exact(problem.model)
        for _ in range(STEPS):
            optimizer.step(problem.residuals)
        with drawing(folder / f"exact_{name}.png", 12, 3.6) as figure, torch.no_grad():
            fitted, wrong, loss = figure.subplots(1, 3)
            (_autoencoder if name == "autoencoder" else _surface)(figure, fitted, wrong, problem)
            curves(loss, result, name, "loss")
            loss.set(title="loss", xlabel="seconds of one core")
            loss.legend()


def _surface(figure: Any, fitted: Any, wrong: Any, problem: Problem) -> None:
    at = grid()
    values, truth = problem.model(at)[:, 0].reshape(100, 100).T, problem.truth(at).reshape(100, 100).T
    second = "t" if problem.name in ("heat", "burgers") else "y"
    for axes, shown, title, colours in (
        (fitted, values, f"u after {STEPS} steps", "viridis"),
        (wrong, values - truth, "its error", "coolwarm"),
    ):
        image = axes.imshow(shown, origin="lower", extent=(0, 1, 0, 1), cmap=colours, aspect="auto")
        axes.set(title=title, xlabel="(x + 1)/2" if problem.name == "burgers" else "x", ylabel=second)
        axes.grid(visible=False)
        figure.colorbar(image, ax=axes)


def _autoencoder(figure: Any, fitted: Any, wrong: Any, problem: Problem) -> None:
    at = grid(20)
    points = problem.truth(at)
    codes, error = problem.model[0](points), (problem.model(points) - points).norm(dim=1)  # type: ignore[index]
    for axes, colour, title in (
        (fitted, at[:, 0], f"the two numbers after {STEPS} steps"),
        (wrong, error, "distance from the surface"),
    ):
        image = axes.scatter(*codes.T, c=colour, s=12)
        axes.set(title=title, xlabel="first", ylabel="second")
        figure.colorbar(image, ax=axes)
