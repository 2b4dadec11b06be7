"""The lab's commands: what they write is valid and says how it was made; wrong input is refused before any work."""

from __future__ import annotations

import itertools
import json
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from llqr_lab.bench import cost, exact_training, measure
from llqr_lab.bench.exact_problems import PROBLEMS, cole_hopf, points
from llqr_lab.cli import app
from llqr_lab.results import write_json
from made_runs import falling, made_run

PNG = b"\x89PNG"


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with measure.one_thread():
        yield


def test_bench_exact_training_trains_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every optimizer ends below the loss that it began with."""
    output, figure = tmp_path / "exact_training.json", tmp_path / "exact_training.png"
    monkeypatch.setattr(exact_training, "PROBLEMS", {name: PROBLEMS[name] for name in ("poisson", "heat", "burgers")})
    monkeypatch.setattr(exact_training, "SECONDS", dict.fromkeys(PROBLEMS, 10.0))
    given = ("bench", "exact-training", "--share", "0.01", "--output", output, "--figure", figure)
    code, printed = invoke(*given)
    assert code == 0, printed
    assert figure.read_bytes().startswith(PNG)
    result = json.loads(output.read_text())
    assert len(result["runs"]) == 3 * sum(map(len, exact_training.GRIDS.values()))
    for run in result["runs"].values():
        assert run["loss"][-1] < run["loss"][0]
        assert run["seconds"] == sorted(run["seconds"])
    assert {row["method"] for row in result["costs"]["width"]} == {"auto", "dual", "primal", "cg"}
    for name in exact_training.GRIDS:
        assert name in printed


def test_the_solutions_of_the_equations_solve_them() -> None:
    """Cole and Hopf's u has u_t + u u_x = ν u_xx, by differences in the network's coordinates (x + 1)/2."""
    nu, h = 0.1 / math.pi, 1e-4
    x = 0.1 + 0.8 * points(50)
    step_x, step_t = torch.tensor([h, 0.0]).double(), torch.tensor([0.0, h]).double()
    u, right, left = (cole_hopf(at, nu) for at in (x, x + step_x, x - step_x))
    u_t = (cole_hopf(x + step_t, nu) - cole_hopf(x - step_t, nu)) / (2 * h)
    u_x, u_xx = (right - left) / (4 * h), (right - 2 * u + left) / (4 * h * h)
    assert (u_t + u * u_x - nu * u_xx).abs().max() < 1e-4 * u_t.abs().max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--repeats", "0"), "--repeats"),
        (("--repeats", "two"), "--repeats"),
        (("--seed", "-1"), "--seed"),
        (("--output", "missing/engine.json"), "doesn't exist"),
        (("--output", "file/engine.json"), "doesn't exist"),
        (("--output", "."), "is a folder"),
    ],
)
def test_a_bench_refuses_wrong_input_before_any_work(
    arguments: tuple[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("llqr_lab.bench.cost.engine", lambda *_: pytest.fail("work was begun"))
    given = dict([("--output", "engine.json"), arguments])
    code, printed = invoke("bench", "engine", *(part for pair in given.items() for part in pair))
    assert code == 2
    assert message in printed


@pytest.mark.parametrize(
    "arguments", [("--steps", "0"), ("--seed", "-1"), ("--output", "missing/demo.png"), ("--output", "demo")]
)
def test_demo_refuses_wrong_input_before_any_work(
    arguments: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llqr_lab.demo.show", lambda *_: pytest.fail("work was begun"))
    code, printed = invoke("demo", *arguments)
    assert code == 2
    assert arguments[0] in printed


def test_runs_of_several_days_make_the_same_tables(tmp_path: Path) -> None:
    """Split in two sources, in either order, and as a kept file with new runs: the same page, the same file."""
    kept, page = tmp_path / "kept.json", tmp_path / "page.md"

    def tables(*sources: str | Path) -> tuple[str, str]:
        page.unlink(missing_ok=True)
        code, printed = invoke("table", *sources, "--save", kept, "--page", page)
        assert code == 0, printed
        return kept.read_text(), page.read_text()

    first, second, whole = (tmp_path / name for name in ("first", "second", "whole"))
    for number, (method, seed) in enumerate(itertools.product(("default", "base", "ekfac-ngd"), range(3))):
        for runs in (whole, first if number % 2 else second):
            made_run(runs, method, seed)
    wanted = tables(whole)
    assert "| base | 3 |" in wanted[1]
    assert tables(first, second) == tables(second, first) == wanted
    tables(first)
    assert tables(kept, second) == wanted
    # of a run that is in two sources, the later one's counts
    made_run(tmp_path / "other", "base", 0, falling(60, 0, shift=2.0))
    assert tables(tmp_path / "other", whole) == wanted
    other = tables(whole, tmp_path / "other")
    assert tables(kept, whole) == wanted != other


def test_a_result_that_is_not_a_number_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "result.json", {"seconds": float("nan")})
    assert not list(tmp_path.iterdir())


def test_bench_engine_measures_and_writes(tmp_path: Path) -> None:
    """Products and fits of tiny networks: every ratio is a positive number, and ScaleFree's objective is lower."""
    output = tmp_path / "engine.json"
    result = CliRunner().invoke(app, ["bench", "engine", "--quick", "--repeats", "1", "--output", str(output)])
    assert result.exit_code == 0, result.output
    text = output.read_text(encoding="utf-8")
    assert "/" not in text
    assert not platform.node() or platform.node() not in text
    content = json.loads(text)
    assert content["command"] == "llqr bench engine --seed 0 --repeats 1 --quick"
    assert content["seed"] == 0
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["python"] == platform.python_version()
    assert content["cores"] >= 1
    for row in content["products"]:
        assert set(row["ratios"]) == {"kl", "newton", "record kl", "record newton"}
        assert all(value > 0 for value in row["ratios"].values())
    objective = content["fits"]["objective"]
    assert objective["K-FAC, ScaleFree × 5"] < objective["K-FAC, SGDM × 25"]


