"""Promise: the short examples run as they are, in seconds and without a network, and what they print is right."""

from __future__ import annotations

import math
import re

import pytest
import torch

from frameworks import EXAMPLES, example, run

pytest.importorskip("sklearn", reason="scikit-learn isn't installed")
SHORT = ("image_classifier", "gpt", "translation", "own_divergence", "exact_steps")


def printed(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    run(name, *arguments)
    return capsys.readouterr().out


def numbers(pattern: str, text: str) -> list[tuple[float, ...]]:
    """The numbers that each # of the pattern stands for, line by line."""
    number = r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)"
    found = re.findall(re.escape(pattern).replace(r"\#", number), text)
    return [tuple(map(float, row if isinstance(row, tuple) else (row,))) for row in found]


@pytest.mark.parametrize("name", SHORT)
def test_they_are_short_and_need_torch_and_llqr_alone(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 85
    imported = {found.split(".")[0] for found in re.findall(r"^(?:from|import) ([\w.]+)", text, re.MULTILINE)}
    assert imported <= {"torch", "llqr", "sklearn", "inspect", "sys", "pathlib"}
    assert ("sklearn" in imported) == ("pip install llqr scikit-learn" in text)


def test_image_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    """LLQR ends at a lower training loss than its base."""
    text = printed("image_classifier", capsys)
    alone, wrapped = numbers("training loss # -> #, test accuracy #", text)
    assert alone[0] == wrapped[0] == pytest.approx(math.log(10), abs=0.05)
    assert wrapped[1] < alone[1] < 0.3
    assert min(alone[2], wrapped[2]) > 0.9
    assert numbers("refits=#, rejected=#", text) == [(41.0, 0.0)]  # 288 steps


def test_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    """From about ln(letters) down."""
    text = printed("gpt", capsys)
    losses = [loss for _, loss in numbers("step #: loss a letter on held-out text #", text)]
    assert len(losses) == 5
    assert 4 < losses[0] < 5.5
    assert losses[-1] < 2.75
    assert losses == sorted(losses, reverse=True)
    assert len(text.split("memory=")[1].split(")", 1)[1]) > 120


def test_gpt_sees_what_it_should() -> None:
    """Targets are the letters one further on, and no letter sees those after it."""
    page = example("gpt")
    torch.manual_seed(0)
    model = page.GPT(3)
    letters = torch.arange(300) % 3
    inputs, targets = page.batch(letters, 8)
    assert torch.equal(targets, (inputs + 1) % 3)
    assert model(inputs).shape == (8, page.LENGTH, 3)
    earlier = model(inputs)[:, :5]
    inputs[:, 5:] = 0
    torch.testing.assert_close(model(inputs)[:, :5], earlier)


def test_translation(capsys: pytest.CaptureFixture[str]) -> None:
    page = example("translation")
    assert page.german(743) == "siebenhundertdreiundvierzig"
    assert page.english(743) == ["seven", "hundred", "forty", "three"]
    assert [page.german(n) for n in (16, 17, 20, 101)] == ["sechzehn", "siebzehn", "zwanzig", "einhundertein"]
    text = printed("translation", capsys)
    rows = numbers("step #: loss #, right on numbers never seen #", text)
    assert [row[0] for row in rows] == [0, 40, 80, 120]
    assert rows[0][1] > 3
    assert rows[-1][1] < 0.2
    assert rows[0][2] == 0
    assert rows[-1][2] > 0.7


def test_own_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("own_divergence", capsys)
    alone, wrapped = numbers("test loss # -> #, # of targets within one deviation", text)
    assert alone[0] == wrapped[0]
    assert wrapped[1] < alone[1] < alone[0] - 0.3
    assert 0.55 < wrapped[2] < 0.8
    assert numbers("refits=#, rejected=#", text) == [(34.0, 0.0)]  # 150 steps


def test_own_divergence_is_the_kl_of_gaussians() -> None:
    """Against torch.distributions, which has the formula too."""
    from torch.distributions import Normal, kl_divergence

    from llqr.divergences import BasePoint

    page = example("own_divergence")
    at, other = torch.randn(5, 2), torch.randn(5, 2)
    truth = kl_divergence(Normal(at[:, 0], at[:, 1].exp()), Normal(other[:, 0], other[:, 1].exp())).mean()
    torch.testing.assert_close(page.GaussianKL().psi(other, BasePoint(at, lambda output: output.sum())), truth)


def test_exact_steps(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("exact_steps", capsys)
    descent, exact = ([float(word) for word in line.split()] for line in re.findall(r": loss (.*)", text))
    assert len(descent) == len(exact) == 11
    assert descent[0] == exact[0]
    for losses in (descent, exact):
        assert losses == sorted(losses, reverse=True)
    assert exact[-1] < 0.1 < 1 < descent[-1]
    assert numbers("dense solve: #", text)[0][0] < 1e-10
