"""Collector: what LLQR sees of a training loop, by one hook on the model.

In a step that begins with a refit the hook looks at the graph of what the model returns, and lets the loop's own backward pass
tell the gradients at every linear map: no pass of its own is needed, and the loss can be anything. Where the maps can't be seen
there (a compiled graph, a fused LSTM, sharded parameters), it holds the inputs and the gradients at the outputs, and LLQR runs
the model once more itself (`llqr.curvature.second_run`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llqr.checks import tensors_in
from llqr.curvature.linear_maps import LinearMap
from llqr.curvature.precision import no_autocast
from llqr.curvature.recorder import CheckpointedError, Streams, refusing_checkpoints
from llqr.curvature.statistics import Sides, Sums
from llqr.curvature.uses import Found, Use, find_uses
from llqr.distributed.processes import holds_gradients
from llqr.structures.base import Structure
from llqr.training_loop import copied, is_own_call

if TYPE_CHECKING:
    from llqr.wrapper import Schedule


@dataclass
class Call:
    """A call of the model: what it was given, and the gradients that came back to what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    streams: Streams | None = None
    """What it drew from, as it was then."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """By the output's place among the tensors that were returned."""


class _AwaitedGradient:
    """A use of a map in the loop's graph, until its step is over. Not the node, whose hook holds this."""

    def __init__(self, use: Use) -> None:
        self.map, self.leaf = use.map, use.leaf
        self.sides: Callable[[Tensor], Sides] | None = use.sides


