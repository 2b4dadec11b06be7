"""Promise: the wheel holds the library alone and asks for torch alone; the sdist has all that its tests need."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from pages import ROOT, text_of

PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "pytorch_optimizer": "pytorch-optimizer", "tomli_w": "tomli-w"}
"""Where a package is called otherwise than what is imported."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling isn't installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


def test_the_wheel_holds_the_library_alone(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("METADATA"))
    library = {name.removeprefix("llqr/") for name in names if name.startswith("llqr/")}
    known = {str(path.relative_to(ROOT / "src" / "llqr")) for path in (ROOT / "src" / "llqr").rglob("*.py")}
    assert {name for name in library if name.endswith(".py")} == known
    assert "py.typed" in library
    others = [name for name in names if not name.startswith("llqr/")]
    assert all(".dist-info/" in name for name in others)
    assert not any("entry_points" in name for name in others), "the command llqr is the lab's"
    needed = [each for each in Parser().parsestr(metadata).get_all("Requires-Dist", []) if "extra ==" not in each]
    assert [each.partition(">")[0] for each in needed] == ["torch"]


def test_the_sdist_has_what_make_test_needs(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("src", "lab", "tests", "docs", "examples", "results"):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert str(file.relative_to(ROOT)) in names, f"the sdist lacks {file.name}"
    beside = "Makefile constraints.txt mkdocs.yml pyproject.toml README.md CHANGELOG.md CONTRIBUTING.md"
    assert set(beside.split()) <= names


def test_the_lab_asks_for_all_that_it_imports() -> None:
    """And the library for torch alone."""
    for folder, project in (("lab", ROOT / "lab"), ("src", ROOT)):
        content = tomllib.loads(text_of(project / "pyproject.toml"))["project"]
        extras = content.get("optional-dependencies", {})
        asked = {
            each.partition(">")[0].partition("=")[0] for each in (*content["dependencies"], *extras.get("peers", []))
        }
        imported, own = set[str](), {"llqr"} if folder == "src" else {"llqr_lab"}
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {each.name.partition(".")[0] for each in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.partition(".")[0])
        foreign = {PACKAGES.get(name, name) for name in imported - set(sys.stdlib_module_names) - own}
        missing = foreign - asked - {"torch", "markupsafe"}  # which come with llqr and with jinja2
        assert not missing, f"{project.name} doesn't ask for {missing}"
    assert "llqr_lab" not in text_of(ROOT / "pyproject.toml")
