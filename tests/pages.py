"""The pages of the project as text: README, CONTRIBUTING and docs, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    page: str
    number: int
    language: str
    code: str

    @property
    def label(self) -> str:
        return f"{self.page}-{self.number}"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(language: str | None = None) -> list[Block]:
    """All fenced blocks, or those of one language, numbered on their page."""
    found = []
    for page in PAGES:
        fences = [(tongue, code) for _, tongue, code in FENCE.findall(text_of(page)) if language in (None, tongue)]
        found += [Block(str(page.relative_to(ROOT)), i, *fence) for i, fence in enumerate(fences)]
    return found


def without_blocks(page: Path) -> str:
    """The text of a page between its fenced blocks."""
    return FENCE.sub("", text_of(page))
