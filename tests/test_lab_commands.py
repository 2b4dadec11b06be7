"""The lab's commands: what they write is valid and says how it was made; wrong input is refused before any work."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from llqr.divergences import KL, Newton
from llqr_lab.bench import measure, overhead
from llqr_lab.cli import app
from llqr_lab.data.picture_sets import small_digits
from llqr_lab.exact_training import command as exact_command
from llqr_lab.exact_training import loops
from llqr_lab.results import write_json

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


def test_exact_prints_its_table_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_command, "TRAIN", 30)
    monkeypatch.setattr(exact_command, "MOST", 5)
    output = tmp_path / "exact.png"
    code, printed = invoke("exact", "--steps", "2", "--output", output)
    assert code == 0, printed
    for name in ("gradient descent", "natural gradient", "damped Newton", "relative error", "> 5"):
        assert name in printed
    assert output.read_bytes().startswith(PNG)


def test_exact_is_the_same_each_time_and_its_exact_steps_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_command, "MOST", 5)
    data = small_digits(30, seed=1)
    assert exact_command.disagreement(data, seed=1) < 1e-8
    first, rate = exact_command.train(data, 1, 3, lambda: None)
    second, again = exact_command.train(data, 1, 3, lambda: None)
    assert rate == again
    for name, run in first.items():
        assert run.losses == second[name].losses
        assert run.accuracy == second[name].accuracy
        assert len(run.losses) == len(run.seconds)


def test_an_exact_step_is_taken_only_where_it_lowers_the_loss() -> None:
    data = small_digits(30, seed=0)
    run = loops.exact_descend(exact_command.network(0), data, KL(), 6)
    assert all(after <= before for before, after in zip(run.losses, run.losses[1:], strict=False))
    assert run.losses[-1] < 0.9 * run.losses[0]


def test_a_newton_step_without_a_minimum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "START", 1e-3)
    data, model = small_digits(30, seed=0), exact_command.network(0)
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    run = loops.exact_descend(model, data, Newton(), 1)
    assert run.refused == 1
    assert run.losses[0] == run.losses[1]
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--repeats", "0"), "--repeats"),
        (("--repeats", "two"), "--repeats"),
        (("--seed", "-1"), "--seed"),
        (("--output", "missing/engine.json"), "doesn't exist"),
        (("--output", "file/engine.json"), "is a file"),
        (("--output", "."), "is a folder"),
    ],
)
def test_a_bench_refuses_wrong_input_before_any_work(
    arguments: tuple[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("llqr_lab.bench.engine.main", lambda *_: pytest.fail("work was begun"))
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


def test_growth_exponent_is_the_power() -> None:
    assert measure.growth_exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)
    assert measure.growth_exponent([1, 2, 4], [3.0, None, 48.0]) == pytest.approx(2)
    assert measure.growth_exponent([1, 2], [3.0, None]) is None
    assert measure.growth_exponent([1, 2, 4], [-3.0, 2.0, 4.0]) == pytest.approx(1)  # memory below zero is left out


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


def test_bench_overhead_times_whole_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps are put together from those with a refit and those without; enough of them are timed as they are."""
    for name, size in (("FIRST", 6), ("LATER", 4), ("PARTS", (slice(0, 6), slice(6, 10))), ("TURN", 2)):
        monkeypatch.setattr(overhead, name, size)
    output = tmp_path / "overhead.json"
    for steps, timed in (("5", False), ("10", True)):
        code, printed = invoke("bench", "overhead", "mlp", "--steps", steps, "--repeats", "2", "--output", output)
        assert code == 0, printed
        result = json.loads(output.read_text(encoding="utf-8"))
        assert result["command"] == f"llqr bench overhead mlp --seed 0 --repeats 2 --steps {steps}"
        (row,) = result["rows"]
        assert sum(row["refits"]) >= 1
        assert min(row["base_seconds"], row["refit"], *row["by_medians"]) > 0
        assert (row["as_timed"] is not None) == timed


def test_bench_memory_has_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(jobs: dict[str, Any]) -> dict[str, int]:
        for prepare, arguments in jobs.values():
            prepare(*arguments)()
        return dict.fromkeys(jobs, 2**20)

    monkeypatch.setattr("llqr_lab.bench.memory.peak_memory", here)
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
