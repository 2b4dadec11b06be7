"""What both optimizers see of a training loop, by hooks on the model: `Collector` for LLQR, `InputHook` for LLQR.paper.

In a step that begins with a refit the hook looks at the graph of what the model returns, and lets the loop's own backward pass
tell the gradients at every linear map: no pass of its own is needed, and the loss can be anything. Where the maps can't be seen
there (a compiled graph, a fused LSTM, sharded parameters), it holds the inputs and the gradients at the outputs, and LLQR runs
the model once more itself (`llqr.curvature.second_run`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from llqr.checks import Inputs, mapped, tensors_in
from llqr.curvature.linear_maps import LinearMap
from llqr.curvature.precision import no_autocast
from llqr.curvature.recorder import CheckpointedError, Streams, refusing_checkpoints
from llqr.curvature.statistics import Sides, Sums
from llqr.curvature.uses import Found, find_uses
from llqr.distributed.processes import holds_gradients
from llqr.errors import LLQRError
from llqr.structures.base import Structure

if TYPE_CHECKING:
    from llqr.wrapper import Schedule


class Listener:
    """Hooks on a model that hear its calls with gradients, where the coming step begins with a refit.

    It knows the schedule, not the optimizer, so that neither keeps the other alive. A copy of it, as in a copy or a pickle of
    the model, does nothing; nor does one without a schedule.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        self._schedule = schedule
        self._listens: bool | None = None
        self.parts = False
        """The loop calls the modules inside, by `model.encode(x)`, `model.forward(x)` or one by one."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is about to be called."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """It was called."""

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What stands for `before` inside of a compiled graph, where the outputs have no graph of their own to look at."""

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Returns what takes the hooks off again."""
        hooks = ExitStack()
        if not self.parts:
            hooks.callback(model.register_forward_pre_hook(partial(_before, self), with_kwargs=True).remove)
        for module in model.modules() if self.parts else [model]:
            hooks.callback(module.register_forward_hook(partial(_after, self), with_kwargs=True).remove)
        return hooks.close

    def hears(self, module: nn.Module) -> bool:
        """Not a call by `torch.func.functional_call`, which puts other tensors in the place of parameters."""
        if not torch.is_grad_enabled() or not isinstance(next(module.parameters(), None), nn.Parameter):
            return False
        if self._listens is not None:
            return self._listens
        return self._schedule is not None and self._schedule.may_be_due()

    @contextmanager
    def listening(self, listens: bool) -> Iterator[None]:
        """For a while hear any call, or none: LLQR calls the model itself, or evaluates a closure again."""
        self._listens = listens
        try:
            yield
        finally:
            self._listens = None

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return type(self), ()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before(listener: Listener, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if listener.hears(module):
        listener.before(module, args, kwargs)


@torch.compiler.substitute_in_graph(_before, skip_signature_check=True)
def _traced_before(listener: Listener, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.is_grad_enabled():
        listener.traced(args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after(listener: Listener, module: nn.Module, *call: Any) -> None:
    if listener.hears(module):
        listener.after(module, *call)


@torch.compiler.substitute_in_graph(_after, skip_signature_check=True)
def _traced_after(listener: Listener, module: nn.Module, *call: Any) -> None:
    pass


@dataclass
class Call:
    """A call of the model: what it was given, and the gradients that came back to what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    streams: Streams | None = None
    """What it drew from, as it was then."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """By the output's place among the tensors that were returned."""


