"""Monitor: what it logs is what the functions give, and a training that it looks at goes on as without it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import llqr
from llqr import LLQR
from llqr.diagnostics import QUANTILES, Monitor, judge, proposed_step, reference, spectra, staleness
from llqr.divergences import KL, Newton
from llqr.errors import LLQRError
from llqr.paper import PaperLLQR
from llqr.solvers import ScaleFree


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(count)]


def wrapped(model: nn.Module) -> PaperLLQR:
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    return LLQR.paper(base, model, KL(), "kfac", every=3, steps=3, solver=ScaleFree(), ema=0.5, damping=0.5)


class Pages:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.histograms: dict[tuple[str, int], Tensor] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value

    def add_histogram(self, tag: str, values: Tensor, global_step: int) -> None:
        self.histograms[tag, global_step] = values


def train(model: nn.Module, optimizer: Any, monitor: Monitor | None, steps: int = 6) -> list[Any]:
    lines = []
    for step, (inputs, targets) in enumerate(batches(steps)):
        if monitor is not None:
            lines.append(monitor(step, inputs, targets))
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return lines


def test_a_line_has_what_the_functions_give() -> None:
    model = network()
    optimizer, pages, kept = wrapped(model), Pages(), []
    train(model, optimizer, None, 4)
    monitor = Monitor(model, optimizer, cross_entropy, pages, every=2, record=kept.append, damping=0.1, tolerance=1e-5)
    inputs, targets = batches(1)[0]
    assert monitor(1, inputs, targets) is None
    line = monitor(4, inputs, targets)
    assert line is not None
    assert kept == [line]
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert (line["step"], line["trouble"], line["quantiles"]) == (4, None, list(QUANTILES))
    exact = reference(model, inputs, targets, cross_entropy, KL(), 0.1, max_steps=100)
    assert line["exact"]["converged"]
    assert line["loss"] == pytest.approx(exact.loss)
    assert optimizer.preconditioner is not None
    steered = optimizer.preconditioner.precondition(exact.gradient).gradients
    steps = {
        "gradient": {n: -g for n, g in exact.gradient.items()},
        "preconditioned": {n: -g for n, g in steered.items()},
        "optimizer": proposed_step(optimizer, model, inputs, targets, cross_entropy),
    }
    for name, step in steps.items():
        verdict = judge(step, exact)
        for number in ("cosine", "cosine_h", "fraction", "fraction_along", "length", "predicted", "actual"):
            assert line[number][name] == pytest.approx(getattr(verdict, number), rel=1e-3, abs=1e-4)
    assert line["layers"]["0"]["cosine"] == pytest.approx(judge(steps["optimizer"], exact).layers["0"].cosine, rel=1e-3)
    total = sum(part["fraction"] for part in line["layers"].values())
    assert total == pytest.approx(line["fraction"]["optimizer"], rel=1e-3)
    found = spectra(optimizer.preconditioner)
    assert line["spectra"].keys() == found.keys()
    for block, values in found.items():  # the least value with at least so much of them at or below it
        reached = [next(float(v) for v in values if (values <= v).double().mean() >= at - 1e-9) for at in QUANTILES]
        assert line["spectra"][block] == pytest.approx(reached)
    stale = staleness(optimizer, inputs, targets, cross_entropy)
    assert line["staleness"] == pytest.approx(stale.staleness)
    assert line["objective"]["fresh"] == pytest.approx(stale.fresh)
    assert pages.scalars["diagnostics/cosine/optimizer", 4] == line["cosine"]["optimizer"]
    assert pages.scalars["diagnostics/staleness", 4] == line["staleness"]
    assert pages.scalars["diagnostics/layers/0/cosine", 4] == line["layers"]["0"]["cosine"]
    assert set(pages.histograms) == {(f"diagnostics/spectrum/{block}", 4) for block in line["spectra"]}


@pytest.mark.parametrize("kind", ["llqr", "adamw"])
def test_a_training_goes_on_as_if_nobody_looked(kind: str) -> None:
    """Bit for bit, with dropout drawing from the global random numbers and BatchNorm counting."""
    states = []
    for looked in (False, True):
        torch.manual_seed(1)
        model = network()
        optimizer = wrapped(model) if kind == "llqr" else torch.optim.AdamW(model.parameters())
        monitor = Monitor(model, optimizer, cross_entropy, every=1, damping=0.1) if looked else None
        train(model, optimizer, monitor, 7)
        states.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_before_the_first_refit_and_without_llqr_there_is_no_u() -> None:
    model = network()
    for optimizer in (wrapped(model), torch.optim.Adam(model.parameters())):
        line = Monitor(model, optimizer, cross_entropy, damping=0.1).look(0, *batches(1)[0])
        assert line["spectra"] == {}
        assert line["staleness"] is None
        assert set(line["cosine"]) == {"gradient", "optimizer"}


def test_trouble_is_told_and_does_not_stop_a_training() -> None:
    model = network()
    optimizer, (inputs, targets) = wrapped(model), batches(1)[0]
    monitor = Monitor(model, optimizer, cross_entropy)
    line = monitor.look(0, inputs / 0, targets)
    assert "not finite" in line["trouble"]
    assert "cosine" not in line
    indefinite = Monitor(model, optimizer, cross_entropy, divergence=Newton(), damping=0.0).look(0, inputs, targets)
    assert "negative curvature" in indefinite["trouble"] or "indefinite" in indefinite["trouble"]
    with torch.no_grad():
        model[0].bias.fill_(float("nan"))
    assert "not finite" in monitor.look(0, inputs, targets)["trouble"]


def test_a_rate_of_zero_has_no_step_to_judge() -> None:
    model = network()
    line = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.0), cross_entropy).look(0, *batches(1)[0])
    assert set(line["cosine"]) == {"gradient"}
    assert line["layers"] == {}


def test_settings_that_can_not_be() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LLQRError, match="every is a positive integer, not 0"):
        Monitor(model, optimizer, cross_entropy, every=0)
    with pytest.raises(LLQRError, match="products is a positive integer"):
        Monitor(model, optimizer, cross_entropy, products=1.5)  # type: ignore[arg-type]


def test_the_library_does_not_import_tensorboard() -> None:
    sources = list(Path(llqr.__file__).parent.rglob("*.py"))
    assert len(sources) > 50
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any("tensorboard" in name or name.startswith("llqr_lab") for name in names), source
