"""Promise: `fit` returns a usable Preconditioner from the identity or a warm start, and says what is wrong with its input."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import nn

from llqr.errors import LLQRError, NonFiniteError
from llqr.preconditioner import Preconditioner
from llqr.refit import fit
from llqr.solvers import SGDM, Adam, ConjugateGradient, ScaleFree
from llqr.structures import Dense, Diagonal, EigenKronecker, Kronecker
from standins import DenseModel, network_model, random_model

MIXED = {"conv": Kronecker(max_dim=10), "a": Dense(), "*.bias": "diagonal", "gain": "scalar", "*": "ekfac"}


def test_history_is_the_objective() -> None:
    """history[0] = q.value(-g) and history[-1] = q.value(-U g)."""
    model = random_model()
    for solver in (SGDM(), Adam(), ConjugateGradient(), ScaleFree()):
        u = fit(model, MIXED, solver, steps=7)
        start = model.value({name: -g for name, g in model.gradient.items()})
        end = model.value({name: -s for name, s in u.apply(model.gradient).items()})
        assert u.history[0] == pytest.approx(float(start), rel=1e-12)
        assert u.history[-1] == pytest.approx(float(end), rel=1e-9)
        assert len(u.history) <= 8


def test_the_default_solver_is_scale_free() -> None:
    model = network_model("mlp", "mean")
    assert fit(model, "kfac", steps=4).history == fit(model, "kfac", ScaleFree(), steps=4).history


def test_warm_start_goes_on_and_is_left_alone() -> None:
    """SGDM without momentum: 10 + 15 steps are 25 steps."""
    model = random_model()
    half = fit(model, "kfac", SGDM(momentum=0.0), steps=10)
    before = half.clone()
    whole = fit(model, "kfac", SGDM(momentum=0.0), steps=25)
    rest = fit(model, "kfac", SGDM(momentum=0.0), steps=15, start=half)
    for key, block in whole.blocks.items():
        for name, tensor in block.items():
            torch.testing.assert_close(rest.blocks[key][name], tensor, rtol=1e-13, atol=1e-13)
            assert torch.equal(half.blocks[key][name], before.blocks[key][name])
    assert rest.history[0] == pytest.approx(half.history[-1])


def test_the_result_shares_nothing_with_its_start() -> None:
    """Also where there was nothing to gain: loading another state into the result leaves the start as it was."""
    model = random_model().scaled(0.0, 1.0)
    start = Preconditioner.identity(model.gradient, "diagonal")
    u = fit(model, "diagonal", steps=1, start=start)
    u.load_state_dict(fit(random_model(), "diagonal", steps=3).state_dict())
    assert all(torch.equal(block["d"], torch.ones_like(block["d"])) for block in start.blocks.values())


@pytest.mark.parametrize("solver", [SGDM(), Adam(), ConjugateGradient(), ScaleFree()], ids=repr)
def test_a_zero_gradient_gives_the_identity(solver: object) -> None:
    model = random_model().scaled(0.0, 1.0)
    u = fit(model, "ekfac", solver, steps=5)
    identity = Preconditioner.identity(model.gradient, "ekfac")
    assert u.history == [0.0]
    assert all(torch.equal(t, identity.blocks[key][n]) for key, block in u.blocks.items() for n, t in block.items())


def test_a_parameter_without_gradient_keeps_its_block() -> None:
    """A block whose gradient is zero has no say in J; it stays the identity up to the common scale."""
    model = random_model()
    model.gradient["b.weight"].zero_()
    u = fit(model, "diagonal", ScaleFree(), steps=5)
    d = u.blocks["b.weight"]["d"]
    torch.testing.assert_close(d, d.mean().expand_as(d))
    assert u.is_finite()


def test_float32_and_curvature_that_breaks() -> None:
    """A product that isn't finite ends the fit with the last U that is."""

    class Breaking(DenseModel):
        def curvature(self, direction: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            product = super().curvature(direction)
            return product if self.products < 4 else {name: p * float("nan") for name, p in product.items()}

    whole = random_model()
    for solver in (SGDM(), Adam(), ConjugateGradient(), ScaleFree()):
        for structure in ("diagonal", "kfac", "ekfac"):
            model = Breaking({name: g.float() for name, g in whole.gradient.items()}, whole.matrix.float())
            u = fit(model, structure, solver, steps=10)
            assert u.is_finite()
            finite = [value for value in u.history if math.isfinite(value)]
            assert finite[-1] <= finite[0]
            assert (finite == u.history) != isinstance(solver, (SGDM, Adam))  # theirs tells how it ended
            assert all(t.dtype == torch.float32 for block in u.blocks.values() for t in block.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "positive integer"),
        ({"steps": 2.5}, "positive integer"),
        ({"steps": True}, "positive integer"),
        ({"solver": SGDM}, "object such as"),
        ({"solver": "sgdm"}, "object such as"),
        ({"structure": "kron"}, "unknown structure"),
        ({"start": {}}, "Preconditioner"),
    ],
)
def test_bad_arguments_are_explained(options: dict[str, object], message: str) -> None:
    with pytest.raises(LLQRError, match=message):
        fit(random_model(), **{"structure": "kfac", **options})


def test_a_start_of_another_structure_is_refused() -> None:
    model = random_model()
    with pytest.raises(LLQRError, match=r"same block for 'a\.weight'"):
        fit(model, "kfac", start=fit(model, "diagonal", steps=1))


def test_a_gradient_that_is_not_finite_is_named() -> None:
    model = random_model()
    model.gradient["a.bias"][1] = float("inf")
    with pytest.raises(NonFiniteError, match=r"a\.bias"):
        fit(model, "kfac")


