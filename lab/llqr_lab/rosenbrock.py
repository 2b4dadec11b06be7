"""`llqr rosenbrock`: the paper's toy example, R(x, y) = (1 - x)² + 100 (y - x²)², where every step has a closed form.

A point is a tensor (x, y) of float64; a direction is a function of it, and θ ← θ + rate · direction at a fixed rate, without
line search. As in the paper R is a network of two layers with one parameter each. It has no data: its input is ignored, and
its loss is the mean output.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from rich.console import Console
from torch import Tensor, nn

from llqr import QuadraticModel, exact_step, fit
from llqr.divergences import Newton
from llqr.solvers import SGDM, ScaleFree, Solver
from llqr.structures import Dense, Scalar
from llqr_lab.bench.measure import one_thread
from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing
from llqr_lab.results import bar, provenance, say, show_table, simple_table, write_json

A, B = 1.0, 100.0
INPUTS = torch.zeros(1, 1, dtype=torch.float64)
Direction = Callable[[Tensor], Tensor]
Build = Callable[[Tensor], nn.Module]
CONVERGED = ScaleFree(reach=1e6)
"""A solver that finds the minimum of J here. Its default bound on U is too tight in the valley, where the Hessian's eigenvalues
are a factor of 2,500 apart."""
PAPER = SGDM(lr=1e-4)
INNER = 500
"""The paper's inner solver, and its steps."""
RATES = (3e-4, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3)
"""SGDM's grid, with momentum 0.9."""
FAR = 1e9
"""A loss above this, or one that isn't finite, counts as divergence."""


def value(point: Tensor) -> float:
    x, y = point.tolist()
    return float((A - x) ** 2 + B * (y - x**2) ** 2)


def gradient(point: Tensor) -> Tensor:
    """∇R = (-2(a - x) - 4b x (y - x²), 2b (y - x²))."""
    x, y = point.tolist()
    return torch.tensor([-2 * (A - x) - 4 * B * x * (y - x**2), 2 * B * (y - x**2)], dtype=torch.float64)


def hessian(point: Tensor) -> Tensor:
    """∇²R = [[2 - 4b (y - 3x²), -4b x], [-4b x, 2b]]; indefinite above y = x² + 1/(2b), a little above the valley's floor."""
    x, y = point.tolist()
    across = -4 * B * x
    return torch.tensor([[2 - 4 * B * (y - 3 * x**2), across], [across, 2 * B]], dtype=torch.float64)


def mean(outputs: Tensor, targets: object) -> Tensor:
    """The loss: the mean output; there are no targets."""
    return outputs.mean()


class Layer(nn.Module):
    """A function of the layer's inputs and of its one parameter."""

    def __init__(self, name: str, value: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(value.clone()))
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs, *self.parameters())


def first(inputs: Tensor, x: Tensor) -> Tensor:
    """Of two layers: (u₁, u₂, u₃) = (a² - 2a x, x², b)."""
    return torch.cat((A**2 - 2 * A * x, x**2, torch.full_like(x, B))).expand(len(inputs), 3)


def second(states: Tensor, y: Tensor) -> Tensor:
    """Of two layers: (u₁ + u₂) + u₃ (y - u₂)²."""
    u1, u2, u3 = states.unbind(1)
    return (u1 + u2) + u3 * (y - u2) ** 2


def whole(inputs: Tensor, point: Tensor) -> Tensor:
    x, y = point.unbind()
    return ((A - x) ** 2 + B * (y - x**2) ** 2).expand(len(inputs))


def one_layer(point: Tensor) -> nn.Module:
    return Layer("point", point, whole)


def two_layers(point: Tensor) -> nn.Sequential:
    """The paper's two-layer form; its parameters are "0.x" and "1.y"."""
    return nn.Sequential(Layer("x", point[:1], first), Layer("y", point[1:], second))


