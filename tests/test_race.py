"""Promise: a race gives every optimizer the same chance, moves every parameter, and counts what it says it counts."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from llqr import LLQR
from llqr_lab.bench.measure import step_seconds
from llqr_lab.bench.race import (
    COURSES,
    ENTRIES,
    Course,
    Entry,
    Race,
    advancing,
    common_end,
    main,
    place,
    seconds_to,
    summary,
    untuned_rows,
)
from llqr_lab.bench.race_page import body, untuned_lines
from llqr_lab.cli import app
from llqr_lab.errors import ConfigError, DataError, RunError
from llqr_lab.experiments.collect import SMOOTH, smoothed, value
from llqr_lab.experiments.command import folder_of
from llqr_lab.experiments.config import Base, Config
from llqr_lab.experiments.loop import Run, train
from llqr_lab.experiments.optimizers import base_of, optimizer
from llqr_lab.experiments.peers import PEERS, MuonInFloat32, Several, muon
from llqr_lab.experiments.presets import resolve
from llqr_lab.tasks import task_of
from small_lab import batch, small

NEEDS = {"soap": "pytorch_optimizer", "shampoo": "pytorch_optimizer", "singd": "singd"}


def installed(base: str) -> bool:
    return base not in NEEDS or importlib.util.find_spec(NEEDS[base]) is not None


def in_this_process(runs: Path) -> Any:
    def perform(wanted: list[Config]) -> None:
        for config in wanted:
            folder = folder_of(runs, config)
            if not folder.done:
                train(config, folder, None, torch.device("cpu"))

    return perform


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("course", ["shakespeare", "fashion-convnet", "cifar10"])
def test_everybody_moves_every_parameter(course: str, entry: Entry, tmp_path: Path) -> None:
    if not installed(entry.base):
        pytest.skip(f"{NEEDS[entry.base]} isn't installed")
    if entry.base in COURSES[course].without:
        with pytest.raises(ConfigError):
            Race(COURSES[course], "smoke", tmp_path, in_this_process(tmp_path)).run({entry: entry.rates[:1]}, [0])
        return
    race = Race(COURSES[course], "smoke", tmp_path, in_this_process(tmp_path))
    race.run({entry: entry.rates[:1]}, [0])
    (result,) = race.results(entry, entry.rates[:1], [0])
    assert result["unmoved"] == []
    assert result["last"]["train_loss"] > 0
    assert result["peak_bytes"] > 0
    assert result["lr"] == entry.rates[0]
    assert f'base.name="{entry.base}"' in result["method"]


def test_a_parameter_that_stays_is_told(tmp_path: Path) -> None:
    config = resolve("shakespeare-gpt-sgdm", "smoke", "base", 0, {"base.lr": 1e-30})
    result = train(config, folder_of(tmp_path, config), None, torch.device("cpu"))
    assert len(result["unmoved"]) > 5


class Made(Race):
    """A race whose runs end as a function of the rate says."""

    def __init__(self, ends: Any, course: Course) -> None:
        super().__init__(course, "smoke", Path(), lambda wanted: None)
        self.ends, self.asked = ends, list[float]()

    def results(self, entry: Entry, rates: Any, seeds: Any) -> list[dict[str, Any]]:
        self.asked += rates
        return [
            {"lr": rate, "diverged": not math.isfinite(self.ends(rate)), "curve": {"train_loss": [self.ends(rate)]}}
            for rate in rates
        ]


@pytest.mark.parametrize(
    ("ends", "best", "tried"),
    [
        (lambda rate: abs(math.log(rate / 3e-3)), 3e-3, 3),
        (lambda rate: abs(math.log(rate / 0.03)), 0.03, 5),  # 0.09 is tried too, and worse
        (lambda rate: abs(math.log(rate / 1e-9)), 1e-3 / 27, 6),  # it ends somewhere
        (lambda rate: math.inf if rate > 5e-3 else -rate, 3e-3, 3),
        (lambda rate: math.inf, None, 3),
    ],
)
def test_a_grid_is_widened_at_its_edge(ends: Any, best: float | None, tried: int) -> None:
    race = Made(ends, COURSES["shakespeare"])
    results = race.grids([Entry("some", "adamw", (1e-3, 3e-3, 1e-2))], 0)["some"]
    found = {rate: end for rate, end in race._ends(results).items() if end < math.inf}
    assert min(found, key=lambda rate: found[rate], default=None) == (best and pytest.approx(best, rel=0.15))
    assert len(results) == len(set(race.asked)) == tried


class BySeed(Race):
    """A race whose runs end as a table by rate and seed says."""

    def __init__(self, ends: dict[float, list[float]]) -> None:
        super().__init__(COURSES["shakespeare"], "smoke", Path(), lambda wanted: None)
        self.ends, self.ran = ends, list[tuple[float, ...]]()

    def run(self, wanted: Any, seeds: Any) -> None:
        self.ran += [tuple(rates) for rates in wanted.values()]

    def results(self, entry: Entry, rates: Any, seeds: Any) -> list[dict[str, Any]]:
        found = [(rate, self.ends[rate][seed]) for rate in rates for seed in seeds]
        return [{"lr": lr, "diverged": end == math.inf, "curve": {"train_loss": [end]}} for lr, end in found]


@pytest.mark.parametrize(
    ("ends", "close", "best"),
    [
        ({0.1: [2.0, 2.5, 2.5], 0.3: [2.1, 1.0, 1.0]}, (0.1,), 0.1),  # not close: the first seed decides
        ({0.1: [2.0, 2.5, 2.5], 0.3: [2.03, 2.1, 2.1]}, (0.1, 0.3), 0.3),
        ({0.1: [2.0, 2.0, math.inf], 0.3: [2.03, 2.9, 2.9]}, (0.1, 0.3), 0.3),
        ({0.1: [math.inf] * 3}, (), None),
    ],
)
def test_rates_that_are_close_are_decided_by_all_seeds(
    ends: dict[float, list[float]], close: tuple[float, ...], best: float | None
) -> None:
    race, entry = BySeed(ends), Entry("some", "sgdm", (0.1, 0.3))
    grids = {"some": race.results(entry, list(ends), [0])}
    assert race.chosen(grids, [entry], [0, 1, 2]) == ({} if best is None else {entry: [best]})
    assert race.ran == ([close] if close else [])


TIMES = {"SGDM": [0.1], "LLQR on SGDM": [0.12], "SOAP": [0.3], "Muon": [0.1]}
"""Seconds of every step."""


def result(losses: list[float], lr: float = 0.1, **more: Any) -> dict[str, Any]:
    """A run that has each of these losses for as many records as are averaged, up to steps 10, 20, 30."""
    records = [loss for loss in losses for _ in range(SMOOTH)]
    columns = {"step": [10 * (k + 1) / SMOOTH for k in range(len(records))], "train_loss": records}
    return {
        "lr": lr,
        "diverged": False,
        "score": "test_loss",
        "last": {"train_loss": losses[-1], "test_loss": losses[-1] + 1},
        "steps": 30,
        "peak_bytes": 1000,
        "unmoved": [],
        "curve": columns,
        **more,
    }


def test_everybody_is_timed_to_what_the_plain_bases_end_at() -> None:
    finals = {
        "SGDM": [result([3, 2, 1.0]), result([3, 2, 1.2]), result([3, 2, 1.1])],
        "LLQR on SGDM": [result([3, 1.1, 0.5]), result([1.05, 1, 1]), result([2, 1.0, 0.1])],
        "SOAP": [result([3, 3, 3])] * 3,
    }
    grids = {name: results[:1] for name, results in finals.items()}
    rows = {
        row["optimizer"]: row
        for row in summary("some", COURSES["shakespeare"], grids, finals, len(finals["SGDM"]), TIMES)
    }
    assert rows["SGDM"]["targets"]["SGDM"] == {"loss": 1.2, "reached": 3, "steps": 30, "seconds": pytest.approx(3.0)}
    assert rows["LLQR on SGDM"]["targets"]["SGDM"] == {
        "loss": 1.2,
        "reached": 3,
        "steps": 20,
        "seconds": pytest.approx(2.4),
    }
    assert rows["SOAP"]["targets"]["SGDM"]["reached"] == 0
    assert rows["LLQR on SGDM"]["score"] == 1.5


def test_the_page_has_everybody_s_steps_and_seconds() -> None:
    finals = {
        "SGDM": [result([3, 2, 1.0]), result([3, 2, 1.2])],
        "LLQR on SGDM": [result([3, 1.1, 0.5]), result([3, 1.0, 0.5])],
        "Muon": [result([3, 3, 0.9]), result([3, 3, 2])],
    }
    grids = {name: results[:1] for name, results in finals.items()}
    rows = summary("some", COURSES["shakespeare"], grids, finals, len(finals["SGDM"]), TIMES)
    text = body(rows, [])
    assert "| LLQR on SGDM | 0.1 | 0.5000 (0.5, 0.5) | 1.5 | 20, 2.4 |" in text
    assert "| Muon | 0.1 | 1.4500 (0.9, 2) | 2.45 | – (1 of 2 seeds) |" in text
    assert "moved every parameter" in text


def test_a_task_that_ends_by_itself_is_timed_to_its_end() -> None:
    course = COURSES["modular-addition"]
    finals = {"AdamW": [result([1, 1, 1], steps_to_target=s) for s in (500, 300, 400)]}
    (row,) = summary("some", course, {"AdamW": finals["AdamW"][:1]}, finals, 3, {"AdamW": [0.1]})
    assert row["targets"]["the end"] == {"loss": None, "reached": 3, "steps": 400, "seconds": pytest.approx(40)}
    assert row["tried"] == {"0.1": 500.0}


def test_the_command_writes_a_table_a_file_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    perform = in_this_process(tmp_path)
    monkeypatch.setattr("llqr_lab.bench.race.sweep", lambda wanted, *rest: perform(wanted))
    output, figure = tmp_path / "race.json", tmp_path / "race.png"
    arguments = (["shakespeare"], ["SGDM", "LLQR on SGDM"], "smoke", [0, 1], tmp_path, None, 1, output, figure)
    main(*arguments)
    first = output.read_text(encoding="utf-8")
    assert '"optimizer": "LLQR on SGDM"' in first
    assert figure.stat().st_size > 10_000
    monkeypatch.setattr("llqr_lab.bench.race.sweep", lambda wanted, *rest: None)  # nothing is left to run
    main(*arguments)
    assert output.read_text(encoding="utf-8") == first


def test_everybody_races_wherever_they_can() -> None:
    left_out = {
        name: {entry.name for entry in ENTRIES} - {e.name for e in course.runners} for name, course in COURSES.items()
    }
    muons = {"Muon", "LLQR on Muon"}  # a ResNet has no matrices for it
    assert left_out == {name: muons if name == "cifar10" else set() for name in COURSES}


def test_on_a_processor_muon_iterates_in_float32() -> None:
    """Momentum m = 0.05 g at first, Nesterov's look ahead to 0.05 g + 0.95 m, five times X ← aX + (bA + cA²)X with A = XXᵀ, in
    double precision, and a step of lr · 0.2 √max(m, n); torch's own, in bfloat16, is a hundred times further from it."""
    torch.manual_seed(0)
    matrices = [torch.randn(6, 4), torch.randn(3, 5)]
    gradients = [torch.randn_like(matrix) for matrix in matrices]
    found = {}
    for kind in (MuonInFloat32, torch.optim.Muon):
        parameters = [nn.Parameter(matrix.clone()) for matrix in matrices]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        kind(parameters, lr=0.1, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
        assert all(map(torch.equal, gradients, [p.grad for p in parameters]))
        found[kind] = parameters
    errors = dict.fromkeys(found, 0.0)
    for i, (matrix, gradient) in enumerate(zip(matrices, gradients, strict=True)):
        x = 0.05 * gradient.double() + 0.95 * 0.05 * gradient.double()
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        exact = matrix.double() - 0.1 * 0.2 * max(matrix.shape) ** 0.5 * x
        for kind in found:
            errors[kind] = max(errors[kind], float((found[kind][i].detach() - exact).abs().max()))
    assert errors[MuonInFloat32] < 1e-6
    assert errors[torch.optim.Muon] > 100 * errors[MuonInFloat32]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_goes_on_where_it_was_stopped_or_says_that_it_cannot(name: str) -> None:
    if not installed(name):
        pytest.skip(f"{NEEDS[name]} isn't installed")
    base = Base(name, lr=1e-3 if name == "adafisher" else 1e-2)  # whose F̃ may be a thousandth

    def trained(model: nn.Module, stepper: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            inputs, targets = batch("gpt")
            stepper.zero_grad()
            model.eval()  # no dropout
            nn.functional.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten()).backward()
            stepper.step()

    straight = small("gpt")
    one = base_of(base, straight)
    trained(straight, one, range(12))
    stopped = small("gpt")
    before = base_of(base, stopped)
    trained(stopped, before, range(6))
    after = base_of(base, stopped)
    if isinstance(after, Several) and not after.resumable:
        with pytest.raises(RunError, match="begin anew"):
            after.load_state_dict(before.state_dict())
        return
    after.load_state_dict(before.state_dict())
    trained(stopped, after, range(6, 12))
    for left, right in zip(straight.parameters(), stopped.parameters(), strict=True):
        assert torch.equal(left, right)


def test_muon_takes_the_matrices_inside() -> None:
    model = small("gpt")
    chosen, rest = muon(Base("muon", lr=1e-3), model).parts
    names = {id(p): name for name, p in model.named_parameters()}
    taken = {names[id(p)] for group in chosen.param_groups for p in group["params"]}
    left = {names[id(p)] for group in rest.param_groups for p in group["params"]}
    assert taken | left == set(names.values())
    assert not taken & left
    matrices = {name for name, p in model.named_parameters() if p.dim() == 2}
    assert taken == matrices - {"embed.weight", "position"}
    with pytest.raises(ConfigError, match="has none"):
        muon(Base("muon", lr=1e-3), nn.Linear(3, 2))


def test_several_optimizers_are_a_base_like_any_other() -> None:
    """One rate and one schedule for all the parts, under LLQR too."""
    model = small("gpt")
    several = muon(Base("muon", lr=1e-3), model)
    wrapped = LLQR.paper(several, model, structure="kfac", every=2, steps=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: 0.5**step)
    for _ in range(3):
        inputs, targets = batch("gpt")
        wrapped.zero_grad()
        nn.functional.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten()).backward()
        wrapped.step()
        schedule.step()
    again = LLQR.paper(muon(Base("muon", lr=1e-3), model), model, structure="kfac", every=2, steps=2)
    again.load_state_dict(wrapped.state_dict())
    assert again.stats.refits == 2
    assert [group["lr"] for part in again.base.parts for group in part.param_groups] == [1e-3 / 8] * 2  # type: ignore[attr-defined]
    assert [group["lr"] for part in several.parts for group in part.param_groups] == [1e-3 / 8] * 2
    assert wrapped.stats.refits == 2


