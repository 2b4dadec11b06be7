"""Promises: a configuration goes to TOML and back unchanged, and refuses what it doesn't know, saying what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from llqr_lab.errors import ConfigError
from llqr_lab.experiments.config import Config, Inner, differences, parsed, read
from llqr_lab.experiments.paper import PUBLISHED, RESULTS
from llqr_lab.experiments.presets import PEERS, PRESETS, SCALES, resolve


def every_setting() -> list[tuple[str, str, str]]:
    return [(name, scale, method) for name, preset in PRESETS.items() for scale in SCALES for method in preset.methods]


@pytest.mark.parametrize(("name", "scale", "method"), every_setting())
def test_every_preset_goes_to_toml_and_back(name: str, scale: str, method: str, tmp_path: Path) -> None:
    config = resolve(name, scale, method, 3)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert read(path) == config
    assert differences(read(path), config) == []


def test_the_paper_scale_is_the_paper_s_appendix() -> None:
    """ "Experiment Details": CIFAR-10/100, ImageNet, IWSLT14, grokking, and "Learning U"."""
    cifar = resolve("cifar100-resnet18-sgdm", "paper", "ekfac-ngd", 0)
    assert (cifar.epochs, cifar.batch, cifar.schedule.name) == (200, 128, "cosine")
    assert (cifar.base.lr, cifar.base.momentum, cifar.base.weight_decay) == (0.05, 0.9, 1e-3)
    assert cifar.llqr is not None
    assert (cifar.llqr.every, cifar.llqr.steps, cifar.llqr.ema, cifar.llqr.damping) == (500, 25, 0.95, 0.0)
    assert (cifar.llqr.solver.name, cifar.llqr.solver.lr, cifar.llqr.solver.momentum) == ("sgdm", 0.005, 0.9)
    newton = resolve("cifar10-resnet18-adamw", "paper", "kfac-newton", 0)
    assert (newton.base.lr, newton.base.weight_decay) == (1e-3, 5e-4)
    assert newton.llqr is not None
    assert (newton.llqr.ema, newton.llqr.divergence) == (0.9, "newton")
    assert resolve("cifar100-resnet18-adamw", "paper", "base", 0).base.lr == 5e-4
    fisher = resolve("cifar100-resnet18-batch256", "paper", "ekfac-ngd", 0)
    assert (fisher.batch, fisher.base.lr, fisher.base.weight_decay) == (256, 0.1, 5e-4)
    assert fisher.llqr is not None
    assert fisher.llqr.every == 250
    imagenet = resolve("imagenet-resnet50-sgdm", "paper", "ekfac-ngd", 0)
    assert (imagenet.epochs, imagenet.batch, imagenet.label_smoothing) == (100, 256, 0.1)
    assert (imagenet.base.lr, imagenet.base.weight_decay, imagenet.schedule.name) == (0.1, 1e-4, "piecewise")
    assert (imagenet.schedule.warmup, imagenet.schedule.milestones) == (25_020, (0.3, 0.7, 0.9))
    shorter = resolve("imagenet-resnet50-90epochs", "paper", "base", 0)
    assert (shorter.epochs, shorter.schedule.milestones) == (90, (30 / 90, 70 / 90))
    assert imagenet.llqr is not None
    assert imagenet.llqr.every == 1500
    iwslt = resolve("iwslt14-transformer-adamw", "paper", "ekfac-ngd", 0)
    assert (iwslt.base.lr, iwslt.base.momentum, iwslt.base.beta2, iwslt.base.weight_decay) == (5e-4, 0.9, 0.98, 1e-4)
    assert (iwslt.model["dropout"], iwslt.label_smoothing, iwslt.data["bpe"]) == (0.3, 0.1, 10_000)
    assert iwslt.llqr is not None
    assert (iwslt.llqr.every, iwslt.llqr.ema, iwslt.schedule.name) == (250, 0.925, "inverse-sqrt")
    assert (iwslt.batch, iwslt.epochs, iwslt.schedule.warmup) == (16_384, 133, 4000)
    assert iwslt.llqr.max_dim > 8848
    grokking = resolve("grokking-divide", "paper", "diagonal-ngd", 0)
    assert (grokking.model["start"], grokking.model["reads"]) == ("lecun", "all")
    assert (grokking.data, grokking.batch) == ({"name": "divide", "p": 97, "train": 0.6}, 512)
    assert (grokking.base.lr, grokking.base.beta2, grokking.base.weight_decay) == (1e-3, 0.98, 0.0)
    assert grokking.llqr is not None
    assert grokking.llqr.solver.lr == 0.01
    assert 0.65 <= grokking.llqr.ema <= 0.8


def test_where_the_paper_is_silent_the_authors_code_is_followed() -> None:
    """The decay of the other networks, PyramidNet's bottlenecks, VGG's head, Cutout, padding, a refit's own batch."""
    for classes in (10, 100):
        for network in ("pyramidnet110", "vgg16bn", "wrn28x10"):
            config = resolve(f"cifar{classes}-{network}-sgdm", "paper", "ekfac-ngd", 0)
            assert config.base.weight_decay == 5e-4
            assert config.data == {"name": f"cifar{classes}", "cutout": 16, "cutout_share": 0.5, "reflect": True}
            assert config.llqr is not None
            assert config.llqr.fresh_batch
    assert resolve("cifar10-pyramidnet110-sgdm", "paper", "base", 0).model["bottleneck"] is True
    vgg = resolve("cifar10-vgg16bn-sgdm", "paper", "base", 0, {"model.dropout": 0.1})
    assert (vgg.model["hidden"], vgg.model["dropout"]) == (2, 0.1)


