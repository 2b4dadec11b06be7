"""Promises: a report says what became of every run, has the tables of `llqr table`, and nothing in a run can hurt it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from llqr_lab.cli import app
from llqr_lab.experiments.collect import collected
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.loop import SPENT
from llqr_lab.experiments.table import cells, verdict
from llqr_lab.report.page import experiments
from llqr_lab.report.runs import columns, curve, found_runs
from made_runs import diagnosed, falling, made_run

EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>&amp;\"'<!--"


def llqr(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})


def report(*sources: Path, output: Path) -> str:
    result = llqr("report", *map(str, sources), "-o", str(output))
    assert result.exit_code == 0, result.output
    assert not output.with_name(output.name + ".part").exists()
    return output.read_text(encoding="utf-8")


def refused(*arguments: str) -> str:
    result = llqr("report", *arguments)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return result.output


class Reader(HTMLParser):
    """The page's elements, its words by the element that holds them, and its rows of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.held: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.held.setdefault(self._open[-1] if self._open else "", []).append(data)
        if any(tag in self._open for tag in ("th", "td")):
            self.rows[-1][-1] = " ".join((self.rows[-1][-1] + data).split())


def carried(text: str) -> Any:
    """What the page's scripts are given."""
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_tables_are_those_of_llqr_table(tmp_path: Path) -> None:
    for method in ("base", "ekfac-ngd"):
        for seed in range(3):
            made_run(tmp_path / "runs", method, seed)
    text = report(tmp_path / "runs", output=tmp_path / "report.html")
    results = collected(tmp_path / "runs")
    rows = Reader(text).rows
    for row in cells("cifar10-resnet18-sgdm", results):
        assert [" ".join(cell.split()) or "–" for cell in row] in rows
    assert "96.37 ± 0.05" in text
    said = verdict(results)
    assert said[1:] in text
    # a file of results that was kept has the same tables
    kept = tmp_path / "kept.json"
    assert llqr("table", str(tmp_path / "runs"), f"--save={kept}").exit_code == 0
    again = Reader(report(kept, output=tmp_path / "again.html"))
    for row in cells("cifar10-resnet18-sgdm", results):
        assert [" ".join(cell.split()) or "–" for cell in row] in again.rows
    # and says nothing new of runs that are there
    both = report(tmp_path / "runs", kept, output=tmp_path / "both.html")
    assert "6 runs · made" in " ".join(both.split())


def test_settings_that_differ_are_a_table_and_the_others_a_list(tmp_path: Path) -> None:
    made_run(tmp_path, "base")
    made_run(tmp_path, "kfac-ngd", settings={"llqr.every": 10})
    made_run(tmp_path, "kfac-ngd")
    made_run(tmp_path, "ekfac-ngd")
    page = Reader(report(tmp_path, output=tmp_path / "report.html"))
    assert ["method", "llqr.structure", "llqr.every"] in page.rows
    assert ["base", "–", "–"] in page.rows
    assert ["kfac-ngd+llqr.every=10", "kfac", "10"] in page.rows
    assert "base.lr" in page.held["dt"]
    assert "llqr.ema" in page.held["dt"]


