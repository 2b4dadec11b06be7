"""Drawn networks: gradients and products are exact or refused (`fuzz_networks`, of which this is a small part)."""

from __future__ import annotations

import pytest

from fuzz_networks import main, outcome

SEEDS = 150


@pytest.mark.parametrize("first", range(0, SEEDS, 30))
def test_drawn_networks(first: int) -> None:
    failed = [seed for seed in range(first, first + 30) if outcome(seed).startswith(("WRONG", "RAW"))]
    assert not failed


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of counts, and an exit code that tells."""
    assert main(["--seeds", "0-4"]) == 0
    assert "5  networks" in capsys.readouterr().out
