"""What LLQR and its curvature cost: `llqr bench overhead`, `llqr bench engine` and `llqr bench memory`.

- overhead: the time of a training with LLQR, nothing set, over that of its base alone. Both are trained in turns from the
  start; a training is put together from the medians of its steps with a refit and of those without, by the default schedule.
- engine: curvature products and fits of `LLQR.paper` in training steps of the same network: forward, backward and AdamW. All
  jobs of a network take turns; a ratio is the median over the rounds.
- memory: the peak of a curvature product with what builds it, whole, in chunks of examples, and in segments of layers. What the
  process holds before (network, batch, direction) isn't counted. Seconds are of the processor, for one more product.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR, QuadraticModel, fit
from llqr.divergences import KL, Divergence, Newton
from llqr.solvers import SGDM, ScaleFree, Solver
from llqr.wrapper import often_at_first
from llqr_lab.bench.measure import Job, one_thread, peak_memory, step_seconds
from llqr_lab.bench.unseen import every_place
from llqr_lab.experiments.config import Base
from llqr_lab.experiments.optimizers import base_of
from llqr_lab.models.convolutional import PyramidNet, ResNet18, ResNet50, convnet, mlp, picture_net
from llqr_lab.models.transformers import GPT, GrokkingTransformer
from llqr_lab.results import bar, provenance, say, show_table, simple_table, write_json

Row = dict[str, Any]
Draw = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Subject:
    network: Callable[[], nn.Module]
    draw: Draw
    batch: int
    summary: str = ""
    base: str = "SGDM"
    steps: int = 60


def _pictures(*shape: int) -> Draw:
    return lambda batch: (torch.randn(batch, *shape), torch.randint(10, (batch,)))


def _equations(batch: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(99, (batch, 5))
    return tokens[:, :4], tokens[:, 4]


def _written(output: Path, command: str, seed: int, content: Row, *tables: Table) -> None:
    write_json(output, {**provenance(command, seed), **content})
    console = Console()
    for table in tables:
        show_table(console, table)
    say(console, f"Wrote {output}")


# overhead

TRAINED = {
    "gpt": Subject(
        lambda: GPT(words=65, length=64, width=64, heads=4, layers=2),
        lambda batch: (torch.randint(65, (batch, 64)), torch.randint(65, (batch, 64))),
        32,
        "the GPT of the race, batch 32 × 64",
        "AdamW",
    ),
    "resnet18": Subject(ResNet18, _pictures(3, 32, 32), 128, "ResNet-18, batch 128", steps=12),
    "convnet": Subject(picture_net, _pictures(1, 28, 28), 128, "the convnet of the race, batch 128"),
    "mlp": Subject(lambda: mlp(width=256), _pictures(784), 128, "784-256-256-10, batch 128"),
}
FIRST, LATER = 300, 100
"""Steps of a training from its start, and steps after that."""


def overhead(names: Sequence[str], output: Path, seed: int, repeats: int, steps: int | None) -> None:
    torch.set_flush_denormal(True)
    with one_thread(), bar(len(names) * repeats, "measuring") as done:
        rows = [{"network": name, **_overhead(TRAINED[name], seed, repeats, steps, done)} for name in names]
    headers = ("base", "ms a step", "step without\na refit", "step with\na refit", f"first {FIRST} steps", "later")
    table = simple_table("with LLQR, nothing set, over the base alone", "network", *headers)
    for row in rows:
        ratios = [row["plain"], row["refit"], *row["by_medians"]]
        shown = ["–" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        table.add_row(row["network"], row["base"], f"{1000 * row['base_seconds']:.1f}", *shown)
    command = f"llqr bench overhead {' '.join(names)} --seed {seed} --repeats {repeats}"
    content = {"threads": 1, "clock": "processor", "repeats": repeats, "first": FIRST, "later": LATER, "rows": rows}
    _written(output, command + (f" --steps {steps}" if steps else ""), seed, content, table)


def _overhead(subject: Subject, seed: int, repeats: int, steps: int | None, done: Callable[[], None]) -> Row:
    count = steps or subject.steps
    begin = lambda: {"base": training(subject, False, seed), "own": training(subject, True, seed)}  # noqa: E731
    base, own = step_seconds(begin, repeats, count, turn=10, done=done).values()
    step = median(base)
    found = ([s for k, s in enumerate(own) if often_at_first(k) == refit] for refit in (False, True))
    plain, refit = (median(some) / step if some else None for some in found)
    schedule = list(map(often_at_first, range(FIRST + LATER)))
    parts = (schedule[:FIRST], schedule[FIRST:])
    together = [[(refit if each else plain) or plain or refit or 0.0 for each in part] for part in parts]
    return {
        "summary": subject.summary,
        "base": subject.base,
        "steps": count,
        "base_seconds": step,
        "plain": plain,
        "refit": refit,
        "refits": list(map(sum, parts)),
        "by_medians": [sum(part) / len(part) for part in together],
    }


def training(subject: Subject, wrapped: bool, seed: int) -> Callable[[int], float]:
    """A network under the base alone, or inside LLQR: what makes a step, and gives its seconds."""
    torch.manual_seed(seed)
    model, (inputs, targets) = subject.network(), subject.draw(subject.batch)
    base = base_of(Base(subject.base.lower(), lr=1e-3), model)  # type: ignore[arg-type]
    optimizer = LLQR(base, model) if wrapped else base

    def step() -> None:
        optimizer.zero_grad()
        every_place(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return lambda number: _seconds(step, time.process_time)


# engine

RECORDED = {
    "transformer": Subject(GrokkingTransformer, _equations, 512),
    "convnet": Subject(convnet, _pictures(3, 32, 32), 128),
    "mlp": Subject(mlp, _pictures(784), 256),
}
DIVERGENCES: dict[str, Divergence] = {"kl": KL(), "newton": Newton()}
PAPER = SGDM(lr=0.005, momentum=0.9)
FITS: dict[str, tuple[str, Solver, int]] = {
    "K-FAC, SGDM × 25": ("kfac", PAPER, 25),
    "E-KFAC, SGDM × 25": ("ekfac", PAPER, 25),
    "K-FAC, ScaleFree × 5": ("kfac", ScaleFree(), 5),
    "E-KFAC, ScaleFree × 5": ("ekfac", ScaleFree(), 5),
    "diagonal, ScaleFree × 5": ("diagonal", ScaleFree(), 5),
}
BETWEEN = 7
"""Training steps between two jobs, whose median counts: a single one is off by a tenth."""


class Bench:
    """A network with a batch; a copy of it is trained, so that its own parameters stay where products were built."""

    def __init__(self, subject: Subject, quick: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, (self.inputs, self.targets) = subject.network(), subject.draw(16 if quick else subject.batch)
        self._trained = copy.deepcopy(self.model)
        self._optimizer = torch.optim.AdamW(self._trained.parameters(), lr=1e-4)
        self.train()  # the optimizer's state is there from now on

    def train(self) -> None:
        self._optimizer.zero_grad()
        functional.cross_entropy(self._trained(self.inputs), self.targets).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def build(self, divergence: str) -> QuadraticModel:
        given = (self.model, self.inputs, self.targets, functional.cross_entropy, DIVERGENCES[divergence])
        return QuadraticModel.build(*given, training=False)

    def first_product(self, divergence: str) -> QuadraticModel:
        """What a refit pays before its first inner step: recording, the gradient, and one product."""
        q = self.build(divergence)
        q.curvature(q.gradient)
        return q

    def product(self, divergence: str) -> Job:
        q = self.first_product(divergence)
        return lambda: q.curvature(q.gradient)

    def in_training_steps(self, jobs: Mapping[str, Job], repeats: int) -> Row:
        """The median of each job's seconds over those of the training steps around it, and the median training step."""
        ratios: dict[str, list[float]] = {name: [] for name in jobs}
        steps: list[float] = [_seconds(self.train)]
        for _ in range(repeats):
            for name, job in jobs.items():
                spent = _seconds(job)
                steps.append(median(_seconds(self.train) for _ in range(BETWEEN)))
                ratios[name].append(2 * spent / (steps[-2] + steps[-1]))
        return {"train_seconds": median(steps), "ratios": {name: median(values) for name, values in ratios.items()}}


