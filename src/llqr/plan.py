"""plan: what each structure of U would cost on a model and a batch, and which one to take where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from llqr import costs, sites
from llqr.checks import Inputs, check_model
from llqr.errors import LLQRError
from llqr.recorder import Selector
from llqr.relaxation import checked_solver
from llqr.structures import Dense, Diagonal, EigenKronecker, Kronecker, Scalar, Structure
from llqr.structures.assign import NAMES, StructureSpec

ORDER = ("ekfac", 'ekfac, modes="all"', "kfac", 'kfac, modes="all"')
"""What is advised if it can be afforded, from the first on. Dense isn't: it learns n² numbers from gradients of n."""


@dataclass(frozen=True)
class Cost:
    """One structure, for all the parameters."""

    structure: Structure
    memory: int
    """Bytes of U."""
    apply: float | None
    """Of U g at every step, in training steps; None where a block is too large to be made."""
    refit: float | None
    """Of a refit, in training steps."""
    measured: bool
    """Whether `apply` was timed; otherwise its arithmetic was counted."""

    def overhead(self, every: int) -> float | None:
        """What a step costs more on average, as a share of a training step."""
        return None if self.apply is None or self.refit is None else self.apply + self.refit / every


@dataclass(frozen=True)
class Plan:
    """What `plan` found. Printing it gives a table; `advised` goes into `LLQR.paper(..., structure=plan.advised)`."""

    costs: dict[str, Cost]
    """By structure."""
    advised: StructureSpec
    why: str
    where: dict[str, str]
    """The parameters that get another structure than the rest, and why."""
    overhead: float
    """Of what is advised: the share of a training step that it adds on average."""
    memory: int
    """Of what is advised, in bytes."""
    train_seconds: float
    """A training step's forward and backward."""
    product: float
    """A curvature product, in training steps."""
    steps: int
    every: int

    def __str__(self) -> str:
        header = ("structure", "U", "apply", "refit", f"overhead at every={self.every}")
        table = [header, *(self.row(name) for name in self.costs)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            f"A training step (forward and backward) takes {1000 * self.train_seconds:.3g} ms; a curvature product "
            f"{self.product:.2f} of that. Costs in training steps, ~ counted; inner steps of a refit: {self.steps}.",
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table),
            f"Advised: {self.advised!r}",
            self.why,
            *(f"  {name}: {reason}" for name, reason in self.where.items()),
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def row(self, name: str) -> tuple[str, str, str, str, str]:
        """A structure's line in the table."""
        cost = self.costs[name]
        overhead = cost.overhead(self.every)
        if cost.apply is None or cost.refit is None or overhead is None:
            return name, size(cost.memory), "too large", "", ""
        return (
            name,
            size(cost.memory),
            f"{'' if cost.measured else '~'}{cost.apply:.3f}",
            f"{'' if cost.measured else '~'}{cost.refit:.1f}",
            f"{100 * overhead:.1f}%",
        )


def plan(
    model: nn.Module,
    batch: Inputs,
    *,
    steps: int = 25,
    every: int = 500,
    budget: float = 0.25,
    memory: float = 4.0,
    output: Selector | None = None,
    training: bool | None = None,
    repeats: int = 3,
) -> Plan:
    """What U would cost with each structure, and what to take.

    Memory is counted from the structures. A training step (forward and backward of a mean square of the output), a curvature
    product and, for every structure whose U takes at most 256 MiB, applying U with its guard are timed in turns, and
    medians taken. For a larger U the arithmetic of applying it is counted, at the speed of a timed matrix product; a block
    that is too large to be made has no cost at all. A refit is counted as its recording, and for each inner step a product and
    four applications of U. The model is left as it was: gradients, buffers, modes, random stream.

    Advised is the first of ekfac and kfac (for convolutions, also with `modes="all"`) that stays within the two limits. If
    none does, the parameters that cost most are diagonal until the rest can be afforded. A matrix with a side that is longer
    than `max_dim` is diagonal in any case: that side has no factor anyway.

    Args:
        model: any module.
        batch: its inputs, as `QuadraticModel.build` takes them: a tensor, a tuple, or a dict of keywords.
        steps: inner steps of a refit, as for `LLQR.paper`.
        every: steps between refits, as for `LLQR.paper`.
        budget: how much longer a training step may become on average, as a share of it.
        memory: how many times the bytes of the parameters U may take.
        output: picks the tensor that the loss is about out of what the model returns.
        training: the modules' mode; None: as they are.
        repeats: rounds of the measurement.
    """
    _check(every, budget, memory, repeats)
    checked_solver(None, steps)
    check_model(model, batch)
    parameters = sites.trainable(model)
    structures = _structures(parameters)
    times = costs.measure(model, batch, parameters, structures, output, training, repeats)
    found: dict[str, Cost] = {}
    for name, structure in structures.items():
        apply = costs.apply_seconds(name, structure, parameters, times) / times.train
        made = costs.can_be_made(structure, parameters)
        refit = times.record / times.train + steps * (times.product / times.train + costs.WORK * apply)
        held = costs.memory(structure, parameters)
        found[name] = Cost(structure, held, apply if made else None, refit if made else None, name in times.apply)
    advice = _Advice(parameters, found, every, 1 + costs.WORK * steps / every, budget, memory).advice()
    return Plan(
        found,
        **advice,
        train_seconds=times.train,
        product=times.product / times.train,
        steps=steps,
        every=every,
    )


