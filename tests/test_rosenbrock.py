"""`llqr rosenbrock`: the two-layer form is the function, Riccati is Newton, and the paper's claims as far as they hold."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from llqr.curvature.quadratic import QuadraticModel
from llqr.divergences import Newton
from llqr.exact import dense_step
from llqr.refit import fit
from llqr.solvers import SGDM
from llqr.structures import Dense, Scalar
from llqr_lab import rosenbrock as problem
from llqr_lab.bench.measure import one_thread
from llqr_lab.cli import app
from llqr_lab.rosenbrock import (
    CLASSIC,
    CONVERGED,
    SCALAR_PERIODS,
    VALLEY,
    Descent,
    Setting,
    cosine,
    dense,
    diagonal_newton,
    scalars,
    steepest,
)
from llqr_lab.rosenbrock import riccati as riccati_step

PNG = b"\x89PNG"
START = CLASSIC.start
POINTS = [(-1.2, 1.0), (0.3, -0.7), (1.0, 1.0), (0.5, 0.5), (-0.8, 1.9)]
"""In the last two the Hessian is indefinite."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def diagonal() -> Descent:
    return CLASSIC.run(diagonal_newton)


def at(point: tuple[float, float]) -> Tensor:
    return torch.tensor(point, dtype=torch.float64)


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("build", [problem.two_layers, problem.one_layer])
@pytest.mark.parametrize("place", POINTS)
def test_both_forms_are_the_function_with_its_derivatives(build: problem.Build, place: tuple[float, float]) -> None:
    point = at(place)
    x, y = place
    assert problem.value(point) == pytest.approx((1 - x) ** 2 + 100 * (y - x**2) ** 2)
    network = build(point)
    output = network(problem.INPUTS)
    assert output.shape == (1,)
    assert output.item() == pytest.approx(problem.value(point), rel=1e-14, abs=1e-14)
    model = QuadraticModel.build(network, problem.INPUTS, None, problem.mean, Newton())
    torch.testing.assert_close(problem.joined(model.gradient), problem.gradient(point), rtol=1e-13, atol=1e-12)
    columns = [
        problem.joined(model.curvature(problem.named(network, unit))) for unit in torch.eye(2, dtype=torch.float64)
    ]
    torch.testing.assert_close(torch.stack(columns), problem.hessian(point), rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_riccati_takes_newtons_path(rate: float) -> None:
    setting = replace(CLASSIC, rate=rate)
    riccati, newton = setting.run(riccati_step), setting.run(problem.newton)
    assert riccati.iterations == newton.iterations
    assert newton.losses[-1] <= 1e-12
    torch.testing.assert_close(torch.stack(riccati.points), torch.stack(newton.points), rtol=0, atol=1e-10)


@pytest.mark.parametrize("place", [point for point in POINTS if point != (1.0, 1.0)])
def test_riccati_is_the_stationary_point_where_the_hessian_is_indefinite_too(place: tuple[float, float]) -> None:
    point = at(place)
    exact = problem.newton(point)
    reference = dense_step(
        problem.one_layer(point), problem.INPUTS, None, problem.mean, Newton(), degenerate="least-norm"
    )
    torch.testing.assert_close(problem.joined(reference), exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(riccati_step(point), exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("setting", "periods"),
    [
        (replace(CLASSIC, until=1e-2, target=1e-2), SCALAR_PERIODS),
        (replace(CLASSIC, until=1e-8, start=(0.5, 0.0), rate=0.1), (1, 2, 5)),
    ],
    ids=["classic", "basin"],
)
def test_more_frequent_refits_of_two_scalars_converge_faster(setting: Setting, periods: Sequence[int]) -> None:
    reached = [setting.run(scalars(every, CONVERGED)).reached(setting.target) for every in periods]
    assert reached[0] == setting.run(problem.newton).reached(setting.target)
    counts = [count for count in reached if count is not None]
    assert len(counts) == len(periods)
    assert counts == sorted(set(counts))


def test_a_converged_fit_of_two_scalars_goes_stale() -> None:
    run = replace(CLASSIC, most=500).run(scalars(5, CONVERGED))
    assert run.diverged
    assert run.reached(0.1) is None


def test_dense_u_on_the_single_layer_is_newtons_method() -> None:
    setting = replace(CLASSIC, rate=0.2)
    run = setting.run(dense(1, CONVERGED))
    assert run.reached(1e-8) == setting.run(problem.newton).reached(1e-8)
    assert min(run.cosines) > 0.999
    assert replace(CLASSIC, until=1e-8).run(dense(20, CONVERGED)).reached(1e-8) is not None


def test_the_diagonal_hessian_crawls_where_the_hessian_is_indefinite(diagonal: Descent) -> None:
    assert diagonal.reached(1.0) is None
    assert diagonal.indefinite > 0.5
    assert replace(CLASSIC, rate=1.0, most=200).run(diagonal_newton).losses[-1] > 1e3


def test_llqr_is_nearer_to_newtons_direction_than_the_diagonal_hessian(diagonal: Descent) -> None:
    relaxed = replace(CLASSIC, until=1e-4).run(scalars(3, CONVERGED))
    on_its_path = [cosine(diagonal_newton(point), problem.newton(point)) for point in relaxed.points[:-1]]
    assert relaxed.mean_cosine > 0.99
    assert sum(on_its_path) / len(on_its_path) < 0.6
    assert diagonal.mean_cosine < 0


def test_the_papers_inner_solver_needs_small_gradients() -> None:
    point = at(START)
    model = QuadraticModel.build(problem.two_layers(point), problem.INPUTS, None, problem.mean, Newton())
    best = 0.5 * float(problem.gradient(point) @ problem.newton(point))
    assert fit(model, Scalar(), SGDM(lr=1e-4), 500).history[-1] / best < -1e6
    assert fit(model, Scalar(), CONVERGED, 25).history[-1] / best == pytest.approx(1, abs=1e-9)
    early = replace(VALLEY, most=300)
    ahead, behind = (early.run(scalars(every, SGDM(lr=1e-4), 500)) for every in (100, 300))
    assert not ahead.diverged
    assert ahead.losses[-1] < behind.losses[-1] < ahead.losses[0]
    assert early.run(steepest).losses[-1] < ahead.losses[-1]


def test_the_fit_is_that_of_the_plain_recursion() -> None:
    point = at((-1.0, 0.998))
    g, h = problem.gradient(point), problem.hessian(point)
    u, buffer = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for _ in range(100):
        buffer = 0.9 * buffer - g * (g - h @ (u * g))
        u = u - 1e-4 * buffer
    model = QuadraticModel.build(problem.two_layers(point), problem.INPUTS, None, problem.mean, Newton())
    blocks = fit(model, Scalar(), SGDM(lr=1e-4), 100).blocks
    torch.testing.assert_close(torch.stack([block["u"] for block in blocks.values()]), u, rtol=1e-9, atol=1e-9)
    single = QuadraticModel.build(problem.one_layer(point), problem.INPUTS, None, problem.mean, Newton())
    step = fit(single, Dense(), CONVERGED, 25).apply({"point": g})["point"]
    torch.testing.assert_close(-step, problem.newton(point), rtol=1e-6, atol=1e-9)


def test_momentum_has_the_best_rate_of_its_grid() -> None:
    name, run = replace(CLASSIC, most=800, until=1e-8).best_momentum()
    assert name == "SGDM, lr 0.003"
    assert run.reached(1e-8) == 617


def test_the_command_writes_results_and_figures(tmp_path: Path) -> None:
    output, losses, paths = (tmp_path / name for name in ("rosenbrock.json", "loss.png", "paths.png"))
    files = ("--output", output, "--loss-figure", losses, "--paths-figure", paths)
    code, printed = invoke("rosenbrock", "--quick", *files)
    assert code == 0, printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "paths.png", "rosenbrock.json"]
    for figure in (losses, paths):
        assert figure.read_bytes().startswith(PNG)
    for words in ("LLQR scalars, every 3", "diagonal Hessian", "not in 30", "iterates differ by at most"):
        assert words in printed

    text = output.read_text()
    assert not platform.node() or platform.node() not in text
    result = json.loads(text)
    assert result["command"] == "llqr rosenbrock --quick"
    assert result["versions"]["torch"] == torch.__version__
    assert result["newton_minus_riccati"] < 1e-10
    for run in (*result["classic"], *result["valley"]):
        assert -1.001 <= run["mean_cosine"] <= 1.001


@pytest.mark.parametrize(
    "arguments",
    [
        ("--output", "missing/rosenbrock.json"),
        ("--loss-figure", "loss"),
        ("--paths-figure", "missing/paths.png"),
        ("--steps", "3"),
    ],
)
def test_wrong_input_is_refused_before_any_work(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llqr_lab.rosenbrock.main", lambda *_: pytest.fail("work was begun"))
    code, printed = invoke("rosenbrock", *arguments)
    assert code == 2
    assert arguments[-2] in printed


def test_by_default_it_writes_into_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not into the docs/ of whatever is here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    given: list[object] = []
    monkeypatch.setattr("llqr_lab.rosenbrock.main", lambda *arguments: given.extend(arguments))
    code, printed = invoke("rosenbrock", "--quick")
    assert code == 0, printed
    names = ("rosenbrock.json", "rosenbrock_loss.png", "rosenbrock_paths.png")
    assert given == [*(Path("results") / name for name in names), True]