def _seconds(job: Job, clock: Callable[[], float] = time.perf_counter) -> float:
    before = clock()
    job()
    return clock() - before


def engine(output: Path, seed: int, repeats: int, quick: bool) -> None:
    rows: list[Row] = []
    objective: dict[str, float] = {}
    with bar(len(RECORDED) + 1, "measuring") as done:
        for name, subject in RECORDED.items():
            bench = Bench(subject, quick, seed)
            jobs: dict[str, Job] = {kind: bench.product(kind) for kind in DIVERGENCES}
            jobs |= {f"record {kind}": partial(bench.first_product, kind) for kind in DIVERGENCES}
            rows.append({"model": name, "batch": len(bench.targets), **bench.in_training_steps(jobs, repeats)})
            done()
        bench = Bench(RECORDED["transformer"], quick, seed)

        def refit(name: str, structure: str, solver: Solver, steps: int) -> None:
            objective[name] = fit(bench.build("kl"), structure, solver, steps).history[-1]

        fits = bench.in_training_steps({name: partial(refit, name, *how) for name, how in FITS.items()}, repeats)
        done()
    title = "Curvature products in training steps of the same network; first: recorded anew, with the gradient"
    products = simple_table(title, "network", "training\nstep (ms)", "KL", "Newton", "first\nKL", "first\nNewton")
    for row in rows:
        ratios = map("{:.2f}".format, row["ratios"].values())
        products.add_row(row["model"], f"{1000 * row['train_seconds']:.1f}", *ratios)
    fitted = simple_table("A refit of the transformer", "fit", "training steps", "objective J")
    for name, value in fits["ratios"].items():
        fitted.add_row(name, f"{value:.1f}", f"{objective[name]:.6g}")
    settings = {"repeats": repeats, "threads": torch.get_num_threads(), "training_step": "forward, backward, AdamW"}
    measured = {"model": "transformer", **fits, "objective": objective}
    command = f"llqr bench engine --seed {seed} --repeats {repeats}{' --quick' if quick else ''}"
    _written(output, command, seed, {"settings": settings, "products": rows, "fits": measured}, products, fitted)


