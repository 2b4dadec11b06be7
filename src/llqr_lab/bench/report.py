"""`llqr bench report`: how long the page of many long runs takes to be made and to be opened."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from llqr_lab.bench.browser import Browser, chromium
from llqr_lab.bench.measure import Job, median, peak_memory
from llqr_lab.experiments.folder import RunError, RunFolder
from llqr_lab.experiments.presets import resolve
from llqr_lab.progress import bar
from llqr_lab.report.command import write_report
from llqr_lab.results import provenance, write_json

SEEDS = 5
"""Of each setting that is made up."""


def main(output: Path, runs: int, points: int, seed: int, repeats: int) -> None:
    program = chromium()
    if program is None:
        raise RunError(
            "there is no Chromium here to open a page with: install one, such as Debian's package 'chromium'"
        )
    with tempfile.TemporaryDirectory(prefix="llqr-report-") as folder:
        source, page = Path(folder, "runs"), Path(folder, "report.html")
        with bar(runs, "making up runs") as done:
            for number in range(runs):
                _made_up(source, number, points, seed)
                done()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        memory = peak_memory({"report": (_report, (source, page))})["report"]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        opened = [_opened(program, page) for _ in range(repeats)]
        content: dict[str, Any] = {
            "runs": runs,
            "points_of_a_run": points,
            "read_bytes": sum(path.stat().st_size for path in source.rglob("*.jsonl")),
            "page_bytes": page.stat().st_size,
            "report_cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "report_memory_bytes": memory,
            "browser": opened[0].pop("browser"),
            "repeats": repeats,
            **{name: median([each[name] for each in opened]) for name in opened[0] if name != "browser"},
        }
    command = f"llqr bench report --runs {runs} --points {points} --seed {seed} --repeats {repeats}"
    write_json(output, {**provenance(command, seed), **content})
    console = Console()
    for name in (
        "page_bytes",
        "report_cpu_seconds",
        "report_memory_bytes",
        "open_seconds",
        "open_cpu_seconds",
        "each_run_seconds",
    ):
        console.print(f"{name.replace('_', ' ')}: {content[name]:,.6g}", highlight=False)
    console.print(f"Wrote {output}", highlight=False, soft_wrap=True)


def _report(source: Path, page: Path) -> Job:
    return lambda: write_report([source], page)


def _made_up(source: Path, number: int, points: int, seed: int) -> None:
    """A run that was evaluated after every step: noise around losses that fall, with spikes."""
    setting, own_seed = divmod(number, SEEDS)
    config = resolve(
        "shakespeare-gpt-sgdm", "cpu", "base", own_seed, {"base.lr": 0.01 * (setting + 1), "steps": points}
    )
    folder = RunFolder(source / f"run-{number}")
    folder.path.mkdir(parents=True)
    folder.begin(config)
    draw = np.random.default_rng((seed, number))
    step = np.arange(1, points + 1)
    loss = 3 * np.exp(-3 * step / points) + 0.5 + 0.01 * setting + 0.1 * draw.standard_normal(points)
    loss[draw.integers(points, size=5)] += 10
    columns = (loss, loss + 0.1 * draw.standard_normal(points), 1 / (1 + loss), 1 / (1.1 + loss))
    text = '{"step": %d, "lr": 0.1, "train_loss": %r, "test_loss": %r, "train_accuracy": %r, "test_accuracy": %r}\n'
    rows = zip(step.tolist(), *(column.tolist() for column in columns), strict=True)
    folder.metrics.write_text("".join(text % row for row in rows), encoding="utf-8")
    seconds = np.cumsum(draw.uniform(0.01, 0.02, points)).tolist()
    folder.times.write_text("".join(f'{{"seconds": {each!r}}}\n' for each in seconds), encoding="utf-8")


def _opened(program: str, page: Path) -> dict[str, Any]:
    """Seconds until the page is there with its curves, and until a curve for each run is drawn instead of one a method."""
    with Browser(program) as browser:
        browser.resize(1280, 900)
        before = browser.processor_seconds
        found: dict[str, Any] = {"browser": browser.version, "open_seconds": browser.open(page)}
        found["open_cpu_seconds"] = browser.processor_seconds - before
        if not browser.run("document.querySelector('canvas').dataset.drawn"):
            raise RunError("the page opened without its curves")
        found["each_run_seconds"] = browser.run(
            "(async () => { const view = document.querySelector('[data-control=view]'); const begun = performance.now(); "
            "view.value = 'runs'; view.dispatchEvent(new Event('change')); "
            "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)))); "
            "return (performance.now() - begun) / 1000; })()"
        )
        if browser.complaints:
            raise RunError(f"the page complained: {browser.complaints[0]}")
        return found