def named(network: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """The parts of a vector of the plane, by parameter of a network."""
    parameters = dict(network.named_parameters())
    parts = torch.split(vector, [parameter.numel() for parameter in parameters.values()])
    return dict(zip(parameters, parts, strict=True))


def joined(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(parts.values()))


# directions


def newton(point: Tensor) -> Tensor:
    """-H⁻¹ g: the stationary point of the quadratic model, wherever H isn't singular."""
    step: Tensor = torch.linalg.solve(hessian(point), -gradient(point))
    return step


def riccati(point: Tensor) -> Tensor:
    """-H⁻¹ g by the Riccati recursion along the two layers; where H is indefinite, its stationary point."""
    return joined(exact_step(two_layers(point), INPUTS, None, mean, Newton(), degenerate="least-norm"))


def diagonal_newton(point: Tensor) -> Tensor:
    """-diag(H)⁻¹ g: what is left of Newton without the coupling between the layers."""
    return -gradient(point) / hessian(point).diagonal()


def steepest(point: Tensor) -> Tensor:
    return -gradient(point)


def momentum(lr: float, share: float = 0.9) -> Direction:
    """SGDM: b ← share · b + g, direction -lr · b, from b = 0."""
    buffer = torch.zeros(2, dtype=torch.float64)

    def direction(point: Tensor) -> Tensor:
        buffer.mul_(share).add_(gradient(point))
        return -lr * buffer

    return direction


def relaxed(build: Build, structure: Scalar | Dense, every: int, solver: Solver, steps: int) -> Direction:
    """-U g, with U fitted to Newton's quadratic model from the identity at every `every`-th call, and kept in between."""
    calls, u = 0, None

    def direction(point: Tensor) -> Tensor:
        nonlocal calls, u
        network = build(point)
        if u is None or calls % every == 0:
            u = fit(QuadraticModel.build(network, INPUTS, None, mean, Newton()), structure, solver, steps)
        calls += 1
        return -joined(u.apply(named(network, gradient(point))))

    return direction


def scalars(every: int, solver: Solver, steps: int = 25) -> Direction:
    """One number per layer, on the two-layer form."""
    return relaxed(two_layers, Scalar(), every, solver, steps)


def dense(every: int, solver: Solver, steps: int = 25) -> Direction:
    """A full 2 × 2 matrix, on the single-layer form."""
    return relaxed(one_layer, Dense(), every, solver, steps)


# runs


def cosine(left: Tensor, right: Tensor) -> float:
    return float(left @ right / (left.norm() * right.norm()))


@dataclass
class Descent:
    """The points of a run from its start on, their losses, and the cosine of each step with Newton's at the same point."""

    points: list[Tensor]
    losses: list[float]
    cosines: list[float] = field(default_factory=list)
    diverged: bool = False

    @property
    def iterations(self) -> int:
        return len(self.cosines)

    def reached(self, target: float) -> int | None:
        """The first iteration after which the loss is at most `target`."""
        return next((i for i, loss in enumerate(self.losses) if loss <= target), None)

    @property
    def mean_cosine(self) -> float:
        return sum(self.cosines) / len(self.cosines)

    @property
    def indefinite(self) -> float:
        """The share of the steps that were taken where the Hessian is indefinite."""
        steps = self.points[: self.iterations]
        return sum(float(torch.linalg.eigvalsh(hessian(point))[0]) < 0 for point in steps) / len(steps)


@dataclass(frozen=True)
class Setting:
    """θ ← θ + rate · direction from `start`, at most `most` times, until the loss is `until`; counted to `target`."""

    start: tuple[float, float]
    rate: float
    most: int
    until: float
    target: float

    def run(self, direction: Direction, rate: float | None = None) -> Descent:
        point = torch.tensor(self.start, dtype=torch.float64)
        run = Descent([point], [value(point)])
        while run.iterations < self.most and run.losses[-1] > self.until:
            step = direction(point)
            point = point + (self.rate if rate is None else rate) * step
            run.cosines.append(cosine(step, newton(run.points[-1])))
            loss = value(point) if bool(point.isfinite().all()) and float(point.abs().max()) < FAR else math.inf
            if not loss <= FAR:
                run.diverged = True
                break
            run.points.append(point)
            run.losses.append(loss)
        return run

    def best_momentum(self) -> tuple[str, Descent]:
        """SGDM with the rate of the grid that takes the fewest iterations to the target, or that ends lowest."""
        runs = {rate: self.run(momentum(rate), rate=1.0) for rate in RATES}
        best = min(RATES, key=lambda rate: (runs[rate].reached(self.target) or math.inf, runs[rate].losses[-1]))
        return f"SGDM, lr {best:g}", runs[best]


CLASSIC = Setting((-1.2, 1.0), rate=0.05, most=3000, until=1e-12, target=1e-8)
"""With U fitted to convergence; periods are of refits."""
SCALAR_PERIODS, DENSE_PERIODS = (1, 2, 3), (1, 10)
VALLEY = Setting((-1.0, 1.0), rate=1e-3, most=15000, until=1e-2, target=1e-2)
"""With the paper's inner solver."""
VALLEY_PERIODS = (50, 100, 250)
Descents = dict[str, Descent]


def descend(classic: Setting, valley: Setting, done: Callable[[], None]) -> tuple[Descents, Descents]:
    """The runs of both settings, by name; `done` is called after each of the two."""

    def runs(setting: Setting, directions: dict[str, Direction]) -> Descents:
        found = {name: setting.run(direction) for name, direction in directions.items()}
        found |= dict([setting.best_momentum()]) | {"diagonal Hessian": setting.run(diagonal_newton)}
        done()
        return found

    many = {f"LLQR scalars, every {every}": scalars(every, CONVERGED) for every in SCALAR_PERIODS}
    many |= {f"LLQR dense, every {every}": dense(every, CONVERGED) for every in DENSE_PERIODS}
    rare = {f"LLQR scalars, every {n}": scalars(n, PAPER, INNER) for n in VALLEY_PERIODS}
    first = VALLEY_PERIODS[0]
    rare |= {f"LLQR dense, every {first}": dense(first, PAPER, INNER), "gradient alone": steepest}
    found = runs(classic, {"Newton": newton, "Riccati": riccati, **many})
    return found, runs(valley, {"Newton": newton, **rare})


def main(output: Path, loss_figure: Path, paths_figure: Path, quick: bool) -> None:
    """Descent, write the results and the figures, and print the tables."""
    console, settings = Console(), [replace(each, most=30) if quick else each for each in (CLASSIC, VALLEY)]
    with one_thread(), bar(2, "descending") as done:
        classic, valley = descend(settings[0], settings[1], done)
    pairs = zip(classic["Newton"].points, classic["Riccati"].points, strict=True)
    content: dict[str, Any] = {"newton_minus_riccati": max(float((left - right).norm()) for left, right in pairs)}
    for name, setting, runs, how in (
        ("classic", settings[0], classic, "U fitted to convergence"),
        ("valley", settings[1], valley, f"U fitted by the paper's SGDM(lr=1e-4), {INNER} steps"),
    ):
        content[name] = []
        headers = (f"iterations to {setting.target:g}", "final loss", "mean cosine", "indefinite")
        table = simple_table(f"{how}; from {setting.start} at rate {setting.rate:g}", "method", *headers)
        for method, run in runs.items():
            told = {each: getattr(run, each) for each in ("iterations", "diverged", "mean_cosine", "indefinite")}
            reached, loss = run.reached(setting.target), run.losses[-1]
            content[name].append({"method": method, **told, "reached": reached, "loss": loss})
            late = f"{'diverged at' if run.diverged else 'not in'} {run.iterations}"
            numbers = (f"{loss:.2g}", f"{run.mean_cosine:.4f}", f"{run.indefinite:.0%}")
            table.add_row(method, late if reached is None else str(reached), *numbers)
        show_table(console, table)
    write_json(output, {**provenance(f"llqr rosenbrock{' --quick' if quick else ''}", seed=0), **content})
    draw_losses(settings, classic, valley, loss_figure)
    draw_paths(classic, paths_figure)
    say(console, f"Newton and Riccati iterates differ by at most {content['newton_minus_riccati']:.1e}")
    say(console, f"Wrote {output}, {loss_figure} and {paths_figure}")


# figures


STYLES: dict[str, dict[str, Any]] = {
    "Newton": {"color": ORANGE, "linewidth": 5.5, "alpha": 0.45},  # broad, so that what lies on it can be seen
    "Riccati": {"color": "black", "linestyle": (0, (1, 3)), "zorder": 5},
    "LLQR scalars": {"color": GREEN},
    "LLQR dense": {"color": BLUE},
    "SGDM": {"color": PINK},
    "gradient alone": {"color": "black", "linestyle": "-."},
    "diagonal Hessian": {"color": GREY, "linestyle": "-."},
}
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)))
"""The refit periods of one structure, from the shortest on."""


