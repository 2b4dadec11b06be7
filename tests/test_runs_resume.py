"""Promise: a run that is killed at any point and resumed gives the metrics of one that wasn't, byte for byte."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from llqr_lab.experiments import loop
from llqr_lab.experiments.config import Config
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.loop import StoppedError, listening, train
from llqr_lab.experiments.presets import resolve
from llqr_lab.tasks import Grokking
from ranks import PRELOADED

RUNS = {
    "default": resolve("cifar10-resnet18-sgdm", "smoke", "default", 0, {"steps": 48, "evaluate_every": 3}),
    "grokking": resolve("grokking-add", "smoke", "kfac-ngd", 0, {"steps": 48, "evaluate_every": 3, "llqr.every": 7}),
    "pictures": resolve(
        "cifar10-resnet18-sgdm", "smoke", "ekfac-newton", 1, {"steps": 48, "evaluate_every": 3, "llqr.every": 6}
    ),
    # dropout draws from the global random numbers, and the batches are of unequal sizes
    "translation": resolve(
        "multi30k-transformer-adamw",
        "smoke",
        "diagonal-ngd",
        2,
        {"steps": 48, "evaluate_every": 4, "llqr.every": 5},
    ),
}


def run(config: Config, folder: Path, at_step: int = 0, there: Event | None = None, workers: int = 0) -> None:
    """A whole run with a checkpoint after every step; it says when it has come to a step."""
    torch.set_num_threads(1)

    def report(step: int, steps: int, metrics: object) -> None:
        if there is not None and step >= at_step:
            there.set()
            time.sleep(0.01)  # so that it doesn't end before it is killed, however fast the machine is

    train(config, RunFolder(folder), None, torch.device("cpu"), workers, checkpoint_seconds=0.0, report=report)


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Processes that have everything imported when they begin, so that a test can kill many of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def killed(server: ForkServerContext, config: Config, folder: RunFolder, at_step: int, delay: float) -> int:
    """Kill a run some time after it has come to a step; the step that its checkpoint is of."""
    there = server.Event()
    process = server.Process(target=run, args=(config, folder.path, at_step, there))
    process.start()
    assert there.wait(120)
    process.join(delay)
    assert process.is_alive(), "it should be killed, not end by itself"
    process.kill()
    process.join()
    return int(torch.load(folder.checkpoint, weights_only=True)["step"]) if folder.checkpoint.exists() else 0


@pytest.mark.parametrize("name", RUNS)
def test_ten_random_kills_change_nothing(name: str, server: ForkServerContext, tmp_path: Path) -> None:
    config, whole, stopped = RUNS[name], RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "stopped")
    run(config, whole.path)
    draw = random.Random(name)
    reached = [0]
    for kill in range(10):
        # so that there is room for the kills to come: it goes on while it is being killed
        furthest = max(reached[-1] + 1, config.steps * (kill + 1) // 12)
        at_step = draw.randint(reached[-1] + 1, furthest)
        reached.append(killed(server, config, stopped, at_step, draw.uniform(0, 0.02)))
        assert not stopped.done
    assert reached == sorted(reached)
    assert 0 < reached[-1] < config.steps
    run(config, stopped.path)
    assert stopped.metrics.read_bytes() == whole.metrics.read_bytes()
    assert len(stopped.read_metrics()) == -(-config.steps // config.evaluate_every)
    assert stopped.done


@pytest.mark.parametrize("step", [1, 6, 7, 8])
def test_kills_around_a_refit(step: int, server: ForkServerContext, tmp_path: Path) -> None:
    """The eighth step begins with a refit, and so does the first."""
    config, stopped = RUNS["grokking"].changed({"steps": 24}), RunFolder(tmp_path / "stopped")
    run(config, tmp_path / "whole")
    killed(server, config, stopped, step, 0.0)
    run(config, stopped.path)
    assert stopped.metrics.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_grokking_is_over_after_the_training_set_was_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """95% test accuracy before that doesn't count; after it, it does, also where the training accuracy is lower again, and
    where the run was stopped in between."""
    accuracies = [(0.5, 0.96), (1.0, 0.2), (0.5, 0.5), (0.5, 0.96), (1.0, 1.0)]  # of training and test, step by step
    config = resolve("grokking-add", "smoke", "base", 0, {"steps": 5, "evaluate_every": 1})
    now = [0]
    monkeypatch.setattr(loop, "right_answers", lambda *_: (int(100 * accuracies[now[0]][0]), 100))
    monkeypatch.setattr(Grokking, "evaluate", lambda *_: {"test_accuracy": accuracies[now[0]][1]})

    def trained(folder: str, stop: int | None = None) -> bytes:
        def report(step: int, steps: int, metrics: object) -> None:
            now[0] = step
            if step == stop:
                signal.raise_signal(signal.SIGINT)

        result = train(config, RunFolder(tmp_path / folder), None, torch.device("cpu"), report=report)
        assert result["steps"] == result["steps_to_target"] == 4
        assert result["steps_to_overfit"] == 2
        return RunFolder(tmp_path / folder).metrics.read_bytes()

    with pytest.raises(StoppedError):
        trained("stopped", stop=3)
    assert trained("stopped") == trained("whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_loses_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """It ends its step, saves, and says so, however far the next checkpoint was; and so it goes on."""
    config, stopped = RUNS["grokking"].changed({"steps": 8}), RunFolder(tmp_path / "stopped")
    run(config, tmp_path / "whole")
    before = signal.getsignal(number)

    def report(step: int, steps: int, metrics: object) -> None:
        if step == 5:
            signal.raise_signal(number)

    with pytest.raises(StoppedError, match="after step 5 of 8, which is saved") as error:
        train(config, stopped, None, torch.device("cpu"), report=report)
    assert error.value.number == number
    assert signal.getsignal(number) is before
    assert torch.load(stopped.checkpoint, weights_only=True)["step"] == 5
    steps: list[int] = []
    train(config, stopped, None, torch.device("cpu"), report=lambda step, *_: steps.append(step))
    assert steps == [5, 6, 7, 8]
    assert stopped.metrics.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_a_second_ctrl_c_ends_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), listening() as asked:  # noqa: PT012
        assert asked() == 0
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # as a sweep sends it too
        assert asked() == signal.SIGTERM
        signal.raise_signal(signal.SIGINT)


def test_processes_that_make_batches_change_nothing(tmp_path: Path) -> None:
    """Nor do they where dropout draws from the same random numbers."""
    config = RUNS["translation"].changed({"steps": 6, "model.dropout": 0.3})
    for workers in (0, 1):
        run(config, tmp_path / str(workers), workers=workers)
    assert (tmp_path / "0" / "metrics.jsonl").read_bytes() == (tmp_path / "1" / "metrics.jsonl").read_bytes()


def test_when_checkpoints_are_written_changes_nothing(tmp_path: Path) -> None:
    config = RUNS["grokking"].changed({"steps": 12})
    run(config, tmp_path / "often")
    train(config, RunFolder(tmp_path / "never"), None, torch.device("cpu"), checkpoint_seconds=1e9)
    assert (tmp_path / "often" / "metrics.jsonl").read_bytes() == (tmp_path / "never" / "metrics.jsonl").read_bytes()
