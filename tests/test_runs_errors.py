"""Promise: bad input is told in a sentence that says what to do, before any work is lost; a run that was there stays."""

from __future__ import annotations

import json
import resource
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from llqr_lab.cli import app
from llqr_lab.errors import RunError
from llqr_lab.experiments import command
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.loop import train
from llqr_lab.experiments.presets import resolve


def llqr(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})


def refused(*arguments: str) -> str:
    result = llqr(*arguments)
    assert result.exit_code in (1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result.output


def smoke(runs: Path, *more: str) -> tuple[str, ...]:
    return ("train", "grokking-add", "--scale=smoke", f"--runs={runs}", "--threads=1", *more)


def begun(folder: Path, steps: int = 6) -> RunFolder:
    """A run that stopped after some checkpoints."""

    class StopError(Exception):
        pass

    def report(step: int, steps: int, metrics: object) -> None:
        if step == 4:
            raise StopError

    config = resolve("grokking-add", "smoke", "base", 0, {"steps": steps, "evaluate_every": 1})
    run = RunFolder(folder)
    with pytest.raises(StopError):
        train(config, run, None, torch.device("cpu"), checkpoint_seconds=0, report=report)
    assert run.checkpoint.exists()
    return run


def resumed(run: RunFolder, told: list[str] | None = None) -> None:
    config = resolve("grokking-add", "smoke", "base", 0, {"steps": 6, "evaluate_every": 1})
    train(config, run, None, torch.device("cpu"), warn=(told if told is not None else []).append)


def test_a_wrong_data_folder(tmp_path: Path) -> None:
    arguments = ("train", "cifar10-resnet18-sgdm", "--scale=cpu", f"--runs={tmp_path / 'runs'}")
    said = refused(*arguments, f"--data={tmp_path / 'nowhere'}")
    assert "cifar10.npz" in said
    assert "cifar-10-binary.tar.gz" in said
    said = refused("train", "shakespeare-gpt-sgdm", f"--runs={tmp_path / 'runs'}")
    assert "--data FOLDER or LLQR_DATA" in said
    assert not (tmp_path / "runs").exists(), "a run that can't begin leaves nothing behind"


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tinyshakespeare.txt").write_bytes(b"")
    said = refused("train", "shakespeare-gpt-sgdm", f"--runs={tmp_path / 'runs'}", f"--data={tmp_path}")
    assert "tinyshakespeare.txt' is empty" in said


def test_labels_out_of_range(tmp_path: Path) -> None:
    pictures, labels = np.zeros((20, 32, 32, 3), np.uint8), np.arange(20) % 11
    np.savez(tmp_path / "cifar10.npz", x_train=pictures, y_train=labels, x_test=pictures, y_test=labels % 10)
    said = refused("train", "cifar10-resnet18-sgdm", f"--runs={tmp_path / 'runs'}", f"--data={tmp_path}")
    assert "labels run from 0 to 10; of 10 classes they must be 0 to 9" in said


def test_unknown_names_have_suggestions(tmp_path: Path) -> None:
    assert "did you mean grokking-add" in refused("train", "groking-add")
    assert "did you mean kfac-ngd" in refused(*smoke(tmp_path, "--method=kfac-nd"))
    assert "did you mean smoke" in refused("train", "grokking-add", "--scale=smok")
    assert "did you mean width" in refused(*smoke(tmp_path, "--set", "model.widht=8"))
    assert "no setting 'data.q'" in refused(*smoke(tmp_path, "--set", "data.q=8"))
    assert "name=value" in refused(*smoke(tmp_path, "--set", "steps"))
    assert "did you mean damping" in refused("sweep", "grokking-add", "--ablation=dampin")
    assert "--device gpu" in refused(*smoke(tmp_path, "--device=gpu"))
    assert "--device meta" in refused(*smoke(tmp_path, "--device=meta"))
    for seeds in ("a", "3-1", "0-99999999999", "4294967296", "1-"):
        assert "aren't seeds" in refused("sweep", "grokking-add", f"--seeds={seeds}")
    assert "name=value" in refused("sweep", "grokking-add", "--set", "base.lr")
    assert "did you mean curves" in refused("figure", "curve", "grokking-add", f"--output={tmp_path / 'a.png'}")
    assert "did you mean fashion" in refused("train", "fashion-mlp", "--set", "data.name=fashin")
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_with_an_unknown_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(resolve("grokking-add", "smoke", "base", 0).to_toml() + "\n[bse]\nlr = 1.0\n", encoding="utf-8")
    said = refused("train", str(path), f"--runs={tmp_path / 'runs'}")
    assert "mine.toml': there is no setting 'bse': did you mean base" in said
    assert "there is no file" in refused("train", str(tmp_path / "other.toml"))


def test_a_configuration_of_one_s_own_runs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(resolve("grokking-add", "smoke", "kfac-ngd", 0).to_toml(), encoding="utf-8")
    own = ("train", str(path), f"--runs={tmp_path / 'runs'}", "--threads=1")
    result = llqr(*own, "--set", "steps=2", "--seed=3")
    assert result.exit_code == 0, result.output
    # it doesn't pass for a run of the preset that it was copied from
    assert (tmp_path / "runs" / "mine" / "own" / "own+steps=2" / "seed-3" / "result.json").exists()
    assert "--method is for presets" in refused(*own, "--method=base")
    assert "--scale is for presets" in refused(*own, "--scale=paper")


def test_runs_are_not_overwritten_nor_mixed(tmp_path: Path) -> None:
    assert llqr(*smoke(tmp_path)).exit_code == 0
    assert "go on with --resume, or remove the folder" in refused(*smoke(tmp_path))
    said = llqr(*smoke(tmp_path, "--resume"))
    assert said.exit_code == 0
    assert "is done" in said.output
    config = tmp_path / "grokking-add" / "smoke" / "base" / "seed-0" / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace("batch = 16", "batch = 32"), encoding="utf-8")
    assert "other settings than were asked for (batch: 32 and 16)" in refused(*smoke(tmp_path, "--resume"))
    config.write_text("batch", encoding="utf-8")
    assert "isn't TOML" in refused(*smoke(tmp_path, "--resume"))