def test_the_other_optimizers_of_table_4() -> None:
    """At AdaFisher's own rates, for as many epochs as take the time of its 200; at other scales as long as all."""
    found = {name: resolve("cifar100-resnet18-batch256", "paper", name, 0) for name in PEERS}
    assert {name: (each.base.name, each.base.lr, each.epochs) for name, each in found.items()} == {
        "adam": ("adam", 1e-3, 210),
        "adafisher": ("adafisher", 1e-3, 200),
        "kfac": ("kfac", 0.3, 107),
        "shampoo": ("shampoo", 0.3, 36),
        "soap": ("soap", 3e-3, 200),
    }
    assert {(each.batch, each.base.weight_decay, each.llqr) for each in found.values()} == {(256, 5e-4, None)}
    assert resolve("cifar100-resnet18-batch256", "cpu", "shampoo", 0).epochs == 6
    with pytest.raises(ConfigError, match=r"no 'kfac' in its table: take it as the base, --set base\.name=kfac"):
        resolve("fashion-mlp", "cpu", "kfac", 0)


def test_every_result_of_the_paper_belongs_to_a_preset_that_has_its_methods() -> None:
    for name, rows in RESULTS.items():
        ours = {"default", "soap"} if "shampoo" in rows else {"default"}
        assert {*rows, *ours} - {PUBLISHED} == set(PRESETS[name].methods), name


@pytest.mark.parametrize(
    ("name", "scale", "method"), [each for each in every_setting() if each[2] not in ("base", *PEERS)]
)
def test_the_base_s_settings_are_the_same_with_and_without_llqr(name: str, scale: str, method: str) -> None:
    alone, wrapped = (resolve(name, scale, each, 0) for each in ("base", method))
    at_equal_time = {"epochs"} if scale == "mini" and name == "cifar100-resnet18-batch256" else set()
    found = {line.partition(":")[0].partition(".")[0] for line in differences(alone, wrapped)}
    assert found <= {"llqr", "default_llqr", "method"} | at_equal_time


def smallest() -> dict[str, object]:
    return {
        "task": "grokking",
        "model": {"name": "grokking-transformer"},
        "data": {"name": "add"},
        "base": {"name": "sgdm", "lr": 0.1},
        "batch": 8,
        "steps": 3,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bacth": 8}, "no setting 'bacth': did you mean batch"),
        ({"base": {"name": "sgdm", "lr": 0.1, "momentun": 0.9}}, r"no setting 'base\.momentun': did you mean momentum"),
        ({"base": {"name": "sgdm"}}, r"'base\.lr' is missing"),
        ({"base": {"name": "sgd", "lr": 0.1}}, r"'base\.name' can't be 'sgd': did you mean sgdm"),
        ({"base": {"name": "sgdm", "lr": 0.0}}, r"'base\.lr' should be positive"),
        ({"base": {"name": "sgdm", "lr": float("nan")}}, "should be a number below"),
        ({"batch": "8"}, "'batch' should be of type int"),
        ({"batch": True}, "'batch' should be of type int"),
        ({"batch": 0}, "'batch' should be positive"),
        ({"steps": -1}, "can't be negative"),
        ({"steps": 0}, "one of 'epochs' and 'steps'"),
        ({"epochs": 1.0}, "one of 'epochs' and 'steps'"),
        ({"model": "resnet18"}, "'model' should be a group of settings with a name"),
        ({"model": {"width": 3}}, "'model' should be a group of settings with a name"),
        ({"llqr": 3}, "should be a group of settings"),
        ({"llqr": {"structure": "kfacc"}}, "did you mean kfac"),
        (
            {"llqr": {"structure": "kfac", "order": 2.0}},
            r"'llqr\.order' has no effect where 'llqr\.divergence' is 'ngd'",
        ),
        ({"llqr": {"structure": "kfac", "intermediate_weight": 2.0}}, r"no effect without 'llqr\.intermediate'"),
        (
            {"llqr": {"structure": "kfac", "solver": {"name": "cg", "schedule": "cosine"}}},
            r"'llqr\.solver\.schedule' has no",
        ),
        ({"llqr": {"structure": "kfac", "ema": 1.0}}, r"'llqr\.ema' should be at least 0 and below 1"),
        ({"llqr": {"structure": "kfac", "solver": {"name": "sgd"}}}, r"'llqr\.solver\.name' can't be 'sgd'"),
        ({"schedule": {"name": "inverse-sqrt"}}, "warmup"),
        ({"schedule": {"name": "piecewise", "milestones": 0.3}}, r"'schedule\.milestones' should be a list"),
    ],
)
def test_what_can_t_be_is_refused(change: dict[str, object], message: str) -> None:
    parsed(smallest())
    with pytest.raises(ConfigError, match=message):
        parsed({**smallest(), **change})