# memory

CUT = {
    "pyramidnet110": Subject(lambda: PyramidNet(bottleneck=True), _pictures(3, 32, 32), 16),
    "resnet50": Subject(ResNet50, _pictures(3, 224, 224), 8),
    "tiny": Subject(lambda: PyramidNet(depth=20, alpha=12, bottleneck=True), _pictures(3, 32, 32), 16),
}
"""As the presets have them; the last to see that it works."""
PARTS = 4
SEGMENTS = ("stages.*.*",)


def memory(names: Sequence[str], output: Path, seed: int) -> None:
    jobs = [(None, ""), *((kind, way) for kind in ("ngd", "newton") for way in ("whole", "examples", "segments"))]
    networks, tables = [], []
    for name in names:
        count, batch = sum(p.numel() for p in CUT[name].network().parameters()), CUT[name].batch
        title = f"{name}, {count / 1e6:.1f} million parameters, batch {batch}"
        table, rows = simple_table(title, "product", "way", "peak (MiB)", "seconds", left=["way"]), []
        for divergence, way in jobs:
            peak, seconds = peak_memory(prepared, name, seed, divergence, way)
            rows.append({"product": divergence or "training step", "way": way, "peak_bytes": peak, "seconds": seconds})
            shown = "" if peak is None else f"{peak / 2**20:.0f}"
            table.add_row(rows[-1]["product"], way, shown, f"{seconds:.2f}")
        networks.append({"network": name, "batch": batch, "parameters": count, "rows": rows})
        tables.append(table)
    settings = {"threads": 1, "dtype": "float32", "chunks": PARTS, "segments": list(SEGMENTS)}
    command = f"llqr bench memory {' '.join(names)} --seed {seed}"
    _written(output, command, seed, {"settings": settings, "networks": networks}, *tables)


def prepared(name: str, seed: int, divergence: str | None, way: str) -> Callable[[], float]:
    subject = CUT[name]
    torch.manual_seed(seed)
    model = subject.network().eval()  # as in the paper's refits
    (inputs, targets), loss_fn = subject.draw(subject.batch), nn.CrossEntropyLoss()
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def job() -> float:
        if divergence is None:
            return _seconds(lambda: loss_fn(model(inputs), targets).backward(), time.process_time)
        chunk = subject.batch // PARTS if way == "examples" else None
        segments = SEGMENTS if way == "segments" else ()
        q = QuadraticModel.build(model, inputs, targets, loss_fn, divergence, 0.0, chunk, segments=segments)
        q.curvature(direction)  # the first one looks at the model's formulas too
        return _seconds(lambda: q.curvature(direction), time.process_time)

    return job