def test_a_run_says_what_it_does_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal too: the method, the step it begins at, lines of progress, and the command after Ctrl-C."""
    shown, asked = command.shown, list[bool]()

    def interrupting(metrics: Mapping[str, Any]) -> str:
        if metrics.get("refits") == 1 and not asked:
            asked.append(True)
            signal.raise_signal(signal.SIGINT)
        return shown(metrics)

    monkeypatch.setattr(command, "LINE_SECONDS", 0.0)
    own = smoke(tmp_path / "my runs", "--method=default", "--set", "steps=3", "--seed=1")
    monkeypatch.setattr(sys, "argv", ["/bin/llqr", *own, "--resume"])
    with monkeypatch.context() as patched:
        patched.setattr(command, "shown", interrupting)
        stopped = llqr(*own, "--resume")
    assert stopped.exit_code == 128 + signal.SIGINT
    assert "method default+steps=3: LLQR around adamw, nothing set" in stopped.output
    assert "no checkpoint to go on from: beginning at step 0 of 3" in stopped.output
    assert "step 1 of 3, loss" in stopped.output
    assert "The run was stopped after step 1 of 3, which is saved" in stopped.output
    again = shlex.split(stopped.output.splitlines()[-1])
    assert again == ["llqr", *own, "--resume"]
    ended = llqr(*again[1:])
    assert ended.exit_code == 0, ended.output
    assert "Going on after step 1 of 3" in ended.output
    assert "adamw alone, without LLQR" in llqr(*smoke(tmp_path, "--set", "steps=1")).output


def test_two_processes_at_one_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    config = resolve("grokking-add", "smoke", "base", 0)
    run.begin(config)
    with run.locked(), pytest.raises(RunError, match="another process is at work"):
        train(config, RunFolder(tmp_path), None, torch.device("cpu"))


def test_settings_are_written_by_the_process_that_trains(tmp_path: Path) -> None:
    """Another one with other settings leaves none behind: it comes too late for the lock."""
    mine, theirs = (resolve("grokking-add", "smoke", "base", 0, {"steps": steps}) for steps in (2, 3))
    with RunFolder(tmp_path).locked(), pytest.raises(RunError, match="another process is at work"):
        train(theirs, RunFolder(tmp_path), None, torch.device("cpu"))
    assert not RunFolder(tmp_path).begun
    train(mine, RunFolder(tmp_path), None, torch.device("cpu"))
    with pytest.raises(RunError, match="other settings than were asked for"):
        train(theirs, RunFolder(tmp_path), None, torch.device("cpu"))


def test_edited_or_torn_metrics_are_noticed(tmp_path: Path) -> None:
    """When a run goes on, and when its results are shown; what was appended after the checkpoint is cut off as before."""
    whole, run = begun(tmp_path / "whole"), begun(tmp_path / "edited")
    resumed(whole)
    content = run.metrics.read_bytes()
    torn = b"\0" * 40 + content[40:]  # as of a disk that lost a page
    edited = content.replace(b'"train_loss": 2', b'"train_loss": 1')
    assert edited != content
    for other in (torn, edited):
        run.metrics.write_bytes(other)
        with pytest.raises(RunError, match=r"metrics\.jsonl isn't what it was: it has been edited, or damaged"):
            resumed(run)
    run.metrics.write_bytes(content + b'{"step": 99')
    resumed(run)
    assert run.metrics.read_bytes() == whole.metrics.read_bytes()

    assert "isn't what the run wrote" not in llqr("table", str(run.path)).output
    run.times.write_bytes(run.times.read_bytes().replace(b'"seconds": ', b'"seconds": 9'))
    assert "times.jsonl of the run in" in refused("table", str(run.path))
    page = tmp_path / "report.html"
    assert llqr("report", str(run.path), f"--output={page}").exit_code == 0
    assert "times.jsonl isn&#x27;t what the run wrote" in page.read_text(encoding="utf-8").replace("&#39;", "&#x27;")


def test_a_checkpoint_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    """Nothing, half of one, something else, or one with other weights than were written: what was measured stays."""
    run = begun(tmp_path)
    before, whole = run.metrics.read_bytes(), run.checkpoint.read_bytes()
    weights = torch.load(run.checkpoint, weights_only=True)["model"]["head.weight"]
    damaged, place = bytearray(whole), whole.find(weights.numpy().tobytes())
    damaged[place : place + 4] = bytes(4)
    torch.save({"lengths": [0, 0], "step": 3}, run.checkpoint)
    other = run.checkpoint.read_bytes()
    for broken in (b"", b"PK\x03\x04 half of it", b"not a checkpoint", whole[: len(whole) // 2], other, bytes(damaged)):
        run.checkpoint.write_bytes(broken)
        with pytest.raises(
            RunError, match=r"can't go on: 'checkpoint\.pt' can't be used .*Remove the folder to start over"
        ):
            resumed(run)
        assert run.metrics.read_bytes() == before
    run.checkpoint.write_bytes(whole)
    resumed(run)
    assert run.done


def test_another_number_of_threads_is_told(tmp_path: Path) -> None:
    run = begun(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    told: list[str] = []
    try:
        resumed(run, told)
    finally:
        torch.set_num_threads(before)
    assert "another number of threads" in told[0]


def test_models_that_can_t_be_built(tmp_path: Path) -> None:
    for change in ("model.width=15", "model.width=-16", 'model.width="abc"'):
        assert "the model can't be built" in refused(*smoke(tmp_path, "--set", change))
    assert list(tmp_path.iterdir()) == []


def test_a_long_label_has_a_folder_too(tmp_path: Path) -> None:
    changes = [f"--set={name}=1e-{number}" for name, number in (("base.lr", 3), ("base.weight_decay", 4))]
    many = [*changes, *(f"--set={name}=1" for name in ("clip_norm", "model.layers", "evaluate_every", "model.heads"))]
    result = llqr(*smoke(tmp_path, *many, "--set=data.train=0.555555555555", "--set=schedule.warmup=3"))
    assert result.exit_code == 0, result.output
    assert "base.weight_decay=0.0001" in llqr("table", str(tmp_path)).output


def test_lost_metrics_are_noticed(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.metrics.write_bytes(b"")
    with pytest.raises(RunError, match=r"metrics\.jsonl isn't what it was"):
        resumed(run)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    """torch.load(weights_only=True): a checkpoint that would call something is one that can't be used."""
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "touched",))  # type: ignore[return-value]

    run = begun(tmp_path / "run")
    torch.save(Evil(), run.checkpoint, pickle_module=pickle)
    with pytest.raises(RunError, match="can't go on"):
        resumed(run)
    assert not (tmp_path / "touched").exists()