class Collector(Listener):
    """The second moments of all linear maps since the last step, or the last call of the model."""

    def __init__(self, schedule: Schedule | None = None, runs_again: bool = False) -> None:
        super().__init__(schedule)
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
        self._mark = object()
        """Of this step."""
        self._streams: Streams | None = None
        self.was_called = False
        """Whether the model was called with gradients on, for this step."""
        self._awaited: list[RemovableHandle] = []

    @property
    def heard_nothing(self) -> bool:
        """Whether the model was called for this step, and no gradient has come back to where one was awaited."""
        return self.was_called and not (self.sums or self.calls) and bool(self._awaited or self.runs_again)

    def know(self, parameters: Mapping[str, Tensor], structures: Mapping[str, Structure]) -> None:
        """The parameters that are stepped, by their names, and the structures of their blocks."""
        self.of = parameters
        self.names = {id(p): name for name, p in parameters.items()}
        self.structures = structures

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._streams = Streams(module)

    def forget(self) -> None:
        """What comes back from now on belongs to another step. Graphs that live on hold no inputs for it."""
        self.sums, self.calls, self.was_called, self._streams = {}, [], False, None
        self._mark = object()
        for hook in self._awaited:
            hook.remove()
        self._awaited = []

    def gradients_are_cleared(self) -> None:
        """As before a step, or in place of one that a GradScaler left out: so is what has come back with them."""
        if self._listens is None:
            self.sums, self.calls = {}, []

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Nothing of a part can be run again."""
        outputs = [tensor for tensor in returned(output) if tensor.requires_grad]
        if not outputs or (self.parts and self.runs_again):
            return
        if not self.was_called:
            self.was_called, self.other_uses = True, {}
        if all(parameter.grad is None for parameter in self.of.values()) and not holds_gradients(module):
            self.sums, self.calls = {}, []  # what has come back was thrown away
        if not any(parameter.requires_grad for parameter in self.of.values()):
            return  # a gradient goes through the model, to something else, as in a GAN
        if not self.runs_again:
            try:
                with refusing_checkpoints():  # they would be run again for every tensor that is asked for
                    found = find_uses(outputs, self.names, self._mark)
            except CheckpointedError:
                found = Found([], {}, hidden=True, has_parameters=True)
            self.other_uses, self.runs_again = {**self.other_uses, **found.other_uses}, found.hidden and not self.parts
            if not self.runs_again:
                for use in found.uses:  # a hook doesn't hold the node that holds it
                    come_back = partial(self._come_back, use.map, use.leaf, use.sides)
                    self._awaited.append(use.node.register_prehook(come_back))
                # a call that goes on from another has no new parameters; else they may have been sharded since
                if self.parts or found.has_parameters or self._awaited:
                    return
        call = Call(copied(args), copied(kwargs), self._streams)
        for place, tensor in enumerate(returned(output)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._hold, self._mark, call, place))  # type: ignore[no-untyped-call]

    def _hold(self, mark: object, call: Call, place: int, gradient: Tensor) -> None:
        if mark is self._mark:
            call.gradients[place] = gradient.detach().clone()
            self.calls = [*(other for other in self.calls if other is not call), call]

    def _come_back(
        self, map_: LinearMap, leaf: Node, sides: Callable[[Tensor], Sides], gradients: Sequence[Any]
    ) -> None:
        """A gradient has come back, in a pass that adds to the weight's: not in one that only asks for others."""
        if gradients[0] is None:
            return
        try:
            adds = torch._C._will_engine_execute_node(leaf)
        except RuntimeError:  # torch.autograd.grad() by the weight itself
            return
        if adds:
            with torch.no_grad(), no_autocast({map_.weight: gradients[0]}):
                self.add(map_, sides(gradients[0].detach()))

    def add(self, map_: LinearMap, sides: Sides) -> None:
        """Count one use of a map."""
        structure = self.structures[map_.weight]
        if map_ not in self.sums:
            self.sums[map_] = Sums(map_, structure)
        self.sums[map_].add(sides)


def returned(output: Any) -> list[Tensor]:
    """The floating-point tensors that a model returned, in order, however deep in what it returned."""
    found = tensors_in(output, dataclasses=True)
    if not found and hasattr(output, "__dict__"):
        found = tensors_in(vars(output), dataclasses=True)
    return [tensor for tensor in found if tensor.is_floating_point()]


class Called(NamedTuple):
    """How a model was when it was called: what it drew from, and the modes of its modules."""

    streams: Streams
    modes: list[tuple[nn.Module, bool]]


class InputHook(Listener):
    """Holds the arguments of the model's last call; without `inputs`, only how the model was."""

    def __init__(self, schedule: Schedule | None = None, inputs: bool = True) -> None:
        super().__init__(schedule)
        self._inputs = inputs
        self.forget()

    def forget(self) -> None:
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.called: Called | None = None
        """How the model was, in that call."""
        self.slopes: list[tuple[Tensor, Tensor]] = []
        """What it returned in that call, with the gradients that came back to it."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = (copied(args), copied(kwargs)) if self._inputs or self._listens else None
        self.called = Called(Streams(module), [(each, each.training) for each in module.modules()])
        self.slopes = []

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A question that breaks off the graph, or an answer that changes, costs more than copies of the inputs that nobody
        asks for: so every call is held."""
        if self._schedule is not None and self._inputs:
            self._call, self.called, self.slopes = (copied(args), copied(kwargs)), None, []

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for tensor in tensors_in(output) if self._call is not None else ():
            if tensor.grad_fn is not None and tensor.is_floating_point() and tensor.dim() > 1:
                tensor.register_hook(partial(_keep, self.slopes, tensor.detach()))  # type: ignore[no-untyped-call]

    @contextmanager
    def listening(self, listens: bool) -> Iterator[None]:
        """Then hold what was held before."""
        before = self._call, self.called, self.slopes
        try:
            with super().listening(listens):
                yield
        finally:
            self._call, self.called, self.slopes = before

    def inputs(self, module: nn.Module) -> Inputs | None:
        return None if self._call is None else as_inputs(module, *self._call)


def _keep(slopes: list[tuple[Tensor, Tensor]], output: Tensor, slope: Tensor) -> None:
    slopes.append((output, slope.detach()))


def as_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """What the module was called with: a tensor, a tuple, or a dict where there were keywords."""
    if not kwargs:
        return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args
    parameters = inspect.signature(module.forward).parameters.values()
    names = [each.name for each in takewhile(lambda each: each.kind is each.POSITIONAL_OR_KEYWORD, parameters)]
    if len(names) < len(args):
        raise LLQRError(
            "the model was called with keywords and with arguments that have no name: call it with one kind, "
            "positions or keywords (or give LLQR.paper a refit_batch)"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def copied(value: Any) -> Any:
    """Copies, without their graphs: the model, or the loop after it, may write into its inputs."""
    return mapped(value, lambda tensor: tensor.detach().clone())
