"""Who races: SGD with momentum alone, and LLQR around it, with the paper's solver and with the default one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llqr.divergences import KL
from llqr.solvers import SGDM

STRUCTURES = ("diagonal", "kfac", "ekfac")
"""Of the paper."""
OFTEN: dict[str, Any] = {"every": 25, "steps": 1, "ema": 0.5, "sample": 0.25}
"""Of the default solver in runs of some hundred steps: a little and often. The paper's periods are for many thousands."""
REFITS: dict[str, Any] = {"every": 50, "steps": 5, "ema": 0.8}
"""Fits that go further, where U itself is looked at."""
PAPER: dict[str, Any] = {"every": 50, "steps": 25, "ema": 0.95}
BASE = "SGDM"


def sgdm(lr: float) -> Callable[[nn.Module], Optimizer]:
    return partial(_sgdm, lr=lr)


def _sgdm(model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def llqr_methods() -> dict[str, dict[str, Any]]:
    """Settings of LLQR by name, with its default solver."""
    return {f"LLQR {structure}": {"structure": structure, **OFTEN} for structure in ("scalar", *STRUCTURES)}


def paper_methods() -> dict[str, dict[str, Any]]:
    """The paper's inner solver: on the divergence of the mean loss, and as the authors have it, on the sum, clipped."""
    plain, clipped = SGDM(lr=0.005, momentum=0.9), SGDM(lr=0.005, momentum=0.9, clip=5.0)
    return {
        "paper's solver, mean": {"structure": "ekfac", "solver": plain, **PAPER},
        "paper's solver, sum": {"structure": "ekfac", "solver": clipped, "divergence": KL(reduction="sum"), **PAPER},
    }


def mode_methods() -> dict[str, dict[str, Any]]:
    """Refits without dropout and with BatchNorm's running statistics, and with both as in training."""
    return {
        f"{structure}, {name}": {"structure": structure, "training": training, **REFITS}
        for structure in STRUCTURES
        for name, training in (("eval", False), ("training", None))
    }


@dataclass(frozen=True)
class Suite:
    """Tasks, learning rates of the base, and methods beside it."""

    tasks: tuple[str, ...]
    rates: tuple[float, ...]
    methods: Callable[[], dict[str, dict[str, Any]]]


SUITES = {
    "solvers": Suite(("digits", "fashion"), (0.01, 0.05), lambda: {**llqr_methods(), **paper_methods()}),
    "modes": Suite(("digits-batchnorm", "digits-dropout"), (0.01,), mode_methods),
}