def test_a_missing_setting_is_named() -> None:
    without = {name: value for name, value in smallest().items() if name != "data"}
    with pytest.raises(ConfigError, match="'data' is missing"):
        parsed(without)


def test_what_isn_t_toml_is_refused_with_the_file_s_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("task = ", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.toml' isn't TOML"):
        read(path)


def test_unknown_names_of_presets_scales_and_methods() -> None:
    for arguments, message in (
        (("grokking-ad", "cpu", "base"), "did you mean grokking-add"),
        (("grokking-add", "gpu", "base"), "did you mean cpu"),
        (("grokking-add", "cpu", "kfac-ndg"), "did you mean kfac-ngd"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(*arguments, 0)


def test_the_default_method_sets_nothing() -> None:
    alone, wrapped = (resolve("shakespeare-gpt-adamw", "cpu", method, 0) for method in ("base", "default"))
    assert {line.partition(":")[0] for line in differences(alone, wrapped)} == {"default_llqr", "method"}
    with pytest.raises(ConfigError, match=r"'llqr\.structure' is missing"):
        resolve("shakespeare-gpt-adamw", "cpu", "default", 0, {"llqr.every": 10})
    with pytest.raises(ConfigError, match="leave out one of them"):
        resolve("shakespeare-gpt-adamw", "cpu", "kfac-ngd", 0, {"default_llqr": True})


def test_changes_by_hand_are_part_of_the_method_s_name() -> None:
    config = resolve("grokking-add", "cpu", "kfac-ngd", 0, {"llqr.every": 100, "base.lr": 0.01})
    assert isinstance(config, Config)
    assert config.label == "kfac-ngd+base.lr=0.01+llqr.every=100"
    assert resolve("grokking-add", "cpu", "kfac-ngd", 0, {"llqr.warm_start": True}).changes == ("llqr.warm_start=true",)
    assert config.llqr is not None
    assert (config.llqr.every, config.base.lr) == (100, 0.01)
    with pytest.raises(ConfigError, match=r"no setting 'llqr\.evry'"):
        resolve("grokking-add", "cpu", "kfac-ngd", 0, {"llqr.evry": 100})
    with pytest.raises(ConfigError, match=r"'llqr\.structure' is missing"):
        resolve("grokking-add", "cpu", "base", 0, {"llqr.every": 100})
    for name in ("seed", "method", "preset", "scale"):
        with pytest.raises(ConfigError, match=f"'{name}' isn't set by --set"):
            resolve("grokking-add", "cpu", "base", 0, {name: 1})


@pytest.mark.parametrize(
    ("name", "method", "changes"),
    [
        ("llqr.reduction", "kfac-newton", {"llqr.reduction": "mean"}),
        ("llqr.solver.clip", "kfac-ngd", {"llqr.solver.name": "cg", "llqr.solver.clip": 1.0}),
        ("llqr.solver.lr", "kfac-ngd", {"llqr.solver.name": "cg", "llqr.solver.lr": 0.1}),
        ("llqr.solver.momentum", "kfac-ngd", {"llqr.solver.name": "adam", "llqr.solver.momentum": 0.5}),
        ("base.beta2", "base", {"base.beta2": 0.9}),
        ("schedule.milestones", "base", {"schedule.milestones": [0.5]}),
    ],
)
def test_what_has_no_effect_is_refused(name: str, method: str, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' has no effect where"):
        resolve("cifar10-resnet18-sgdm", "smoke", method, 0, changes)


def test_another_solver_begins_with_its_own_defaults() -> None:
    config = resolve("grokking-add", "paper", "kfac-ngd", 0, {"llqr.solver.name": "cg"})
    assert config.llqr is not None
    assert config.llqr.solver == Inner(name="cg")
