"""Promise: examples/ddp.py trains on several ranks, by DDP and by FSDP2, and goes on from its checkpoints with more of them."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from ranks import on_ranks

EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp.py"


def run(*arguments: str) -> str:
    """What the example prints on this rank, in the process group that is there."""
    printed = io.StringIO()
    given = mock.patch.object(sys, "argv", [str(EXAMPLE), *arguments])
    kept = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with given, kept, contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def both_ways(folder: str) -> list[str]:
    plain = run("--epochs", "1", "--folder", f"{folder}/ddp")
    return [plain, run("--epochs", "1", "--folder", f"{folder}/fsdp", "--fsdp")]


def resumed(folder: str) -> list[str]:
    return [run("--epochs", "2", "--folder", f"{folder}/{way}", "--resume", *flag) for way, flag in WAYS.items()]


LINE = r"epoch (\d): accuracy (0\.\d+), (\d+) refits"
WAYS: dict[str, list[str]] = {"ddp": [], "fsdp": ["--fsdp"]}


def test_the_example(tmp_path: Path) -> None:
    (plain, sharded), second = on_ranks(2, tmp_path / "two", both_ways, str(tmp_path))
    assert second == ["", ""]
    assert plain == sharded
    ((epoch, accuracy, refits),) = re.findall(LINE, plain)
    assert (epoch, refits) == ("0", "17")  # 24 steps
    assert float(accuracy) > 0.6
    for words in on_ranks(3, tmp_path / "three", resumed, str(tmp_path))[0]:
        ((epoch, later_accuracy, refits),) = re.findall(LINE, words)
        assert (epoch, refits) == ("1", "23"), "of 24 steps an epoch, those of the first count in the second"
        assert float(later_accuracy) > float(accuracy)
