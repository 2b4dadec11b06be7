"""`llqr bench engine`: what curvature products and fits cost, in units of one training step of the same network.

A training step is forward, backward and AdamW. All jobs of a network take turns; a ratio is the median over the rounds of the
job's seconds over the mean of the training steps before and after it.
"""

import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from llqr import QuadraticModel, fit
from llqr.divergences import KL, Divergence, Newton
from llqr.solvers import SGDM, ScaleFree, Solver
from llqr_lab.models.convolutional import convnet, mlp
from llqr_lab.models.transformers import GrokkingTransformer
from llqr_lab.results import bar, provenance, say, show_table, simple_table, write_json

Row = dict[str, Any]
Job = Callable[[], object]


def _tokens(batch: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(99, (batch, 5))
    return tokens[:, :4], tokens[:, 4]


def _pictures(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda batch: (torch.randn(batch, *shape), torch.randint(10, (batch,)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], int]] = {
    "transformer": (GrokkingTransformer, _tokens, 512),
    "convnet": (convnet, _pictures(3, 32, 32), 128),
    "mlp": (mlp, _pictures(784), 256),
}
"""With their batches."""
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

    def __init__(self, name: str, quick: bool, seed: int) -> None:
        torch.manual_seed(seed)
        network, draw, batch = NETWORKS[name]
        self.model, (self.inputs, self.targets) = network(), draw(16 if quick else batch)
        self._trained = copy.deepcopy(self.model)
        self._optimizer = torch.optim.AdamW(self._trained.parameters(), lr=1e-4)
        self.train()  # the optimizer's state is there from now on

    def train(self) -> None:
        """One training step: forward, backward, AdamW."""
        self._optimizer.zero_grad()
        functional.cross_entropy(self._trained(self.inputs), self.targets).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def build(self, divergence: str) -> QuadraticModel:
        given = (self.model, self.inputs, self.targets, functional.cross_entropy, DIVERGENCES[divergence])
        return QuadraticModel.build(*given, training=False)

    def product(self, divergence: str) -> Job:
        """One product with a curvature that was recorded before."""
        q = self.first_product(divergence)
        return lambda: q.curvature(q.gradient)

    def first_product(self, divergence: str) -> QuadraticModel:
        """What a refit pays before its first inner step: recording, the gradient, and one product."""
        q = self.build(divergence)
        q.curvature(q.gradient)
        return q


def main(output: Path, seed: int, repeats: int, quick: bool) -> None:
    """Run, write the results, and print the tables."""
    rows: list[Row] = []
    objective: dict[str, float] = {}
    with bar(len(NETWORKS) + 1, "measuring") as done:
        for name in NETWORKS:
            bench = Bench(name, quick, seed)
            jobs: dict[str, Job] = {kind: bench.product(kind) for kind in DIVERGENCES}
            jobs |= {f"record {kind}": partial(bench.first_product, kind) for kind in DIVERGENCES}
            rows.append({"model": name, "batch": len(bench.targets), **in_training_steps(bench, jobs, repeats)})
            done()
        bench = Bench("transformer", quick, seed)

        def refit(name: str, structure: str, solver: Solver, steps: int) -> None:
            objective[name] = fit(bench.build("kl"), structure, solver, steps).history[-1]

        fits = in_training_steps(bench, {name: partial(refit, name, *how) for name, how in FITS.items()}, repeats)
        done()
    settings = {"repeats": repeats, "threads": torch.get_num_threads(), "training_step": "forward, backward, AdamW"}
    measured = {"model": "transformer", **fits, "objective": objective}
    result = {"settings": settings, "products": rows, "fits": measured}
    command = f"llqr bench engine --seed {seed} --repeats {repeats}{' --quick' if quick else ''}"
    write_json(output, {**provenance(command, seed), **result})
    console = Console()
    report(result, console)
    say(console, f"Wrote {output}")


def in_training_steps(bench: Bench, jobs: Mapping[str, Job], repeats: int) -> Row:
    """The median of each job's seconds over those of the training steps around it, and the median training step."""
    ratios: dict[str, list[float]] = {name: [] for name in jobs}
    steps: list[float] = [_seconds(bench.train)]
    for _ in range(repeats):
        for name, job in jobs.items():
            spent = _seconds(job)
            steps.append(median(_seconds(bench.train) for _ in range(BETWEEN)))
            ratios[name].append(2 * spent / (steps[-2] + steps[-1]))
    return {"train_seconds": median(steps), "ratios": {name: median(values) for name, values in ratios.items()}}


def _seconds(job: Job) -> float:
    before = time.perf_counter()
    job()
    return time.perf_counter() - before


def report(result: dict[str, Any], console: Console) -> None:
    """Products and fits, as tables."""
    title = "Curvature products in training steps of the same network; first: recorded anew, with the gradient"
    products = simple_table(title, "network", "training\nstep (ms)", "KL", "Newton", "first\nKL", "first\nNewton")
    for row in result["products"]:
        ratios = [f"{row['ratios'][name]:.2f}" for name in ("kl", "newton", "record kl", "record newton")]
        products.add_row(row["model"], f"{1000 * row['train_seconds']:.1f}", *ratios)
    fits = simple_table(f"A refit of the {result['fits']['model']}", "fit", "training steps", "objective J")
    for name, value in result["fits"]["ratios"].items():
        fits.add_row(name, f"{value:.1f}", f"{result['fits']['objective'][name]:.6g}")
    for table in (products, fits):
        show_table(console, table)
