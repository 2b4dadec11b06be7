"""`llqr compare`: optimizers are held against the same exact step, by state that follows the training; bad input is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from llqr.diagnostics import reference
from llqr_lab import options
from llqr_lab.compare import subjects
from llqr_lab.compare.command import report
from llqr_lab.compare.look import ExactInverse, Look, Settings, Summed, elsewhere
from llqr_lab.compare.shadows import Shadow, shadows
from llqr_lab.compare.subjects import Subject
from llqr_lab.models.named import NETWORKS
from llqr_lab.race.tasks import TASKS
from test_lab_commands import PNG, invoke

RESULTS = Path(__file__).parent.parent / "results"
QUICK = Settings(damping=0.01, products=30, draws=20, inner=3, blocks=True)


def tiny() -> Subject:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(12, 4, generator=generator), torch.randint(3, (12,), generator=generator)

    return Subject(model, draw, cross_entropy)


def test_without_a_word_where_it_writes_into_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it makes and names, and not into the docs/ of whatever is here."""
    monkeypatch.setattr("llqr_lab.compare.command.subject", lambda *_: tiny())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    code, printed = invoke("compare", "digits", "--at", "0", "--products", "30", "--draws", "20", "--inner", "3")
    assert code == 0, printed
    assert "Wrote results/compare_digits_sgdm.json and results/compare_digits_sgdm.png" in printed
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        "results/compare_digits_sgdm.json",
        "results/compare_digits_sgdm.png",
    ]


