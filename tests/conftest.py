from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("llqr", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("llqr")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No data folder, no hub, and a cache that is the tests' own, whatever the machine has."""
    monkeypatch.delenv("LLQR_DATA", raising=False)
    monkeypatch.setenv("LLQR_CACHE", str(_cache(tmp_path_factory)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _cache(factory: pytest.TempPathFactory) -> Path:
    folder = factory.getbasetemp() / "cache"
    folder.mkdir(exist_ok=True)
    return folder