def test_apply_takes_some_names_and_refuses_unknown_ones() -> None:
    """U is block diagonal: a part of the gradient gives that part of U g, in the order given."""
    model = random_model()
    u = fit(model, "kfac", SGDM(), steps=5)
    whole = u.apply(model.gradient)
    part = u.apply({name: model.gradient[name] for name in ("b.bias", "a.weight")})
    assert list(part) == ["b.bias", "a.weight"]
    for name, step in part.items():
        torch.testing.assert_close(step, whole[name])
    with pytest.raises(LLQRError, match=r"did you mean 'a\.weight'"):
        u.apply({"a.wieght": model.gradient["a.weight"]})


def test_blend_is_tensor_by_tensor() -> None:
    """ema · U + (1 - ema) · V, factor by factor."""
    model = random_model()
    u, v = fit(model, MIXED, steps=2), fit(model, MIXED, steps=5)
    blend = u.blend(v, 0.9)
    for key, block in blend.blocks.items():
        for name, tensor in block.items():
            torch.testing.assert_close(tensor, 0.9 * u.blocks[key][name] + 0.1 * v.blocks[key][name])
    with pytest.raises(LLQRError, match="between 0 and 1"):
        u.blend(v, 1.5)
    with pytest.raises(LLQRError, match="same block"):
        u.blend(fit(model, "scalar", steps=1), 0.9)


def test_state_dict_round_trip() -> None:
    """Through torch.save and torch.load(weights_only=True) into a fresh identity; what doesn't fit is refused whole."""
    model = random_model()
    u = fit(model, MIXED, steps=5)
    file = io.BytesIO()
    torch.save(u.state_dict(), file)
    file.seek(0)
    loaded = Preconditioner.identity(model.gradient, MIXED)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert loaded.history == u.history
    for name, step in loaded.apply(model.gradient).items():
        assert torch.equal(step, u.apply(model.gradient)[name])

    other = Preconditioner.identity({"gain": model.gradient["gain"]}, "scalar")
    with pytest.raises(LLQRError, match=r"unknown block .*known are 'gain'"):
        other.load_state_dict(u.state_dict())
    state = u.state_dict()
    del state["blocks"]["gain"]
    with pytest.raises(LLQRError, match="no block for 'gain'"):
        loaded.load_state_dict(state)
    wrong = Preconditioner.identity(model.gradient, EigenKronecker()).state_dict()
    with pytest.raises(LLQRError, match="has tensors"):
        Preconditioner.identity(model.gradient, Kronecker()).load_state_dict(wrong)


def test_repr_and_structures() -> None:
    u = Preconditioner.identity(random_model().gradient, MIXED)
    assert "Kronecker(max_dim=10): C(2, 2), D(12,) for conv.weight" in repr(u)
    assert u.structures["b.bias"] == Diagonal()
    assert u.memory == sum(t.numel() * 8 for block in u.blocks.values() for t in block.values())


def test_gradients_that_do_not_fit() -> None:
    model = random_model()
    g = model.gradient
    for structure in ("kfac", "dense"):
        u = fit(model, structure, steps=1)
        refused: list[tuple[str, Any]] = [
            (r"'a.weight' has shape \(3, 4\), and the parameter \(4, 3\)", {**g, "a.weight": g["a.weight"].T}),
            ("'a.weight' is a NoneType.*leave it out", {**g, "a.weight": None}),
            ("'a.weight' is a list.*leave it out", {**g, "a.weight": [1.0]}),
            ("'a.weight' is sparse.*to_dense", {**g, "a.weight": g["a.weight"].to_sparse()}),
            ("'a.weight' is torch.int64", {**g, "a.weight": g["a.weight"].long()}),
            ("'a.weight' is on meta", {**g, "a.weight": g["a.weight"].to("meta")}),
            ("mapping from parameter names", list(g.values())),
            ("mapping from parameter names", g["a.weight"]),
        ]
        for match, gradients in refused:
            with pytest.raises(LLQRError, match=match):
                u.apply(gradients)
        assert all(step.dtype == torch.float32 for step in u.apply({n: v.float() for n, v in g.items()}).values())


def test_states_and_blends_that_are_none() -> None:
    u = fit(random_model(), "diagonal", steps=2)
    before = u.state_dict()
    states: list[Any] = [{}, None, "x", {"blocks": 1, "history": []}, {"blocks": {"a.bias": 1}, "history": []},
                         {"history": []}, u.blocks]  # fmt: skip
    states += [{**before, "blocks": {**before["blocks"], "a.bias": {"diagonal": 1.0}}}, {**before, "history": 3}]
    for state in states:
        with pytest.raises(LLQRError, match=r"state_dict\(\) of a Preconditioner|the state's block for"):
            u.load_state_dict(state)
    assert torch.equal(u.blocks["a.bias"]["d"], before["blocks"]["a.bias"]["d"])
    for ema in ("x", None, True, torch.tensor([0.1, 0.2]), float("nan")):
        with pytest.raises(LLQRError, match="ema is a number between 0 and 1"):
            u.blend(u, ema)  # type: ignore[arg-type]


def test_what_is_no_quadratic_model() -> None:
    with pytest.raises(LLQRError, match=r"NoneType.*QuadraticModel\.build"):
        fit(None, "kfac")  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match=r"Linear.*QuadraticModel\.build"):
        fit(nn.Linear(3, 2), "kfac")  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match=r"dict.*QuadraticModel\.build"):
        fit(random_model().gradient, "kfac")  # type: ignore[arg-type]