def _style(name: str, runs: Descents) -> dict[str, Any]:
    kind = name.partition(",")[0]
    siblings = [other for other in runs if other.startswith(kind)]
    return {"linestyle": DASHES[siblings.index(name)], **STYLES[kind]}


def draw_losses(settings: Sequence[Setting], classic: Descents, valley: Descents, path: Path) -> None:
    """The loss against the iteration, with U fitted to convergence (left) and by the paper's inner solver (right)."""
    with drawing(path, 12, 6.6) as figure:
        left, right = figure.subplots(1, 2)
        for axes, setting, runs in zip((left, right), settings, (classic, valley), strict=True):
            for name, run in runs.items():
                label = f"{name} (diverges)" if run.diverged else name
                axes.plot(range(len(run.losses)), run.losses, label=label, **_style(name, runs))
            finished = [run.iterations for run in runs.values() if run.reached(setting.target) is not None]
            how = "to convergence" if runs is classic else "by the paper's inner solver"
            axes.set(yscale="log", title=f"U fitted {how}\nfrom {setting.start}, rate {setting.rate:g}")
            axes.set(xlabel="iteration", ylabel="loss", xlim=(0, 1.03 * max(finished, default=setting.most)))
            axes.set_ylim(top=min(axes.get_ylim()[1], 1e3))
            _legend(axes)