def test_a_full_disk_leaves_a_run_that_can_go_on(tmp_path: Path) -> None:
    """A file that may not grow fails as one on a full disk does."""
    whole, run = begun(tmp_path / "whole"), begun(tmp_path / "full")
    resumed(whole)
    before = run.checkpoint.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = resolve("grokking-add", "smoke", "base", 0, {"steps": 6, "evaluate_every": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"couldn't be written .*make room, then go on with --resume"):
            train(config, run, None, torch.device("cpu"), checkpoint_seconds=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.checkpoint.read_bytes() == before
    resumed(run)
    assert run.metrics.read_bytes() == whole.metrics.read_bytes()


def test_a_run_that_diverges_ends_and_says_so(tmp_path: Path) -> None:
    result = llqr(*smoke(tmp_path, "--set", "base.lr=1e25"))
    assert result.exit_code == 0, result.output
    assert "diverged" in result.output
    shown = llqr("table", str(tmp_path)).output
    assert "0 of 1" in shown


def test_results_that_were_edited(tmp_path: Path) -> None:
    assert llqr(*smoke(tmp_path)).exit_code == 0
    kept = tmp_path / "kept.json"
    assert llqr("table", str(tmp_path), f"--save={kept}").exit_code == 0
    whole = json.loads(kept.read_text(encoding="utf-8"))
    edits = ({"steps": 0}, {"score": None}, {"last": 3}, {"curve": {"step": [1], "seconds": []}})
    for edit in (*edits, {"examples": "many"}, {"steps_to_target": "soon"}):
        kept.write_text(json.dumps({"runs": [{**whole["runs"][0], **edit}]}), encoding="utf-8")
        assert "isn't a file of results" in refused("table", str(kept))
    kept.write_text(json.dumps({"runs": ["a"]}), encoding="utf-8")
    assert "isn't a file of results" in refused("table", str(kept))
    kept.write_text(json.dumps({"runs": [{**whole["runs"][0], "method": "[/red]"}]}), encoding="utf-8")
    assert "[/red]" in llqr("table", str(kept)).output


def test_nothing_to_show(tmp_path: Path) -> None:
    assert "no finished runs" in refused("table", str(tmp_path))
    assert "name the folder of runs" in refused("table", str(tmp_path / "nowhere"))
    (tmp_path / "file.json").write_text("[]", encoding="utf-8")
    assert "isn't a file of results" in refused("table", str(tmp_path / "file.json"))
    output = f"--output={tmp_path / 'a.png'}"
    assert "no finished runs" in refused("figure", "curves", "grokking-add", f"--source={tmp_path}", output)
