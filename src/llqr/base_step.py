"""The base's own step: its momentum, which U turns, and its length, which stays.

The base steps with the raw gradients, as it would alone. Then -‖Δθ‖ U m / ‖U m‖ takes the place of its step Δθ, for each linear
map with its bias; m is the base's momentum. Decoupled weight decay is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

OWN_MOMENTUM = 0.9
"""Of the average that is kept around a base whose momentum isn't known."""

AVERAGING: tuple[type[Optimizer], ...] = (Adam, AdamW, NAdam, RAdam, Adamax)
"""Bases, themselves and not what is derived from them, that keep an average of the gradients as `exp_avg`."""
MUON: tuple[type[Optimizer], ...] = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()


class Momentum:
    """The base's momentum, parameter by parameter; of a base that doesn't show it, an average of our own."""

    def __init__(self, base: Optimizer) -> None:
        self._base = base
        self.averages: dict[str, Tensor] = {}

    @property
    def is_known(self) -> bool:
        return type(self._base) in (SGD, *AVERAGING, *MUON)

    def gather(self, gradients: Mapping[str, Tensor], groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Before the base steps: average the gradients, where nobody else does."""
        if self.is_known:
            return
        for name, gradient in gradients.items():
            signed = -gradient if groups[name].get("maximize") else gradient
            if name not in self.averages:
                self.averages[name] = torch.zeros_like(gradient)
            self.averages[name].lerp_(signed, 1 - OWN_MOMENTUM)

    def of(self, name: str, parameter: Tensor, before: Tensor, group: Mapping[str, Any]) -> Tensor | None:
        """After the base has stepped from `before`."""
        kind, state = type(self._base), self._base.state.get(parameter, {})
        if kind in AVERAGING:
            return state.get("exp_avg")
        if kind is not SGD and kind not in MUON:
            return self.averages.get(name)
        buffer, gradient = state.get("momentum_buffer"), parameter.grad
        if gradient is None or (buffer is not None and not group["nesterov"]):
            return buffer
        if kind in MUON:
            return gradient.lerp(buffer, group["momentum"]) if buffer is not None else gradient
        gradient = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:
            gradient = gradient.add(before, alpha=float(group["weight_decay"]))
        return gradient if buffer is None else gradient.add(buffer, alpha=group["momentum"])


def decay(base: Optimizer, group: Mapping[str, Any]) -> float:
    """What the base multiplies its parameters by beside its step.

    SGD and Adam have weight decay in their gradients, and so in their momentum. What isn't known is taken to be decoupled.
    """
    coupled = type(base) in (SGD, Adam, NAdam, RAdam, Adamax) and not group.get("decoupled_weight_decay", False)
    if coupled or not group.get("weight_decay") or "lr" not in group:
        return 1.0
    return 1 - float(group["lr"]) * float(group["weight_decay"])


def groups_of(base: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The group of each parameter, by its name."""
    by_id = {id(p): group for group in base.param_groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in parameters.items()}


def norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(list(tensors)))