def test_a_peer_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("llqr_lab.experiments.peers.importlib.import_module", missing)
    with pytest.raises(ConfigError, match="pip install"):
        PEERS["soap"](Base("soap", lr=1e-3), small("gpt"))


def test_a_translation_that_is_not_decoded_is_judged_by_its_validation_loss(tmp_path: Path) -> None:
    config = resolve("multi30k-transformer-adamw", "smoke", "base", 0, {"data.beam": 0})
    result = train(config, folder_of(tmp_path, config), None, torch.device("cpu"))
    assert result["score"] == "valid_loss"
    assert "bleu" not in result
    assert value(result) == result["last"]["valid_loss"]
    with pytest.raises(DataError, match="beam"):
        task_of(config.changed({"data.beam": -1}), None)


def test_losses_are_recorded_between_evaluations(tmp_path: Path) -> None:
    """The means of the steps since the last record, the same as where each is evaluated."""
    lines = {}
    for changes in ({"record_every": 1, "evaluate_every": 4}, {"evaluate_every": 1}):
        config = resolve("shakespeare-gpt-sgdm", "smoke", "base", 0, changes)
        folder = folder_of(tmp_path, config)
        train(config, folder, None, torch.device("cpu"))
        lines[changes["evaluate_every"]] = folder.read_metrics()
    assert ["test_loss" in line for line in lines[4]] == [False, False, False, True]
    assert [line["train_loss"] for line in lines[4]] == [line["train_loss"] for line in lines[1]]
    assert lines[4][-1]["test_loss"] == lines[1][-1]["test_loss"]


