import pytest
import torch
from hypothesis import settings

settings.register_profile("llqr", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("llqr")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