def test_what_became_of_runs(tmp_path: Path) -> None:
    made_run(tmp_path, "base", 0)
    made_run(tmp_path, "base", 1, diverged=True, lines=[*falling(5, 1), {"step": 300, "train_loss": None}])
    stopped = made_run(tmp_path, "base", 2, finished=False)
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3050, "train_lo')
    failed = made_run(tmp_path, "base", 3, finished=False)
    (failed / "run.log").write_text("step 3\nRuntimeError: out of <memory>\n", encoding="utf-8")
    damaged = made_run(tmp_path, "base", 4, finished=False)
    whole = (damaged / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (damaged / "metrics.jsonl").write_text("\n".join([*whole[:9], whole[9][:20], *whole[10:], ""]), encoding="utf-8")
    unreadable = made_run(tmp_path, "base", 5)
    (unreadable / "config.toml").write_text("= what", encoding="utf-8")
    half = made_run(tmp_path, "base", 6)
    (half / "result.json").write_text("{", encoding="utf-8")
    made_run(tmp_path, "base", 7, lines=[], finished=False)
    running = made_run(tmp_path, "base", 8, finished=False)
    lost = made_run(tmp_path, "base", 9, finished=False)
    (lost / "metrics.jsonl").unlink()
    (lost / "metrics.jsonl").symlink_to("/proc/self/mem")  # a file that opens, and then can't be read
    with RunFolder(running).locked():
        page = Reader(report(tmp_path, output=tmp_path / "report.html"))
        assert RunFolder(running).running
    assert not RunFolder(running).running
    # rows of the last table: method, seed, status with its mark, …
    status = {
        row[1]: row[2].split()[-1] for row in page.rows if len(row) > 4 and row[0] == "base" and row[1].isdecimal()
    }
    assert status == {
        "0": "finished",
        "1": "diverged",
        "2": "stopped",
        "3": "failed",
        "4": "stopped",
        "6": "unreadable",
        "7": "stopped",
        "8": "running",
        "9": "stopped",
    }
    notes = [row[0] for row in page.rows if len(row) == 1]
    assert any("RuntimeError: out of <memory>" in note for note in notes)
    assert any("seed 4: 1 lines of metrics couldn't be read" in note for note in notes)
    assert any("train_loss wasn't a finite number 1 time" in note for note in notes)
    assert any("config.toml can't be read" in note for note in notes)
    assert any("result.json isn't whole" in note for note in notes)
    assert any("metrics.jsonl can't be read (Input/output error)" in note for note in notes)


def test_a_broken_line_takes_its_seconds_with_it(tmp_path: Path) -> None:
    folder = made_run(tmp_path, lines=falling(3, 0), finished=False)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "{", lines[2], ""]), encoding="utf-8")
    (run,) = found_runs([tmp_path])
    assert run.metrics["step"].tolist() == [50, 150]
    assert run.metrics["seconds"].tolist() == [25.0, 75.0]


def test_nothing_in_a_run_gets_out_of_its_place(tmp_path: Path) -> None:
    """Names, metrics, settings, logs and blocks that look like HTML are words in the page, in tables and in JSON."""
    lines = [
        {"step": 1, EVIL: 1.0, "\ud800": 2.0, "loss": 3.0},
        {"step": 2, EVIL: float("inf"), "loss": float("nan")},
    ]
    diagnostics = [{"step": 1, "cosine": {EVIL: 0.5}}]
    folder = made_run(tmp_path, named=EVIL, lines=lines, finished=False, diagnostics=diagnostics)
    (folder / "run.log").write_text(f"Error: {EVIL}\n", encoding="utf-8")
    config = (folder / "config.toml").read_text(encoding="utf-8")
    (folder / "config.toml").write_text(
        config.replace('preset = "cifar10-resnet18-sgdm"', f"preset = {json.dumps(EVIL)}")
        + f"\n[{json.dumps(EVIL)}]\n{json.dumps(EVIL)} = {json.dumps(EVIL)}\n",
        encoding="utf-8",
    )
    text = report(tmp_path, output=tmp_path / "report.html")
    page = Reader(text)
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert "img" not in {tag for tag, _ in page.elements}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert not [1 for _, attributes in page.elements if "style" in attributes], "the policy would not let it count"
    data = carried(text)
    assert EVIL in [metric["name"] for metric in data[0]["metrics"]]
    assert {method["label"] for metric in data[0]["metrics"] for method in metric["methods"]} == {EVIL}
    assert [metric["name"] for metric in data[0]["diagnostics"]] == [f"cosine.{EVIL}"]
    assert EVIL in page.held["h2"][0]
    body = text.split('id="payload">')[1]
    assert "<" not in body.split("</script>")[0]


