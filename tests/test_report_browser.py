"""Promise: the page does in a browser what it says, by mouse, keys and fingers, without a word on the console."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from llqr_lab.bench.browser import Browser, chromium
from llqr_lab.cli import app
from llqr_lab.experiments.loop import SPENT
from llqr_lab.report.command import write_report
from made_runs import diagnosed, falling, made_run

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="there is no Chromium here: install one to test the report's page"
)

SHIFT = 8
EVIL = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experiments: one with seeds, diagnostics, a name that is a script and a run that failed; one with many points."""
    runs = tmp_path_factory.mktemp("runs")
    for method in ("base", "ekfac-ngd"):
        for seed in range(3):
            lines = falling(60, seed, 0.1 * len(method))
            # tables with all that is recorded are wider than a phone
            times = [{"seconds": 0.5 * line["step"], **dict.fromkeys(SPENT, 0.1 * line["step"])} for line in lines]
            made_run(runs, method, seed, lines, times, diagnostics=diagnosed() if method != "base" else ())
    made_run(runs, "kfac-ngd", finished=False, lines=falling(30, 0))
    last = {"step": 3000, "test_accuracy": float("nan"), "constructor": 1.0, EVIL: 1.0}
    made_run(runs, named=EVIL, lines=[*falling(40, 5), last])
    many = falling(5000, 0, every=1)
    many[3210]["train_loss"] = 40.0
    made_run(runs, lines=many, preset="cifar100-resnet18-sgdm", finished=False)
    output = tmp_path_factory.mktemp("page") / "report.html"
    write_report([runs], output)
    return output


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as browser:
        yield browser


@pytest.fixture
def browser(running: Browser, page: Path) -> Iterator[Browser]:
    """The page, as someone sees it who opens it for the first time; nothing is left on the console when it is closed."""
    running.resize(1280, 900)
    running.media()
    running.complaints.clear()
    running.open(page)
    running.run("localStorage.clear()")
    running.open(page)
    yield running
    assert running.complaints == []
    assert running.run("window.hurt") is None


def chart(browser: Browser, panel: str = "#experiment-0 .panel[data-kind=curves]") -> dict[str, Any]:
    """What a chart says that it shows."""
    browser.painted()
    return dict(browser.run(f"({{...document.querySelector('{panel} canvas').dataset}})"))


