"""What structures of U cost on a model and a batch: bytes, and seconds in training steps.

Bytes are counted. Seconds are measured where U is small enough to be made for it; otherwise the arithmetic is counted and a
timed matrix product says how long it takes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from llqr.checks import Inputs
from llqr.precision import at_least_single
from llqr.preconditioner import Preconditioner
from llqr.quadratic import QuadraticModel
from llqr.recorder import Parameters, Recorder, Selector
from llqr.structures import Dense, EigenKronecker, Kronecker, Structure
from llqr.structures.stacks import BLOCK_LIMIT

MADE = 2**28
"""Bytes of U up to which applying it is timed; beyond, it is counted."""
WORK = 4
"""Work on U's tensors in an inner step, in applications of U: U g, its pullback, and its derivative along the direction."""
SIDE = 512
"""Of the matrices whose product is timed."""


@dataclass(frozen=True)
class Times:
    """Seconds: of a training step (forward and backward), of a curvature product, of recording with a first product."""

    train: float
    product: float
    record: float
    apply: dict[str, float]
    """Of U g with its guard, for the structures whose U could be made."""
    multiply: float
    """Of one multiplication and addition inside a large matrix product."""


def memory(structure: Structure, parameters: Mapping[str, Tensor]) -> int:
    """Bytes of U, one block a parameter; nothing is allocated."""
    return sum(block_memory(structure, parameter) for parameter in parameters.values())


def block_memory(structure: Structure, parameter: Tensor) -> int:
    return structure.memory(parameter.shape, at_least_single(parameter.dtype).itemsize)


def can_be_made(structure: Structure, parameters: Mapping[str, Tensor]) -> bool:
    """Whether no block is larger than `Preconditioner` takes."""
    return all(block_memory(structure, parameter) <= BLOCK_LIMIT for parameter in parameters.values())


def multiplications(structure: Structure, shape: Sequence[int]) -> int:
    """Multiplications and additions in the matrix products of U x; what goes number by number isn't counted."""
    sizes, numbers = structure.sizes(shape), math.prod(shape)
    if isinstance(structure, Dense):
        return numbers**2
    if len(shape) < 2 or not isinstance(structure, (Kronecker, EigenKronecker)):
        return 0
    factors = list(sizes.values())[:-1] if isinstance(structure, EigenKronecker) else list(sizes.values())
    times = 2 if isinstance(structure, EigenKronecker) else 1  # into the basis, and back
    return times * numbers * sum(size[0] for size in factors if len(size) == 2)


def measure(
    model: nn.Module,
    batch: Inputs,
    parameters: Parameters,
    structures: Mapping[str, Structure],
    output: Selector | None,
    training: bool | None,
    repeats: int,
) -> Times:
    """Time everything in turns, `repeats` rounds, and take medians. The model is left as it was.

    A mean square of the output stands for the loss, and Gauss-Newton's curvature for the divergence's: a KL product costs
    the same.
    """
    train = _training_step(Recorder(model, (), output, training, own_precision=True), parameters, batch)
    gradients = train()
    q: list[QuadraticModel] = []

    def record() -> None:
        q[:] = [QuadraticModel.build(model, batch, None, _stand_in, "gauss-newton", output=output, training=training)]
        q[0].curvature(gradients)

    record()
    small = {
        name: Preconditioner.identity(parameters, structure)
        for name, structure in structures.items()
        if memory(structure, parameters) <= MADE
    }
    some = next(iter(parameters.values()))
    square = torch.ones(SIDE, SIDE, dtype=at_least_single(some.dtype), device=some.device)
    jobs: dict[str, Callable[[], object]] = {
        "train": train,
        "product": lambda: q[0].curvature(gradients),
        "record": record,
        "multiply": lambda: square @ square,
    }
    jobs |= {f"apply {name}": partial(u.steer, gradients) for name, u in small.items()}
    seconds = _in_turns(jobs, repeats, some.device)
    return Times(
        seconds["train"],
        seconds["product"],
        seconds["record"],
        {name: seconds[f"apply {name}"] for name in small},
        seconds["multiply"] / SIDE**3,
    )


def apply_seconds(name: str, structure: Structure, parameters: Mapping[str, Tensor], times: Times) -> float:
    """Measured, or else counted: the matrix products, and a pass over the numbers like the diagonal's."""
    if name in times.apply:
        return times.apply[name]
    products = sum(multiplications(structure, parameter.shape) for parameter in parameters.values())
    return products * times.multiply + times.apply.get("diagonal", 0.0)


def _training_step(recorder: Recorder, parameters: Parameters, batch: Inputs) -> Callable[[], Parameters]:
    def train() -> Parameters:
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
        with torch.enable_grad():
            loss = _stand_in(recorder.run(leaves, batch)[0], None)
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    return train


def _stand_in(output: Tensor, targets: None) -> Tensor:
    return output.square().mean()


def _in_turns(jobs: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            _finish(device)
            before = time.perf_counter()
            job()
            _finish(device)
            seconds[name].append(time.perf_counter() - before)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _finish(device: torch.device) -> None:
    """Wait for what an accelerator was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