def _structures(parameters: Mapping[str, Tensor]) -> dict[str, Structure]:
    convolutions = any(parameter.dim() > 2 for parameter in parameters.values())
    structures: dict[str, Structure] = {"scalar": Scalar(), "diagonal": Diagonal(), "kfac": Kronecker()}
    if convolutions:
        structures['kfac, modes="all"'] = Kronecker(modes="all")
    structures["ekfac"] = EigenKronecker()
    if convolutions:
        structures['ekfac, modes="all"'] = EigenKronecker(modes="all")
    return {**structures, "dense": Dense()}


@dataclass
class _Advice:
    parameters: Mapping[str, Tensor]
    found: Mapping[str, Cost]
    every: int
    applications: float
    """Of U a step, on average: the step's own, and a refit's spread over the steps."""
    budget: float
    memory: float

    def advice(self) -> dict[str, Any]:
        bytes_of_all = sum(p.numel() * p.element_size() for p in self.parameters.values())
        room = self.memory * bytes_of_all
        names = [name for name in ORDER if name in self.found]
        long = {name: self._too_long(p) for name, p in self.parameters.items() if self._too_long(p)}
        for name in names:
            overhead, held = self._of(name, long)
            if overhead <= self.budget and held <= room and not self._nothing_left(long):
                return self._told(
                    name, long, f"{name} adds {overhead:.1%} to a training step and U takes {size(held)}."
                )
        name = names[-1]
        moved = dict(long)
        for parameter in sorted(self._matrices(long), key=lambda p: self._weight(name, p), reverse=True):
            overhead, held = self._of(name, moved)
            if overhead <= self.budget and held <= room:
                break
            moved[parameter] = self._too_dear(name, parameter)
        if self._nothing_left(moved):
            return self._told("diagonal", {}, self._only_diagonal(name, long))
        overhead, held = self._of(name, moved)
        why = (
            f"{name} everywhere would be beyond the limits ({self.budget:.0%} of a training step, {self.memory:g} times the "
            f"parameters' memory); with the largest blocks diagonal it adds {overhead:.1%} and U takes {size(held)}."
        )
        return self._told(name, moved, why)

    def _told(self, name: str, moved: Mapping[str, str], why: str) -> dict[str, Any]:
        chosen: str | Structure = name if name in NAMES else self.found[name].structure
        spec: StructureSpec = {**dict.fromkeys(moved, "diagonal"), "*": chosen} if moved else chosen
        overhead, held = self._of(name, moved)
        return {"advised": spec, "why": why, "where": dict(moved), "overhead": overhead, "memory": held}

    def _of(self, name: str, moved: Mapping[str, str]) -> tuple[float, int]:
        """Overhead and bytes, with the structure of this name but for the moved parameters, which are diagonal.

        A parameter's share of what the structure costs beyond the diagonal is its share of the multiplications.
        """
        diagonal, cost = self.found["diagonal"], self.found[name]
        assert diagonal.apply is not None and diagonal.refit is not None  # noqa: PT018  no diagonal is too large
        kept = [parameter for parameter in self.parameters if parameter not in moved]
        total = sum(self._weight(name, parameter) for parameter in self.parameters)
        share = sum(self._weight(name, parameter) for parameter in kept) / total if total else 0.0
        extra = ((cost.apply if cost.apply is not None else float("inf")) - diagonal.apply) * share if share else 0.0
        overhead = diagonal.apply + diagonal.refit / self.every + self.applications * max(extra, 0.0)
        held = sum(
            costs.block_memory(diagonal.structure if parameter in moved else cost.structure, tensor)
            for parameter, tensor in self.parameters.items()
        )
        return overhead, held

    def _weight(self, name: str, parameter: str) -> int:
        return costs.multiplications(self.found[name].structure, self.parameters[parameter].shape)

    def _matrices(self, moved: Mapping[str, str]) -> list[str]:
        return [name for name, tensor in self.parameters.items() if tensor.dim() > 1 and name not in moved]

    def _nothing_left(self, moved: Mapping[str, str]) -> bool:
        return not self._matrices(moved)

    def _too_long(self, parameter: Tensor) -> str:
        longest, limit = max(parameter.shape, default=1), Kronecker().max_dim
        if parameter.dim() < 2 or longest <= limit:
            return ""
        return f"diagonal: a factor of {longest:,} × {longest:,} is beyond max_dim={limit}"

    def _too_dear(self, name: str, parameter: str) -> str:
        tensor, structure = self.parameters[parameter], self.found[name].structure
        held = size(costs.block_memory(structure, tensor))
        return f"diagonal: {tuple(tensor.shape)} takes {held} and {self._weight(name, parameter):.2g} multiplications a step"

    def _only_diagonal(self, name: str, long: Mapping[str, str]) -> str:
        overhead, held = self._of("diagonal", {})
        if not self._matrices({}):
            start = "No parameter is a matrix, so kfac and ekfac are diagonal too"
        elif not self._matrices(long):
            start = "No matrix is small enough for factors"
        else:
            start = f"Factors for any of the matrices would be beyond the limits ({self.budget:.0%} of a training step)"
        late = "" if overhead <= self.budget else "; take a larger every, or fewer steps, to come below the limit"
        return f"{start}; the diagonal adds {overhead:.1%} and takes {size(held)}{late}."


def size(number: int) -> str:
    """Bytes, for people."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def _check(every: int, budget: float, memory: float, repeats: int) -> None:
    for name, value in (("every", every), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LLQRError(f"{name} is a positive integer, not {value!r}")
    for name, share, what in (
        ("budget", budget, "the share of a training step that a step may cost more, as in 0.25"),
        ("memory", memory, "how many times the parameters' bytes U may take, as in 4.0"),
    ):
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < float("inf"):
            raise LLQRError(f"{name} is a positive number, {what}; not {share!r}")
