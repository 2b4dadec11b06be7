"""Draws README's figure from results/race.json, and writes README's table: python docs/figures/readme.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from llqr_lab.bench.race_page import draw

ROOT = Path(__file__).parent.parent.parent
TASKS = {
    "shakespeare": "GPT, tinyshakespeare",
    "multi30k": "transformer, Multi30k",
    "cifar10": "ResNet-8, CIFAR-10",
    "fashion-convnet": "convnet, Fashion-MNIST",
    "fashion-mlp": "MLP, Fashion-MNIST",
    "modular-addition": "transformer, modular addition (steps to 95%)",
}
TABLE = re.compile(r"^\| task .*?\n\n", re.DOTALL | re.MULTILINE)


def rows() -> list[dict[str, Any]]:
    """Around AdamW and SGDM at their own best rates, nothing of LLQR tuned."""
    untuned = json.loads((ROOT / "results" / "race.json").read_text(encoding="utf-8"))["untuned"]
    return [row for row in untuned if row["base"] in ("AdamW", "SGDM")]


def table() -> str:
    by_task = {(row["task"], row["base"]): row for row in rows()}
    lines = ["| task | AdamW → with LLQR | steps | time | SGDM → with LLQR | steps | time |", "|" + " --- |" * 7]
    for task, words in TASKS.items():
        cells = [words]
        for base in ("AdamW", "SGDM"):
            row = by_task[task, base]
            alone, turned = (_result(row[side], "steps" in words) for side in ("alone", "llqr"))
            cells += [f"{alone} → {turned}", f"×{row['steps_ratio']:.2f}", f"×{row['seconds_ratio']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n"


def _result(side: dict[str, Any], by_steps: bool) -> str:
    return f"{median(side['steps']):.0f}" if by_steps else f"{side['train_loss']:.3g}"


if __name__ == "__main__":
    draw(rows(), ROOT / "docs" / "figures" / "readme.png")
    readme = ROOT / "README.md"
    readme.write_text(TABLE.sub(lambda _: table(), readme.read_text(encoding="utf-8")), encoding="utf-8")
