"""Promises: schedules, averages, ratios and verdicts are what their formulas say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llqr_lab.errors import ConfigError
from llqr_lab.experiments.collect import Result, summary
from llqr_lab.experiments.command import parse_values
from llqr_lab.experiments.config import Schedule
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.optimizers import rate
from llqr_lab.experiments.paper import PUBLISHED
from llqr_lab.experiments.presets import resolve
from llqr_lab.experiments.sweep import _started, ablation_grid, configurations
from llqr_lab.experiments.table import cells, gains, shares, shown, times, verdict
from llqr_lab.figures.experiments import _point
from llqr_lab.options import seed_list
from llqr_lab.tasks import Grokking


def result(method: str, score: float | None, seconds: float = 10.0, **more: Any) -> dict[str, Any]:
    return {
        "preset": "cifar10-resnet18-sgdm",
        "scale": "mini",
        "seed": 0,
        "method": method,
        "score": "test_accuracy",
        "model": "resnet20",
        "data": "cifar10",
        "batch": 128,
        "clock": "processor",
        "steps": 100,
        "seconds": seconds,
        "diverged": score is None,
        "last": {"test_accuracy": score},
        **more,
    }


def test_schedules() -> None:
    """cosine: ½(1 + cos πk/n); inverse-sqrt: √(w/k) after w steps of linear warm-up; piecewise: tenths."""
    cosine = Schedule("cosine")
    assert [rate(cosine, step, 100) for step in (0, 50, 100)] == pytest.approx([1.0, 0.5, 0.0], abs=1e-12)
    assert rate(cosine, 25, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    inverse = Schedule("inverse-sqrt", warmup=4)
    assert [rate(inverse, step, 100) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(inverse, 15, 100) == pytest.approx(0.5)
    tenths = Schedule("piecewise", warmup=2, milestones=(0.3, 0.6, 0.9))
    assert [rate(tenths, step, 100) for step in (0, 2, 29, 30, 60, 90)] == pytest.approx([0.5, 1, 1, 0.1, 0.01, 0.001])
    assert rate(Schedule(), 77, 100) == 1.0


def test_the_standard_error() -> None:
    """s/√n, with s² = Σ(x - x̄)²/(n - 1)."""
    found = summary([1.0, 2.0, 4.0])
    assert found is not None
    assert found.mean == pytest.approx(7 / 3)
    assert found.error == pytest.approx(math.sqrt(((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2 / 3))
    single = summary([3.0])
    assert single is not None
    assert single.error is None
    assert summary([]) is None


def test_numbers_are_shown_without_powers_of_ten() -> None:
    found = summary([6000.0, 7000.0])
    assert shown(found, 1.0) == "6500 ± 500"
    assert shown(summary([0.6387, 0.6421]), 100.0) == "64.04 ± 0.17"
    assert shown(summary([23456.0]), 1.0) == "23456"


def test_the_time_ratio_is_the_median_of_the_common_seeds_and_of_one_clock() -> None:
    base = [result("base", 0.5, seconds, seed=seed) for seed, seconds in enumerate((10.0, 11.0, 50.0))]
    own = [result("kfac-ngd", 0.5, 22.0, seed=seed) for seed in (1, 2, 3)]
    assert times(own[:1], base) == "×2"
    assert times([*own, result("kfac-ngd", 0.5, 30.0)], base) == "×2", "of 3, 2 and 0.44"
    assert times([result("kfac-ngd", 0.5, 22.0, clock="wall")], base) == "–"
    assert times(own[2:], base) == "–"
    elsewhere = {"memory_bytes": 1}
    assert times([{**own[0], **elsewhere}], base) == "–", "another machine"
    assert times([{**own[0], **elsewhere}, own[1]], base) == times(own[1:2], base)
    assert times(own, []) == "–"


def test_the_table_has_the_column_that_the_paper_took_from_elsewhere() -> None:
    """SGDM† of Table 4, which no run of ours stands beside."""
    _, base, published = cells("cifar100-resnet18-batch256", [result("base", 0.5)])
    assert base == ["base", "1", "50", "×1", "77.52 ± 0.13", "×1"]
    assert published == [PUBLISHED, "", "", "", "76.56 ± 0.20", "×1"]


def seeded(method: str, scores: Sequence[float | None]) -> list[Result]:
    return [result(method, score, seed=seed) for seed, score in enumerate(scores)]


def test_verdicts_are_of_differences_seed_by_seed() -> None:
    """Gain d_s = method_s - base_s; better where mean(d) > 2 sd(d)/√n, however far apart the seeds are."""
    base = seeded("base", (0.40, 0.51, 0.62))
    better = seeded("kfac-ngd", (0.45, 0.55, 0.66))
    even = seeded("ekfac-ngd", (0.41, 0.50, 0.63))
    worse = seeded("diagonal-ngd", (0.38, 0.50, 0.60))
    said = verdict(base + better + even + worse)
    assert "better than the base by over two standard errors: kfac-ngd" in said
    assert "within two standard errors of the base: ekfac-ngd" in said
    assert "worse by over two standard errors: diagonal-ngd" in said
    assert gains(better[::-1], base) == pytest.approx([0.04, 0.04, 0.05])
    # two good seeds and one that diverged aren't better than three that all came to their end
    failing = seeded("kfac-ngd", (0.45, 0.55, None))
    assert "failed more often than the base: kfac-ngd (2 of 3 seeds came to a score)" in verdict(base + failing)
    assert "no run of the base" in verdict(better)
    assert "came to no score" in verdict([result("base", None), *better])
    assert "one seed" in verdict([base[0], better[0]])
    assert "no seed in common" in verdict([base[0], better[1]])


def test_shares_are_of_the_bases_steps_and_seconds_to_its_last_loss() -> None:
    """The first record whose mean of three losses is at most the base's last mean, over the base's whole run."""
    steps, seconds = [10, 20, 30, 40], [1.0, 2.0, 3.0, 4.0]
    base = result("base", 0.5, 4.0, curve={"step": steps, "seconds": seconds, "train_loss": [4.0, 3.0, 2.0, 1.0]})
    own = result(
        "default",
        0.5,
        8.0,
        curve={"step": steps, "seconds": [2 * s for s in seconds], "train_loss": [3.0, 2.0, 1.0, 1.0]},
    )
    base, own = ({**each, "steps": 40} for each in (base, own))
    assert shares(base, own) == (30 / 40, 6.0 / 4.0)
    assert shares(own, base) == (math.inf, math.inf)
    assert shares(base, {**own, "diverged": True}) == (math.inf, math.inf)
    grokked = {"score": "steps_to_target", "steps_to_target": 100, "seconds_to_target": 3.0}
    never = {"score": "steps_to_target", "steps_to_target": None, "seconds_to_target": None}
    assert shares({**base, **never}, {**own, **grokked}) == (100 / 40, 3.0 / 4.0)
    assert shares({**base, **grokked}, {**own, **never}) == (math.inf, math.inf)
    assert shares({**base, **grokked}, {**own, **grokked}) == (1.0, 1.0)


def test_curves_hold_what_was_measured_last_and_leave_out_what_diverged() -> None:
    row = result("base", 0.5, curve={"step": [10, 20], "seconds": [1.0, 2.0], "train_loss": [3.0, 2.0]})
    assert _point(row, 5, "step", "train_loss") is None
    assert _point(row, 15, "step", "train_loss") == (15, 3.0)
    assert _point(row, 500, "seconds", "train_loss") == (2.0, 2.0)
    assert _point({**row, "diverged": True}, 500, "step", "train_loss") is None


def test_steps_to_grokking() -> None:
    task = Grokking({"name": "grokking-transformer"}, 8, 0, None, "add", p=5)
    # understood before it was learned, and once more after it, when the training accuracy has fallen again
    accuracies = [(0.5, 0.1), (0.9, 0.96), (0.995, 0.2), (0.97, 0.96), (1.0, 0.97)]
    lines = [
        {"step": 10 * number, "seconds": float(number), "train_accuracy": train, "test_accuracy": test}
        for number, (train, test) in enumerate(accuracies, 1)
    ]
    assert [task.over(line, learned=number >= 2) for number, line in enumerate(lines)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert task.summary(lines) == {"steps_to_overfit": 30, "steps_to_target": 40, "seconds_to_target": 4.0}
    assert task.summary(lines[:3])["steps_to_target"] is None
    anyhow = Grokking({"name": "grokking-transformer"}, 8, 0, None, "add", p=5, by_heart=False)
    assert anyhow.summary(lines)["steps_to_target"] == 20


def test_what_a_sweep_is_asked_for() -> None:
    assert seed_list("0-2,7,1") == [0, 1, 2, 7]
    assert parse_values("llqr.every=50,100") == ("llqr.every", [50, 100])
    assert parse_values("model.blocks=[1,1]") == ("model.blocks", [[1, 1]])
    assert parse_values("llqr.solver.name=sgdm,cg") == ("llqr.solver.name", ["sgdm", "cg"])
    found = configurations("grokking-add", "smoke", ("base", "kfac-ngd"), (0, 1), {"llqr.every": [1, 2]})
    assert [(config.label, config.seed) for config in found] == [
        ("base", 0),
        ("kfac-ngd+llqr.every=1", 0),
        ("kfac-ngd", 0),  # smoke runs refit every 2 steps anyway
        ("base", 1),
        ("kfac-ngd+llqr.every=1", 1),
        ("kfac-ngd", 1),
    ]


def test_the_periods_of_an_ablation_are_multiples_of_the_presets_own() -> None:
    for scale, every in (("paper", 500), ("mini", 18)):
        assert ablation_grid("inner", "cifar10-resnet18-sgdm", scale)["llqr.every"] == [every, 4 * every]


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize("structure", ["diagonal", "kfac", "ekfac"])
def test_the_papers_methods_are_llqr_paper_with_nothing_set(structure: str, divergence: str) -> None:
    import torch

    from llqr import LLQR
    from llqr.paper import PaperLLQR
    from llqr_lab.experiments.optimizers import optimizer

    config = resolve("cifar10-resnet18-sgdm", "paper", f"{structure}-{divergence}", 0)
    made = optimizer(config, torch.nn.Linear(3, 2))
    assert isinstance(made, PaperLLQR)
    assert repr(made) == repr(LLQR.paper(made.base, made.model, divergence, structure))


def test_settings_reach_the_optimizer() -> None:
    import torch

    from llqr.paper import PaperLLQR
    from llqr.solvers import SGDM
    from llqr_lab.experiments.optimizers import optimizer

    config = resolve(
        "grokking-add",
        "smoke",
        "kfac-ngd",
        0,
        {"llqr.damping": 0.5, "llqr.warm_start": True, "llqr.chunk_size": 4, "llqr.ema": 0.25, "llqr.steps": 3},
    )
    made = optimizer(config, torch.nn.Linear(3, 2))
    assert isinstance(made, PaperLLQR)
    assert (made.ema, made.warm_start) == (0.25, True)
    told = repr(made)
    assert all(word in told for word in ("kfac", "3", "0.5"))
    assert made._refit.solver == SGDM(lr=0.005, momentum=0.9, clip=5.0)
    assert (made._refit.damping, made._refit.chunk_size, made._refit.steps) == (0.5, 4, 3)


def test_divergences_reach_the_optimizer() -> None:
    """Reverse KL, Rényi of an order and metrics on what modules return, summed as the paper's KL or averaged."""
    import torch

    from llqr_lab.experiments.optimizers import optimizer

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    for method, changes, words in (
        ("ekfac-reverse-kl", {}, "ReverseKL(reduction='sum')"),
        ("ekfac-renyi", {"llqr.order": 2.0, "llqr.reduction": "mean"}, "Renyi(2)"),
        ("kfac-ngd", {"llqr.intermediate": ["0"]}, "KL(reduction='sum') + Intermediate({'0': 0.1}, reduction='sum')"),
        ("kfac-newton", {"llqr.intermediate": ["1"], "llqr.intermediate_weight": 2.0}, "Intermediate({'1': 2.0})"),
    ):
        made: Any = optimizer(resolve("grokking-add", "smoke", method, 0, changes), model)
        assert words in repr(made._refit.divergence), method
    with pytest.raises(ConfigError, match=r"the model has no module '00': did you mean 0"):
        optimizer(resolve("grokking-add", "smoke", "kfac-ngd", 0, {"llqr.intermediate": ["00"]}), model)


