"""Promise: `llqr bench unseen` compares LLQR with its base fairly, on tasks that learn, and tells where it does harm."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from llqr_lab.bench import measure, unseen
from llqr_lab.bench.unseen import (
    UNSEEN,
    CharacterLSTM,
    Comparison,
    Trial,
    autoencoder,
    body,
    cell,
    every_place,
    graphs,
    shapes,
)
from llqr_lab.cli import app

GENERATED = ("regression", "unet", "gnn")
"""Tasks that need no data set."""
SMALL = ["--steps", "10", "--jobs", "1"]


@pytest.mark.parametrize("name", GENERATED)
def test_batches_are_a_function_of_the_step_and_the_start_of_the_seed(name: str) -> None:
    task = UNSEEN[name]
    inputs, targets = task.load(None, 0)(3)
    again, _ = task.load(None, 0)(3)
    other, _ = task.load(None, 1)(3)
    assert all(map(torch.equal, inputs, again))
    assert not torch.equal(inputs[0], other[0])
    assert all(map(torch.equal, task.start(2).parameters(), task.start(2).parameters()))
    assert task.loss(task.start(0)(*inputs), targets).isfinite()


def test_networks_on_data_sets_take_their_shapes() -> None:
    assert autoencoder()(torch.rand(2, 784)).shape == (2, 784)
    tokens = torch.randint(65, (2, 7))
    assert every_place(CharacterLSTM()(tokens), tokens).isfinite()
    assert UNSEEN["vit"].start(0)(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_what_is_generated_is_what_its_targets_say() -> None:
    (pictures,), classes = shapes(size=8)
    assert (pictures.shape, classes.shape) == ((8, 1, 32, 32), (8, 32, 32))
    assert set(classes.unique().tolist()) == {0, 1, 2}
    assert pictures[classes[:, None] > 0].mean() > 0.9 > 0.1 > pictures[classes[:, None] == 0].mean()
    (features, adjacency), steps = graphs(size=8)
    assert torch.equal(features[..., 0] > 0, steps == 0)
    near = torch.einsum("bij,bj->bi", (adjacency > 0).float(), (steps == 0).float()) > 0
    assert torch.equal(near & (steps > 0), steps == 1)


@pytest.mark.parametrize("name", GENERATED)
def test_the_base_learns_what_is_generated(name: str) -> None:
    result = unseen.train(Trial(name, "AdamW", False, "cosine", 3e-3, 0, 60), None)
    assert result["last"] < 0.9 * result["first"]


def test_the_command_writes_results_and_a_page_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "WIDEST", 0)
    made: list[Trial] = []
    train = unseen.train
    monkeypatch.setattr(unseen, "train", lambda run, data: (made.append(run), train(run, data))[1])
    output, page = tmp_path / "unseen.json", tmp_path / "page.md"
    places = ["--output", str(output), "--page", str(page)]
    first = CliRunner().invoke(app, ["bench", "unseen", "regression", *SMALL, *places])
    assert first.exit_code == 0, first.output
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 2 * 2 * 3
    assert len({(row["base"], row["schedule"], row["factor"]) for row in rows}) == 12
    assert "| regression | AdamW | " in page.read_text(encoding="utf-8")
    assert len(made) == len(set(made)) >= 2 * 12


class Made(Comparison):
    """Runs that end as a function says."""

    def __init__(self, end: Any) -> None:
        super().__init__(None, 1, 10)
        self.end = end

    def results(self, wanted: Any) -> dict[Trial, dict[str, Any]]:
        return {run: {"first": 2.0, "last": self.end(run), "seconds": 1.0} for run in wanted}


def test_the_best_rate_is_looked_for_beyond_the_edge() -> None:
    made = Made(lambda run: None if run.rate > 1 else abs(math.log(run.rate / 0.9)))
    assert made.best_rates(["gnn"], 0) == {("gnn", "SGDM"): 0.9, ("gnn", "AdamW"): pytest.approx(0.27)}
    with pytest.raises(unseen.RunError, match="every rate"):
        Made(lambda run: None).best_rates(["gnn"], 0)


def test_what_is_learned_without_inputs() -> None:
    """The best output for all examples of a squared error is the targets' mean; of a cross-entropy, it gives their entropy."""
    regression, gnn = UNSEEN["regression"], UNSEEN["gnn"]
    draw = regression.load(None, 0)
    targets = torch.cat([draw(step)[1] for step in range(20)])
    assert regression.without_inputs(draw) == pytest.approx(
        float((targets - targets.mean(0)).square().mean()), rel=1e-4
    )
    draw = gnn.load(None, 0)
    targets = torch.cat([draw(step)[1] for step in range(20)])
    shares = torch.nn.functional.one_hot(targets).float().mean(0)
    entropy = -(shares * shares.clamp_min(1e-30).log()).sum(-1).mean()
    assert gnn.without_inputs(draw) == pytest.approx(float(entropy), rel=1e-3)


def test_harm_is_told_where_the_base_trains() -> None:
    ends = {
        0.033: (1.0, 1.01),
        0.1: (1.0, 1.03),
        0.3: (1.0, None),
        0.01: (1.43, 3.0),  # as good as an output that is the same for all graphs
        0.0033: (1.0, 0.5),
        0.03: (None, 1),
    }
    made = Made(lambda run: ends[run.rate][run.llqr])
    rows = made.rows({("gnn", "SGDM"): 0.1, ("gnn", "AdamW"): 0.01}, [0])
    told = {row["rate"]: (row["harm"], cell(row)) for row in rows}
    assert told[0.033] == (False, "1.010 (1 → 1.01)")
    assert told[0.1] == (True, "**1.030** (1 → 1.03)")
    assert told[0.3] == (True, "**–** (1 → diverged)")
    assert told[0.01] == (False, "the base doesn't train (1.43 → 3)")
    assert told[0.03] == (False, "the base doesn't train (diverged → 1)")
    assert "In 4 of these" in body(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gnnn"], "did you mean gnn"),
        (["lstm"], "LLQR_DATA"),
        (["gnn", "--seeds", "two"], "seeds"),
        (["gnn", "--steps", "1"], "--steps"),
        (["gnn", "--page", "missing/page.md"], "folder"),
    ],
)
def test_bad_input_is_told_before_any_work(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLQR_DATA", raising=False)
    monkeypatch.setattr(unseen, "train", lambda *_: pytest.fail("work was begun"))
    places = ["--output", str(tmp_path / "unseen.json")]
    result = CliRunner().invoke(app, ["bench", "unseen", *arguments, *places])
    assert result.exit_code in (1, 2)
    assert message in result.output
