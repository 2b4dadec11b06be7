"""Trust: J of the step that the base will take, with a bound on how far U may lengthen it.

The base steps by about η U g, with η its learning rate (over 1 - momentum), and the paper's J asks what U g itself would do.
Where curvature is small, as on the plateau that training begins on, its U is of the order of 1/curvature; once the curvature
has grown, steps of η U g are too long, and training diverges. So with ε = -U g

    J(U) = g·ε + ½ ε·(η H + ρ I) ε,

which is m(η ε)/η, and ρ/2 ‖ε‖² more: directions with η·curvature above 1 are shortened, and none is lengthened by more than
about 1/ρ. Bases that normalise their steps (Adam, Muon) have no η in these units; there it is 1/(g·Hg/g·g), so that ρ is
relative to the curvature along the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from llqr.errors import LLQRError
from llqr.solvers import Quadratic, bend
from llqr.solvers.totals import totals_of

DEFAULT = 0.1
"""ρ with the default solver; docs/choosing.md has the measurements."""


class Trusted:
    """A quadratic model with √η H √η + ρ I in place of H; η may differ between parameters."""

    def __init__(self, model: Quadratic, rates: Mapping[str, float], trust: float) -> None:
        self.gradient, self.totals = model.gradient, totals_of(model)
        self._model, self._trust = model, trust
        self._roots = {name: math.sqrt(rates[name]) for name in model.gradient}

    def curvature(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        product = self._model.curvature({name: self._roots[name] * v for name, v in direction.items()})
        return {n: torch.add(self._trust * v, product[n], alpha=self._roots[n]) for n, v in direction.items()}

    def bend(self, direction: dict[str, Tensor]) -> float:
        square = sum(float((v * v).sum()) for v in direction.values())
        return bend(self._model, {name: self._roots[name] * v for name, v in direction.items()}) + self._trust * square


def trusted(model: Quadratic, base: Optimizer, parameters: Mapping[str, Tensor], trust: float) -> Quadratic:
    """The model of the step that this base takes."""
    if isinstance(base, SGD):
        rates = {id(p): _rate(group) for group in base.param_groups for p in group["params"]}
        by_name = {name: rates[id(p)] for name, p in parameters.items()}
    else:
        by_name = dict.fromkeys(parameters, _inverse_curvature(model))
    return Trusted(model, by_name, trust)


def check_trust(trust: float) -> float:
    if isinstance(trust, bool) or not isinstance(trust, (int, float)) or not 0 <= trust < math.inf:
        raise LLQRError(
            "trust is a positive number (U lengthens no step by more than about 1/trust), or 0 for the paper's objective; "
            f"not {trust!r}"
        )
    return float(trust)


def _rate(group: Mapping[str, Any]) -> float:
    """How far one unit of gradient moves a parameter in the end: lr (1 - dampening) / (1 - momentum).

    lr is the largest that a schedule tells of: a U fitted during a warm-up has to serve what comes after it.
    """
    lr = max(float(group[name]) for name in ("lr", "initial_lr", "max_lr") if group.get(name) is not None)
    momentum = float(group["momentum"])
    return lr * (1 - float(group["dampening"])) / (1 - momentum) if 0 < momentum < 1 else lr


def _inverse_curvature(model: Quadratic) -> float:
    squares = sum(float(g.square().sum()) for g in model.gradient.values())
    curved, square = totals_of(model).sums([bend(model, dict(model.gradient)), squares])
    return square / abs(curved) if curved else 1.0
