"""The base's own step: its momentum, which U turns, and its length, which stays.

The base steps with the raw gradients, as it would alone. Then -‖Δθ‖ U m / ‖U m‖ takes the place of its step Δθ, tensor by
tensor; m is the base's momentum. Decoupled weight decay is left as it is. So nothing of the base has to be tuned again, and no
step is longer than the base's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from llqr.statistics import Block

OWN_MOMENTUM = 0.9
"""Of the average that is kept around a base whose momentum isn't known."""

AVERAGING: tuple[type[Optimizer], ...] = (Adam, AdamW, NAdam, RAdam, Adamax)
"""Bases, themselves and not what is derived from them, that keep an average of the gradients as `exp_avg`."""
MUON: tuple[type[Optimizer], ...] = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()
COUPLED: tuple[type[Optimizer], ...] = (SGD, Adam, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta, ASGD)
"""Bases whose weight decay is a part of the gradient, and so of the momentum, unless they are told otherwise."""

Group = Mapping[str, Any]


class Momentum:
    """The base's momentum, parameter by parameter; around a base that doesn't show it, an average of our own."""

    def __init__(self, base: Optimizer) -> None:
        self._base = base
        self.averages: dict[str, Tensor] = {}

    @property
    def is_known(self) -> bool:
        return type(self._base) in (SGD, *AVERAGING, *MUON)

    def gather(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], groups: Mapping[str, Group]
    ) -> None:
        """Before the base steps: average the gradients, where the base doesn't show that it does."""
        if self.is_known:
            return
        for name, gradient in gradients.items():
            signed = -gradient if groups[name].get("maximize") else gradient
            if is_coupled(self._base, groups[name]) and groups[name].get("weight_decay"):
                signed = signed.add(parameters[name], alpha=float(groups[name]["weight_decay"]))
            if name not in self.averages:
                self.averages[name] = torch.zeros_like(gradient)
            self.averages[name].lerp_(signed, 1 - OWN_MOMENTUM)

    def of(self, name: str, parameter: Tensor, before: Tensor, group: Group) -> Tensor | None:
        """After the base has stepped from `before`."""
        kind, state = type(self._base), self._base.state.get(parameter, {})
        if kind in AVERAGING:
            average: Tensor | None = state.get("exp_avg")
            return average
        if not self.is_known:
            return self.averages.get(name)
        buffer, gradient = state.get("momentum_buffer") if group["momentum"] else None, parameter.grad
        if buffer is not None and not group["nesterov"]:
            return buffer if isinstance(buffer, Tensor) else None
        if gradient is None:
            return None
        if kind in MUON:
            return gradient if buffer is None else gradient.lerp(buffer, group["momentum"])
        gradient = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:
            gradient = gradient.add(before, alpha=float(group["weight_decay"]))
        return gradient if buffer is None else gradient.add(buffer, alpha=group["momentum"])


def is_coupled(base: Optimizer, group: Group) -> bool:
    """Whether weight decay is a part of the gradient."""
    return isinstance(base, COUPLED) and not group.get("decoupled_weight_decay", False)


def decay(base: Optimizer, group: Group) -> float:
    """What the base multiplies its parameters by beside its step; weight decay of a base that isn't known is taken for that."""
    if is_coupled(base, group) or not group.get("weight_decay") or "lr" not in group:
        return 1.0
    return 1 - float(group["lr"]) * float(group["weight_decay"])


def groups_of(base: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Group]:
    """The group of each parameter, by its name."""
    by_id = {id(p): group for group in base.param_groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in parameters.items()}


STEEPNESS = 0.15
"""The least cosine between a step and the momentum. Along U m it is 0.2 to 0.6 on networks that train well. Where the curvature
isn't known well, or U is out of date, U m can be almost level, and such steps only wander."""


class Turned(NamedTuple):
    """The steps that take the place of the base's, and the maps that leave it as it is."""

    steps: dict[str, Tensor]
    left: list[str]


class Part(NamedTuple):
    """The weight or the bias of a map."""

    block: Block
    name: str
    direction: Tensor
    """U m."""
    momentum: Tensor
    """m."""
    step: Tensor
    """What the base did, Δθ."""


def turn(blocks: Iterable[Block], momenta: Mapping[str, Tensor], steps: Mapping[str, Tensor]) -> Turned:
    """-‖Δθ‖ d / ‖d‖, tensor by tensor, with d = U m, or d = U m + μ m where that is needed for a cosine of `STEEPNESS` with m.

    Where something isn't finite, or there is no momentum, the base's step Δθ stays.
    """
    parts = [
        part
        for block in blocks
        if all(name in momenta and name in steps for name in block.map.members)
        for part in _parts(block, momenta, steps)
    ]
    result = Turned({}, [])
    for part, (along, own, momentum, length) in zip(parts, _sizes(parts), strict=True):
        usable = all(map(math.isfinite, (along, own, momentum, length))) and own > 0 and momentum > 0
        if not usable:
            if length != 0:
                result.left.append(part.block.map.key)
            continue
        share, added = _steep(along / (own * momentum))
        direction = part.direction.mul_(-length * share / own)
        if added:
            direction.add_(part.momentum.to(direction.dtype), alpha=-length * added / momentum)
        map_ = part.block.map
        if map_.places is None or part.name != map_.weight:
            result.steps[part.name] = direction.reshape(steps[part.name].shape)
        else:
            if part.name not in result.steps:
                result.steps[part.name] = steps[part.name].clone(memory_format=torch.contiguous_format)
            map_.put(direction, result.steps[part.name])
    return result


def _steep(cosine: float) -> tuple[float, float]:
    """α and μ, so that α u + μ e is a unit vector as steep as asked for; u and e are those of U m and m, at this cosine."""
    if cosine >= STEEPNESS:
        return 1.0, 0.0
    across = math.sqrt(max(1 - cosine * cosine, 0.0))
    if across < 1e-6:  # straight uphill
        return 0.0, 1.0
    share = math.sqrt(1 - STEEPNESS * STEEPNESS) / across
    return share, STEEPNESS - share * cosine


def _sizes(parts: Sequence[Part]) -> list[list[float]]:
    """U m · m, ‖U m‖, ‖m‖ and ‖Δθ‖ of each, in one transfer."""
    if not parts:
        return []
    dots = [(part.direction * part.momentum).sum() for part in parts]
    norms = torch._foreach_norm([tensor for part in parts for tensor in (part.direction, part.momentum, part.step)])
    sizes = [torch.stack(dots)[:, None], torch.stack([norm.to(dots[0].dtype) for norm in norms]).reshape(-1, 3)]
    found: list[list[float]] = torch.cat(sizes, 1).tolist()
    return found


def _parts(block: Block, momenta: Mapping[str, Tensor], steps: Mapping[str, Tensor]) -> Iterable[Part]:
    """Of one map."""
    map_ = block.map
    weight, *bias = map_.split(block.apply(momenta))
    yield Part(block, map_.weight, weight, map_.matrix(momenta[map_.weight]), map_.matrix(steps[map_.weight]))
    if map_.bias is not None:
        yield Part(block, map_.bias, bias[0], momenta[map_.bias].reshape(-1), steps[map_.bias].reshape(-1))
