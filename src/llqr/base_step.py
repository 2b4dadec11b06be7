"""The base's own step: its momentum, which U turns, and its length, which stays.

The base steps with the raw gradients, as it would alone. Then -‖Δθ‖ U m / ‖U m‖ takes the place of its step Δθ, tensor by
tensor; m is the base's momentum, as Nesterov's step has it (where U m is almost level, a little of m is added: `turn`).
Decoupled weight decay stays.
A step that is suddenly long is made shorter (`Lengths`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from llqr.curvature.linear_maps import Block, LinearMap, Stack, stacked
from llqr.curvature.precision import raised
from llqr.errors import LLQRError

if TYPE_CHECKING:
    from llqr.distributed.processes import Process

OWN_MOMENTUM = 0.9
"""Of the average that is kept around a base whose momentum isn't known."""

AVERAGING: tuple[type[Optimizer], ...] = (Adam, AdamW, NAdam, RAdam, Adamax)
"""Bases, themselves and not what is derived from them, that keep an average of the gradients as `exp_avg`."""
MUON: tuple[type[Optimizer], ...] = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()
COUPLED: tuple[type[Optimizer], ...] = (SGD, Adam, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta, ASGD)
"""Bases whose weight decay is a part of the gradient, and so of the momentum, unless they are told otherwise."""

Group = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


class BaseStep:
    """The step of LLQR: the base takes its own, and what is stepped along U m is turned there."""

    def __init__(self, base: Optimizer, averages: dict[str, Tensor], lengths: dict[str, list[float]]) -> None:
        self._base, self.momentum, self.lengths = base, Momentum(base, averages), Lengths(lengths)
        self._taken_back = TakenBack(base)
        self._before: dict[str, Tensor] = {}

    def take(self, parameters: Tensors, gradients: Tensors, blocks: Sequence[Block], processes: Process) -> list[str]:
        """-‖Δθ‖ U m / ‖U m‖ in the place of the base's step Δθ. All in shards, where the parameters are.

        Returns the maps whose step the base took as it would have alone, because something wasn't finite.
        """
        names = list(dict.fromkeys(name for block in blocks for name in block.map.members))
        groups = groups_of(self._base, parameters)
        slopes = self.momentum.gather(gradients, parameters, groups)
        if not names:
            self._base.step()
            return []
        with processes.stepping():
            local = {name: processes.local(parameters[name]) for name in names}
            before = self._remembered(local)
            self._base.step()
            momenta = dict[str, Tensor]()
            for name in names:
                how = slopes.get(name), before[name], groups[name], processes.local
                if (momentum := self.momentum.of(name, parameters[name], *how)) is not None:
                    momenta[name] = momentum
            factors = {name: decay(self._base, groups[name]) for name in names}
            for factor in {*factors.values()} - {1.0}:
                torch._foreach_mul_([before[name] for name in names if factors[name] == factor], factor)
            own = dict(zip(names, torch._foreach_sub(list(local.values()), list(before.values())), strict=True))
            bounded = self.lengths.bounded(own, groups, processes.lengths(own.values()))
            turned = processes.turn(blocks, momenta, bounded, parameters)
            turned.left.extend(b.map.key for b in blocks if not momenta.keys() >= set(b.map.members))
            self._taken_back.look(own, turned.steps)
            for name, step in turned.steps.items():
                torch.add(before[name], step.to(before[name].dtype), out=local[name])
        return turned.left

    def _remembered(self, parameters: Tensors) -> dict[str, Tensor]:
        """θ before the base steps, in memory that is kept from step to step."""
        kinds = [(name, p.shape, p.dtype) for name, p in parameters.items()]
        if kinds != [(name, p.shape, p.dtype) for name, p in self._before.items()]:
            self._before = {name: torch.empty_like(p, requires_grad=False) for name, p in parameters.items()}
        torch._foreach_copy_(list(self._before.values()), list(parameters.values()))
        return self._before


