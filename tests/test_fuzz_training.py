"""Promise: drawn trainings come to the same saved and loaded, killed and resumed, and on ranks. Here a few of them are run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fuzz_saving
from fuzz_training import fuzz


@pytest.mark.parametrize(("kind", "count"), [("save", 16), ("kills", 2), ("ddp", 4), ("fsdp", 4)])
def test_a_few_draws(kind: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    assert fuzz(kind, range(count), out) == []
    assert sorted(json.loads(line)["seed"] for line in out.read_text().splitlines()) == list(range(count))
    assert capsys.readouterr().out.splitlines()[-1].split()[:5] == [kind, str(count), str(count), "0", "0"]


def test_what_fails_is_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seeds that are known aren't run again, and count."""
    out = tmp_path / "lines.jsonl"
    out.write_text('{"seed": 0, "result": "equal", "wrong": [], "drawn": "", "count": 2}\n{"seed": 1, "resu')

    def save(seed: int) -> tuple[list[str], str, int]:
        assert seed != 0, "it is known"
        if seed == 1:
            raise RuntimeError("out of luck")
        return ["weight by 1e-3"], "this and that", 1

    monkeypatch.setattr(fuzz_saving, "save", save)
    assert [line["seed"] for line in fuzz("save", range(3), out)] == [1, 2]
    told = capsys.readouterr().out
    assert "out of luck" in told
    assert "seed 2 different: weight by 1e-3\n  this and that" in told
    assert told.splitlines()[-1].split()[:6] == ["save", "3", "1", "1", "1", "3"]
    assert [line["seed"] for line in fuzz("save", range(3), out)] == [1, 2]