@pytest.mark.parametrize("command", [("bench", "overhead", "convent")])
def test_a_network_that_is_not_there_is_refused_with_the_nearest(command: tuple[str, ...]) -> None:
    code, printed = invoke(*command)
    assert code in (1, 2)
    assert "did you mean convnet" in printed


def test_bench_overhead_puts_trainings_together(tmp_path: Path) -> None:
    """From the medians of steps with a refit and without, as often as the schedule has them."""
    output = tmp_path / "overhead.json"
    code, printed = invoke("bench", "overhead", "mlp", "--steps", "14", "--repeats", "2", "--output", output)
    assert code == 0, printed
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["command"] == "llqr bench overhead mlp --seed 0 --repeats 2 --steps 14"
    (row,) = result["rows"]
    assert row["refits"] == [41, 3]
    assert row["base_seconds"] > 0
    for refits, steps, ratio in zip(row["refits"], (cost.FIRST, cost.LATER), row["by_medians"], strict=True):
        assert ratio == pytest.approx((refits * row["refit"] + (steps - refits) * row["plain"]) / steps)


def test_bench_memory_has_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(prepare: Any, *arguments: Any) -> tuple[int, float]:
        return 2**20, prepare(*arguments)()

    monkeypatch.setattr("llqr_lab.bench.cost.peak_memory", here)
    output = tmp_path / "memory.json"
    code, printed = invoke("bench", "memory", "tiny", "--output", output)
    assert code == 0, printed
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["command"] == "llqr bench memory tiny --seed 0"
    (network,) = result["networks"]
    ways = [(row["product"], row["way"]) for row in network["rows"]]
    assert ways == [("training step", "")] + [
        (d, w) for d in ("ngd", "newton") for w in ("whole", "examples", "segments")
    ]
    assert all(row["seconds"] > 0 for row in network["rows"])
    code, printed = invoke("bench", "memory", "resnet5")
    assert "did you mean resnet50" in printed
