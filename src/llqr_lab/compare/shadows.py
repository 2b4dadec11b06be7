"""Optimizers that follow a training without having a say in it: their momenta and moments are of the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from llqr import LLQR
from llqr.diagnostics import proposed_step
from llqr.paper import PaperLLQR
from llqr.solvers import ScaleFree
from llqr_lab.compare.subjects import Batch, Subject

EVERY = 50
"""Steps between refits of a U that is carried along."""
Makers = dict[str, Callable[[nn.Module], list[Optimizer]]]


class Shadow:
    """Optimizers of a copy of the model, which is put where the model is before every step."""

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], Sequence[Optimizer]]) -> None:
        self.twin = copy.deepcopy(model)
        self.optimizers = list(make(self.twin))

    def follow(self, model: nn.Module, step: int, inputs: Tensor) -> None:
        """Take the model's gradients in, as a step from where it is would."""
        self.put(model)
        for mine, theirs in zip(self.twin.parameters(), model.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
        for each in self.optimizers:
            if isinstance(each, PaperLLQR) and step % EVERY == 0:
                each.refit(inputs)
            each.step()

    def put(self, model: nn.Module) -> None:
        with torch.no_grad():
            self.twin.load_state_dict(model.state_dict())

    def proposal(self, model: nn.Module, batch: Batch, subject: Subject) -> dict[str, Tensor]:
        self.put(model)
        return proposed_step(self.optimizers, self.twin, *batch, subject.loss)


def shadows(base: str, rate: float) -> Makers:
    """The base's own kind at its rate; the others at their usual ones, which change the length of a step and nothing else."""
    sgd, adam = (rate, 1e-3) if base == "sgdm" else (0.05, rate)
    makers: Makers = {
        "SGD": lambda m: [SGD(m.parameters(), lr=sgd)],
        "SGDM": lambda m: [SGD(m.parameters(), lr=sgd, momentum=0.9)],
        "Adam": lambda m: [Adam(m.parameters(), lr=adam)],
        "Muon": _muon,
    }
    if find_spec("pytorch_optimizer") is not None:
        makers |= {"Shampoo": _shampoo, "SOAP": _soap}
    return makers


def base_of(name: str, model: nn.Module, rate: float) -> Optimizer:
    """What trains: AdamW, or SGD with momentum."""
    parameters = model.parameters()
    return AdamW(parameters, lr=rate) if name == "adamw" else SGD(parameters, lr=rate, momentum=0.9)


def carried(structures: Sequence[str], base: str, rate: float) -> Makers:
    """The paper's LLQR around the base, refitted and averaged along the way."""

    def maker(structure: str) -> Callable[[nn.Module], list[Optimizer]]:
        settings: dict[str, Any] = {"structure": structure, "every": _never, "steps": 5, "ema": 0.8}
        return lambda m: [LLQR.paper(base_of(base, m, rate), m, solver=ScaleFree(), **settings)]

    return {f"carried {structure}": maker(structure) for structure in structures}


def _never(step: int) -> bool:
    """Shadows are refitted from outside: they call no model, so there are no inputs to catch."""
    return False


def _muon(model: nn.Module) -> list[Optimizer]:
    """For the matrices, and Adam for the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [*([Muon(matrices, lr=0.02)] if matrices else []), *([Adam(rest, lr=1e-3)] if rest else [])]


def _shampoo(model: nn.Module) -> list[Optimizer]:
    from pytorch_optimizer import ScalableShampoo

    return [
        ScalableShampoo(model.parameters(), lr=1e-3, start_preconditioning_step=5, preconditioning_compute_steps=10)
    ]


def _soap(model: nn.Module) -> list[Optimizer]:
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=3e-3, weight_decay=0.0)]
