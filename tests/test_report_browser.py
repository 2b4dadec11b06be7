"""Promise: the page does in a browser what it says, without a word on the console."""

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

from browser import Browser, chromium
from llqr_lab.experiments.loop import SPENT
from llqr_lab.report.page import write_report
from made_runs import diagnosed, falling, made_run

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="there is no Chromium here: install one to test the report's page"
)

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
    yield running
    assert running.complaints == []
    assert running.run("window.hurt") is None


CURVES = "#experiment-0 .panel[data-kind=metrics]"


def names(browser: Browser, panel: str = CURVES) -> list[str]:
    """Those in a chart's legend; the areas around the lines aren't listed."""
    rows = f"[...document.querySelectorAll('{panel} .u-series')].slice(1).filter((row) => row.offsetHeight)"
    return list(browser.run(f"{rows}.map((row) => row.querySelector('.u-label').textContent)"))


def box(browser: Browser, selector: str) -> tuple[float, float, float, float]:
    browser.run(f"document.querySelector('{selector}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.painted()
    return tuple(
        browser.run(
            f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect(); "
            "return [b.left, b.top, b.width, b.height]; })()"
        )
    )


def choose(browser: Browser, control: str, value: str, panel: str = CURVES) -> None:
    browser.run(
        f"(() => {{ const s = document.querySelector('{panel} [data-control={control}]'); "
        f"const wanted = {json.dumps(value)}; s.checked = wanted === 'on'; "
        "if (s.options) s.value = [...s.options].find((o) => o.value === wanted || o.textContent === wanted).value; "
        "s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    browser.painted()


def ink(browser: Browser, panel: str = CURVES) -> np.ndarray[Any, Any]:
    """The picture in a chart."""
    browser.painted()
    text = browser.run(f"document.querySelector('{panel} canvas').toDataURL('image/png')")
    return np.asarray(Image.open(BytesIO(base64.b64decode(text.split(",")[1]))).convert("RGBA")).astype(int)


def test_it_opens_with_its_curves_drawn(browser: Browser) -> None:
    assert names(browser) == ["base", "kfac-ngd", "ekfac-ngd", EVIL]
    assert (ink(browser)[..., 3] > 0).mean() > 0.02
    assert names(browser, "#experiment-0 .panel[data-kind=diagnostics]") == ["ekfac-ngd"]
    choose(browser, "seeds", "each")
    assert len(names(browser)) == 8
    assert names(browser)[:2] == ["base, seed 0", "base, seed 1"]


def test_other_metrics_and_axes(browser: Browser) -> None:
    for metric in ("constructor", EVIL):
        choose(browser, "metric", metric)
        assert names(browser) == [EVIL]
    choose(browser, "metric", "test loss")
    assert browser.run(f"document.querySelector('{CURVES} [data-control=log]').checked") is True, (
        "losses are on a log axis"
    )
    before = ink(browser)
    choose(browser, "log", "off")
    assert (ink(browser) != before).any()
    before = ink(browser)
    choose(browser, "along", "seconds")
    assert (ink(browser) != before).any()


def test_lines_are_hidden_with_their_areas_and_the_chart_is_zoomed(browser: Browser) -> None:
    before = ink(browser)
    browser.run(f"document.querySelectorAll('{CURVES} .u-series th')[1].click()")
    assert (ink(browser) != before).any()
    off = f"[...document.querySelectorAll('{CURVES} .u-series')].map((row) => row.classList.contains('u-off'))"
    assert browser.run(off)[:5] == [False, True, True, True, False]
    left, top, width, height = box(browser, f"{CURVES} .u-over")
    browser.drag((left + 0.5 * width, top + 0.5 * height), (left + 0.75 * width, top + 0.6 * height))
    zoomed = ink(browser)
    assert (zoomed != before).any()


def test_a_spike_is_drawn(browser: Browser) -> None:
    """It is at 3,211 of 5,000 steps: beside it the upper half of the chart is all but empty."""
    panel = "#experiment-1 .panel[data-kind=metrics]"
    box(browser, panel)
    choose(browser, "metric", "train loss", panel)
    choose(browser, "log", "off", panel)
    picture = ink(browser, panel)
    on_white = 255 - picture[..., 3] / 255 * (255 - picture[..., :3].max(axis=-1))
    upper = (on_white < 210)[: len(picture) // 2, 80:]  # without the numbers of the axis
    columns = np.flatnonzero(upper.sum(axis=0) > 20)
    assert 0 < len(columns) < 20


def test_colours_follow_the_system(browser: Browser) -> None:
    day, light = ink(browser), browser.run("getComputedStyle(document.body).backgroundColor")
    browser.media(prefers_color_scheme="dark")
    browser.painted()
    assert browser.run("getComputedStyle(document.body).backgroundColor") != light
    assert (ink(browser) != day).any(), "the curves too"


@pytest.mark.parametrize(("width", "scale"), [(1280, 1.0), (360, 2.0)])
def test_nothing_sticks_out(browser: Browser, width: int, scale: float) -> None:
    """Tables scroll by themselves."""
    browser.resize(width, 800, scale, mobile=width < 500)
    browser.painted()
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_without_scripts_there_are_the_tables(browser: Browser, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.load(page)
        assert browser.run("document.documentElement.dataset.ready") is None, "scripts are off"
        assert "scripts are off" in browser.run("document.querySelector('noscript').innerText")
        assert browser.run("document.querySelector('#experiment-0').querySelectorAll('.scroll table').length") >= 4
        assert browser.run("[...document.querySelectorAll('.panel')].some((each) => each.offsetHeight)") is False
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


def test_the_report_of_the_runs_that_were_made(running: Browser, tmp_path: Path) -> None:
    results = Path(__file__).parent.parent / "results" / "experiments.json"
    runs = json.loads(results.read_text(encoding="utf-8"))["runs"]
    output = tmp_path / "report.html"
    write_report([results], output)
    running.resize(1280, 900)
    running.media()
    running.complaints.clear()
    running.open(output)
    for number, preset in enumerate(sorted({run["preset"] for run in runs})):
        assert preset in running.run(f"document.querySelector('#experiment-{number}').textContent")
        methods = {run["method"] for run in runs if run["preset"] == preset}
        assert len(names(running, f"#experiment-{number} .panel[data-kind=metrics]")) == len(methods)
    assert running.complaints == []
