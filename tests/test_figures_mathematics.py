"""Promise: the figures of docs/mathematics.md are drawn by the script beside them, and show what the page says of them."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from llqr import QuadraticModel, exact_step, fit
from llqr.structures import Diagonal
from pages import ROOT, text_of

spec = spec_from_file_location("mathematics", ROOT / "docs" / "figures" / "mathematics.py")
assert spec is not None
assert spec.loader is not None
drawn: Any = module_from_spec(spec)
spec.loader.exec_module(drawn)


@pytest.fixture(scope="module")
def relaxed() -> dict[str, dict[str, Any]]:
    return drawn._relaxed()


@pytest.mark.parametrize("kind", drawn.DRAWN)
def test_figure_is_drawn(
    kind: str, relaxed: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn, "_relaxed", lambda: relaxed)  # it takes long enough to do it once
    path = tmp_path / f"{kind}.png"
    drawn.DRAWN[kind](path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"figures/mathematics_{kind}.png" in text_of(ROOT / "docs" / "mathematics.md")


def test_one_number_a_layer_is_enough_for_two_parameters() -> None:
    """-U g with two numbers is -H⁻¹g, and ends closer to the minimum than any multiple of -g."""
    model, inputs, targets = drawn._two_layers(drawn.START)
    exact = drawn._flat(exact_step(model, inputs, targets, drawn._half_square, drawn.MEASURE))
    q = QuadraticModel.build(model, inputs, targets, drawn._half_square, drawn.MEASURE)
    learned = -drawn._flat(fit(q, Diagonal(), steps=drawn.INNER).apply(q.gradient))
    torch.testing.assert_close(learned, exact, rtol=1e-3, atol=1e-4)
    start, truth = torch.tensor(drawn.START).double(), torch.tensor(drawn.TRUTH).double()
    gradient = drawn._flat(q.gradient)
    beside = (truth - start) - gradient * (gradient @ (truth - start)) / (gradient @ gradient)
    assert (start + exact - truth).norm() < 0.5 * beside.norm()
    fresh, kept, descent = (torch.tensor(drawn._path(refit)[-1]).double() for refit in (1, drawn.PATHS, None))
    assert (fresh - truth).norm() < 0.01 < 0.05 < (kept - truth).norm() < 0.1 < 0.5 < (descent - truth).norm()


def test_shares_of_the_exact_step(relaxed: dict[str, dict[str, Any]]) -> None:
    """0.96 and more, but for the scalar; on another batch about the plain gradient's share, less for the diagonal."""
    found = relaxed
    for name in ("diagonal", "kfac", "ekfac"):
        assert found[name]["shares"][-1] > 0.955
        assert len(found[name]["shares"]) == 26
    assert found["scalar"]["shares"][-1] < 0.6
    alone = found[drawn.ALONE]["other"]
    assert found["diagonal"]["other"] < 0.9 * alone
    for name in ("scalar", "kfac", "ekfac"):
        assert abs(found[name]["other"] - alone) < 0.05
