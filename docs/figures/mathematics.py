"""Draws the figures of docs/mathematics.md into this folder: python docs/figures/mathematics.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from torch import Tensor, nn
from torch.nn import functional

from llqr import QuadraticModel, diagnostics, exact_step, fit
from llqr.divergences import KL
from llqr.structures import Diagonal
from llqr_lab.data.picture_sets import digits
from llqr_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, drawing

START = (2.3, 2.0)
TRUTH = (1.6, 1.2)
MEASURE = KL(family="gaussian")
RATE = 0.25
PATHS = 12
INNER = 25
DAMPING = 1e-2
ALONE = "−g alone"
STRUCTURES = {"scalar": (PINK, ":"), "diagonal": (ORANGE, "-."), "kfac": (BLUE, "-"), "ekfac": (GREEN, "--")}


def steps(path: Path) -> None:
    """One step from the same point by several rules (left), and where they lead when repeated (right)."""
    with drawing(path, 12, 5.4) as figure:
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        _one_step(left)
        _paths(right)
        left.set_ylabel("weight of the second layer")
        for axes in (left, right):
            axes.set_xlabel("weight of the first layer")
            axes.legend(loc="upper left", fontsize="small", frameon=True)


def _one_step(axes: Axes) -> None:
    model, inputs, targets = _two_layers(START)
    q = QuadraticModel.build(model, inputs, targets, _half_square, MEASURE)
    gradient, exact = _flat(q.gradient), _flat(exact_step(model, inputs, targets, _half_square, MEASURE))
    single = -gradient * float(gradient @ gradient) / q.curvature_along(q.gradient)
    learned = -_flat(fit(q, Diagonal(), steps=INNER).apply(q.gradient))
    _levels(axes)
    hessian = torch.stack([_flat(q.curvature(_named(q.gradient, unit))) for unit in torch.eye(2).double()])
    _ellipses(axes, gradient, hessian)
    for step, colour, width, label in (
        (single, PINK, 4.0, "the best multiple of g: U = c I"),
        (-RATE * gradient, GREY, 2.0, f"gradient descent, −{RATE:g} g"),
        (exact, "#F0B48A", 8.0, "exact, −H⁻¹g"),
        (learned, GREEN, 2.0, "−U g, U of one number a layer"),
    ):
        x, y = START[0] + float(step[0]), START[1] + float(step[1])
        axes.plot([START[0], x], [START[1], y], color=colour, linewidth=width, marker="o", markevery=[1], label=label)
    axes.plot(*START, "ks", markersize=6)
    axes.set_title("one step; dashed: level curves of the quadratic model")


def _paths(axes: Axes) -> None:
    _levels(axes)
    for label, colour, style, refit in (
        (f"gradient descent, −{RATE:g} g", GREY, "-", None),
        ("half of −U g, U refitted at every step", GREEN, "-", 1),
        ("half of −U g, U of the first step kept", BLUE, "--", PATHS),
    ):
        points = _path(refit)
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=4, label=label)
    axes.plot(*START, "ks", markersize=6)
    axes.set_title(f"{PATHS} steps")


def _path(refit: int | None) -> list[tuple[float, float]]:
    """Gradient descent, or steps along U g with a U that is fitted every so often."""
    points = [START]
    u = None
    for number in range(PATHS):
        model, inputs, targets = _two_layers(points[-1])
        q = QuadraticModel.build(model, inputs, targets, _half_square, MEASURE)
        if refit is not None and number % refit == 0:
            u = fit(q, Diagonal(), steps=INNER)
        step = -RATE * _flat(q.gradient) if u is None else -0.5 * _flat(u.apply(q.gradient))
        points.append((points[-1][0] + float(step[0]), points[-1][1] + float(step[1])))
    return points


def _two_layers(weights: tuple[float, float]) -> tuple[nn.Sequential, Tensor, Tensor]:
    """x ↦ b tanh(a x), and what it should be."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.fill_(weight)
    inputs = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    return model, inputs, TRUTH[1] * torch.tanh(TRUTH[0] * inputs)


