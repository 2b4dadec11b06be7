"""plan: how LLQR would step each parameter of a model, and what that would cost on a batch."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, as_arguments, check_callable, check_finite, check_model, checked_integer, tensors_in
from llqr.curvature.locations import trainable, uncompiled
from llqr.curvature.recorder import Selector, Streams
from llqr.errors import LLQRError
from llqr.optimizer import LLQR
from llqr.structures.stacks import StructureSpec
from llqr.wrapper import LONGEST, often_at_first

FIRST = 300
"""Steps from the start that `overhead_at_first` is about: the default schedule refits more often there."""
LISTED = 40
"""Parameters that are printed; of the rest, how many there are."""


@dataclass(frozen=True)
class Plan:
    """What `plan` found. Printing it gives a table."""

    parameters: dict[str, str]
    """How each is stepped: along U m, or by the base and why."""
    train_seconds: float
    """A training step's forward and backward pass."""
    refit: float
    """A refit, in training steps."""
    step: float
    """Turning a step to U m, in training steps."""
    overhead: float
    """What a step costs more on average with a refit every 40 steps, as a share of a training step."""
    overhead_at_first: float
    """The same over the first 300 steps, with the refits of the default schedule."""
    memory: dict[str, int]
    """Bytes: "curvature", "U", "copy" (of the parameters that are stepped along U m), and the "parameters" themselves."""

    def __str__(self) -> str:
        held = ", ".join(f"{name} {size(held)}" for name, held in self.memory.items())
        width = max(map(len, list(self.parameters)[:LISTED]))
        return "\n".join(
            [
                f"A training step (forward and backward) takes {1000 * self.train_seconds:.3g} ms. LLQR adds "
                f"{self.overhead:.1%}, and {self.overhead_at_first:.1%} over the first {FIRST} steps:",
                f"a refit takes {self.refit:.2f} training steps, a step along U m {self.step:.3f}.",
                f"Memory: {held}.",
                *(f"  {name:{width}}  {how}" for name, how in list(self.parameters.items())[:LISTED]),
                *([f"  and {len(self.parameters) - LISTED} more"] if len(self.parameters) > LISTED else []),
            ]
        )

    __repr__ = __str__


def plan(
    model: nn.Module,
    batch: Inputs,
    *,
    structure: StructureSpec = "kfac",
    output: Selector | None = None,
    repeats: int = 3,
) -> Plan:
    """How `LLQR(base, model, structure=structure)` would step each parameter, and what it would cost.

    A copy of the model is trained on the batch for a few steps, in the mode that the model is in: with a refit and without one,
    in turns, and medians are taken. The base's own step isn't in any of them.

    Args:
        model: any module.
        batch: its inputs: a tensor, a tuple, or a dict of keywords.
        structure: of U, as for `LLQR`.
        output: picks the tensor whose mean square stands for the loss out of what the model returns. None: all of them.
        repeats: rounds of the measurement.
    """
    checked_integer("repeats", repeats)
    check_callable("output", output)
    check_model(model, batch)
    inner = uncompiled(model)
    trainable(inner)  # raises where there is nothing to step
    with Streams(inner).again():
        try:
            twin = copy.deepcopy(inner)
        except Exception as error:
            raise LLQRError(f"the model can't be copied, and costs are measured on a copy ({error})") from error
        rehearsal = _Rehearsal(twin, batch, structure, output)
        train, base, step, refit = rehearsal.seconds(repeats)
    step, refit = max(step - base, 0.0), refit + (train if inner is not model else 0.0)  # compiled: it is run once more
    blocks = rehearsal.optimizer.blocks.values()
    along = {name for block in blocks for name in block.map.members}
    parameters = dict(twin.named_parameters())
    refits = sum(map(often_at_first, range(FIRST)))
    return Plan(
        rehearsal.optimizer.assignments(),
        train,
        refit / train,
        step / train,
        (step + refit / LONGEST) / train,
        (step + refit * refits / FIRST) / train,
        {
            "curvature": _bytes(m for block in blocks for m in block.moments.values()),
            "U": _bytes(tensor for block in blocks for tensor in block.inverse.values()),
            "copy": _bytes(parameters[name] for name in along),
            "parameters": _bytes(parameters.values()),
        },
    )


class _Rehearsal:
    """Steps of LLQR around SGD, whose refits can be turned on and off."""

    def __init__(self, model: nn.Module, batch: Inputs, structure: StructureSpec, output: Selector | None) -> None:
        self._model, self._batch, self._output, self._refits = model, batch, output, True
        base = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        self.optimizer = LLQR(base, model, structure=structure, every=lambda step: self._refits)

    def seconds(self, repeats: int) -> list[float]:
        """The medians of a training step, the base's step, LLQR's step, and what a refit adds; a first round isn't counted."""
        rounds, optimizer = [], self.optimizer
        for _ in range(1 + repeats):
            self._refits, before = True, optimizer.stats.seconds
            heard = _timed(self._train)  # with what the hooks add
            optimizer.step()
            refit, self._refits = optimizer.stats.seconds - before, False
            train, step, base = _timed(self._train), _timed(optimizer.step), _timed(optimizer.base.step)
            rounds.append((train, base, step, refit + max(heard - train, 0.0)))
        return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]

    def _train(self) -> None:
        self.optimizer.zero_grad()
        args, kwargs = as_arguments(self._batch)
        with torch.enable_grad():
            try:
                returned = self._model(*args, **kwargs)
            except Exception as error:
                raise LLQRError(f"the model fails on this batch: {type(error).__name__}: {error}") from error
            chosen = tensors_in(returned if self._output is None else self._output(returned), dataclasses=True)
            outputs = [value for value in chosen if value.requires_grad]
            if not outputs:
                raise LLQRError("nothing that the model returns depends on a parameter that is trained")
            for value in outputs:
                check_finite(value.detach(), "the output")
            torch.stack([value.square().mean() for value in outputs]).sum().backward()  # type: ignore[no-untyped-call]


def _timed(job: Callable[[], object]) -> float:
    begun = time.perf_counter()
    job()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # nothing is left for the next one to wait for
    return time.perf_counter() - begun


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def size(number: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