def test_tables_are_whole_in_80_columns() -> None:
    """Of the results that were made; a line may be longer, but no number ends in dots."""
    for path in sorted(RESULTS.glob("compare_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        with StringIO() as printed:
            for look in result["looks"]:
                report(look, result, Console(file=printed, width=80))
            assert "…" not in printed.getvalue()


def test_the_command_writes_a_result_that_says_how_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llqr_lab.compare.command.subject", lambda *_: tiny())
    output, figure = tmp_path / "found.json", tmp_path / "found.png"
    settings = ("--at", "0,2,5", "--products", "30", "--draws", "20", "--inner", "3", "--base", "adamw")
    code, printed = invoke("compare", "digits", *settings, "--output", output, "--figure", figure)
    assert code == 0, printed
    assert figure.read_bytes().startswith(PNG)
    result = json.loads(output.read_text())
    assert result["command"].startswith("llqr compare digits --base adamw --lr 0.001 --at 0,2,5 --batch 128")
    assert [look["step"] for look in result["looks"]] == [0, 2, 5]
    last = result["looks"][-1]
    wanted = {"SGD", "SGDM", "Adam", "Muon", "diag(H)⁻¹", "K-FAC", "exact, by layer", "exact, by parameter"}
    for structure in ("scalar", "diagonal", "kfac", "ekfac", "dense"):
        wanted |= {f"LLQR {structure}", f"LLQR {structure}, paper, mean", f"LLQR {structure}, paper, sum"}
    for structure in ("scalar", "diagonal", "kfac", "ekfac"):
        wanted |= {f"LLQR {structure}, eval mode", f"carried {structure}: U g", f"carried {structure}: step"}
    wanted.remove("carried scalar: U g")  # around AdamW it acts on the update, and nobody steps by that
    if find_spec("pytorch_optimizer") is not None:
        wanted |= {"Shampoo", "SOAP"}
    assert wanted <= set(last["rows"])
    for row in last["rows"].values():
        assert row["fraction"] <= 1 + 1e-6
        assert -1 <= row["cosine"] <= 1
    assert last["exact"]["converged"]
    assert [each["fitted"] for each in last["older"]] == [0, 2]
    there = last["another_batch"]["fraction_along"]
    assert there.keys() == last["older"][0]["fraction_along"].keys() | {"exact"}
    assert 0 < there["exact"] < 1
    assert last["coupling"]["lost"]["parameter"] >= 0
    assert "after 5 steps of adamw" in printed
    assert "K-FAC" in printed


def test_rows_are_verdicts_on_the_same_batch() -> None:
    """The row of SGD is that of -g, whatever its rate; a fit is better on its batch than where it starts."""
    subject = tiny()
    batch = subject.draw(0)
    look = Look(subject.model, subject, batch, QUICK)
    followers = {name: Shadow(subject.model, make) for name, make in shadows("sgdm", 0.1).items()}
    look.fill(followers, {}, subject.model, batch)
    model = subject.model.double()
    exact = reference(model, batch[0].double(), batch[1], cross_entropy, damping=0.01, tolerance=1e-6)
    down = exact.judge({name: -g for name, g in exact.gradient.items()}, by_layer=False)
    assert look.rows["SGD"]["cosine"] == pytest.approx(down.cosine, abs=1e-3)
    assert look.rows["SGD"]["length"] == pytest.approx(0.1 * down.length, rel=1e-3)
    best = {name: row["fraction_along"] or 0.0 for name, row in look.rows.items()}
    for structure in ("scalar", "diagonal", "kfac", "ekfac", "dense"):
        assert best[f"LLQR {structure}"] >= best["SGD"] - 1e-6
        assert best[f"LLQR {structure}"] <= 1 + 1e-6
    there = elsewhere(look.inverses, exact)
    assert there["LLQR kfac"] == pytest.approx(best["LLQR kfac"], abs=1e-3)


def test_shadows_have_the_state_of_an_optimizer_that_saw_the_same_gradients() -> None:
    """Adam's moments depend on the gradients alone, so a shadow's next step is that of an Adam with this history."""
    subject = tiny()
    model = subject.model
    shadow = Shadow(model, shadows("adamw", 0.01)["Adam"])
    mover = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for step in range(3):
        inputs, targets = subject.draw(step)
        mover.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        history.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        shadow.follow(model, step, inputs)
        mover.step()
    batch = subject.draw(9)
    found = shadow.proposal(model, batch, subject)
    stand_ins = [nn.Parameter(torch.zeros_like(p)) for p in model.parameters()]
    adam = Adam(stand_ins, lr=0.01)
    mover.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    history.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for gradients in history:
        before = [p.detach().clone() for p in stand_ins]
        for p, g in zip(stand_ins, gradients, strict=True):
            p.grad = g
        adam.step()
    for step_of, p, old in zip(found.values(), stand_ins, before, strict=True):
        assert torch.allclose(step_of, p.detach() - old, atol=1e-6)


def test_the_exact_inverse_is_that_of_its_batch() -> None:
    subject = tiny()
    look = Look(subject.model, subject, subject.draw(0), QUICK)
    found = ExactInverse(look.reference, 200).apply(look.reference.gradient)
    assert look.reference.judge({n: -v for n, v in found.items()}).cosine_h == pytest.approx(1, abs=1e-4)


def test_the_sum_over_a_batch_is_so_many_times_the_mean() -> None:
    subject = tiny()
    look = Look(subject.model, subject, subject.draw(0), QUICK)
    q = look.reference.quadratic
    v = dict(q.gradient)
    assert torch.allclose(Summed(q, 12).curvature(v)["0.weight"], 12 * q.curvature(v)["0.weight"])


def test_subjects_give_the_same_batch_whenever_asked() -> None:
    assert set(options.SUBJECTS) == {*TASKS, "shakespeare", *NETWORKS}
    for name in ("digits", "mlp", "transformer"):
        made = subjects.subject(name, 3, 1, None)
        (x, y), (again, _), (other, _) = made.draw(4), made.draw(4), made.draw(5)
        assert torch.equal(x, again)
        assert not torch.equal(x, other)
        assert len(y) == 3
        made.loss(made.model(x), y)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digit",), "nothing to compare on is called 'digit'"),
        (("digits", "--base", "adam"), "no base is called 'adam'"),
        (("digits", "--at", "3,1"), "isn't a list of increasing numbers"),
        (("digits", "--at", "x"), "isn't a list of increasing numbers"),
        (("digits", "--damping", "0"), "isn't a positive number"),
        (("digits", "--lr", "-1", "--output", "x.json", "--figure", "x.png"), "isn't a positive number"),
        (("digits", "--output", "nowhere/x.json"), "doesn't exist"),
        (("shakespeare", "--output", "x.json", "--figure", "x.png"), "LLQR_DATA"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = invoke("compare", *arguments)
    assert code != 0
    assert message in printed
    assert not list(tmp_path.iterdir())