def test_losses_are_smoothed_and_steps_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single low record isn't arrival; and everybody takes as many turns, from the start in every round."""
    lucky = result([3, 3, 3])
    lucky["curve"]["train_loss"][4] = 0.5
    assert place(lucky, COURSES["shakespeare"], 1.0) is None
    assert smoothed(lucky)[:6] == pytest.approx([3, 3, 3, 3, 6.5 / 3, 6.5 / 3])
    turns = list[str]()
    monkeypatch.setattr(Run, "advance", lambda run, batch: turns.append(run.config.method))
    methods = ("base", "default")
    configs = {method: resolve("shakespeare-gpt-sgdm", "smoke", method, 0, {}) for method in methods}
    task = task_of(configs["base"], None)
    done = list[None]()
    begin = lambda: {method: advancing(config, task) for method, config in configs.items()}  # noqa: E731
    found = step_seconds(begin, 2, 4, 2, lambda: done.append(None))
    assert {name: len(times) for name, times in found.items()} == {"base": 4, "default": 4}
    assert len(done) == 2
    assert turns == [method for _ in range(4) for method in methods for _ in range(2)]


def test_the_time_of_many_steps_is_known_from_the_first_ones() -> None:
    times = [4.0, 2.0, 1.0, 1.0]
    assert [seconds_to(times, steps) for steps in (1, 3, 4, 10)] == [4, 7, 8, 14]