def test_the_page_lets_no_other_script_run_and_loads_nothing(tmp_path: Path) -> None:
    made_run(tmp_path)
    text = report(tmp_path, output=tmp_path / "report.html")
    page = Reader(text)
    policy = next(attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    for content in (*scripts, *re.findall(r"<style>(.*?)</style>", text, re.DOTALL)):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" in policy
    for tag, attributes in page.elements:
        assert "src" not in attributes
        assert tag != "link"
        assert (attributes.get("href") or "#").startswith("#")
    # where uPlot is from is no address that is loaded
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"https://github.com/leeoniya/uPlot"}
    assert str(tmp_path) not in text


def test_what_is_drawn_is_what_was_measured(tmp_path: Path) -> None:
    lines = falling(6000, 0, every=1)
    lines[4321]["train_loss"] = 55.5
    made_run(tmp_path, lines=lines, seed=0)
    made_run(tmp_path, lines=falling(6000, 1, every=1), seed=1)
    (experiment,) = carried(report(tmp_path, output=tmp_path / "report.html"))
    (method,) = next(metric for metric in experiment["metrics"] if metric["name"] == "train_loss")["methods"]
    run = method["runs"][0]
    assert (method["label"], run["label"]) == ("base", "base, seed 0")
    assert len(run["step"]) == 1000
    assert run["mean"] == pytest.approx([lines[int(step) - 1]["train_loss"] for step in run["step"]], rel=1e-5)
    assert run["seconds"] == pytest.approx([0.5 * step for step in run["step"]])
    assert max(run["high"]) == max(method["high"]) == 55.5, "no spike is lost"


def test_a_curve_over_seeds() -> None:
    """Mean, smallest and largest at each step of the seeds that have it; what isn't finite is left out."""
    one = columns([{"step": step, "loss": float(step), "seconds": 2.0 * step} for step in (1, 2, 4)])
    other = columns([{"step": 2, "loss": 4.0}, {"step": 4, "loss": None}, {"step": 6, "loss": 1.0}])
    found = curve([one, other, columns([{"step": 9, "accuracy": 1.0}])], "loss", 100)
    assert found == {
        "step": [1.0, 2.0, 4.0, 6.0],
        "seconds": [2.0, 4.0, 8.0, None],
        "mean": [1.0, 3.0, 4.0, 1.0],
        "low": [1.0, 2.0, 4.0, 1.0],
        "high": [1.0, 4.0, 4.0, 1.0],
    }
    few = curve([one, other], "loss", 2)
    assert few is not None
    assert (few["step"], few["low"], few["high"]) == ([2.0, 6.0], [1.0, 1.0], [4.0, 4.0])
    assert curve([one], "accuracy", 2) is None


HUGE = 10**400


@pytest.mark.parametrize("command", ["report", "table"])
@pytest.mark.parametrize(
    "name", ["train_loss", "test_accuracy", "epoch", "seconds", "steps", "seed", "evaluation_seconds"]
)
def test_whole_numbers_beyond_all_floats(name: str, command: str, tmp_path: Path) -> None:
    """Wherever they are, they are shown as not finite, or the run is told to be broken."""
    lines = falling(5, 0)
    lines[-1][name] = HUGE
    made_run(tmp_path / "runs", lines=lines, times=[{"seconds": 1, name: HUGE}] * 5)
    folder = made_run(tmp_path / "runs", seed=1)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    (folder / "result.json").write_text(json.dumps({**result, name: HUGE}), encoding="utf-8")
    more = ["-o" if command == "report" else "--save", str(tmp_path / "written")]
    found = llqr(command, str(tmp_path / "runs"), *more)
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert found.exit_code == 0 or (command == "table" and "Error: the" in found.output)