def _half_square(output: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * functional.mse_loss(output, targets)


def _flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in named.values()])


def _named(like: dict[str, Tensor], flat: Tensor) -> dict[str, Tensor]:
    return {name: part.reshape(like[name].shape) for name, part in zip(like, flat, strict=True)}


def _grid() -> tuple[Tensor, Tensor]:
    a, b = torch.meshgrid(torch.linspace(1.2, 2.6, 200), torch.linspace(0.85, 2.15, 200), indexing="xy")
    return a, b


def _levels(axes: Axes) -> None:
    a, b = _grid()
    x = torch.linspace(-2, 2, 9)
    errors = b[..., None] * torch.tanh(a[..., None] * x) - TRUTH[1] * torch.tanh(TRUTH[0] * x)
    levels = torch.logspace(-4, 0, 13).tolist()
    axes.contour(a, b, 0.5 * errors.square().mean(-1), levels, colors="#BBBBBB", linewidths=0.8)
    axes.plot(*TRUTH, "k*", markersize=11)
    axes.grid(False)


def _ellipses(axes: Axes, gradient: Tensor, hessian: Tensor) -> None:
    a, b = _grid()
    change = torch.stack((a - START[0], b - START[1]), dim=-1).double()
    model = change @ gradient + 0.5 * ((change @ hessian) * change).sum(-1)
    least = float(-0.5 * gradient @ torch.linalg.solve(hessian, gradient))
    levels = [least * (1 - share) for share in (0.03, 0.15, 0.4, 0.75)]
    axes.contour(a, b, model, levels, colors=ORANGE, linewidths=0.9, linestyles="--", alpha=0.8)


def stages(path: Path) -> None:
    """A network as a controlled system: the roll-out forward, and what is sent back."""
    with drawing(path, 12, 4.0) as figure:
        axes = figure.subplots()
        axes.set_xlim(0, 12)
        axes.set_ylim(0, 4.0)
        axes.axis("off")
        centres = (2.2, 5.2, 9.0)
        for centre, index in zip(centres, ("0", "1", "N-1"), strict=True):
            _stage(axes, centre, index)
        axes.text(7.1, 2.52, "…", ha="center", va="center", fontsize=20)
        for x0, x1, state, back in (
            (0.25, 1.25, "0", None),
            (3.15, 4.25, "1", "1"),
            (6.15, 6.95, "2", "2"),
            (7.25, 8.05, "N-1", "N-1"),
            (9.95, 10.85, "N", "N"),
        ):
            _arrow(axes, (x0, 2.75), (x1, 2.75), BLUE)
            middle = (x0 + x1) / 2
            axes.text(
                middle, 2.9, rf"$\delta x_{{{state}}}$" + ("$=0$" if back is None else ""), ha="center", color=BLUE
            )
            if back is not None:
                _arrow(axes, (x1, 2.3), (x0, 2.3), ORANGE)
                axes.text(
                    middle, 1.9, rf"$K_{{{back}}},\lambda_{{{back}}}$", ha="center", color=ORANGE, fontsize="small"
                )
        _box(axes, 11.4, 2.52, 1.0, 1.0, "#fdf0e7", ORANGE)
        axes.text(11.4, 2.68, r"$Q_N$", ha="center", va="center")
        axes.text(11.4, 2.3, r"$\nabla\ell$", ha="center", va="center")
        axes.text(11.4, 3.2, "divergence, loss", ha="center", fontsize="small", color=GREY)
        axes.text(0.2, 3.75, "forward: activations follow linear dynamics", color=BLUE, va="center")
        axes.text(
            0.2, 0.25, "backward: what a change of an activation will cost from there on", color=ORANGE, va="center"
        )