def test_chunks_and_solvers_reach_the_optimizer() -> None:
    """The clip stays where the solver becomes Adam, as in the authors' code; solvers that have none do without."""
    import torch

    from llqr_lab.experiments.optimizers import optimizer

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    for changes, words in (
        ({"llqr.chunk_size": 2, "llqr.segments": ["0", "1"]}, "chunk_size=2, segments=['0', '1']"),
        ({"llqr.solver.name": "adam"}, "Adam(lr=0.005, betas=(0.9, 0.999), eps=1e-08, clip=5.0)"),
        ({"llqr.solver.name": "adam", "llqr.solver.clip": 0.0}, "eps=1e-08, clip=None)"),
        ({"llqr.solver.name": "cg"}, "ConjugateGradient()"),
    ):
        assert words in repr(optimizer(resolve("fashion-mlp", "paper", "kfac-ngd", 0, changes), model))


def test_a_sweep_keeps_the_threads_that_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run has its share of the cores, unless OMP_NUM_THREADS says how many threads."""
    told: list[str] = []

    def popen(command: list[str], env: dict[str, str], **_: Any) -> None:
        told.append(env["OMP_NUM_THREADS"])

    monkeypatch.setattr("subprocess.Popen", popen)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for threads in ("3", None):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        _started(RunFolder(tmp_path), ["train"], jobs=2)
    assert told == ["3", "4"]


def test_the_inner_rate_falls_with_the_training(tmp_path: Path) -> None:
    """½(1 + cos πk/n) of it at step k of n, so that the refits of a run are those of constant rates one after another."""
    from llqr.solvers import SGDM
    from llqr_lab.experiments.optimizers import Decaying, optimizer
    from llqr_lab.tasks import task_of

    config = resolve("grokking-add", "smoke", "kfac-ngd", 0, {"llqr.solver.schedule": "cosine", "llqr.every": 1})
    task = task_of(config, None)
    seen: list[float] = []

    class Noted(SGDM):
        def solve(self, problem: Any, u: Any, steps: int) -> Any:
            seen.append(self.lr)
            return super().solve(problem, u, steps)

    from torch import device

    from llqr_lab.experiments.loop import Run

    run: Any = Run(config, task, device("cpu"))
    own = run.optimizer._refit.solver
    assert isinstance(own, Decaying)
    object.__setattr__(own, "solver", Noted(lr=0.005, momentum=0.9, clip=5.0))
    for step in range(3):
        run.advance(task.train[step])
    assert seen == pytest.approx([0.005 * 0.5 * (1 + math.cos(math.pi * k / config.steps)) for k in range(3)])
    assert optimizer


def test_a_refit_has_a_batch_of_its_own_where_it_is_asked_for() -> None:
    """The fitted U is that of `fit` on the batch with a number beyond the run's steps, not on the step's."""
    import torch

    from llqr_lab.experiments.loop import Run
    from llqr_lab.tasks import task_of

    found = []
    for fresh in (False, True):
        config = resolve("grokking-add", "smoke", "kfac-ngd", 0, {"llqr.fresh_batch": fresh})
        task = task_of(config, None)
        run: Any = Run(config, task, torch.device("cpu"))
        asked: list[int] = []
        train = task.train

        class Watched:
            steps_per_epoch = train.steps_per_epoch

            def __getitem__(self, step: int, asked: list[int] = asked, train: Any = train) -> Any:
                asked.append(step)
                return train[step]

        task.train = Watched()
        run.advance(train[0])
        found.append(asked)
        assert run.optimizer.stats.refits == 1
    assert found == [[], [6]]
