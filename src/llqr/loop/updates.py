"""Updates: U that acts on what the base does with the gradients, in place of the gradients.

Adam divides every gradient by its own running size, and so undoes a U that gives each tensor one number. There U can act on the
update instead: θ ← θ + U Δθ, with Δθ the base's step and AdamW's weight decay left alone (Adam's own is in its gradients).
Adam's step is P⁻¹ times its average of the gradients, P = √v + ε, which is a gradient step in the coordinates √P θ. In these,
g is P^-½ g, H is P^-½ H P^-½, and all that holds around SGD (`llqr.loop.trust`) holds again: U is fitted to that problem. A U
that multiplies number by number is the same in both coordinates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from llqr.errors import LLQRError, unknown
from llqr.precision import is_low
from llqr.solvers import Quadratic, Solver, bend
from llqr.solvers.totals import totals_of
from llqr.structures.assign import StructureSpec
from llqr.structures.diagonal import Diagonal
from llqr.structures.scalar import Scalar
from llqr.structures.stacks import Group

GRADIENT, UPDATE = "gradient", "update"
KINDS = (Adam, AdamW)
"""Themselves: a subclass may do anything in its step."""


def acted_on(
    acts_on: str | None,
    base: Optimizer,
    structure: StructureSpec | None,
    solver: Solver | None,
    trust: float | None,
    parameters: Mapping[str, Tensor],
) -> str:
    """What U is to act on, as the options say."""
    rounded = any(map(is_low, parameters.values()))
    if acts_on is None:
        lengths = structure is None or _is_scalar(structure)
        own_way = type(base) in KINDS and lengths and solver is None and trust != 0 and not rounded
        return UPDATE if own_way else GRADIENT
    if acts_on not in (GRADIENT, UPDATE):
        raise unknown("acts_on", acts_on, (GRADIENT, UPDATE))
    if acts_on == GRADIENT:
        return GRADIENT
    if type(base) not in KINDS:
        raise LLQRError(
            'acts_on="update" is for torch.optim.Adam and AdamW themselves, whose steps it knows how to measure, and the base '
            f"is a {type(base).__name__}: leave it out, and U acts on the gradients"
        )
    if trust == 0 or (trust is None and solver is not None):
        raise LLQRError(
            'acts_on="update" fits U to the base\'s own step, which trust=0 (and with a solver of your own, leaving trust out) '
            "doesn't: give a positive trust, or leave out the solver"
        )
    if rounded:
        raise LLQRError(
            'acts_on="update" sees what the base did to the parameters, which half precision rounds away: keep the parameters '
            'in float32 (and use autocast), or write acts_on="gradient"'
        )
    return UPDATE


def _is_scalar(structure: StructureSpec) -> bool:
    kinds = list(structure.values()) if isinstance(structure, Mapping) else [structure]
    return all(kind in ("scalar", Scalar()) for kind in kinds)


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
        self._model, self._roots, self.totals = model, roots, totals_of(model)
        self.gradient = self._scaled(model.gradient)

    def curvature(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._scaled(self._model.curvature(self._scaled(direction)))

    def bend(self, direction: dict[str, Tensor]) -> float:
        return bend(self._model, self._scaled(direction))

    def _scaled(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._roots[name] * value for name, value in values.items()}


class Past(NamedTuple):
    """Adam's running averages of squared gradients, by parameter; and the largest so far, where it steps by that (amsgrad)."""

    squares: Mapping[str, Tensor]
    peaks: Mapping[str, Tensor]


def past_of(base: Optimizer, parameters: Mapping[str, Tensor]) -> Past:
    states = {name: base.state.get(p, {}) for name, p in parameters.items()}
    squares = {name: states[name].get("exp_avg_sq", torch.zeros_like(p)) for name, p in parameters.items()}
    return Past(
        {name: square.detach() for name, square in squares.items()},
        {name: state["max_exp_avg_sq"] for name, state in states.items() if "max_exp_avg_sq" in state},
    )


def measured(
    model: Quadratic, base: Optimizer, parameters: Mapping[str, Tensor], past: Past, values: Mapping[str, Tensor]
) -> Measured:
    """The model in the coordinates of the step that Adam would take by the model's gradient.

    `values` are the parameters as a whole, where `parameters` are the optimizer's, which may be shards.
    """
    groups = {id(p): group for group in base.param_groups for p in group["params"]}
    roots = {}
    with torch.no_grad():
        for name, gradient in model.gradient.items():
            parameter = parameters[name]
            group, steps = groups[id(parameter)], float(base.state.get(parameter, {}).get("step", 0)) + 1
            if group.get("maximize", False):
                gradient = -gradient
            if group["weight_decay"] and not _is_decoupled(base, group):
                gradient = gradient + float(group["weight_decay"]) * values[name].detach()
            beta = float(group["betas"][1])
            square = beta * past.squares[name].to(gradient.dtype) + (1 - beta) * gradient.square()
            if name in past.peaks:
                square = torch.maximum(square, past.peaks[name].to(gradient.dtype))
            roots[name] = ((square / (1 - beta**steps)).sqrt() + float(group["eps"])).rsqrt()
    return Measured(model, roots)


class Updates:
    """What a base does to its parameters, and what it becomes. Memory is kept from step to step, as in `llqr.steering`."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        """θ before the base steps, with weight decay, and Δθ after it."""

    def remember(self, base: Optimizer, parameters: Mapping[str, Tensor], names: Collection[str]) -> None:
        """Just before the base steps."""
        decays = {id(p): _decay(base, group) for group in base.param_groups for p in group["params"]}
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


def _decay(base: Optimizer, group: Mapping[str, Any]) -> float:
    """What AdamW multiplies its parameters by before it steps."""
    return 1 - float(group["lr"]) * float(group["weight_decay"]) if _is_decoupled(base, group) else 1.0


def _is_decoupled(base: Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(base, AdamW)))
