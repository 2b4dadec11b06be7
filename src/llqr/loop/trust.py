"""Trust: J of the step that the base takes, and how far U may lengthen it.

The base steps by U g times a rate, and the paper's J asks what U g itself would do. Where curvature is small, as on the plateau
that training begins on, its U is of the order of 1/curvature; once the curvature has grown, such steps are too long, and
training diverges. So with ε = -U g

    J(U) = g·ε + ½ ε·(η H + ρ I) ε,

where η puts H in units of the base's *edge of stability*: beyond η·curvature = 1 the base's steps grow (that is a curvature of
2/lr without momentum m, and of 2(1 + m)/lr with it). Fitted to this, U ≈ (ηH + ρ)⁻¹ brings no direction beyond the edge, and
lengthens none by more than 1/ρ. Bases that normalise their steps (Adam, Muon) have no η in these units; there it is
1/(g·Hg/g·g), so that ρ is relative to the curvature along the gradient.

ρ is *earned*. It begins at 1, where U only shortens. At each refit the U in use is tried on the new batch: with ε = -U g,
η ε·Hε/(-g·ε) says how near the edge it has come, with other data and after the steps since it was fitted. Well inside, ρ is
divided by 3, down to 0.1; outside, multiplied; far outside, U begins anew at ρ = 1, and ρ may not become that small again.

Between refits U g is *bounded*: it is made no longer than 1.5 times what it was in the step that U was fitted in (or than g),
and where it would be more than three times that, something has changed that U doesn't know: the step is the base's own.
docs/findings.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from llqr.errors import LLQRError
from llqr.preconditioner import Preconditioner
from llqr.solvers import Quadratic, bend
from llqr.solvers.totals import totals_of

CAUTIOUS, BOLD = 1.0, 0.1
"""ρ at the start, and where U has proved itself."""
FACTOR = 3.0
"""From one ρ to the next."""
INSIDE, OUTSIDE, FAR_OUTSIDE = 0.5, 1.0, 2.0
"""How near the edge a U has come."""
LONGER, MUCH_LONGER = 1.5, 3.0
"""How long U g may become, and where U is left out, relative to the step that U was fitted in."""

Norms = Callable[[list[float]], list[float]]
"""From norms of the part that is here to those of all."""


@dataclass
class Trust:
    """What U has earned so far."""

    rho: float
    earned: bool
    """ρ changes from refit to refit; else it is as it was given."""
    bounds: bool
    """The length of U g matters to the base."""
    least: float = BOLD
    """What ρ may come to."""
    length: float | None = None
    """‖U g‖ in the step that U was fitted in; None until that step is taken."""

    def judge(self, edge: float) -> bool:
        """Set ρ by how near the edge the U in use is on a new batch; whether it is so far outside that it has to go."""
        if not edge <= FAR_OUTSIDE:
            self.rho, self.least = CAUTIOUS, min(CAUTIOUS, FACTOR * self.rho)
            return True
        if edge > OUTSIDE:
            self.rho = min(CAUTIOUS, FACTOR * self.rho)
        elif edge < INSIDE:
            self.rho = max(self.least, self.rho / FACTOR)
        return False

    def bound(
        self,
        steered: Mapping[str, Tensor | None],
        gradients: Mapping[str, Tensor],
        norms: Norms,
        length: float | None = None,
    ) -> Mapping[str, Tensor | None] | None:
        """U g as it may be, or None where the step is better the base's own; tensors are changed in place."""
        parts = [part for part in steered.values() if part is not None]
        if length is None:
            (length,) = norms([_norm(parts)])
        if self.length is None:
            self.length = length if math.isfinite(length) else None
        if self.length is None or not LONGER * self.length < length < math.inf:
            return steered
        own = [gradients[name] for name, part in steered.items() if part is not None and name in gradients]
        (plain,) = norms([_norm(own)])
        if length > MUCH_LONGER * self.length and plain < length:
            return None
        allowed = max(plain, LONGER * self.length)
        if allowed < length:
            for part in parts:
                part.mul_(allowed / length)
        return steered

    def __str__(self) -> str:
        return f"{self.rho:g}, earned" if self.earned else f"{self.rho:g}"

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name in ("rho", "least", "length")}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what another had earned; a fixed ρ stays."""
        self.length = state.get("length")
        if self.earned:
            self.rho, self.least = float(state.get("rho", CAUTIOUS)), float(state.get("least", BOLD))


def trust_of(base: Optimizer, trust: float | None, default_solver: bool) -> Trust | None:
    """As the options of LLQR say; None is the paper's objective."""
    if trust is None and not default_solver:
        return None
    if trust is not None and not check_trust(trust):
        return None
    plain = isinstance(base, SGD)
    earned = trust is None and plain
    rho = float(trust) if trust is not None else CAUTIOUS if earned else BOLD
    return Trust(rho, earned, bounds=plain)


class Trusted:
    """A quadratic model with √η H √η + ρ I in place of H; η may differ between parameters."""

    def __init__(self, model: Quadratic, rates: Mapping[str, float], trust: float) -> None:
        self.gradient, self.totals = model.gradient, totals_of(model)
        self.trust = trust
        self._model = model
        self._roots = {name: math.sqrt(rates[name]) for name in model.gradient}

    def curvature(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        product = self._model.curvature({name: self._roots[name] * v for name, v in direction.items()})
        return {n: torch.add(self.trust * v, product[n], alpha=self._roots[n]) for n, v in direction.items()}

    def bend(self, direction: dict[str, Tensor]) -> float:
        square = sum(float((v * v).sum()) for v in direction.values())
        return self._curved(direction) + self.trust * square

    def edge(self, u: Preconditioner) -> float:
        """How near the edge of stability the base's steps by U g are: η ε·Hε / (-g·ε), 1 at the edge."""
        step = u.apply(dict(self.gradient))
        along = sum(float((g * step[name]).sum()) for name, g in self.gradient.items())
        along, curved = self.totals.sums([along, self._curved(step)])
        return abs(curved) / along if along > 0 else math.inf

    def _curved(self, direction: Mapping[str, Tensor]) -> float:
        return bend(self._model, {name: self._roots[name] * v for name, v in direction.items()})


def trusted(model: Quadratic, base: Optimizer, parameters: Mapping[str, Tensor], trust: float) -> Trusted:
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
    """1/curvature at the edge of stability: gradient descent with heavy-ball momentum m is stable up to lr·λ = 2(1 + m), and
    with Nesterov's up to 2(1 + m)/(1 + 2m).

    lr is the largest that a schedule tells of: a U fitted during a warm-up has to serve what comes after it.
    """
    lr = max(float(group[name]) for name in ("lr", "initial_lr", "max_lr") if group.get(name) is not None)
    momentum = float(group["momentum"])
    look_ahead = 1 + 2 * momentum if group["nesterov"] else 1.0
    return lr * (1 - float(group["dampening"]) * (momentum > 0)) * look_ahead / (2 * (1 + momentum))


def _inverse_curvature(model: Quadratic) -> float:
    squares = sum(float(g.square().sum()) for g in model.gradient.values())
    curved, square = totals_of(model).sums([bend(model, dict(model.gradient)), squares])
    return square / abs(curved) if curved else 1.0


def _norm(tensors: list[Tensor]) -> float:
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(local)))) if local else 0.0
