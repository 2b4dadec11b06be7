"""What `llqr bench engine` runs: training steps, curvature products and fits of the same networks on the same batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from llqr.curvature.quadratic import QuadraticModel
from llqr.divergences import KL, Divergence, Newton
from llqr.relaxation import fit
from llqr.solvers import SGDM, ScaleFree, Solver
from llqr_lab.models import named

DIVERGENCES: dict[str, Divergence] = {"kl": KL(), "newton": Newton()}
SOLVERS: dict[str, Solver] = {"sgdm": SGDM(lr=0.005, momentum=0.9), "scale-free": ScaleFree()}


@dataclass(frozen=True)
class Size:
    """One of the networks, and its batch."""

    model: str = "transformer"
    batch: int = 512
    width: int = 128
    depth: int = 2
    words: int = 99


class Bench:
    """A network with a batch; a copy of it is trained, so that its own parameters stay where products were built."""

    def __init__(self, size: Size, seed: int) -> None:
        torch.manual_seed(seed)
        self.size = size
        self.model, self.inputs, self.targets = _network(size)
        self._trained = copy.deepcopy(self.model)
        self._optimizer = torch.optim.AdamW(self._trained.parameters(), lr=1e-4)
        self.train()  # the optimizer's state is there from now on

    def train(self) -> None:
        """One training step: forward, backward, AdamW."""
        self._optimizer.zero_grad()
        functional.cross_entropy(self._trained(self.inputs), self.targets).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def build(self, divergence: str, chunk_size: int | None = None) -> QuadraticModel:
        chosen = DIVERGENCES[divergence]
        return QuadraticModel.build(
            self.model, self.inputs, self.targets, functional.cross_entropy, chosen, 0.0, chunk_size, training=False
        )

    def product(self, divergence: str) -> Callable[[], object]:
        """One product with a curvature that was recorded before."""
        q = self.build(divergence)
        q.curvature(q.gradient)
        return lambda: q.curvature(q.gradient)

    def refit(self, structure: str, solver: str, steps: int, chunk_size: int | None = None) -> float:
        """Build and fit; the objective that it reaches."""
        u = fit(self.build("kl", chunk_size), structure, SOLVERS[solver], steps)
        return u.history[-1]


def prepare_memory(kind: str, size: Size, seed: int) -> Callable[[], object]:
    """A job whose memory is measured in a process of its own."""
    bench = Bench(size, seed)
    if kind == "train":
        return bench.train
    return lambda: bench.refit("kfac", "sgdm", 2, size.batch // 8 if kind == "chunked" else None)


def _network(size: Size) -> named.Example:
    if size.model == "transformer":
        return named.transformer(size.batch, size.words, size.width, size.depth)
    return named.NETWORKS[size.model](size.batch)