def test_llqr_runs_at_the_rate_of_its_base_with_nothing_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    perform = in_this_process(tmp_path)
    monkeypatch.setattr("llqr_lab.bench.race.sweep", lambda wanted, *rest: perform(wanted))
    output, figure, page = tmp_path / "race.json", tmp_path / "race.png", tmp_path / "page.md"
    names = ["SGDM", "LLQR on SGDM"]
    main(["shakespeare"], names, "smoke", [0, 1], tmp_path, None, 1, output, figure, page, True)
    found = json.loads(output.read_text(encoding="utf-8"))
    assert [row["optimizer"] for row in found["rows"]] == ["SGDM"]
    (row,) = found["untuned"]
    assert (row["base"], row["lr"]) == ("SGDM", found["rows"][0]["lr"])
    assert row["alone"]["train_losses"] == found["rows"][0]["train_losses"]
    assert len(row["llqr"]["train_losses"]) == 2
    rates = {path.parent.name for path in tmp_path.rglob("seed-0") if path.parent.name.startswith("default")}
    assert len(rates) == 1
    text = page.read_text(encoding="utf-8")
    assert "### Nothing of LLQR tuned" in text
    assert "LLQR on SGDM" not in text
    assert figure.stat().st_size > 10_000


LLQR_ON_SGDM = next(each for each in ENTRIES if each.name == "LLQR on SGDM")
BASES = [result([3, 2, 1.0], seed=0), result([3, 2, 1.2], seed=1), result([3, 2, 1.1], seed=2)]


