"""What mkdocs does with links that lead out of docs/, to files that are there in a checkout and not on a site.

On the pages they are written as paths in the repository, `../results/exact.json`, so that they work wherever the repository is
looked at. On the site such a file is put beside the pages: a Python file as a page that shows it, any other as it is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
"""A link to another file: what opens it, the path, the place in it, what closes it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to outside of docs/."""
    for page in list(files.documentation_pages()):
        for _, target, _, _ in LINK.findall(page.content_string):
            outside = outside_path(page.src_uri, target)
            source = Path(config.docs_dir).parent / (outside or "")
            if outside is None or files.get_file_from_path(site_path(outside)) is not None or not source.is_file():
                continue  # where there is no such file, mkdocs says that the link is dead
            files.append(File.generated(config, site_path(outside), content=shown(outside, source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links lead there."""

    def led(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        outside = outside_path(page.file.src_uri, target)
        if outside is None or files.get_file_from_path(site_path(outside)) is None:
            return link.group()
        return (
            before
            + posixpath.relpath(site_path(outside), posixpath.dirname(page.file.src_uri))
            + (anchor or "")
            + after
        )

    return LINK.sub(led, markdown)


def outside_path(page: str, target: str) -> str | None:
    """The path in the repository that a link of a page leads to, if that isn't in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith(("docs/", "..", "/")) or path == "docs" else path


def site_path(outside: str) -> str:
    """Where a file of the repository is among the sources of the site."""
    return outside.removesuffix(".py") + ".md" if outside.endswith(".py") else outside


def shown(outside: str, source: Path) -> str | bytes:
    """A page that shows a Python file, or the file itself."""
    if not outside.endswith(".py"):
        return source.read_bytes() if not outside.endswith(".md") else source.read_text(encoding="utf-8")
    return f"# {outside}\n\n```py\n{source.read_text(encoding='utf-8')}```\n"