class Momentum:
    """The base's momentum, parameter by parameter; around a base that doesn't show it, an average of our own.

    It is as Nesterov's step has it, whether the base's is or not: the gradient of this step counts once more than in what the
    base remembers, m = (1 - δ) g + μ buffer. In an average δ is μ.
    """

    def __init__(self, base: Optimizer, averages: dict[str, Tensor]) -> None:
        self._base, self.averages = base, averages

    @property
    def is_known(self) -> bool:
        return type(self._base) in (SGD, *AVERAGING, *MUON)

    def gather(self, gradients: Tensors, parameters: Tensors, groups: Mapping[str, Group]) -> dict[str, Tensor]:
        """Before the base steps: g where it may write into the gradients, as SGD with Nesterov's momentum does; and average g,
        where it shows no average."""
        slopes = {}
        for name, gradient in gradients.items():
            if self.is_known and not (type(self._base) is SGD and groups[name]["nesterov"]):
                continue
            slope = slope_of(self._base, gradient, parameters[name], groups[name])
            slopes[name] = slope.clone() if slope is gradient else slope
            if not self.is_known:
                before = self.averages.get(name, torch.zeros_like(gradient)).to(slope)
                self.averages[name] = before.lerp_(slope, 1 - OWN_MOMENTUM)
        return slopes

    def of(
        self,
        name: str,
        parameter: Tensor,
        slope: Tensor | None,
        before: Tensor,
        group: Group,
        local: Callable[[Tensor], Tensor],
    ) -> Tensor | None:
        """After the base has stepped from `before`; of shards, what is `local`, as `before` is. The buffer alone, where the
        base has cleared the gradient."""
        if slope is not None:
            slope = local(slope)
        elif parameter.grad is not None:
            slope = slope_of(self._base, local(parameter.grad), before, group)
        kind, state = type(self._base), self._base.state.get(parameter, {})
        if kind in AVERAGING:
            buffer, momentum = state.get("exp_avg"), float(group["betas"][0])
        elif not self.is_known:
            buffer, momentum = self.averages.get(name), OWN_MOMENTUM
        else:
            momentum = float(group["momentum"])
            buffer = state.get("momentum_buffer") if momentum else None
        if slope is None or buffer is None:
            return slope if buffer is None else local(buffer)
        if kind is not SGD:
            return slope.lerp(local(buffer), momentum)
        dampening = float(group["dampening"])
        return torch.add(slope * (1 - dampening) if dampening else slope, local(buffer), alpha=momentum)


def slope_of(base: Optimizer, gradient: Tensor, parameter: Tensor, group: Group) -> Tensor:
    """The gradient of what the base minimises, with weight decay where that is a part of it."""
    signed = -gradient if group.get("maximize") else gradient
    if is_coupled(base, group) and group.get("weight_decay"):
        signed = signed.add(parameter, alpha=float(group["weight_decay"]))
    return signed


def is_coupled(base: Optimizer, group: Group) -> bool:
    """Whether weight decay is a part of the gradient."""
    return isinstance(base, COUPLED) and not group.get("decoupled_weight_decay", False)


def decay(base: Optimizer, group: Group) -> float:
    """What the base multiplies its parameters by beside its step; weight decay of a base that isn't known is taken for that."""
    if is_coupled(base, group) or not group.get("weight_decay") or "lr" not in group:
        return 1.0
    return 1 - float(group["lr"]) * float(group["weight_decay"])


def groups_of(base: Optimizer, parameters: Tensors) -> dict[str, Group]:
    """The group of each parameter, by its name."""
    by_id = {id(p): group for group in base.param_groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in parameters.items()}


class Lengths:
    """How long the base's steps are of late, tensor by tensor: no step along U m is longer than `LEAP` times that.

    A gradient that is suddenly large makes the base's step long, and points back. U m of it doesn't: U is of the batches
    before, so such a step goes on to where gradients are larger still.

    Lengths are divided by the learning rate, which may change at once; their root mean square counts the last twenty or so.
    The first steps, as many as `KNOWN` asks for, are as long as the base's. Steps that are shorter than a tenth of the root
    don't count: they are of a layer that isn't used for a while.
    """

    MEMORY, LEAP, IDLE, KNOWN = 0.95, 2.0, 0.1, 10.0

    def __init__(self, known: dict[str, list[float]]) -> None:
        self.known = known
        """Σ β^i ℓ_i² and Σ β^i, by name."""

    def bounded(self, steps: Tensors, groups: Mapping[str, Group], lengths: Iterable[float]) -> dict[str, Tensor]:
        """The steps, those that are too long made shorter; of these lengths."""
        result = dict(steps)
        for name, length in zip(steps, lengths, strict=True):
            length /= float(groups[name].get("lr", 1.0)) or 1.0
            if not 0 < length < math.inf:
                continue
            squares, weight = self.known.get(name, (0.0, 0.0))
            usual = math.sqrt(squares / weight) if weight else length
            if weight > self.KNOWN and length > self.LEAP * usual:
                result[name] = steps[name] * (self.LEAP * usual / length)
                length = self.LEAP * usual
            if length > self.IDLE * usual:
                self.known[name] = [self.MEMORY * squares + length * length, self.MEMORY * weight + 1]
        return result


