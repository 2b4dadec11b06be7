"""Updates: U that acts on what the base does with the gradients, in place of the gradients.

Adam divides every gradient by its own running size, and so undoes a U that gives each tensor one number. There U can act on the
update instead: θ ← θ + U Δθ, with Δθ the base's step and weight decay left alone. Adam's step is P⁻¹ times its average of the
gradients, P = √v + ε, which is a gradient step in the coordinates √P θ. In these, g is P^-½ g, H is P^-½ H P^-½, and all that
holds around SGD (`llqr.loop.trust`) holds again: U is fitted to that problem. A U that multiplies number by number is the same
in both coordinates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from llqr.errors import LLQRError, unknown
from llqr.precision import raised
from llqr.solvers import Quadratic, Solver, bend
from llqr.solvers.totals import totals_of
from llqr.structures.assign import StructureSpec
from llqr.structures.diagonal import Diagonal
from llqr.structures.scalar import Scalar
from llqr.structures.stacks import Group

GRADIENT, UPDATE = "gradient", "update"


def acted_on(
    acts_on: str | None,
    base: Optimizer,
    structure: StructureSpec | None,
    solver: Solver | None,
    trust: float | None,
) -> str:
    """What U is to act on, as the options say."""
    if acts_on is None:
        plain = structure is None or structure in ("scalar", Scalar())
        return UPDATE if isinstance(base, Adam) and plain and solver is None and trust is None else GRADIENT
    if acts_on not in (GRADIENT, UPDATE):
        raise unknown("acts_on", acts_on, (GRADIENT, UPDATE))
    if acts_on == GRADIENT:
        return GRADIENT
    if not isinstance(base, Adam):
        raise LLQRError(
            'acts_on="update" is for Adam and AdamW, whose steps it knows how to measure, and the base is a '
            f"{type(base).__name__}: leave it out, and U acts on the gradients"
        )
    if trust == 0 or (trust is None and solver is not None):
        raise LLQRError(
            'acts_on="update" fits U to the base\'s own step, which trust=0 (and with a solver of your own, leaving trust out) '
            "doesn't: give a positive trust, or leave out the solver"
        )
    return UPDATE


def check_multiplies(groups: Sequence[Group]) -> None:
    """Raise for a U that would be another in the base's coordinates."""
    for group in groups:
        if not isinstance(group.structure, (Scalar, Diagonal)):
            raise LLQRError(
                'acts_on="update" is for structures that multiply number by number, "scalar" and "diagonal", and '
                f'{group.keys[0]!r} has {group.structure!r}: write acts_on="gradient" for those'
            )


class Measured:
    """A quadratic model in the coordinates in which the base's step is a gradient step."""

    def __init__(self, model: Quadratic, roots: Mapping[str, Tensor]) -> None:
        self._model, self.totals = model, totals_of(model)
        self._roots = {name: roots[name].to(g.dtype) for name, g in model.gradient.items()}
        self.gradient = self._scaled(model.gradient)

    def curvature(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._scaled(self._model.curvature(self._scaled(direction)))

    def bend(self, direction: dict[str, Tensor]) -> float:
        return bend(self._model, self._scaled(direction))

    def _scaled(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._roots[name] * value for name, value in values.items()}


def roots_of(base: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """P^-½ of Adam's next step, by parameter."""
    groups = {id(p): group for group in base.param_groups for p in group["params"]}
    with torch.no_grad():
        return {name: _metric(base, groups[id(p)], p).rsqrt() for name, p in parameters.items()}


def _metric(base: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """P = √v̂ + ε of the step that is coming, its gradient included; what has had neither is measured as it is."""
    state, gradient = raised(dict(base.state.get(parameter, {}))), raised(parameter.grad)
    (_, beta), step = group["betas"], float(state["step"]) if state else 0.0
    average = state["exp_avg_sq"] if state else raised(torch.zeros_like(parameter))
    if gradient is not None:
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            gradient = gradient.add(parameter, alpha=float(group["weight_decay"]))
        average, step = beta * average + (1 - beta) * gradient.square(), step + 1
    if not step:
        return torch.ones_like(average)
    if group["amsgrad"] and state:
        average = torch.maximum(average, state["max_exp_avg_sq"])
    size: Tensor = (average / (1 - beta**step)).sqrt()
    return size + float(group["eps"])


class Updates:
    """What a base does to its parameters, and what it becomes. Memory is kept from step to step, as in `llqr.steering`."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        """θ before the base steps, with weight decay, and Δθ after it."""

    def remember(self, base: Optimizer, parameters: Mapping[str, Tensor], names: Collection[str]) -> None:
        """Just before the base steps."""
        decays = {id(p): _decay(group) for group in base.param_groups for p in group["params"]}
        with torch.no_grad():
            self._held = {name: self._room(name, parameters[name]) for name in names}
            for name, held in self._held.items():
                held.copy_(parameters[name])
                if (decay := decays[id(parameters[name])]) != 1:
                    held.mul_(decay)

    def taken(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Δθ, after the base has stepped; weight decay isn't in it."""
        with torch.no_grad():
            for name, held in self._held.items():
                held.neg_().add_(parameters[name])
        return self._held

    def become(self, parameters: Mapping[str, Tensor], updates: Mapping[str, Tensor | None]) -> None:
        """θ as it is with these, which are lost. What is as it was leaves θ as it is, to the bit."""
        with torch.no_grad():
            for name, update in updates.items():
                if update is not None:
                    parameters[name].add_(update.sub_(self._held[name]))

    def _room(self, name: str, parameter: Tensor) -> Tensor:
        room = self._held.get(name)
        fits = room is not None and (room.shape, room.dtype, room.device) == (
            parameter.shape,
            parameter.dtype,
            parameter.device,
        )
        return room if fits and room is not None else torch.empty_like(parameter, requires_grad=False)


def _decay(group: Mapping[str, Any]) -> float:
    """What AdamW multiplies its parameters by before it steps."""
    decoupled = group.get("decoupled_weight_decay", False)
    return 1 - float(group["lr"]) * float(group["weight_decay"]) if decoupled else 1.0
