"""Promise: the demonstration is fair (same start, batches and rates), and what it reports is what happened."""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from typer.testing import CliRunner

from llqr_lab.cli import app
from llqr_lab.data.digits import digits
from llqr_lab.data.fashion import fashion_mnist, read_idx
from llqr_lab.data.folder import DataError
from llqr_lab.demo import optimizers
from llqr_lab.figures.curves import draw
from llqr_lab.race.run import Curve, train
from llqr_lab.race.tasks import TASKS, batches


def test_the_same_start_and_the_same_batches() -> None:
    task, data = TASKS["digits"], digits()
    for first, second in zip(task.start(3).parameters(), task.start(3).parameters(), strict=True):
        assert torch.equal(first, second)
    draw, again = batches(data, 16, 3), batches(data, 16, 3)
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(draw(), again(), strict=True))
    runs = [train(task, data, 1, optimizers()["LLQR(SGDM)"], steps=20) for _ in range(2)]
    assert runs[0].losses == runs[1].losses


def test_llqr_lowers_the_loss_faster_than_its_base() -> None:
    """The demo's claim, at a third of its length."""
    task, data = TASKS["digits"], digits()
    ends = {name: train(task, data, 0, make, steps=100).losses[-1] for name, make in optimizers().items()}
    assert ends["LLQR(SGDM)"] < 0.7 * ends["SGDM"]
    assert ends["LLQR(AdamW)"] < 0.7 * ends["AdamW"]


def test_seconds_are_of_the_processor() -> None:
    """What else the machine does, here nothing for a second, isn't in them."""

    class Slow(SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(0.5)
            return super().step(closure)

    task, data = TASKS["digits"], digits()
    curve = train(task, data, 0, lambda model: Slow(model.parameters(), lr=0.1), steps=2)
    assert 0 < curve.seconds[-1] < 0.9


def test_the_demo_shows_a_row_for_everybody(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--steps", "12", "--output", str(tmp_path / "demo.png")])
    assert result.exit_code == 0, result.output
    assert all(f"  {name} " in result.output for name in optimizers())
    assert "Seconds are processor time" in " ".join(result.output.split())
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_a_curve_tells_when_the_target_was_reached() -> None:
    assert Curve([0, 10, 20], [0.0, 1.0, 2.0], [3.0, 0.5, 0.1]).reached(0.5) == 1
    assert Curve([0, 10], [0.0, 1.0], [3.0, float("nan")]).reached(0.5) is None


def write_idx(path: Path, values: torch.Tensor) -> None:
    path.parent.mkdir(exist_ok=True)
    sides = b"".join(side.to_bytes(4, "big") for side in values.shape)
    path.write_bytes(gzip.compress(b"\0\0\x08" + bytes([values.dim()]) + sides + bytes(values.flatten().tolist())))


def test_fashion_mnist_is_read_from_its_four_files(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = {part: torch.randint(256, (n, 28, 28), generator=generator) for part, n in (("train", 5), ("t10k", 3))}
    for part, images in pictures.items():
        write_idx(tmp_path / "fashion_mnist" / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / "fashion_mnist" / f"{part}-labels-idx1-ubyte.gz", torch.arange(len(images)))
    data = fashion_mnist(tmp_path)
    assert data.train_inputs.shape == (5, 1, 28, 28)
    assert data.test_targets.tolist() == [0, 1, 2]
    assert float(data.train_inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train_inputs.std()) == pytest.approx(1, abs=1e-5)
    raw = pictures["t10k"].float() / 255
    torch.testing.assert_close(
        data.test_inputs[:, 0] - data.test_inputs.mean(), (raw - raw.mean()) / (pictures["train"].float() / 255).std()
    )


BROKEN = {
    "empty": b"",
    "not gzip": b"not gzip",
    "too short": gzip.compress(b"\0\0\x08\1\0\0\0\5abc", mtime=0),
    "no header": gzip.compress(b"\1\2", mtime=0),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_told(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "broken.gz"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(DataError, match="get it again"):
        read_idx(path)


def test_the_demos_figure_has_a_line_for_everybody(tmp_path: Path) -> None:
    curves = {name: Curve([0, 1], [0.0, 1.0], [1.0, 0.5]) for name in (*optimizers(), "one")}
    draw(curves, 0.6, tmp_path / "all.png")
    with pytest.raises(ValueError, match="zip"):  # rather than a picture that leaves somebody out
        draw({**curves, "more": curves["one"]}, 0.6, tmp_path / "more.png")
