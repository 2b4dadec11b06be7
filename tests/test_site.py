"""Promise: the documentation builds strictly, needs no network, has no dead link, and names all that is public."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from llqr_lab.errors import RunError
from llqr_lab.experiments import table
from llqr_lab.experiments.collect import collected
from llqr_lab.experiments.paper import RESULTS
from llqr_lab.experiments.presets import PRESETS
from llqr_lab.results import filled_page, write_page
from pages import ROOT, text_of

pytest.importorskip("material", reason="mkdocs-material isn't installed: pip install llqr[docs]")
pytest.importorskip("mkdocstrings", reason="mkdocstrings isn't installed: pip install llqr[docs]")

PUBLIC = ("llqr", "llqr.divergences", "llqr.structures", "llqr.solvers", "llqr.exact", "llqr.diagnostics")


class Links(HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {str(given[name]) for name in ("id", "name") if given.get(name)}
        target = given.get("href") if tag in ("a", "link") else given.get("src")
        if target:
            loads = tag != "a" and given.get("rel") not in ("canonical", "next", "prev")
            (self.loaded if loads else self.links).append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    closed = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **closed, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Links]:
    return {page: Links(page) for page in site.rglob("*.html")}


def test_no_link_is_dead(site: Path, built: dict[Path, Links]) -> None:
    """Every link and every file that a page loads is there, and so is the place in it that the link names."""
    checked = 0
    for page, found in built.items():
        if page.name == "404.html":
            continue  # its links are from wherever it is shown
        for target in (*found.links, *found.loaded):
            address = urlsplit(target)
            if address.scheme:
                continue
            there = (page.parent / unquote(address.path)).resolve() if address.path else page
            there = there / "index.html" if there.is_dir() else there
            assert there.is_file(), f"{page.relative_to(site)} has a dead link: {target}"
            if address.fragment and there.suffix == ".html":
                assert unquote(address.fragment) in built[there].places, f"{page.relative_to(site)}: no place {target}"
            checked += 1
    assert checked > 1000


def test_nothing_is_fetched(site: Path, built: dict[Path, Links]) -> None:
    """No script, style, font or picture from elsewhere, in pages or in style sheets."""
    for page, found in built.items():
        assert not [target for target in found.loaded if urlsplit(target).netloc], page.name
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), (
            sheet.name
        )


def test_no_link_leaves_the_site(built: dict[Path, Links]) -> None:
    """Nobody checks those that do."""
    away = {target for found in built.values() for target in found.links if urlsplit(target).netloc}
    assert not away


def test_the_reference_has_every_public_name(site: Path, built: dict[Path, Links]) -> None:
    """By the anchors that mkdocstrings makes: under the name that people import."""
    places = set().union(*(found.places for page, found in built.items() if "api" in page.parts))
    pages = {
        "divergences",
        "structures",
        "solvers",
        "diagnostics",
    }  # these have a page each, and __version__ has no docstring
    for package in PUBLIC:
        for name in import_module(package).__all__:
            if not (package == "llqr" and name in {*pages, "__version__"}):
                assert {f"{package}.{name}", f"llqr.{name}", f"llqr.{name}.{name}"} & places, (
                    f"{package}.{name} isn't in docs/api"
                )
    assert all((site / "api" / name / "index.html").is_file() for name in pages)
    for method in (
        "LLQR.step",
        "paper.PaperLLQR.refit",
        "LLQR.state_dict",
        "QuadraticModel.build",
        "reporting.Stats.as_logs",
    ):
        assert f"llqr.{method}" in places


def test_examples_are_shown_and_results_are_beside_the_pages(site: Path) -> None:
    shown = (site / "examples" / "gpt" / "index.html").read_text(encoding="utf-8")
    assert "write_on" in shown
    assert (site / "results" / "experiments.json").read_bytes() == (ROOT / "results" / "experiments.json").read_bytes()
    for example in (ROOT / "examples").glob("*.py"):
        assert (site / "examples" / example.stem / "index.html").is_file(), f"{example.name} isn't in docs/examples.md"


def test_reproduction_is_of_the_present_results() -> None:
    """It is what `llqr table results/experiments.json --page docs/reproduction.md` writes, for every preset."""
    page = ROOT / "docs" / "reproduction.md"
    results = collected(ROOT / "results" / "experiments.json")
    made = filled_page(text_of(page), table.COMMAND, table.body(results), page)
    assert text_of(page) == made, "write it again"
    for name in PRESETS:
        assert name in text_of(page)
        for method in {each["method"] for each in results if each["preset"] == name}:
            reported = RESULTS.get(name, {}).get(method)
            if reported:
                assert " | ".join(reported.shown) in text_of(page)


def test_commands_of_uneven_runs(tmp_path: Path) -> None:
    """A sweep for methods with the same seeds."""
    one = collected(ROOT / "results" / "experiments.json")[0]
    one = {**one, "preset": "shakespeare-gpt-sgdm", "scale": "mini"}
    runs = [{**one, "method": method, "seed": seed} for method, seeds in UNEVEN.items() for seed in seeds]
    assert table.commands(runs) == [
        "llqr sweep shakespeare-gpt-sgdm --scale mini --methods diagonal-ngd,ekfac-ngd --seeds 0-2",
        "llqr sweep shakespeare-gpt-sgdm --scale mini --methods kfac-ngd --seeds 0,2",
    ]
    page = tmp_path / "page.md"
    page.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(RunError, match="has no place for results"):
        write_page(page, table.COMMAND, "words")
    assert text_of(page) == "# nothing\n"


UNEVEN = {"diagonal-ngd": (0, 1, 2), "ekfac-ngd": (2, 1, 0), "kfac-ngd": (0, 2)}
