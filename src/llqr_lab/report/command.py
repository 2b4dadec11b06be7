"""`llqr report`: from folders of runs to one page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from llqr_lab.experiments.folder import RunError
from llqr_lab.report.experiments import experiments
from llqr_lab.report.page import page
from llqr_lab.report.runs import found_runs
from llqr_lab.results import write_text


def write_report(sources: Sequence[Path], output: Path) -> str:
    """Write the page; what to say of it."""
    found = experiments(found_runs(sources))
    # names may hold halves of characters, which no file can
    text = page(found, datetime.now()).encode("utf-8", "replace").decode("utf-8")
    try:
        write_text(output, text)
    except OSError as error:
        raise RunError(f"'{output}' couldn't be written ({error}): make room, or name another file with -o") from None
    count = sum(len(each.runs) for each in found)
    runs = "1 run" if count == 1 else f"{count:,} runs"
    many = "1 experiment" if len(found) == 1 else f"{len(found)} experiments"
    return f"Wrote {output}: {runs} of {many}, {output.stat().st_size / 1e6:.1f} MB"
