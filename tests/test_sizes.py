"""Promises: `llqr bench sizes` compares at one loss, each at its best rate; LLQR's share of AdamW's steps is at one rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llqr_lab.bench import race, sizes
from llqr_lab.bench.race import COURSES, Course, end
from llqr_lab.experiments.command import folder_of
from llqr_lab.experiments.loop import train


def made(losses: list[float], seed: int = 0, seconds: float = 1.0) -> dict[str, Any]:
    steps = [10 * (number + 1) for number in range(len(losses))]
    curve = {"step": steps, "seconds": [seconds * step for step in steps], "train_loss": losses}
    return {
        "diverged": False,
        "seed": seed,
        "score": "test_accuracy",
        "lr": 0.01,
        "steps": steps[-1],
        "seconds": seconds * steps[-1],
        "curve": curve,
    }


def test_with_a_target_the_best_rate_is_the_one_that_is_there_first() -> None:
    """The end of a run is the first step whose mean of three losses is at most the target, not its last loss."""
    course = Course("fashion-convnet", target=0.3)
    early, late = made([0.375, 0.125, 0.2, 0.9]), made([0.9, 0.5, 0.1, 0.1])
    assert end(early, course) == 20  # (0.375 + 0.125)/2 = 0.25
    assert end(late, course) == 40
    assert end(made([0.9, 0.9, 0.9]), course) == float("inf")


def test_a_course_of_another_length() -> None:
    longer = COURSES["shakespeare"].of_length(1500)
    assert (longer.cpu["steps"], longer.cpu["record_every"]) == (1500, 30)
    assert COURSES["modular-addition"].of_length(1500).cpu == {"steps": 1500, "evaluate_every": 10}
    assert COURSES["shakespeare"].of_length(None) is COURSES["shakespeare"]


def test_rows_are_medians_over_seeds() -> None:
    runs = [made([0.9, 0.2, 0.2, 0.2], 0), made([0.3, 0.3], 1), made([0.9, 0.9, 0.2, 0.1], 2)]
    row = sizes._racer(32, "SOAP", [0.01], runs)
    assert (row["step"], row["seconds"]) == (40, 40.0)  # 40, 10, never
    assert sizes._racer(32, "SOAP", [], [])["step"] is None
    base, own = [made([0.9, 0.6, 0.3], 7)], [made([0.4, 0.2, 0.2], 7, seconds=3.0)]
    assert sizes._gain(64, base, own) == {"size": 64, "lr": 0.01, "steps": 10 / 30, "seconds": 30 / 30}


def test_the_command_writes_tables_a_file_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_optimizer")

    def perform(wanted: Any, *rest: Any) -> None:
        for config in wanted:
            folder = folder_of(tmp_path, config)
            if not folder.done:
                train(config, folder, None, torch.device("cpu"))

    monkeypatch.setattr(race, "sweep", perform)
    output, figure, page = tmp_path / "sizes.json", tmp_path / "sizes.png", tmp_path / "page.md"
    sizes.main("smoke", [0], tmp_path, None, 1, output, figure, page)
    found = json.loads(output.read_text(encoding="utf-8"))
    assert [row["optimizer"] for row in found["batch"]] == [*sizes.RACERS, *sizes.RACERS]
    assert [row["size"] for row in found["layers"]] == [4, 8]
    assert figure.stat().st_size > 10_000
    assert "hidden layers 8" in page.read_text(encoding="utf-8")