@pytest.mark.parametrize(
    ("own", "steps", "ratios", "shown"),
    [
        (BASES, [30, 30, 30], [1, 1, 1], "×1.00 (×1.00, ×1.00)"),
        # each to its own base's end: 1.1 is there for seed 1 alone
        ([result([3, 1.1, 1.0], seed=s) for s in (0, 1)], [30, 20], [1, 2 / 3], "×0.83 (×0.67, ×1.00; 2 of 3 seeds)"),
        (
            [result([1.0, 1, 1], seed=0), result([3, 1.2, 1], seed=1), result([3, 1.0, 1], seed=2)],
            [pytest.approx(10 / 3), 20, 20],  # at the first record
            [1 / 9, 2 / 3, 2 / 3],
            "×0.67 (×0.11, ×0.67)",
        ),
        (
            [result([3, 1, 1], seed=0), result([3, 1, 1], seed=1), result([3, 3, 3], seed=2)],
            [20, 20, None],
            [2 / 3, 2 / 3, None],
            "×0.67 (×0.67, never)",
        ),
        (
            [result([3, 1, 1], seed=0), result([3, 1, 9], seed=1, diverged=True), result([3, 3, 3], seed=2)],
            [20, None, None],
            [2 / 3, None, None],
            "never (×0.67, never)",
        ),
        ([result([3, 1, 1], seed=2)], [20], [2 / 3], "×0.67 (×0.67, ×0.67; 1 of 3 seeds)"),
        ([], [], [], "–"),
    ],
)
def test_ratios_are_of_llqr_and_its_base_with_the_same_seed(
    own: list[dict[str, Any]], steps: list[float], ratios: list[float], shown: str
) -> None:
    (row,) = untuned_rows("some", COURSES["shakespeare"], {"SGDM": BASES}, {LLQR_ON_SGDM: own}, 3, TIMES)
    assert row["llqr"]["steps"] == steps
    assert row["alone"]["steps"] == [30] * len(own)
    assert row["steps_ratios"] == pytest.approx(ratios)
    assert row["seconds_ratios"] == pytest.approx([each and 1.2 * each for each in ratios])
    assert untuned_lines([row])[1][5] == shown
    assert (row["steps_ratio"] is None) is shown.startswith(("never", "–"))


