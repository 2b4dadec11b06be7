"""The page: templates, style and scripts put into one file that needs no other."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from llqr_lab.report.experiments import Experiment
from llqr_lab.report.format import named, number, seconds
from llqr_lab.report.payload import payload
from llqr_lab.report.runs import UNREADABLE

SCRIPTS = ("data.js", "scale.js", "paint.js", "chart.js", "gestures.js", "panel.js", "spectra.js", "main.js")
"""In the order in which they build on each other."""
MARKS = {
    "finished": "✓",
    "diverged": "↗",
    "running": "…",
    "stopped": "‖",
    "failed": "✕",
    UNREADABLE: "?",
}
"""Beside the words, so that colour isn't all that tells statuses apart."""


def page(experiments: list[Experiment], made: datetime) -> str:
    """Everything from runs goes through templates that escape it, or through JSON that the scripts never take for HTML."""
    environment = Environment(
        loader=PackageLoader("llqr_lab.report", "static"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., str]] = {"number": number, "seconds": seconds, "title": named}
    environment.filters |= filters
    # a run's text may hold what would end the element that it is in; scripts and style are ours
    theme, style = _ours("theme.js"), _ours("report.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_ours, SCRIPTS)) + "})();\n"
    return environment.get_template("page.html").render(
        experiments=experiments,
        count=sum(len(each.runs) for each in experiments),
        made=made.strftime("%Y-%m-%d %H:%M"),
        version=version("llqr"),
        marks=MARKS,
        policy=_policy([theme, script], style),
        theme=Markup(theme),
        style=Markup(style),
        script=Markup(script),
        payload=Markup(payload(experiments)),
    )


def _ours(name: str) -> str:
    return files("llqr_lab.report").joinpath("static", name).read_text(encoding="utf-8")


def _policy(scripts: list[str], style: str) -> str:
    """Nothing is loaded from anywhere, and no script runs but these."""
    allowed = " ".join(map(_hash, scripts))
    return f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
