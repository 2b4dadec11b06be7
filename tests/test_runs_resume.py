"""Promise: a run that is killed at any point and resumed gives the metrics of one that wasn't, byte for byte."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from llqr_lab.experiments.config import Config
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.presets import resolve

RUNS = {
    "grokking": resolve("grokking-add", "smoke", "kfac-ngd", 0, {"steps": 30, "evaluate_every": 3, "llqr.every": 7}),
    "pictures": resolve(
        "cifar10-resnet18-sgdm", "smoke", "ekfac-newton", 1, {"steps": 16, "evaluate_every": 3, "llqr.every": 6}
    ),
    # dropout draws from the global random numbers, and the batches are of unequal sizes
    "translation": resolve(
        "multi30k-transformer-adamw",
        "smoke",
        "diagonal-ngd-scalefree",
        2,
        {"steps": 20, "evaluate_every": 4, "llqr.every": 5},
    ),
}


def run(config: Config, folder: Path, checkpoint_seconds: float = 0.0, at_step: int = 0) -> None:
    """A whole run, or one that waits forever once it has come to a step."""
    from llqr_lab.experiments.loop import train

    torch.set_num_threads(1)

    def report(step: int, steps: int, metrics: object) -> None:
        if step == at_step:
            time.sleep(1000)

    train(config, RunFolder(folder), None, torch.device("cpu"), checkpoint_seconds=checkpoint_seconds, report=report)


@pytest.fixture(scope="module")
def server() -> multiprocessing.context.ForkServerContext:
    """Processes that have everything imported when they begin, so that a test can kill many of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["llqr_lab.experiments.loop", "torch.utils.tensorboard", "kornia.augmentation"])
    return context


def killed(server: multiprocessing.context.ForkServerContext, seconds: float, *arguments: object) -> bool:
    """Start a run and kill it after so long; whether it was still at work."""
    process = server.Process(target=run, args=arguments)
    process.start()
    process.join(seconds)
    alive = process.is_alive()
    process.kill()
    process.join()
    assert alive or process.exitcode == 0
    return alive


@pytest.mark.parametrize("name", RUNS)
def test_ten_random_kills_change_nothing(
    name: str, server: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    config, whole, stopped = RUNS[name], RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "stopped")
    begin = time.monotonic()
    process = server.Process(target=run, args=(config, whole.path))
    process.start()
    process.join()
    assert process.exitcode == 0
    duration = time.monotonic() - begin
    draw = random.Random(name)
    kills = 0
    while kills < 10:
        if not killed(server, draw.uniform(0, 0.7) * duration, config, stopped.path):
            # it got to its end between two kills: once more from the start
            shutil.rmtree(stopped.path)
        kills += 1
    run(config, stopped.path)
    assert stopped.metrics.read_bytes() == whole.metrics.read_bytes()
    assert len(stopped.read_metrics()) == -(-config.steps // config.evaluate_every)
    assert stopped.done


@pytest.mark.parametrize("step", [1, 6, 7, 8, 20])
def test_kills_just_before_at_and_after_a_refit(
    step: int, server: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    config, stopped = RUNS["grokking"].changed({"steps": 24}), RunFolder(tmp_path / "stopped")
    run(config, tmp_path / "whole")
    process = server.Process(target=run, args=(config, stopped.path, 0.0, step))
    process.start()
    while len(stopped.read_metrics()) < step // 3 or not any(path.exists() for path in stopped.checkpoints):
        if step == 1:
            break
        time.sleep(0.02)
    process.kill()
    process.join()
    run(config, stopped.path)
    assert stopped.metrics.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_when_checkpoints_are_written_changes_nothing(tmp_path: Path) -> None:
    config = RUNS["grokking"].changed({"steps": 12})
    for name, seconds in (("often", 0.0), ("never", 1e9)):
        run(config, tmp_path / name, seconds)
    assert (tmp_path / "often" / "metrics.jsonl").read_bytes() == (tmp_path / "never" / "metrics.jsonl").read_bytes()


def test_the_events_of_tensorboard_are_those_of_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = RUNS["grokking"].changed({"steps": 12})
    run(config, tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    lines = RunFolder(tmp_path).read_metrics()
    assert [event.step for event in events.Scalars("train_loss")] == [line["step"] for line in lines]
    assert [event.value for event in events.Scalars("train_loss")] == pytest.approx(
        [line["train_loss"] for line in lines]
    )
