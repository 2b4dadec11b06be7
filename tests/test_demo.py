"""Promise: the demonstration is fair (same start, batches and rates), and what it reports is what happened."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from typer.testing import CliRunner

from llqr_lab.cli import app
from llqr_lab.data.picture_sets import digits
from llqr_lab.demo import OPTIMIZERS, Curve, draw, network, train


def test_the_same_start_and_the_same_batches() -> None:
    data = digits()
    assert float(data.train_inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train_inputs.std()) == pytest.approx(1, abs=1e-5)
    for first, second in zip(network(3).parameters(), network(3).parameters(), strict=True):
        assert torch.equal(first, second)
    runs = [train(data, 1, OPTIMIZERS["LLQR(SGDM)"], steps=20) for _ in range(2)]
    assert runs[0].losses == runs[1].losses


def test_llqr_lowers_the_loss_faster_than_its_base() -> None:
    """The demo's claim, at a third of its length."""
    data = digits()
    ends = {name: train(data, 0, make, steps=100).losses[-1] for name, make in OPTIMIZERS.items()}
    assert ends["LLQR(SGDM)"] < 0.7 * ends["SGDM"]
    assert ends["LLQR(AdamW)"] < 0.7 * ends["AdamW"]


def test_seconds_are_of_the_processor() -> None:
    """What else the machine does, here nothing for a second, isn't in them."""

    class Slow(SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(0.5)
            return super().step(closure)

    data = digits()
    curve = train(data, 0, lambda model: Slow(model.parameters(), lr=0.1), steps=2)
    assert 0 < curve.seconds[-1] < 0.9


def test_the_demo_shows_a_row_for_everybody(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--steps", "12", "--output", str(tmp_path / "demo.png")])
    assert result.exit_code == 0, result.output
    assert all(f"  {name} " in result.output for name in OPTIMIZERS)
    assert "Seconds are processor time" in " ".join(result.output.split())
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_a_curve_tells_when_the_target_was_reached() -> None:
    assert Curve([0, 10, 20], [0.0, 1.0, 2.0], [3.0, 0.02, 0.01]).reached == ("10", "1.0")
    assert Curve([0, 10], [0.0, 1.0], [3.0, float("nan")]).reached == ("> 10", "–")


def test_the_demos_figure_has_a_line_for_everybody(tmp_path: Path) -> None:
    curves = {name: Curve([0, 1], [0.0, 1.0], [1.0, 0.5]) for name in OPTIMIZERS}
    draw(curves, tmp_path / "all.png")
    with pytest.raises(ValueError, match="zip"):  # rather than a picture that leaves somebody out
        draw({**curves, "more": curves["SGDM"]}, tmp_path / "more.png")