class Collector:
    """The second moments of all linear maps since the last step, or the last call of the model.

    It knows the schedule, not the optimizer, so that neither keeps the other alive. A copy of it, as in a copy or a pickle of
    the model, does nothing.
    """

    def __init__(self, schedule: Schedule | None = None, runs_again: bool = False) -> None:
        self._schedule = schedule
        self.runs_again = runs_again
        """LLQR runs the model itself, and is told with what."""
        self.of: Mapping[str, Tensor] = {}
        self.names: Mapping[int, str] = {}
        self.structures: Mapping[str, Structure] = {}
        self.sums: dict[LinearMap, Sums] = {}
        self.other_uses: Mapping[str, str] = {}
        """Parameters that aren't in linear maps alone, by what else uses them."""
        self.calls: list[Call] = []
        """Those that a gradient came back to, as of micro-batches."""
        self._step, self._mark = 0, object()
        self._streams: Streams | None = None
        self.was_called = False
        """Whether the model was called with gradients on, for this step."""
        self._awaited: weakref.WeakSet[_AwaitedGradient] = weakref.WeakSet()

    def know(self, parameters: Mapping[str, Tensor], structures: Mapping[str, Structure]) -> None:
        """The parameters that are stepped, by their names, and the structures of their blocks."""
        self.of = parameters
        self.names = {id(p): name for name, p in parameters.items()}
        self.structures = structures

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While LLQR runs the model itself, or evaluates a closure again, nothing is heard."""
        schedule, self._schedule = self._schedule, None
        try:
            yield
        finally:
            self._schedule = schedule

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Returns what takes the hooks off again."""
        hooks = ExitStack()
        hooks.callback(model.register_forward_pre_hook(partial(_begin, self)).remove)
        hooks.callback(model.register_forward_hook(partial(_listen, self), with_kwargs=True).remove)
        return hooks.close

    def attach_to_parts(self, model: nn.Module) -> Callable[[], None]:
        """For loops that call the modules inside, by `model.encode(x)`, `model.forward(x)` or one by one."""
        hooks = ExitStack()
        for module in model.modules():
            listen = partial(_listen, self, part=True)
            hooks.callback(module.register_forward_hook(listen, with_kwargs=True).remove)
        return hooks.close

    def listens(self) -> bool:
        """Whether the coming step begins with a refit."""
        return self._schedule is not None and self._schedule.may_be_due()

    def begin(self, module: nn.Module) -> None:
        """The model is about to be called."""
        self._streams = Streams(module)

    def forget(self) -> None:
        """What comes back from now on belongs to another step. Graphs that live on hold no inputs for it."""
        self.sums, self.calls, self.was_called, self._streams = {}, [], False, None
        self._step, self._mark = self._step + 1, object()
        for awaited in self._awaited:
            awaited.sides = None
        self._awaited.clear()

    def gradients_are_cleared(self) -> None:
        """As before a step, or in place of one that a GradScaler left out: so is what has come back with them."""
        if self._schedule is not None:
            self.sums, self.calls = {}, []

    def hear(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, part: bool = False
    ) -> None:
        """The model was called, or a part of it, of which nothing can be run again."""
        outputs = [tensor for tensor in returned(output) if tensor.requires_grad]
        if not outputs or (part and self.runs_again):
            return
        if not self.was_called:
            self.was_called, self.other_uses = True, {}
        if all(parameter.grad is None for parameter in self.of.values()) and not holds_gradients(module):
            self.sums, self.calls = {}, []  # what has come back was thrown away
        if not any(parameter.requires_grad for parameter in self.of.values()):
            return  # a gradient goes through the model, to something else, as in a GAN
        holds = self.runs_again
        if not self.runs_again:
            found = self._found(outputs)
            self.other_uses, self.runs_again = {**self.other_uses, **found.other_uses}, found.hidden and not part
            for use in () if self.runs_again else found.uses:
                awaited = _AwaitedGradient(use)
                self._awaited.add(awaited)
                use.node.register_prehook(partial(self._come_back, awaited))
            # parameters that aren't in it may have been sharded since; a call that goes on from another has none that are new
            holds = self.runs_again or not (part or found.has_parameters or self._awaited)
        if holds:
            call = Call(copied(args), copied(kwargs), self._streams)
            for place, tensor in enumerate(returned(output)):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._hold, self._step, call, place))  # type: ignore[no-untyped-call]

    def _found(self, outputs: list[Tensor]) -> Found:
        """Nothing is seen of checkpointed blocks: they would be run again for every tensor that is asked for."""
        try:
            with refusing_checkpoints():
                return find_uses(outputs, self.names, self._mark)
        except CheckpointedError:
            return Found([], {}, hidden=True, has_parameters=True)

    def _hold(self, step: int, call: Call, place: int, gradient: Tensor) -> None:
        if step == self._step:
            call.gradients[place] = gradient.detach().clone()
            self.calls = [*(other for other in self.calls if other is not call), call]

    def _come_back(self, awaited: _AwaitedGradient, gradients: Sequence[Any]) -> None:
        """A gradient has come back, in a pass that adds to the weight's: not in one that only asks for others."""
        if awaited.sides is None or gradients[0] is None:
            return
        try:
            adds = torch._C._will_engine_execute_node(awaited.leaf)
        except RuntimeError:  # torch.autograd.grad() by the weight itself
            return
        if adds:
            with torch.no_grad(), no_autocast({awaited.map.weight: gradients[0]}):
                self.add(awaited.map, awaited.sides(gradients[0].detach()))

    def add(self, map_: LinearMap, sides: Sides) -> None:
        """Count one use of a map."""
        structure = self.structures[map_.weight]
        if not structure.joins_bias(map_.kernel):
            map_ = replace(map_, bias=None)
        if map_ not in self.sums:
            self.sums[map_] = Sums(map_, structure)
        self.sums[map_].add(sides)

    def __reduce__(self) -> tuple[type[Collector], tuple[()]]:
        return Collector, ()


def returned(output: Any) -> list[Tensor]:
    """The floating-point tensors that a model returned, in order, however deep in what it returned."""
    found = tensors_in(output, dataclasses=True)
    if not found and hasattr(output, "__dict__"):
        found = tensors_in(vars(output), dataclasses=True)
    return [tensor for tensor in found if tensor.is_floating_point()]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(collector: Collector, module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and collector.listens() and is_own_call(module):
        collector.begin(module)


@torch.compiler.substitute_in_graph(_begin, skip_signature_check=True)
def _traced_begin(collector: Collector, module: nn.Module, args: tuple[Any, ...]) -> None:
    """What stands for it inside of a compiled graph."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _listen(
    collector: Collector,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    part: bool = False,
) -> None:
    if torch.is_grad_enabled() and collector.listens() and is_own_call(module):
        collector.hear(module, args, kwargs, output, part)


@torch.compiler.substitute_in_graph(_listen, skip_signature_check=True)
def _traced(
    collector: Collector,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    part: bool = False,
) -> None:
    """What stands for it inside of a compiled graph, where the outputs have no graph of their own to look at."""
