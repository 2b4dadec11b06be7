"""Promise: `diagnostics.every` writes what the steps were worth, and changes nothing of the run, stopped or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llqr_lab.errors import ConfigError
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.loop import train
from llqr_lab.experiments.presets import resolve

LOOKED = {"diagnostics.every": 3, "diagnostics.products": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "grokking": {"preset": "grokking-add", "method": "kfac-ngd", "changes": {"steps": 8, "llqr.every": 2}},
    # dropout draws from the global random numbers, tokens are padded, gradients are clipped
    "translation": {
        "preset": "multi30k-transformer-adamw",
        "method": "diagonal-ngd",
        "changes": {"steps": 8, "llqr.every": 3, "clip_norm": 0.5},
    },
    "batchnorm": {"preset": "cifar10-resnet18-sgdm", "method": "base", "changes": {"steps": 5, "evaluate_every": 5}},
}


class StoppedError(Exception):
    """A run that is stopped."""


def run(name: str, path: Path, looked: bool, stop_at: int = -1) -> RunFolder:
    """A whole run, or one that is stopped right after this step, with a checkpoint after every step."""
    setting = SETTINGS[name]
    config = resolve(setting["preset"], "smoke", setting["method"], 0, setting["changes"] | (LOOKED if looked else {}))
    folder = RunFolder(path)

    def report(step: int, steps: int, metrics: object) -> None:
        if step == stop_at:
            raise StoppedError

    train(config, folder, None, torch.device("cpu"), 0, checkpoint_seconds=0.0, report=report)
    return folder


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.diagnostics.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", SETTINGS)
def test_looking_changes_nothing_and_is_the_same_after_a_stop(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain, looked = run(name, tmp_path / "plain", False), run(name, tmp_path / "looked", True)
    assert looked.metrics.read_bytes() == plain.metrics.read_bytes()
    assert not plain.diagnostics.exists()
    with pytest.raises(StoppedError):
        run(
            name, tmp_path / "stopped", True, stop_at=4
        )  # after the second look, whose line is cut off and written again
    stopped = run(name, tmp_path / "stopped", True)
    assert stopped.metrics.read_bytes() == plain.metrics.read_bytes()
    assert stopped.diagnostics.read_bytes() == looked.diagnostics.read_bytes()
    steps = SETTINGS[name]["changes"]["steps"]
    found = lines(looked)
    assert [line["step"] for line in found] == list(range(0, steps, 3))
    for line in found:
        assert line["trouble"] is None
        assert 0 < line["cosine"]["gradient"] <= 1
        assert line["fraction_along"]["gradient"] == pytest.approx(line["cosine_h"]["gradient"] ** 2, rel=0.3)
        assert {"method", "residual", "converged"} == set(line["exact"])
        assert "optimizer" in line["actual"]
    with_u = name != "batchnorm"
    assert bool(found[-1]["spectra"]) == with_u
    assert (found[-1]["staleness"] is not None) == with_u
    assert ("preconditioned" in found[-1]["cosine"]) == with_u


def test_settings_that_can_not_be() -> None:
    with pytest.raises(ConfigError, match=r"'diagnostics\.products' should be positive"):
        resolve("grokking-add", "smoke", "base", 0, {"diagnostics.products": 0})
    with pytest.raises(ConfigError, match=r"'diagnostics\.every' can't be negative"):
        resolve("grokking-add", "smoke", "base", 0, {"diagnostics.every": -1})
    with pytest.raises(ConfigError, match=r"there is no setting 'diagnostics\.evry'.*every"):
        resolve("grokking-add", "smoke", "base", 0, {"diagnostics.evry": 1})
