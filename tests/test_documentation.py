"""Every block of code in README and docs is checked: Python runs, excerpts are of the examples, commands are understood."""

from __future__ import annotations

import re
import shlex
import time
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from llqr_lab.cli import app
from llqr_lab.experiments.command import configuration
from llqr_lab.experiments.presets import PRESETS, SCALES, known_preset
from llqr_lab.experiments.sweep import planned_runs
from llqr_lab.options import name_list, seed_list
from pages import PAGES, ROOT, blocks, text_of, without_blocks

BLOCKS = [
    pytest.param(each.code, id=each.label)
    for each in blocks("python")
    if "transformers" not in each.code  # that one runs in test_framework_trainer.py
]
LLQR = typer.main.get_command(app)
COMMANDS = [
    pytest.param(line.partition("#")[0].strip(), id=f"{each.label}-{number}")
    for each in blocks("sh")
    for number, line in enumerate(each.code.splitlines())
]


@pytest.mark.parametrize("code", BLOCKS)
def test_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    exec(compile(code, "example", "exec"), namespace)
    if "init_process_group" in code:
        time.sleep(0.5)  # torch waits forever if a group goes before its thread has let go of its last work


def test_there_are_no_blocks_of_other_kinds() -> None:
    """Fenced ones are Python, excerpts of examples, commands, or no code; indented ones are formulas."""
    for each in blocks():
        assert each.language in ("python", "py", "sh", ""), f"{each.label} is {each.language}, which nothing checks"
        if not each.language:
            assert not looks_like_code(each.code), f"{each.label} is code without a language"
    for page in PAGES:
        indented = re.findall(r"^(?: {4}|\t).*", without_blocks(page), re.MULTILINE)
        assert not looks_like_code("\n".join(line.strip() for line in indented)), f"{page.name} has indented code"


def looks_like_code(text: str) -> bool:
    return re.search(r"^(import |from \w+ import|def |class |llqr |make |pip |\$ )", text, re.MULTILINE) is not None


def test_excerpts_are_of_the_examples() -> None:
    """The ```py blocks are lines of the examples that their sections link to."""
    for page in dict.fromkeys(each.page for each in blocks("py")):
        sections = re.split(r"^## ", text_of(ROOT / page), flags=re.MULTILINE)
        for section in (section for section in sections if "```py\n" in section):
            linked = re.search(r"\(\.\./(examples/\w+\.py)\)", section)
            assert linked, f"{page} has an excerpt of nothing: {section[:40]!r}"
            lines = text_of(ROOT / linked[1]).splitlines()
            for line in "".join(re.findall(r"^```py\n(.*?)^```", section, re.DOTALL | re.MULTILINE)).splitlines():
                assert line in lines, f"{linked[1]} has no line {line!r}"
    assert len(blocks("py")) >= 4


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of llqr are parsed as they would be, presets and settings looked up; others name what there is."""
    if not line:
        return
    program, *arguments = shlex.split(line)
    if program == "make":
        targets = re.findall(r"^(\w+):", text_of(ROOT / "Makefile"), re.MULTILINE)
        parts = {f"test-{path.stem.split('_')[1]}" for path in (ROOT / "tests").glob("test_*.py")}
        assert set(arguments) <= {*targets, *parts}
    elif program == "pip":
        extras = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
        verb, target = arguments
        package, _, rest = target.partition("[")
        assert (verb, package in (".", "llqr")) == ("install", True)
        assert set(rest.rstrip("]").split(",")) - {""} <= set(extras)
    elif program == ".venv/bin/python":
        script, *rest = arguments
        source = text_of(ROOT / script)
        assert all(f'"{word}"' in source for word in rest if re.match(r"--|[a-z]+$", word))
    else:
        assert program == "llqr", f"nothing checks {line!r}"
        for folder in ("docs/figures", "runs/mine"):
            (tmp_path / folder).mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        understood(arguments)


def understood(arguments: list[str]) -> None:
    """Raise where the command line would be refused; nothing is run but dry."""
    command, rest, context = LLQR, arguments, None
    while isinstance(command, TyperGroup):
        context = command.make_context(command.name, list(rest), parent=context)
        _, command, rest = command.resolve_command(context, list(rest))
    given = command.make_context(command.name, list(rest), parent=context).params
    if command.name == "sweep":
        presets, scale, methods, seeds, ablation = (
            given[n] for n in ("presets", "scale", "methods", "seeds", "ablation")
        )
        planned_runs(presets, scale, name_list(methods), seed_list(seeds), ablation, given["changes"] or [])
    elif command.name == "train" and given["target"]:
        configuration(given["target"], given["scale"], given["method"], given["seed"], given["changes"] or [])
    elif command.name == "figure":
        named = set(filter(None, given["methods"].split(",")))
        for preset in given["presets"] or []:
            own = set(known_preset(preset).methods)
            assert not named or named & own, f"{preset} has none of {named}"
        assert given["scale"] in SCALES
    elif command.name == "table":
        for part in given["presets"].split(","):
            assert any(part in preset for preset in PRESETS), f"no preset has {part!r} in its name"


@pytest.mark.parametrize(
    "line",
    [
        "llqr swep x",
        "llqr sweep grokking-add grokking-ad",
        "llqr sweep grokking-add --methods adam",
        "llqr figure curves grokking-add grokking-ad",
        "llqr figure curves iwslt14-transformer-adamw --methods kfac-ngd",
        "llqr table --presets resnet18,cifr",
        "llqr train --sed 1",
        "make coffee",
    ],
)
def test_wrong_commands_are_noticed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"No such|there is no preset|coffee|has none of|no preset has|in its table"):
        test_command_is_understood(line, tmp_path, monkeypatch)


def test_commands_in_the_text_exist() -> None:
    """`llqr bench race`, written in a sentence, up to what stands for something else: PRESET, --option, a path."""
    found = 0
    for page in PAGES:
        for words in re.findall(r"`llqr ([a-z][^`]*)`", without_blocks(page)):
            found += 1
            command = LLQR
            for word in words.split():
                if not isinstance(command, TyperGroup):
                    break
                assert word in command.commands, f"{page.name}: there is no `llqr {words}`"
                command = command.commands[word]
    assert found > 10


def test_guide_pages_are_short() -> None:
    """At most 700 words between blocks of code and formulas; the map 900. Lab notes and the reference aren't counted."""
    sections = re.split(r"^  - ", text_of(ROOT / "mkdocs.yml").partition("\nnav:\n")[2], flags=re.MULTILINE)
    guide = [each for each in sections if not each.startswith(("Lab notes:", "Reference:"))]
    pages = re.findall(r"[\w/-]+\.md", "".join(guide))
    assert len(pages) > 15
    for page in pages:
        prose = re.sub(r"^ {4}.*", "", without_blocks(ROOT / "docs" / page), flags=re.MULTILINE)
        words = len(re.findall(r"\S*\w\S*", prose))
        assert words <= (900 if page == "architecture.md" else 700), f"{page} has {words} words"


def test_readme_has_the_results_of_the_race(tmp_path: Path) -> None:
    """It is what docs/figures/readme.py writes of results/race.json."""
    spec = spec_from_file_location("readme", ROOT / "docs" / "figures" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TABLE.findall(text_of(ROOT / "README.md")) == [script.table()], "write it again"
    script.draw(script.rows(), tmp_path / "readme.png")
    assert (tmp_path / "readme.png").stat().st_size > 10_000


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", without_blocks(page)):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which isn't there"
