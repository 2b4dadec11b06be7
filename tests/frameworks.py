"""The pages of examples/, as modules; and what the tests of the frameworks share."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

FILTERS = [
    "ignore::DeprecationWarning",  # the frameworks' own: what llqr warns of stays an error
    "ignore::FutureWarning",
    "ignore::ResourceWarning",
]


def quiet(*more: str) -> list[Any]:
    """Marks for a module of tests."""
    return [pytest.mark.filterwarnings(text) for text in (*FILTERS, *more)]


def run(name: str, *arguments: str) -> None:
    """A page as a command."""
    path = str(EXAMPLES / f"{name}.py")
    with patch.object(sys, "argv", [path, *arguments]):
        runpy.run_path(path, run_name="__main__")


def example(name: str) -> ModuleType:
    """A page, run as far as `if __name__ == "__main__"`."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