def test_a_base_needs_all_its_steps() -> None:
    """Also where it was at its last loss before, by luck: its schedule was made for all of them."""
    bases, own = ([result(losses, seed=seed) for seed in range(3)] for losses in ([2, 1.0, 1.0], [2, 0.5, 0.5]))
    (row,) = untuned_rows("some", COURSES["shakespeare"], {"SGDM": bases}, {LLQR_ON_SGDM: own}, 3, TIMES)
    assert row["alone"]["steps"] == [bases[0]["steps"]] * 3
    assert row["llqr"]["steps"][0] < bases[0]["steps"]


def test_a_line_of_the_untuned_table() -> None:
    own = [result([3, 1.0, 0.5], seed=seed) for seed in range(3)]
    bases = [*BASES[:2], result([3, 2, 1.0], seed=2, diverged=True)]
    rows = untuned_rows("some", COURSES["shakespeare"], {"SGDM": bases}, {LLQR_ON_SGDM: own}, 3, TIMES)
    ratios = ["×0.67 (×0.67, ×0.67; 2 of 3 seeds)", "×0.80 (×0.80, ×0.80; 2 of 3 seeds)"]
    header, line = untuned_lines(rows)
    assert line == ["some", "SGDM", "0.1", "30, 30, –", "20, 20, –", *ratios, "– (1, 1.2)", "0.5000 (0.5, 0.5)"]
    assert len(header) == len(line)
    json.dumps(rows, allow_nan=False)


def test_runs_that_end_by_themselves_are_paired_by_their_steps() -> None:
    """Where the base came to no end, there is nothing to divide by."""
    bases, own = (
        [result([1, 1, 1], seed=seed, steps_to_target=end) for seed, end in enumerate(ends)]
        for ends in ((500, 300, None), (250, 300, 100))
    )
    (row,) = untuned_rows("some", COURSES["modular-addition"], {"SGDM": bases}, {LLQR_ON_SGDM: own}, 3, TIMES)
    assert row["steps_ratios"] == [0.5, 1.0]
    assert row["steps_ratio"] == 0.75
    assert untuned_lines([row])[1][3:6] == ["500, 300, –", "250, 300, 100", "×0.75 (×0.50, ×1.00; 2 of 3 seeds)"]


def test_losses_are_recorded_every_fiftieth_of_a_course() -> None:
    for course in COURSES.values():
        config = resolve(course.preset, "cpu", "default", 0, {**course.changes, **course.cpu})
        assert config.default_llqr
        assert 50 * (config.record_every or config.evaluate_every) <= config.steps


def test_a_run_that_diverges_or_comes_to_no_end_counts_for_nothing() -> None:
    """With two of three seeds there, or one that was there and diverged, there is no time; nor a target of a base."""
    bases = [result([3, 2, 1.0])] * 3
    blown = result([0.5, 0.4, 9], diverged=True)
    for results in ([result([0.5, 0.4, 0.3])] * 2, [result([0.5, 0.4, 0.3])] * 2 + [blown]):
        finals = {"SGDM": bases, "LLQR on SGDM": results}
        rows = summary("some", COURSES["shakespeare"], {n: r[:1] for n, r in finals.items()}, finals, 3, TIMES)
        assert rows[1]["targets"]["SGDM"] == {"loss": 1.0, "reached": 2, "steps": None, "seconds": None}
        assert rows[1]["diverged"] == (["0.1"] if len(results) == 3 else [])
    assert common_end([*bases[:2], blown]) is None
    assert common_end([]) is None


