"""Promise: races are fair (same start, batches and learning rate), and what they report is what happened."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from llqr_lab.bench.target import summary
from llqr_lab.cli import app
from llqr_lab.data.digits import digits
from llqr_lab.data.fashion import fashion_mnist, read_idx
from llqr_lab.data.folder import DataError
from llqr_lab.figures.curves import draw
from llqr_lab.race.methods import BASE, SUITES, llqr_methods, sgdm
from llqr_lab.race.run import Curve, train
from llqr_lab.race.tasks import TASKS, batches


def test_the_same_start_and_the_same_batches() -> None:
    task, data = TASKS["digits"], digits()
    for first, second in zip(task.start(3).parameters(), task.start(3).parameters(), strict=True):
        assert torch.equal(first, second)
    draw, again = batches(data, 16, 3), batches(data, 16, 3)
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(draw(), again(), strict=True))
    runs = [train(task, data, 1, sgdm(0.05), llqr_methods()["LLQR kfac"], steps=20) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    assert runs[0].stats["refits"] == 1


def test_llqr_lowers_the_loss_faster_than_its_base_at_this_rate() -> None:
    """The demo's claim, at half its length: much lower at step 300, whatever the structure."""
    task, data = TASKS["digits"], digits()
    alone = train(task, data, 0, sgdm(0.01), steps=300).losses[-1]
    for name, settings in llqr_methods().items():
        assert train(task, data, 0, sgdm(0.01), settings, steps=300).losses[-1] < 0.75 * alone, name


def test_a_curve_tells_when_the_target_was_reached() -> None:
    assert Curve([0, 10, 20], [0.0, 1.0, 2.0], [3.0, 0.5, 0.1]).reached(0.5) == 1
    assert Curve([0, 10], [0.0, 1.0], [3.0, float("nan")]).reached(0.5) is None
    stopped = train(TASKS["digits"], digits(), 0, sgdm(0.05), steps=200, until=2.0)
    assert stopped.losses[-1] <= 2.0 < stopped.losses[-2]
    assert stopped.steps[-1] < 200


def test_the_summary_compares_each_seed_with_the_base_of_that_seed() -> None:
    rows = [
        {
            "task": "t",
            "lr": 0.1,
            "seed": seed,
            "method": method,
            "steps": steps,
            "seconds": 2.0 * steps if steps else None,
        }
        for seed, method, steps in (
            (0, "SGDM", 100),
            (1, "SGDM", 400),
            (0, "A", 50),
            (1, "A", 100),
            (0, "B", 10),
            (1, "B", None),
        )
    ]
    base, fast, flaky = summary(rows)
    assert base["steps"] == [100, 250, 400]
    assert fast["steps_ratio"] == pytest.approx((0.5 + 0.25) / 2)
    assert (flaky["reached"], flaky["runs"], flaky["steps_ratio"]) == (1, 2, None)  # who fails has no ratio to show


def test_bench_target_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, figure = tmp_path / "target.json", tmp_path / "target.png"
    arguments = [
        "bench",
        "target",
        "solvers",
        "--quick",
        "--seeds",
        "1",
        "--output",
        str(output),
        "--figure",
        str(figure),
    ]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    runs = json.loads(output.read_text())["runs"]
    assert len(runs) == 1 + len(SUITES["solvers"].methods())
    monkeypatch.setattr("llqr_lab.bench.target.train", lambda *_: pytest.fail("it was there already"))
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert json.loads(output.read_text())["runs"] == runs


def test_missing_data_and_unknown_suites_are_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLQR_DATA", raising=False)
    places = ["--output", str(tmp_path / "a.json"), "--figure", str(tmp_path / "a.png")]
    asked = CliRunner().invoke(app, ["bench", "target", "solvers", *places])
    assert asked.exit_code == 2
    assert "LLQR_DATA" in asked.output
    unknown = CliRunner().invoke(app, ["bench", "target", "sovlers", *places])
    assert unknown.exit_code == 2
    assert "solvers" in unknown.output


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
    curves = {name: Curve([0, 1], [0.0, 1.0], [1.0, 0.5]) for name in (BASE, *llqr_methods())}
    draw(curves, 0.6, tmp_path / "all.png")
    with pytest.raises(ValueError, match="zip"):  # rather than a picture that leaves somebody out
        draw({**curves, "one": curves[BASE], "more": curves[BASE]}, 0.6, tmp_path / "more.png")
