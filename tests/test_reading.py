"""Whoever follows a step through the code passes few files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import llqr
from llqr import LLQR

ROOT = Path(llqr.__file__).parent
MOST_LINES = 450


def test_a_step_passes_eight_files_and_a_refit_fifteen() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = LLQR(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, every=3)
    inputs, targets = torch.randn(8, 5), torch.randint(3, (8,))
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            files.add(frame.f_code.co_filename)

    for step in range(6):
        files.clear()
        refits = optimizer.stats.refits
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        finally:
            sys.setprofile(before)
        refitted = optimizer.stats.refits > refits
        assert refitted == (step % 3 == 0)
        assert 0 < len(files) <= (15 if refitted else 8), sorted(files)


def test_no_file_is_longer_than_a_story() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {name: count for name, count in lengths.items() if count > MOST_LINES} == {}