@pytest.mark.parametrize("what", ["a folder", "no marks", "nowhere"])
def test_a_page_that_cannot_be_written_is_told_before_the_first_run(what: str, tmp_path: Path) -> None:
    page = {"a folder": tmp_path, "no marks": tmp_path / "page.md", "nowhere": tmp_path / "no" / "page.md"}[what]
    if what == "no marks":
        page.write_text("words", encoding="utf-8")
    output = tmp_path / "race.json"
    with pytest.raises(RunError, match=r"page|folder"):
        main(["shakespeare"], ["SGDM"], "smoke", [0], tmp_path, None, 1, output, tmp_path / "race.png", page)
    assert not output.exists()


def test_the_page_is_not_written_where_runs_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    arguments = (["shakespeare"], ["SGDM", "LLQR on SGDM"], "smoke", [0], tmp_path, None, 1, tmp_path / "race.json")
    monkeypatch.setattr("llqr_lab.bench.race.sweep", lambda wanted, *rest: False)
    with pytest.raises(RunError, match="came to no end"):
        main(*arguments, tmp_path / "race.png", page)
    assert not page.exists()
    perform = in_this_process(tmp_path)
    monkeypatch.setattr("llqr_lab.bench.race.sweep", lambda wanted, *rest: perform(wanted))
    main(*arguments, tmp_path / "race.png", page)
    assert "| shakespeare | SGDM |" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("preset", "average"),
    [("grokking-add", "batch"), ("shakespeare-gpt-sgdm", "batch+sequence"), ("fashion-convnet", "batch")],
)
def test_singd_is_told_what_the_loss_is_a_mean_over(preset: str, average: str) -> None:
    if not installed("singd"):
        pytest.skip("singd isn't installed")
    config = resolve(preset, "smoke", "base", 0, {"base.name": "singd"})
    made = base_of(config.base, task_of(config, None).network())
    assert isinstance(made, Several)
    assert {group["loss_average"] for group in made.parts[0].param_groups} == {average}


def test_singd_leaves_large_vocabularies_to_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed("singd"):
        pytest.skip("singd isn't installed")
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 24), nn.Linear(24, 40))
    for largest, expected in ((1024, {(24, 8), (24,), (40, 24), (40,)}), (30, {(24, 8), (24,)})):
        monkeypatch.setattr("llqr_lab.experiments.peers.LARGEST_FACTOR", largest)
        made = base_of(Base("singd", 0.01), model)
        assert isinstance(made, Several)
        assert {tuple(p.shape) for group in made.parts[0].param_groups for p in group["params"]} == expected
    monkeypatch.setattr("llqr_lab.experiments.peers.LARGEST_FACTOR", 30)
    with pytest.raises(ConfigError, match="none inside"):
        base_of(Base("singd", 0.01), nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40)))


def test_settings_of_llqr_reach_it() -> None:
    settings = {"llqr.reduction": "mean", "llqr.fresh_batch": False, "llqr.ema": 0.5, "llqr.max_dim": 17}
    config = resolve("shakespeare-gpt-sgdm", "smoke", "kfac-ngd", 0, settings)
    made = repr(optimizer(config, task_of(config, None).network()))
    for shown in ("ema=0.5", "max_dim=17"):
        assert shown in made


def test_a_run_of_modular_arithmetic_may_record_between_evaluations(tmp_path: Path) -> None:
    config = resolve("grokking-add", "smoke", "base", 0, {"record_every": 1, "evaluate_every": 2})
    assert train(config, folder_of(tmp_path, config), None, torch.device("cpu"))["steps_to_target"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fashion-mpl"], "did you mean fashion-mlp"),
        (["--optimizers", "LLQR on Adam"], "LLQR on AdamW"),
        (["--untuned", "--optimizers", "SGDM,LLQR on AdamW"], "name the base too"),
    ],
)
def test_a_race_that_cannot_be_is_told_before_any_work(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llqr_lab.bench.race.main", lambda *_: pytest.fail("work was begun"))
    places = ["--output", str(tmp_path / "race.json"), "--figure", str(tmp_path / "race.png")]
    result = CliRunner().invoke(app, ["bench", "race", *arguments, *places])
    assert result.exit_code == 1
    assert message in result.output