def test_where_the_time_went(tmp_path: Path) -> None:
    """A refit is what the steps with one take beyond the others' mean: R - n (S - R)/(N - n)."""
    lines = [{"step": 100, "train_loss": 1.0, "refits": 9, "rejected": 1}]
    times = [{"seconds": 20.0, **dict(zip(SPENT, (11.0, 3.0, 2.0, 1.0), strict=True))}]
    made_run(tmp_path, "kfac-ngd", lines=lines, times=times)
    page = Reader(report(tmp_path, output=tmp_path / "report.html"))
    refits = 11.0 - 10 * (20.0 - 11.0) / 90
    assert ["method", "steps, s", "refits, s", "evaluation, s", "batches, s", "checkpoints, s"] in page.rows
    assert ["kfac-ngd", f"{20 - refits:.1f}", f"{refits:.1f}", "3.0", "2.0", "1.0"] in page.rows


def test_a_real_run_records_its_time_beside_its_metrics(tmp_path: Path) -> None:
    for method in ("base", "kfac-ngd"):
        arguments = (
            "train",
            "grokking-add",
            "--scale=smoke",
            f"--method={method}",
            f"--runs={tmp_path}",
            "--threads=1",
        )
        assert llqr(*arguments, "--set=evaluate_every=2", "--checkpoint-seconds=0").exit_code == 0
    (experiment,) = experiments(found_runs([tmp_path]))
    for run in experiment.runs:
        for name in SPENT:
            assert (np.diff(run.metrics[name]) >= 0).all()
            assert run.result is not None
            assert run.result[name] >= run.metrics[name][-1]
        assert (run.metrics["refit_step_seconds"] <= run.metrics["seconds"]).all()
    assert list(experiment.methods.values())[1][0].metrics["refit_step_seconds"][-1] > 0
    assert experiment.times[0][1:] == ["steps, s", "refits, s", "evaluation, s", "batches, s", "checkpoints, s"]
    metrics = (tmp_path / "grokking-add/smoke").rglob("metrics.jsonl")
    assert all("seconds" not in path.read_text(encoding="utf-8") for path in metrics)


def test_diagnostics_of_any_form(tmp_path: Path) -> None:
    made_run(tmp_path, "ekfac-ngd", diagnostics=diagnosed(20))
    odd = [
        {"step": 0, "spectra": "none", "trouble": "no <step>"},
        {"step": 6, "fraction": "?", "new": {"thing": 2.0}},
        {},
    ]
    made_run(tmp_path, "kfac-ngd", diagnostics=odd)
    text = report(tmp_path, output=tmp_path / "report.html")
    (experiment,) = carried(text)
    names = ["cosine.optimizer", "cosine.gradient", "fraction", "staleness", "new.thing", "layers.head.cosine"]
    assert [metric["name"] for metric in experiment["diagnostics"]] == names
    assert "kfac-ngd, seed 0: diagnostics at step 0: no <step>" in [row[0] for row in Reader(text).rows]


def test_bad_input_is_told(tmp_path: Path) -> None:
    output = ("-o", str(tmp_path / "report.html"))
    assert "there is no" in refused(str(tmp_path / "nowhere"), *output)
    (tmp_path / "empty").mkdir()
    assert "a run is a folder with a config.toml" in refused(str(tmp_path / "empty"), *output)
    (tmp_path / "some.json").write_text("[]", encoding="utf-8")
    assert "isn't a file of results" in refused(str(tmp_path / "some.json"), *output)
    (tmp_path / "none.json").write_text('{"runs": []}', encoding="utf-8")
    assert "there are no runs in what was named" in refused(str(tmp_path / "none.json"), *output)
    assert not (tmp_path / "report.html").exists()
    made_run(tmp_path / "runs")
    assert "doesn't exist; make it first" in refused(str(tmp_path / "runs"), "-o", str(tmp_path / "no" / "report.html"))
    assert "is a folder" in refused(str(tmp_path / "runs"), "-o", str(tmp_path))


def test_a_page_that_can_t_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "runs")
    output = tmp_path / "report.html"
    output.write_text("the old one", encoding="utf-8")

    def full(path: Path, target: object) -> Path:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    said = refused(str(tmp_path / "runs"), "-o", str(output))
    assert "couldn't be written" in said
    assert "No space left" in said
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]
    assert output.read_text(encoding="utf-8") == "the old one"