def draw_paths(classic: Descents, path: Path) -> None:
    """Paths over level curves (left), and the cosine of each direction with Newton's along them (right)."""
    scalar = [name for name in classic if name.startswith("LLQR scalars")][-1]
    runs = {name: classic[name] for name in ("Newton", "Riccati", scalar, "diagonal Hessian")}
    with drawing(path, 12, 5.8) as figure:
        left, right = figure.subplots(1, 2)
        xs, ys = np.meshgrid(np.linspace(-1.6, 1.4, 300), np.linspace(-0.5, 2.0, 300))
        left.contour(xs, ys, (A - xs) ** 2 + B * (ys - xs**2) ** 2, np.logspace(-2, 3, 11), colors="#BBBBBB", zorder=0)
        edge = xs[0] ** 2 + 1 / (2 * B)
        left.fill_between(xs[0], edge, ys.max(), where=list(edge < ys.max()), color="#F4F4F4", zorder=-1)
        left.text(0.0, 1.4, "Hessian indefinite", ha="center", color=GREY, fontsize="small")
        for name, run in runs.items():
            x, y = torch.stack(run.points).T.tolist()
            left.plot(x, y, label=f"{name}, {run.iterations} iterations", **_style(name, runs))
            left.plot(x[-1], y[-1], "o", color=STYLES[name.partition(",")[0]]["color"], markersize=5)
        left.plot(*runs["Newton"].points[0].tolist(), "ks", markersize=5)
        left.plot(A, A**2, "k*", markersize=11)
        left.set(xlabel="x", ylabel="y", title="paths over level curves (half a decade apart)")
        left.grid(False)
        own = runs[scalar].points[: runs[scalar].iterations]
        along = [cosine(diagonal_newton(point), newton(point)) for point in own]
        drawn: list[tuple[str, list[float], dict[str, Any]]] = [
            (f"{scalar}, on its own path", runs[scalar].cosines, STYLES["LLQR scalars"]),
            ("diagonal Hessian, on its own path", runs["diagonal Hessian"].cosines, STYLES["diagonal Hessian"]),
            ("diagonal Hessian, on LLQR's path", along, {"color": GREY, "linestyle": ":"}),
        ]
        for label, cosines, style in drawn:
            right.plot(range(1, len(cosines) + 1), cosines, label=label, **style)
        right.set(xscale="log", ylim=(-1.08, 1.08), xlabel="iteration", title="cosine with Newton's direction")
        _legend(left)
        _legend(right)


def _legend(axes: Axes) -> None:
    """Below the panel, where no curve is."""
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
