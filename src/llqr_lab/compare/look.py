"""One moment of a training: every optimizer's step held against the exact one, here and where the same U is used again."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from llqr import QuadraticModel, fit
from llqr.diagnostics import Reference, Verdict, reference
from llqr.diagnostics.comparison import flat, named, norm
from llqr.errors import LLQRError
from llqr.exact.conjugate import conjugate_gradients
from llqr.paper import PaperLLQR
from llqr.solvers import SGDM, Quadratic, Solver
from llqr_lab.compare.approximations import Inverse, diagonal, kfac_inverse
from llqr_lab.compare.coupling import Coupling, coupling
from llqr_lab.compare.shadows import Shadow
from llqr_lab.compare.subjects import Batch, Subject

STRUCTURES = ("scalar", "diagonal", "kfac", "ekfac")
DENSE = 400
"""The largest parameter, in numbers, of models that LLQR with dense blocks is fitted to."""
NUMBERS = ("cosine", "cosine_h", "fraction", "fraction_along", "length", "predicted", "actual")

Row = dict[str, float | None]


class Applied(Protocol):
    """U, or any other inverse: something that makes a step of a gradient."""

    def apply(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Settings:
    damping: float
    products: int
    draws: int
    inner: int
    """Steps of a fit."""
    blocks: bool
    """Whether the steps of H cut to blocks are solved too, which takes longest."""


@dataclass
class Summed:
    """A quadratic model whose curvature is that of the joint distribution of a batch: so many times that of the mean."""

    model: Quadratic
    count: int
    gradient: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.gradient = self.model.gradient

    def curvature(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.count * part for name, part in self.model.curvature(direction).items()}


class Look:
    """The model as it is, in float64, with the batch of the coming step."""

    def __init__(self, model: nn.Module, subject: Subject, batch: Batch, settings: Settings) -> None:
        self.model = copy.deepcopy(model).double()
        self.subject, self.settings = subject, settings
        self.batch = _double(batch)
        self.reference = self.referred(batch)
        self.inverses: dict[str, Applied] = {}
        self.rows: dict[str, Row] = {}
        self.cut: Coupling | None = None

    def referred(self, batch: Batch) -> Reference:
        """The exact step of a batch at these parameters."""
        inputs, targets = _double(batch)
        return reference(
            self.model,
            inputs,
            targets,
            self.subject.loss,
            damping=self.settings.damping,
            max_steps=self.settings.products,
            tolerance=1e-4,
        )

    def fill(
        self, shadows: Mapping[str, Shadow], carried: Mapping[str, Shadow], model: nn.Module, batch: Batch
    ) -> None:
        """All the rows."""
        for name, shadow in shadows.items():
            self._add(name, shadow.proposal(model, batch, self.subject))
        curvature = diagonal(self.reference, self.settings.draws)
        self._keep("diag(H)⁻¹", Inverse(curvature))
        self._keep("K-FAC", kfac_inverse(self.reference, draws=self.settings.draws, known_diagonal=curvature))
        if self.settings.blocks:
            self.cut = coupling(self.reference, 1e-3, self.settings.products)
            self.rows |= {"exact, by layer": row(self.cut.layer), "exact, by parameter": row(self.cut.parameter)}
        self._fit_all()
        for name, shadow in carried.items():
            (optimizer,) = shadow.optimizers
            assert isinstance(optimizer, PaperLLQR)
            if optimizer.preconditioner is not None:
                applied = optimizer.preconditioner.apply(_single(self.reference.gradient))
                self._add(f"{name}: U g", {each: -part for each, part in applied.items()})
                self._add(f"{name}: step", shadow.proposal(model, batch, self.subject))

    def _fit_all(self) -> None:
        q: Quadratic = self.reference.quadratic
        count = self.batch[1].numel()
        paper, clipped = SGDM(lr=0.005, momentum=0.9), SGDM(lr=0.005, momentum=0.9, clip=5.0)
        largest = max(g.numel() for g in q.gradient.values())
        for structure in (*STRUCTURES, *(["dense"] if largest <= DENSE else [])):
            self._fit(f"LLQR {structure}", q, structure, None)
            self._fit(f"LLQR {structure}, paper, mean", q, structure, paper)
            self._fit(f"LLQR {structure}, paper, sum", Summed(q, count), structure, clipped)
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules()):
            running = QuadraticModel.build(
                self.model, *self.batch, self.subject.loss, "ngd", self.settings.damping, training=False
            )
            for structure in STRUCTURES:
                self._fit(f"LLQR {structure}, eval mode", running, structure, None)

    def _fit(self, name: str, q: Quadratic, structure: str, solver: Solver | None) -> None:
        self._keep(name, fit(q, structure, solver, self.settings.inner))

    def _keep(self, name: str, inverse: Applied) -> None:
        self.inverses[name] = inverse
        self._add(name, {each: -part for each, part in inverse.apply(self.reference.gradient).items()})

    def _add(self, name: str, step: Mapping[str, Tensor]) -> None:
        """A row; none for an optimizer that makes no step yet, as SOAP at its first."""
        if norm(step) > 0:
            self.rows[name] = row(self.reference.judge(step, by_layer=False))

    def by_layer(self) -> dict[str, dict[str, float | None]]:
        """The Euclidean cosine of some steps with the exact one, layer by layer."""
        found: dict[str, dict[str, float | None]] = {}
        for name in ("K-FAC", "LLQR diagonal", "LLQR kfac", "LLQR ekfac"):
            step = {each: -part for each, part in self.inverses[name].apply(self.reference.gradient).items()}
            found[name] = {layer: _finite(part.cosine) for layer, part in self.reference.parts(step).items()}
        down = {each: -g for each, g in self.reference.gradient.items()}
        found["SGD"] = {layer: _finite(part.cosine) for layer, part in self.reference.parts(down).items()}
        return found


class ExactInverse:
    """(H + λ)⁻¹ of one batch, by conjugate gradients for each gradient that it is applied to."""

    def __init__(self, reference: Reference, products: int) -> None:
        self._reference, self._products = reference, products

    def apply(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        curvature = self._reference.quadratic.curvature
        solved = conjugate_gradients(
            lambda v: flat(curvature(named(v, gradients))), flat(gradients), 1e-3, self._products
        )
        return {name: -part for name, part in named(solved.step, gradients).items()}


def elsewhere(inverses: Mapping[str, Applied], there: Reference) -> dict[str, float | None]:
    """How much of what is attainable there these inverses attain along -U g, with g the gradient there."""
    found: dict[str, float | None] = {}
    for name, inverse in inverses.items():
        try:
            step = {each: -part for each, part in inverse.apply(there.gradient).items()}
            found[name] = _finite(there.judge(step, by_layer=False).fraction_along)
        except LLQRError:  # a diagonal that has a zero where this gradient has none
            found[name] = None
    down = {each: -g for each, g in there.gradient.items()}
    return {"SGD": there.judge(down, by_layer=False).fraction_along, **found}


def row(verdict: Verdict) -> Row:
    return {name: _finite(getattr(verdict, name)) for name in NUMBERS}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _double(batch: Batch) -> Batch:
    inputs, targets = batch
    return (inputs.double() if inputs.is_floating_point() else inputs), targets


def _single(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.to(torch.float32) for name, part in gradient.items()}