def box(browser: Browser, selector: str = "#experiment-0 canvas") -> tuple[float, float, float, float]:
    browser.run(f"document.querySelector('{selector}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.painted()
    found = browser.run(
        f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect(); "
        "return [b.left, b.top, b.width, b.height]; })()"
    )
    return tuple(found)


def click(browser: Browser, selector: str) -> None:
    left, top, width, height = box(browser, selector)
    at = (left + width / 2, top + height / 2)
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        browser.mouse(kind, *at)
    browser.painted()


def choose(browser: Browser, control: str, value: str, experiment: int = 0) -> None:
    browser.run(
        f"(() => {{ const s = document.querySelector('#experiment-{experiment} [data-control={control}]'); "
        f"s.value = {json.dumps(value)}; "
        "s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    browser.painted()


def ink(browser: Browser, experiment: int = 0) -> np.ndarray[Any, Any]:
    """The picture in an experiment's first chart."""
    browser.painted()
    text = browser.run(f"document.querySelector('#experiment-{experiment} canvas').toDataURL('image/png')")
    return np.asarray(Image.open(BytesIO(base64.b64decode(text.split(",")[1]))).convert("RGBA")).astype(int)


def test_it_opens_with_its_curves_drawn(browser: Browser) -> None:
    shown = chart(browser)
    assert shown["drawn"] == "4"
    assert (float(shown["from"]), float(shown["to"])) == (0.0, 3000.0)
    assert (ink(browser)[..., 3] > 0).mean() > 0.02
    entries = browser.run(
        "[...document.querySelectorAll('#experiment-0 .panel[data-kind=curves] li')].map(e => e.textContent)"
    )
    assert entries == ["base 3 seeds", "kfac-ngd stopped", "ekfac-ngd 3 seeds", EVIL]
    assert "lines are the mean over seeds, areas reach from the smallest to the largest" in browser.run(
        "document.querySelector('#experiment-0 [data-caption]').textContent"
    )


def test_runs_are_shown_and_hidden(browser: Browser) -> None:
    before = ink(browser)
    click(browser, "#experiment-0 li:nth-child(3) input")
    assert chart(browser)["drawn"] == "3"
    assert (ink(browser) != before).any()
    click(browser, "#experiment-0 [data-show=none]")
    assert chart(browser)["drawn"] == "0"
    click(browser, "#experiment-0 [data-show=all]")
    assert chart(browser)["drawn"] == "4"
    # by keys alone: the box that has the focus
    browser.run("document.querySelector('#experiment-0 li input').focus()")
    browser.key(" ")
    assert chart(browser)["drawn"] == "3"
    choose(browser, "view", "runs")
    assert chart(browser)["drawn"] == "8"


def test_zoom_by_mouse(browser: Browser) -> None:
    left, top, width, height = box(browser)
    whole = chart(browser)
    browser.drag((left + 0.5 * width, top + 0.5 * height), (left + 0.75 * width, top + 0.6 * height))
    zoomed = chart(browser)
    assert 1350 < float(zoomed["from"]) < 1550
    assert 2100 < float(zoomed["to"]) < 2350
    assert float(zoomed["bottom"]) > float(whole["bottom"]), "the height follows what is looked at"
    at = (left + 0.5 * width, top + 0.5 * height)
    browser.mouse("mouseWheel", *at, deltaX=0, deltaY=-120)
    assert chart(browser)["from"] > zoomed["from"], "the chart was clicked, so the wheel is its own"
    for count in (1, 2):
        browser.mouse("mousePressed", *at, clickCount=count)
        browser.mouse("mouseReleased", *at, clickCount=count)
    assert chart(browser) == whole
    browser.run("document.activeElement.blur()")
    browser.mouse("mouseWheel", *at, deltaX=0, deltaY=60)
    assert chart(browser) == whole, "the page's wheel isn't taken away"
    click(browser, "#experiment-0 [data-zoom=in]")
    assert (float(chart(browser)["from"]), float(chart(browser)["to"])) == (750.0, 2250.0)
    click(browser, "#experiment-0 [data-zoom=reset]")
    assert chart(browser) == whole


def test_zoom_and_values_by_keys(browser: Browser) -> None:
    whole = chart(browser)
    browser.run("document.querySelector('#experiment-0 canvas').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    said = browser.run("document.querySelector('#experiment-0 [data-live]').textContent")
    assert said.startswith("step 100: ")
    assert "base 0." in said
    browser.key("+")
    assert float(chart(browser)["to"]) < 1600
    before = float(chart(browser)["from"])
    browser.key("ArrowRight", SHIFT)
    assert float(chart(browser)["from"]) > before
    browser.key("0")
    assert chart(browser) == whole


def test_values_under_the_pointer(browser: Browser) -> None:
    left, top, width, height = box(browser)
    browser.mouse("mouseMoved", left + 0.5 * width, top + 0.5 * height)
    browser.painted()
    tip = browser.run("document.querySelector('#experiment-0 .tip').innerText")
    assert "3 seeds" in tip
    assert EVIL in tip
    browser.mouse("mouseMoved", 5, 5)
    browser.painted()
    assert browser.run("document.querySelector('#experiment-0 .tip').hidden") is True


def test_zoom_by_fingers(browser: Browser) -> None:
    left, top, width, height = box(browser)
    middle, high = left + width / 2, top + height / 2

    def touch(kind: str, apart: float) -> None:
        places = [] if kind == "touchEnd" else [(middle - apart, 1), (middle + apart, 2)]
        points = [{"x": x, "y": high, "id": number} for x, number in places]
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    touch("touchStart", 60)
    for apart in (90, 140, 200):
        touch("touchMove", apart)
    touch("touchEnd", 0)
    shown = chart(browser)
    assert float(shown["to"]) - float(shown["from"]) < 1200
    assert float(shown["from"]) < 1500 < float(shown["to"])


def test_other_metrics_axes_and_bands(browser: Browser) -> None:
    for metric in ("constructor", EVIL):
        choose(browser, "metric", metric)
        assert chart(browser)["drawn"] == "1"
    choose(browser, "metric", "test_accuracy")
    choose(browser, "along", "seconds")
    assert float(chart(browser)["to"]) == 1500.0
    choose(browser, "metric", "test_loss")
    assert browser.run("document.querySelector('#experiment-0 [data-control=logy]').checked") is True
    assert float(chart(browser)["bottom"]) > 0
    for band in ("deviation", "none", "range"):
        choose(browser, "band", band)
    choose(browser, "middle", "median")
    assert "median" in browser.run("document.querySelector('#experiment-0 [data-caption]').textContent")
    click(browser, "#experiment-0 [data-control=logx]")
    assert float(chart(browser)["from"]) == 25.0


def test_colours_follow_the_system_until_they_are_chosen(browser: Browser, page: Path) -> None:
    def paper() -> str:
        browser.painted()
        return str(browser.run("getComputedStyle(document.body).backgroundColor"))

    light = paper()
    day = ink(browser)
    browser.media(prefers_color_scheme="dark")
    dark = paper()
    assert dark != light
    assert (ink(browser) != day).any(), "the curves too"
    click(browser, "[data-theme-choice=light]")
    assert paper() == light, "what was chosen wins over the system"
    assert browser.run("document.querySelector('[data-theme-choice=light]').ariaPressed") == "true"
    click(browser, "[data-theme-choice=dark]")
    browser.media(prefers_color_scheme="light")
    assert paper() == dark
    browser.open(page)
    assert paper() == dark, "and is remembered"
    click(browser, "[data-theme-choice=system]")
    assert paper() == light


def test_words_stand_out_in_both(browser: Browser) -> None:
    """WCAG's contrast (L₁ + 0.05)/(L₂ + 0.05): at least 4.5 for words, 3 for lines."""

    def contrast(one: str, other: str) -> float:
        lights = sorted(map(luminance, (one, other)))
        return (lights[1] + 0.05) / (lights[0] + 0.05)

    for theme in ("light", "dark"):
        click(browser, f"[data-theme-choice={theme}]")
        resolved = (
            "((names) => { const probe = document.body.appendChild(document.createElement('span')); "
            "const found = names.map((n) => { probe.style.color = `var(--${n})`; return getComputedStyle(probe).color; }); "
            "probe.remove(); return found; })"
        )
        words = ["ink", "quiet", "accent", "good", "bad", "wait"]
        lines = [f"line-{number}" for number in range(8)]
        paper, raised, mark, *found = browser.run(f"{resolved}({['paper', 'raised', 'mark', *words, *lines]})")
        for name, colour in zip([*words, *lines], found, strict=True):
            assert contrast(colour, paper) >= (4.5 if name in words else 3.0), (theme, name)
        assert min(contrast(found[0], raised), contrast(found[0], mark), contrast(found[1], mark)) >= 4.5, theme


def luminance(colour: str) -> float:
    channels = [int(each) / 255 for each in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_spikes_and_diagnostics_are_drawn(browser: Browser) -> None:
    # sorted by name, the experiment with many points is the second
    box(browser, "#experiment-1 canvas")
    choose(browser, "metric", "train_loss", experiment=1)
    assert float(chart(browser, "#experiment-1")["top"]) > 40
    # the spike is at 3,211 of 5,000 steps; beside it the upper half has lines of the grid only
    picture = ink(browser, 1)[..., 3] > 0
    height, width = picture.shape
    left = np.flatnonzero(picture[height - 40 :].any(axis=0))[0]
    at = left + round((width - left) * 3211 / 5000)
    rows = [picture[20 : height // 2, near - 12 : near + 12].any(axis=1).sum() for near in (at, at - 200, at + 200)]
    assert rows[0] > height // 4 > 3 * max(rows[1:])
    box(browser, "#experiment-0 .spectra")
    assert browser.run("document.querySelector('#experiment-0 .grid').dataset.drawn") == "3"
    box(browser, "#experiment-0 .panel[data-kind=diagnostics]")
    assert chart(browser, "#experiment-0 .panel[data-kind=diagnostics]")["drawn"] == "1"


@pytest.mark.parametrize(("name", "width", "scale"), [("desktop", 1280, 1.0), ("phone", 360, 2.0)])
def test_nothing_sticks_out(browser: Browser, name: str, width: int, scale: float, tmp_path: Path) -> None:
    browser.resize(width, 800, scale, mobile=name == "phone")
    browser.painted()
    assert browser.run("document.documentElement.scrollWidth") == width
    outside = browser.run(
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, .hidden, .tip') && "
        f"e.getBoundingClientRect().right > {width} + 1).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    # nor do tables: on a phone their rows are lists, and no column is beyond the edge
    browser.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    hidden = browser.run(
        "[...document.querySelectorAll('.scroll td')].filter((e) => { const b = e.getBoundingClientRect(); "
        f"return b.left < 0 || b.right > {width} + 1 || e.scrollWidth > e.clientWidth + 1; }})"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert hidden == []
    if name == "phone":
        said = browser.run("getComputedStyle(document.querySelector('.runs td:nth-child(4)'), '::before').content")
        assert said == '"steps"'
    browser.run("document.querySelectorAll('details').forEach((e) => { e.open = false; })")
    picture = tmp_path / f"{name}.png"
    browser.screenshot(picture)
    shot = Image.open(picture)
    assert shot.size == (width * scale, 800 * scale)
    assert len(shot.getcolors(1 << 20) or []) > 50


def test_on_paper_everything_is_open_drawn_and_light(browser: Browser, tmp_path: Path) -> None:
    click(browser, "[data-theme-choice=dark]")
    browser.media("print")
    browser.painted()
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("document.querySelectorAll('details:not([open])').length") == 0
    assert browser.run("[...document.querySelectorAll('.panel canvas')].every((each) => each.dataset.drawn)") is True
    assert browser.run("getComputedStyle(document.querySelector('.zoom')).display") == "none"
    browser.media()
    browser.painted()
    assert browser.run("document.querySelectorAll('details[open]').length") == 0
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_without_scripts_there_are_the_tables(browser: Browser, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.load(page)
        assert browser.run("document.documentElement.dataset.ready") is None, "scripts are off"
        assert "scripts are off" in browser.run("document.querySelector('noscript').innerText")
        # paper, time, settings and runs; what a script would have to draw isn't there as a hole
        assert browser.run("document.querySelector('#experiment-0').querySelectorAll('.scroll table').length") >= 4
        shown = "[...document.querySelectorAll('.panel, .spectra, .themes')].some((each) => each.offsetHeight)"
        assert browser.run(shown) is False
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_no_other_script_runs(browser: Browser) -> None:
    """The page's own policy stops what would get through, and says so on the console."""
    browser.run("document.body.insertAdjacentHTML('beforeend', `<img src='data:,' onerror='window.hurt = 1'>`)")
    browser.run(
        "document.body.appendChild(Object.assign(document.createElement('script'), {textContent: 'window.hurt = 1'}))"
    )
    browser.painted()
    assert browser.run("window.hurt") is None
    assert any("Content Security Policy" in each for each in browser.complaints)
    browser.complaints.clear()


def test_bench_report_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "report.json"
    arguments = ["bench", "report", "--runs=6", "--points=900", "--repeats=1", f"--output={output}"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text(encoding="utf-8"))
    assert (found["runs"], found["points_of_a_run"], found["repeats"]) == (6, 900, 1)
    assert found["read_bytes"] > 6 * 900 * 100
    assert 50_000 < found["page_bytes"] < found["read_bytes"]
    assert min(found["open_seconds"], found["open_cpu_seconds"], found["each_run_seconds"]) > 0
    assert found["browser"].split("/")[0] in ("Chrome", "HeadlessChrome")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1
    assert "there is no Chromium here" in refused.output


def test_the_report_of_the_runs_that_were_made(running: Browser, tmp_path: Path) -> None:
    """Of results/experiments.json: all experiments are drawn, runs hidden and zoomed, the theme changed; wide and narrow."""
    results = Path(__file__).parent.parent / "results" / "experiments.json"
    runs = json.loads(results.read_text(encoding="utf-8"))["runs"]
    output = tmp_path / "report.html"
    write_report([results], output)
    running.resize(1280, 900)
    running.media()
    running.complaints.clear()
    running.open(output)
    running.run("localStorage.clear()")
    running.open(output)
    for number, preset in enumerate(sorted({run["preset"] for run in runs})):
        own = running.run(f"document.querySelector('#experiment-{number}').textContent")
        assert preset in own
        methods = {run["method"] for run in runs if run["preset"] == preset}
        box(running, f"#experiment-{number} canvas")  # charts are drawn when they are seen
        assert chart(running, f"#experiment-{number} .panel[data-kind=curves]")["drawn"] == str(len(methods))
    before, drawn = ink(running), int(chart(running)["drawn"])
    click(running, "#experiment-0 li:nth-child(1) input")
    assert chart(running)["drawn"] == str(drawn - 1)
    click(running, "#experiment-0 [data-zoom=in]")
    assert (ink(running) != before).any()
    pictures = []
    for theme, width in (("light", 1280), ("dark", 1280), ("light", 390)):
        click(running, f"[data-theme-choice={theme}]")
        running.resize(width, 900, mobile=width < 500)
        running.painted()
        assert running.run("document.documentElement.scrollWidth") <= width
        picture = tmp_path / f"{theme}-{width}.png"
        running.screenshot(picture)
        pictures.append(np.asarray(Image.open(picture).convert("L")).astype(int))
    assert pictures[0].mean() > 128 > pictures[1].mean()
    assert running.complaints == []
