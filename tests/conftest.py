import pytest
import torch
from hypothesis import settings

settings.register_profile("llqr", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("llqr")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data folder and no hub, whatever the machine has."""
    monkeypatch.delenv("LLQR_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