class TakenBack:
    """Whether the base takes back what is put in the place of its steps: one that steps from weights of its own, as float32
    masters, does. Looked at in the first steps around a base that isn't torch's.

    Its step is compared with a b + c t, with b its own step before and t the one that took its place. To go back to its own
    weights it has to step by b - t more, so that c is -1 and steps grow longer; by any other base c is about 0, or steps that
    overshoot a minimum grow shorter.
    """

    STEPS, IN_A_ROW, BACK = 30, 5, -0.8

    def __init__(self, base: Optimizer) -> None:
        self._name = type(base).__name__
        self._left = 0 if type(base).__module__.startswith("torch.optim") else self.STEPS
        self._before: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self._times = 0

    def look(self, steps: Tensors, turned: Tensors) -> None:
        """At the base's steps, and at what takes their place."""
        if not self._left:
            return
        if self._before is not None:
            share, grows = self._share(steps, *self._before)
            self._times = self._times + 1 if share < self.BACK and grows else 0
        self._left -= 1
        self._before = ({name: steps[name] for name in turned}, dict(turned)) if self._left else None
        if self._times == self.IN_A_ROW:
            raise LLQRError(
                f"{self._name} takes back what LLQR puts in the place of its steps: it keeps weights of its own, and steps "
                "from them. Give LLQR a base that steps the parameters themselves, such as torch.optim.AdamW, and begin anew"
            )

    @staticmethod
    def _share(steps: Tensors, own: Tensors, turned: Tensors) -> tuple[float, bool]:
        """c of the a b + c t that is nearest to the steps, and whether they are longer than b."""
        names = [name for name in own if name in steps and steps[name].shape == own[name].shape]
        pairs = ((own, own), (own, turned), (turned, turned), (own, steps), (turned, steps), (steps, steps))
        bb, bt, tt, bd, td, dd = (sum(float((x[n] * y[n]).sum()) for n in names) for x, y in pairs)
        determinant = bb * tt - bt * bt
        return (bb * td - bt * bd) / determinant if determinant > 0 else 0.0, dd > bb


STEEPNESS = 0.15
"""The least cosine between a step and the momentum. Along U m it is 0.2 to 0.6 on networks that train well; where U is out of
date U m can be almost level, and such steps only wander."""


class TurnedSteps(NamedTuple):
    """The steps that take the place of the base's, and the maps that leave it as it is."""

    steps: dict[str, Tensor]
    left: list[str]


def turn(blocks: Iterable[Block], momenta: Tensors, steps: Tensors) -> TurnedSteps:
    """-‖Δθ‖ d / ‖d‖, tensor by tensor, with d = U m, or d = U m + μ m where that is needed for a cosine of `STEEPNESS` with m.

    Where something isn't finite, or there is no momentum, the base's step Δθ stays.
    """
    result = TurnedSteps({}, [])
    usable = [b for b in blocks if all(name in momenta and name in steps for name in b.map.members)]
    found = [tensor for stack in stacked(usable) for tensor in _turned(stack, momenta, steps)]
    if not found:
        return result
    for tensor, numbers in zip(found, _measured(found), strict=True):
        map_, name = tensor.map, tensor.name
        along, size, momentum, length = numbers
        if not all(map(math.isfinite, numbers)) or size <= 0 or momentum <= 0:
            if length != 0:
                result.left.append(map_.key)
            continue
        share, added = _steep(along / (size * momentum))
        direction = tensor.direction.mul_(-length * share / size)
        if added:
            direction.add_(tensor.momentum, alpha=-length * added / momentum)
        if name == map_.weight and map_.places is not None:
            if name not in result.steps:
                result.steps[name] = steps[name].clone(memory_format=torch.contiguous_format)
            map_.put(direction.view(map_.shape), result.steps[name])
        else:
            result.steps[name] = direction.view(steps[name].shape)
    return result


class _Turned(NamedTuple):
    """The weight or the bias of a map."""

    map: LinearMap
    name: str
    direction: Tensor
    """U m, without gaps: its norm is many times faster."""
    momentum: Tensor
    """m."""
    step: Tensor
    """The base's."""


def _turned(stack: Stack, momenta: Tensors, steps: Tensors) -> Iterator[_Turned]:
    maps = [block.map for block in stack.blocks]
    for number, directions in enumerate(maps[0].split(stack.apply(stack.read(momenta)))):
        for map_, direction in zip(maps, directions.contiguous().view(len(maps), -1).unbind(), strict=True):
            name = map_.members[number]
            momentum, step = (map_.part(name, tensors) for tensors in (momenta, steps))
            yield _Turned(map_, name, direction, raised(momentum).reshape(-1), step)


def _measured(tensors: Sequence[_Turned]) -> list[list[float]]:
    """U m · m, ‖U m‖, ‖m‖ and ‖Δθ‖ of each, in one transfer."""
    _, _, directions, momenta, steps = zip(*tensors, strict=True)
    # a product of (1, n) and (n, 1) is ten times slower, but in a batch
    pairs = zip(directions, momenta, strict=True)
    along = [torch.bmm(direction[None, None], momentum[None, :, None]).view(()) for direction, momentum in pairs]
    columns = along, *map(torch._foreach_norm, (directions, momenta, steps))
    numbers = torch.stack([torch.stack([number.to(along[0]) for number in column]) for column in columns], 1)
    return cast(list[list[float]], numbers.tolist())


def _steep(cosine: float) -> tuple[float, float]:
    """α and μ, so that α u + μ e is a unit vector as steep as asked for; u and e are those of U m and m, at this cosine."""
    if cosine >= STEEPNESS:
        return 1.0, 0.0
    across = math.sqrt(max(1 - cosine * cosine, 0.0))
    if across < 1e-6:  # straight uphill
        return 0.0, 1.0
    share = math.sqrt(1 - STEEPNESS * STEEPNESS) / across
    return share, STEEPNESS - share * cosine
