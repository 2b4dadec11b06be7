"""Run folders as `llqr train` would leave them, with whatever in them that a test needs."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from llqr_lab.experiments.presets import resolve

Line = dict[str, Any]


def made_run(
    runs: Path,
    method: str = "base",
    seed: int = 0,
    lines: Sequence[Line] | None = None,
    times: Sequence[Line] | None = None,
    *,
    preset: str = "cifar10-resnet18-sgdm",
    finished: bool = True,
    diverged: bool = False,
    settings: dict[str, Any] | None = None,
    named: str = "",
    diagnostics: Sequence[Line] = (),
) -> Path:
    """A run of a preset at --scale cpu, under a name of one's own if wanted; what it measured is made up."""
    number = len(list(runs.rglob("config.toml"))) if runs.exists() else 0
    folder = runs / f"run-{number}"
    folder.mkdir(parents=True)
    config = resolve(preset, "cpu", method, seed, settings or {})
    label = named or config.label
    table = tomllib.loads(config.to_toml()) | ({"method": named} if named else {})
    folder.joinpath("config.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    lines = falling(60, seed, 0.1 * len(method)) if lines is None else lines
    times = [{"seconds": 0.5 * line.get("step", 0)} for line in lines] if times is None else times
    for name, content in (("metrics", lines), ("times", times), ("diagnostics", diagnostics)):
        if content:
            text = "".join(json.dumps(line) + "\n" for line in content)
            folder.joinpath(f"{name}.jsonl").write_text(text, encoding="utf-8")
    if finished:
        last = {**lines[-1], **times[-1]}
        result = {
            "preset": preset,
            "scale": "cpu",
            "method": label,
            "score": "test_accuracy",
            "model": "resnet20",
            "data": "cifar10",
            "batch": 128,
            "clock": "processor",
            "seed": seed,
            "steps": lines[-1]["step"],
            "seconds": times[-1]["seconds"],
            "diverged": diverged,
            "last": last,
        }
        folder.joinpath("result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def falling(count: int, seed: int, shift: float = 0.0, every: int = 50) -> list[Line]:
    """Metrics of a training that goes well, with something like noise that is the same each time."""
    lines = []
    for number in range(1, count + 1):
        noise = 0.05 * math.sin(12.9898 * number + 78.233 * (seed + 1))
        loss = 2.3 * math.exp(-3 * number / count) + 0.2 + 0.1 * shift + noise
        lines.append(
            {"step": every * number, "train_loss": loss, "test_loss": loss + 0.1, "test_accuracy": 1 - loss / 3}
        )
    return lines


def diagnosed(count: int = 20, blocks: Sequence[str] = ("stem.weight", "stages.0.weight", "head.weight")) -> list[Line]:
    """Diagnostics of U that moves away from the identity."""
    return [
        {
            "step": 100 * number,
            "trouble": None,
            "quantiles": [0.0, 0.25, 0.5, 0.75, 1.0],
            "spectra": {
                block: [(1 + number / 10) ** (power * (place + 1) / 2) for power in (-2, -1, 0, 1, 2)]
                for place, block in enumerate(blocks)
            },
            "cosine": {"gradient": 0.2 + 0.01 * number, "optimizer": 0.5 + 0.02 * number},
            "layers": {"head": {"cosine": 0.3}},
            "fraction": 0.4 + 0.01 * number,
            "staleness": None if number == 1 else 0.1 / number,
        }
        for number in range(1, count + 1)
    ]