def _stage(axes: Axes, centre: float, index: str) -> None:
    _box(axes, centre, 2.52, 1.8, 1.0, "#eaf3f9", BLUE)
    axes.text(centre, 2.68, rf"$A_{{{index}}}\,\delta x + B_{{{index}}}\,\delta\theta$", ha="center", va="center")
    axes.text(
        centre, 2.3, rf"costs $Q_{{{index}}}, M_{{{index}}}, R_{{{index}}}$", ha="center", va="center", fontsize="small"
    )
    axes.text(centre, 3.2, f"layer {index}".replace("N-1", "N − 1"), ha="center", fontsize="small", color=GREY)
    _arrow(axes, (centre, 1.2), (centre, 1.98), GREEN)
    axes.text(centre, 0.9, rf"$\delta\theta_{{{index}}}$", ha="center", color=GREEN, fontsize=13)


def _box(axes: Axes, x: float, y: float, width: float, height: float, fill: str, edge: str) -> None:
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(
        FancyBboxPatch(corner, width, height, "round,pad=0.02,rounding_size=0.1", facecolor=fill, edgecolor=edge)
    )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8})


def relaxation(path: Path) -> None:
    """J as U is learned, as a share of the exact step's (left); and what is left of it on the next batch (right)."""
    found = _relaxed()
    with drawing(path, 12, 4.6) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for name, (colour, style) in STRUCTURES.items():
            left.plot(found[name]["shares"], color=colour, linestyle=style, label=name)
        for axes in (left, right):
            axes.axhline(1, color="black", linewidth=1.2)
        left.annotate("the exact step", (0.0, 1.0), xytext=(4, -14), textcoords="offset points")
        left.set_xlabel("inner steps")
        left.set_ylabel("J(U) / m(δ*)")
        left.set_title("U, fitted on one batch")
        left.legend(loc="lower right")
        left.set_ylim(0, 1.15)
        bars = {ALONE: GREY, **{name: colour for name, (colour, _) in STRUCTURES.items()}}
        for place, (name, colour) in enumerate(bars.items()):
            for shift, which in ((-0.2, "own"), (0.2, "other")):
                height = found[name][which]
                bar = right.bar(place + shift, height, 0.36, color=colour, alpha=1 if shift < 0 else 0.45)
                right.bar_label(bar, [f"{height:.2f}"], label_type="center", color="white" if shift < 0 else "black")
        right.set_xticks(range(len(bars)), list(bars))
        right.set_title("at the best length: that batch, and (pale) another one")


def _relaxed() -> dict[str, dict[str, Any]]:
    data = digits(256)
    torch.manual_seed(0)
    inputs, targets = functional.avg_pool2d(data.train_inputs.double(), 2).flatten(1), data.train_targets
    inputs = (inputs - inputs.mean(0)) / inputs.std()
    model = nn.Sequential(nn.Linear(inputs.shape[1], 16), nn.Tanh(), nn.Linear(16, 10)).double()
    loss_fn = functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        torch.autograd.backward(loss_fn(model(inputs), targets))
        optimizer.step()
    halves = ((inputs[:128], targets[:128]), (inputs[128:], targets[128:]))
    own, other = (diagnostics.reference(model, *half, loss_fn, "ngd", damping=DAMPING) for half in halves)
    q, q_other = (QuadraticModel.build(model, *half, loss_fn, "ngd", damping=DAMPING) for half in halves)
    found: dict[str, dict[str, Any]] = {}
    for name in (ALONE, *STRUCTURES):
        u = None if name == ALONE else fit(q, name, steps=INNER)
        found[name] = {} if u is None else {"shares": [value / own.attainable for value in u.history]}
        for which, exact, there in (("own", own, q), ("other", other, q_other)):
            preconditioned = there.gradient if u is None else u.apply(there.gradient)
            step = {key: -part for key, part in preconditioned.items()}
            found[name][which] = diagnostics.judge(step, exact).fraction_along
    return found


DRAWN = {"steps": steps, "stages": stages, "relaxation": relaxation}

if __name__ == "__main__":
    for name, draw in DRAWN.items():
        draw(Path(__file__).parent / f"mathematics_{name}.png")
