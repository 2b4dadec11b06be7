"""Promise: every preset runs at --scale smoke, from data to table, with nothing at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from llqr_lab.cli import app
from llqr_lab.experiments.collect import collected
from llqr_lab.experiments.config import read
from llqr_lab.experiments.presets import BARE, PEERS, PRESETS, resolve


def llqr(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def train(preset: str, method: str, runs: Path) -> None:
    llqr("train", preset, "--scale=smoke", f"--method={method}", f"--runs={runs}", "--threads=1")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_from_data_to_table(preset: str, tmp_path: Path) -> None:
    methods = ("base", [each for each in PRESETS[preset].methods if each not in BARE][-1])
    for method in methods:
        train(preset, method, tmp_path)
    results = collected(tmp_path)
    assert sorted(each["method"] for each in results) == sorted(methods)
    config = resolve(preset, "smoke", methods[1], 0)
    assert read(tmp_path / preset / "smoke" / methods[1] / "seed-0" / "config.toml") == config
    for result in results:
        assert result["steps"] == config.steps
        assert result["last"]["train_loss"] > 0
        refits = result["last"].get("refits")
        # one before the first step, then every two
        assert refits == (None if result["method"] == "base" else config.steps // 2), result["method"]
        assert result["last"].get("rejected") in (None, 0)
    shown = llqr("table", str(tmp_path))
    assert f"{preset}: {PRESETS[preset].summary}" in shown
    assert "ours at --scale smoke, not comparable with the paper" in shown
    assert all(method in shown for method in methods)


@pytest.mark.parametrize("method", PRESETS["cifar10-resnet18-sgdm"].methods[1:])
def test_every_structure_and_divergence(method: str, tmp_path: Path) -> None:
    train("cifar10-resnet18-sgdm", method, tmp_path)
    (result,) = collected(tmp_path)
    # the default refits at every one of its first steps, the paper's at every second
    assert (result["last"]["refits"], result["last"]["rejected"]) == (4 if method == "default" else 2, 0)
    assert result["preconditioner_bytes"] > 0


def test_newton_in_chunks(tmp_path: Path) -> None:
    """PyramidNet's refits are cut, and Newton's loss comes from the loop's closure. Cut by layers, too, the numbers are the
    same."""
    preset, method = "cifar10-pyramidnet110-sgdm", "ekfac-newton"
    train(preset, method, tmp_path)
    llqr(
        "train",
        preset,
        "--scale=smoke",
        f"--method={method}",
        f"--runs={tmp_path}",
        "--set=llqr.segments=['stages.*.*']",
    )
    by_examples, by_both = collected(tmp_path)
    assert by_examples["settings"]["llqr"]["chunk_size"] == by_both["settings"]["llqr"]["chunk_size"] == 8
    assert by_both["settings"]["llqr"]["segments"] == ["stages.*.*"]
    assert (by_both["last"]["refits"], by_both["last"]["rejected"]) == (2, 0)
    assert by_both["last"]["objective"] == pytest.approx(by_examples["last"]["objective"], rel=1e-3)


def test_the_default_method_refits_by_itself(tmp_path: Path) -> None:
    train("multi30k-transformer-adamw", "default", tmp_path)
    (result,) = collected(tmp_path)
    assert result["last"]["refits"] >= 1
    assert result["unmoved"] == []


@pytest.mark.parametrize("method", PEERS)
def test_the_other_optimizers_of_table_4(method: str, tmp_path: Path) -> None:
    train("cifar100-resnet18-batch256", method, tmp_path)
    (result,) = collected(tmp_path)
    assert result["unmoved"] == []
    assert result["settings"]["base"]["name"] == method


@pytest.mark.parametrize("name", ["renyi", "reverse-kl", "gauss-newton"])
def test_other_geometries(name: str, tmp_path: Path) -> None:
    """Reverse KL is KL to second order, Rényi's is `order` times it: with an inner rate divided by that, the same U."""
    common = ["train", "fashion-imbalanced", "--scale=smoke", "--threads=1", f"--runs={tmp_path}"]
    llqr(*common, f"--method=ekfac-{name}", "--set", 'llqr.intermediate=["1"]')
    (result,) = collected(tmp_path)
    assert (result["last"]["refits"], result["last"]["rejected"]) == (2, 0)
    assert result["settings"]["llqr"]["divergence"] == name


def test_a_sweep_skips_what_is_done_and_its_results_are_drawn(tmp_path: Path) -> None:
    arguments = (
        "sweep",
        "grokking-add",
        "--scale=smoke",
        "--seeds=0-1",
        "--methods=base,kfac-ngd",
        f"--runs={tmp_path}",
    )
    assert llqr(*arguments).count("steps in") == 4
    assert llqr(*arguments).count("done before") == 4
    kept = tmp_path / "kept.json"
    table = llqr("table", str(tmp_path), f"--save={kept}")
    assert llqr("table", str(kept)) == table
    elsewhere = (*arguments[:-1], f"--runs={tmp_path / 'elsewhere'}", f"--known={kept}")
    assert llqr(*elsewhere).count("done before") == 4
    kept.write_text(kept.read_text().replace('"batch":16,"epochs"', '"batch":17,"epochs"', 1))
    assert llqr(*elsewhere).count("done before") == 3  # one was made with other settings
    assert len(collected(tmp_path / "elsewhere")) == 1
    for kind, presets in (("curves", ["grokking-add"]), ("curves", ["grokking-add"] * 3), ("grokking", [])):
        picture = tmp_path / f"{kind}{len(presets)}.png"
        llqr("figure", kind, *presets, f"--source={kept}", "--scale=smoke", f"--output={picture}")
        assert picture.stat().st_size > 10_000


def test_an_ablation_is_swept_and_drawn(tmp_path: Path) -> None:
    common = ("grokking-add", "--scale=smoke", "--seeds=0", f"--runs={tmp_path}")
    llqr("sweep", *common, "--ablation=warm-start", "--methods=kfac-ngd", "--set=llqr.ema=0.0")
    assert len(collected(tmp_path)) == 2
    picture = tmp_path / "ablation.png"
    llqr("figure", "warm-start", "grokking-add", f"--source={tmp_path}", "--scale=smoke", f"--output={picture}")
    assert picture.stat().st_size > 5_000
