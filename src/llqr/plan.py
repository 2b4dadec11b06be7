"""plan: how LLQR would step each parameter of a model, and what that would cost on a batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from llqr.assignments import assignments
from llqr.base_step import turn
from llqr.checks import Inputs, check_callable, check_finite, check_model
from llqr.collector import Collector
from llqr.errors import LLQRError
from llqr.linear_maps import find_uses
from llqr.loop.schedule import LONGEST, often_at_first
from llqr.plainly import unfused, without_checkpoints
from llqr.precision import no_autocast
from llqr.recorder import Recorder, Selector
from llqr.second_run import Everything
from llqr.sites import trainable, uncompiled
from llqr.statistics import Block, merged
from llqr.structures import Structure
from llqr.structures.assign import StructureSpec, assign

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

    The model is run on the batch in the mode that it is in, and left as it was: gradients, buffers, modes, random stream. A
    training step, a refit (second moments and inverses) and a step along U m are timed in turns, and medians taken; the base's
    own step isn't in any of them.

    Args:
        model: any module.
        batch: its inputs: a tensor, a tuple, or a dict of keywords.
        structure: of U, as for `LLQR`.
        output: picks the tensor whose mean square stands for the loss out of what the model returns. None: all of them.
        repeats: rounds of the measurement.
    """
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise LLQRError(f"repeats is a positive integer, not {repeats!r}")
    check_callable("output", output)
    check_model(model, batch)
    called, model = model, uncompiled(model)
    trainable(model)  # raises where there is nothing to step
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    structures = assign(structure, parameters)
    for each in structures.values():
        each.check_closed_form()
    rehearsal = _Rehearsal(model, batch, output, parameters, structures)
    train, refit, step = _in_turns([rehearsal.train, rehearsal.refit, rehearsal.step], repeats, rehearsal.device)
    if rehearsal.hidden or called is not model:  # LLQR runs the model once more
        refit += train
    blocks = rehearsal.blocks.values()
    refits = sum(map(often_at_first, range(FIRST)))
    return Plan(
        assignments(parameters, blocks, rehearsal.others, rehearsal.otherwise),
        train,
        refit / train,
        step / train,
        (step + refit / LONGEST) / train,
        (step + refit * refits / FIRST) / train,
        {
            "curvature": _bytes(m for block in blocks for m in block.moments.values()),
            "U": _bytes(tensor for block in blocks for tensor in block.inverse.values()),
            "copy": _bytes(rehearsal.before.values()),
            "parameters": _bytes(parameters.values()),
        },
    )


class _Rehearsal:
    """A training step, a refit and a step along U m, each to be timed. The parameters are leaves that share their numbers."""

    def __init__(
        self,
        model: nn.Module,
        batch: Inputs,
        output: Selector | None,
        parameters: Mapping[str, Tensor],
        structures: Mapping[str, Structure],
    ) -> None:
        self._parameters, self._batch = parameters, batch
        self._recorder = (Everything if output is None else Recorder)(model, (), output, own_precision=True)
        self.device = next(iter(parameters.values())).device
        try:
            leaves, outputs, _ = self._run()  # as the loop does
        except LLQRError:
            raise
        except Exception as error:
            raise LLQRError(f"the model fails on this batch: {type(error).__name__}: {error}") from error
        for value in outputs:
            check_finite(value, "the output")
        seen = find_uses(outputs, _names(leaves))
        self.hidden = seen.hidden or not seen.met
        with unfused(model), without_checkpoints():
            leaves, self._outputs, loss = self._run()
        self._ids = _names(leaves)
        found = find_uses(self._outputs, self._ids)
        self.others = found.others
        edges = [get_gradient_edge(leaf) for leaf in leaves.values()] + [
            GradientEdge(use.node, 0) for use in found.uses
        ]
        gradients = torch.autograd.grad(loss, edges, allow_unused=True, retain_graph=True)
        self._momenta = {name: g for name, g in zip(leaves, gradients, strict=False) if g is not None}
        self._slopes = gradients[len(leaves) :]
        self.otherwise = {
            name: f"by the base: {'in no linear map' if name in self._momenta else 'not used'}" for name in leaves
        }
        self._collector = Collector()
        self._collector.know(parameters, structures)
        self.blocks: dict[str, Block] = {}
        self.refit()
        names = dict.fromkeys(name for block in self.blocks.values() for name in block.map.members)
        self.before = {name: torch.empty_like(self._momenta[name]) for name in names if name in self._momenta}

    def _run(self) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
        """The leaves, what the model returns, and the mean squares of that."""
        with torch.enable_grad():
            tensors = {n: p.detach().requires_grad_(p.requires_grad) for n, p in self._parameters.items()}
            outputs = [value for value in self._recorder.run(tensors, self._batch) if value.requires_grad]
            if not outputs:
                raise LLQRError("nothing that the model returns depends on a parameter that is trained")
            loss = torch.stack([value.square().mean() for value in outputs]).sum()
        return {name: leaf for name, leaf in tensors.items() if leaf.requires_grad}, outputs, loss

    def train(self) -> None:
        with without_checkpoints():
            leaves, _, loss = self._run()
        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)

    def refit(self) -> None:
        """As the hook on the model does it, and `LLQR.step`."""
        self._collector.forget()
        with torch.no_grad(), no_autocast(self._parameters):
            for use, slope in zip(find_uses(self._outputs, self._ids).uses, self._slopes, strict=True):
                if slope is not None:
                    self._collector.add(use.map, use.sides(slope))
            for key, sums in merged(self._collector.sums.values()).items():
                block = self.blocks.setdefault(key, Block(sums.map, sums.structure))
                block.take(sums.moments())
                block.invert()

    def step(self) -> None:
        """As `LLQR.step` does it, with the gradients as the base's momentum and as its step."""
        if not self.before:
            return
        before = self.before
        with torch.no_grad(), no_autocast(self._parameters):
            torch._foreach_copy_(list(before.values()), [self._parameters[name] for name in before])
            taken = torch._foreach_sub([self._momenta[name] for name in before], list(before.values()))
            turned = turn(self.blocks.values(), self._momenta, dict(zip(before, taken, strict=True)))
            for name, step in turned.steps.items():
                torch.add(before[name], step.to(before[name].dtype), out=before[name])


def _names(leaves: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(leaf): name for name, leaf in leaves.items()}


def _in_turns(jobs: list[Callable[[], None]], repeats: int, device: torch.device) -> list[float]:
    """The median seconds of each, after a round that isn't counted."""
    seconds: list[list[float]] = [[] for _ in jobs]
    for _ in range(1 + repeats):
        for job, times in zip(jobs, seconds, strict=True):
            begun = time.perf_counter()
            job()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # nothing is left for the next one to wait for
            times.append(time.perf_counter() - begun)
    return [statistics.median(times[1:]) for times in seconds]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def size(number: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
