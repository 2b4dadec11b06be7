"""Every Python block in the README and the docs runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{i}")
    for page in PAGES
    for i, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_excerpts_are_of_the_examples() -> None:
    """The ```py blocks of docs/frameworks.md are lines of the pages that they link to."""
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    sections = re.findall(r"\(\.\./(examples/\w+\.py)\)(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE)
    assert len(sections) == 3
    for example, section in sections:
        lines = (ROOT / example).read_text(encoding="utf-8").splitlines()
        excerpts = re.findall(r"^```py\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        assert excerpts
        for line in "".join(excerpts).splitlines():
            assert line in lines, f"{example} has no line {line!r}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which isn't there"
