"""`llqr bench overhead`: the time of a whole training with LLQR, nothing set, over that of its base alone.

Base and LLQR train copies of a network in turns of a few steps, on one thread, from the start, several times. Every step's time
is its median over the times, so refits are in it as often as the default schedule has them: over the first 300 steps, and over
the steps after these. A network whose steps are too long for that is timed over a few, and the rest is put together from the
medians of its steps with a refit and of those without, by the default schedule.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from llqr import LLQR
from llqr.wrapper import often_at_first
from llqr_lab.bench.measure import one_thread, step_seconds
from llqr_lab.bench.unseen import every_place
from llqr_lab.models.convolutional import ResNet18, mlp, picture_net
from llqr_lab.models.transformers import GPT
from llqr_lab.results import bar, provenance, say, show_table, simple_table, write_json

FIRST, LATER = 300, 100
"""Steps of a training from its start, and steps after that."""
PARTS = (slice(0, FIRST), slice(FIRST, FIRST + LATER))
TURN = 10
Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    summary: str
    network: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    base: str = "SGDM"
    steps: int = FIRST + LATER


def _pictures(batch: int, *shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(batch, *shape), torch.randint(10, (batch,)))


SUBJECTS = {
    "gpt": Subject(
        "the GPT of the race, batch 32 × 64",
        lambda: GPT(words=65, length=64, width=64, heads=4, layers=2),
        lambda: (torch.randint(65, (32, 64)), torch.randint(65, (32, 64))),
        "AdamW",
    ),
    "resnet18": Subject("ResNet-18, batch 128", ResNet18, _pictures(128, 3, 32, 32), steps=12),
    "convnet": Subject("the convnet of the race, batch 128", picture_net, _pictures(128, 1, 28, 28)),
    "mlp": Subject("784-256-256-10, batch 128", lambda: mlp(width=256), _pictures(128, 784)),
}


def training(subject: Subject, wrapped: bool, seed: int) -> Callable[[int], float]:
    """A network under the base alone, or inside LLQR: what makes a step, and gives its seconds."""
    torch.manual_seed(seed)
    model, (inputs, targets) = subject.network(), subject.batch()
    parameters = model.parameters()
    base: Optimizer = SGD(parameters, lr=1e-3, momentum=0.9) if subject.base == "SGDM" else AdamW(parameters, 1e-4)
    optimizer = LLQR(base, model) if wrapped else base

    def step(number: int) -> float:
        begun = time.process_time()
        optimizer.zero_grad()
        every_place(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return time.process_time() - begun

    return step


def main(names: Sequence[str], output: Path, seed: int, repeats: int, steps: int | None) -> None:
    torch.set_flush_denormal(True)
    with one_thread(), bar(len(names) * repeats, "measuring") as done:
        schedule = list(map(often_at_first, range(FIRST + LATER)))
        rows = [{"network": name, **measure(SUBJECTS[name], seed, repeats, steps, schedule, done)} for name in names]
    command = f"llqr bench overhead {' '.join(names)} --seed {seed} --repeats {repeats}"
    content = {"threads": 1, "clock": "processor", "repeats": repeats, "first": FIRST, "later": LATER, "rows": rows}
    write_json(output, {**provenance(command + (f" --steps {steps}" if steps else ""), seed), **content})
    console = Console()
    show_table(console, table(rows))
    say(console, f"Wrote {output}")


def measure(
    subject: Subject, seed: int, repeats: int, steps: int | None, schedule: Sequence[bool], done: Callable[[], None]
) -> Row:
    count = steps or subject.steps
    begin = lambda: {"base": training(subject, False, seed), "own": training(subject, True, seed)}  # noqa: E731
    base, own = step_seconds(begin, repeats, count, TURN, done).values()
    step, kinds = median(base), list(zip(own, map(often_at_first, range(count)), strict=True))
    found = ([s for s, had in kinds if had == kind] for kind in (False, True))
    plain, refit = (median(some) if some else None for some in found)
    together = [(refit if each else plain) or plain or refit or 0.0 for each in schedule]
    return {
        "summary": subject.summary,
        "base": subject.base,
        "steps": count,
        "base_seconds": step,
        "plain": plain and plain / step,
        "refit": refit and refit / step,
        "refits": [sum(schedule[part]) for part in PARTS],
        "by_medians": [sum(together[part]) / (len(together[part]) * step) for part in PARTS],
        "as_timed": [sum(own[part]) / sum(base[part]) for part in PARTS] if count >= FIRST + LATER else None,
    }


def table(rows: Sequence[Row]) -> Table:
    headers = ("base", "ms a step", "step without\na refit", "step with\na refit")
    parts = (f"first {FIRST} steps\n(by medians)", "later\n(by medians)")
    made = simple_table("with LLQR, nothing set, over the base alone", "network", *headers, *parts)
    for row in rows:
        kinds = ["–" if row[kind] is None else f"{row[kind]:.2f}" for kind in ("plain", "refit")]
        timed = [f"×{each:.3f}" for each in row["as_timed"] or ()] or ["–", "–"]
        both = [f"{each} (×{middle:.3f})" for each, middle in zip(timed, row["by_medians"], strict=True)]
        made.add_row(row["network"], row["base"], f"{1000 * row['base_seconds']:.1f}", *kinds, *both)
    return made
