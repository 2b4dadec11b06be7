"""How a model is run as a function of its parameters, so that all of its graph can be read, and left as it was."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from llqr.checks import Inputs, call, replaced, tensors_in
from llqr.curvature.locations import Location, catching
from llqr.curvature.precision import LOWEST, AutocastOff, at_least_single, is_low, raised
from llqr.curvature.replacements import constants
from llqr.errors import LLQRError, LLQRWarning, callers_level

Stream = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How its state is read and set."""


class Streams:
    """The streams of a model, to be drawn from again and again as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._streams = list(_streams(model))
        self._begun = self._states()

    @contextmanager
    def again(self) -> Iterator[None]:
        """What is drawn in there is the same each time, and afterwards the streams are where they were."""
        before = self._states()
        self._set(self._begun)
        try:
            yield
        finally:
            self._set(before)

    def drawn(self) -> bool:
        """Whether something was drawn since `again` began."""
        return not _same(self._states(), self._begun)

    def _states(self) -> list[Any]:
        return [read() for read, _ in self._streams]

    def _set(self, states: list[Any]) -> None:
        for (_, write), state in zip(self._streams, states, strict=True):
            write(state)


def _streams(model: nn.Module) -> Iterator[Stream]:
    yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    for device in accelerators(model):
        of, where = torch.get_device_module(device), {} if device.type == "mps" else {"device": device}
        yield partial(of.get_rng_state, **where), partial(of.set_rng_state, **where)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.random.get_state, numpy.random.set_state
    values = (value for module in model.modules() for name, value in vars(module).items() if name not in TORCHS_OWN)
    held = {id(one): one for value in values for one in _within(value)}
    for value in held.values():
        if isinstance(value, torch.Generator):
            yield value.get_state, value.set_state
        elif isinstance(value, random.Random):
            yield value.getstate, value.setstate
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            yield value.get_state, value.set_state
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            yield partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state")


TORCHS_OWN = frozenset(vars(nn.Module()))
"""What every module has: none of it is a stream."""
SHORT = 100
"""Longer lists are data."""


def _within(value: Any) -> Collection[Any]:
    """An attribute, or what is in it where it is a short list, a tuple or a dictionary."""
    if not isinstance(value, (dict, list, tuple)) or len(value) > SHORT:
        return (value,)
    return value.values() if isinstance(value, dict) else value


def accelerators(model: nn.Module) -> set[torch.device]:
    """The devices, other than processors, that a model is on."""
    tensors = [*model.parameters(), *model.buffers()]
    return {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return _same(list(left.values()), list(right.values()))
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_same, left, right))
    equal = left == right
    return equal if isinstance(equal, bool) else bool(equal.all())  # an array's


class _Plainly:
    """What a reentrant checkpoint calls, without one: its own backward pass works with loss.backward() alone."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def without_checkpoints() -> AbstractContextManager[None]:
    """Checkpointed blocks keep what they save. To run them again in the backward pass they would need all that the model was
    run with: its parameters, buffers, modes and precision, and the rules that recorded it."""
    return replaced(checkpoint, CheckpointFunction=_Plainly, _checkpoint_hook=lambda frame: nullcontext())


class CheckpointedError(Exception):
    """A tensor was asked for that a checkpointed block would have to be run again for."""


def refusing_checkpoints() -> AbstractContextManager[None]:
    """No block is run again in there."""

    def refuse(frame: Any, graph: Any) -> None:
        raise CheckpointedError

    return replaced(checkpoint, _recomputation_hook=refuse)


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Recurrent layers step by step: back ends run them as one node, and cuDNN's has no derivative in eval mode."""
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield
        return
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


@contextmanager
def in_modes(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Modules in given modes for a while."""
    before = [(module, module.training) for module, _ in modes]
    try:
        for module, training in modes:
            module.training = training
        yield
    finally:
        for module, training in before:
            module.training = training


def _eager() -> AbstractContextManager[Any]:
    """Compiled models run uncompiled: their graphs can't be differentiated twice, and don't know our rules."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


Parameters = dict[str, Tensor]
Selector = Callable[[Any], Tensor]

EVALUATED = "evaluate the modules (training=False; LLQR.paper does that where it knows the loss: give step() a closure)"
"""What to do about a network that can't be cut in parts while it trains."""


class Recorder:
    """How to run a model as a function of its parameters, leaving everything that it holds as it was.

    What the network has at `locations` is returned beside its output. `training` overrides the modules' modes for the time of a
    run (None: as they are now). Modes and buffers are those of now in every run, and so are random streams, unless others are
    given. `whole=False` refuses random models, which would draw otherwise for a part of the batch. `call` is run in place of
    the model itself. `segments` are modules of which a recording keeps the inputs alone; they run again for every product.
    `choose` says which tensors of what the model returns are recorded, in place of the output that `select` picks.

    Checkpointed blocks and fused recurrent layers are run plainly.

    A model that has half-precision numbers or enters autocast runs in float32 all the same, unless it can't, or its frozen
    parameters are of half precision (twice the memory of a large model that only adapters are trained of). Then it runs in its
    own precision, with the parameters converted in the graph, so that derivatives by them are float32 still.
    """

    def __init__(
        self,
        model: nn.Module,
        locations: Sequence[Location] = (),
        select: Selector | None = None,
        training: bool | None = None,
        whole: bool = True,
        call: Callable[[], Tensor] | None = None,
        streams: Streams | None = None,
        segments: Mapping[str, nn.Module] | None = None,
        choose: Callable[[Any], list[Tensor]] | None = None,
    ) -> None:
        self._call, self.segments, self._choose = call, segments or {}, choose
        self.model, self.locations, self.select, self._whole = model, list(locations), select, whole
        self._modes = [(module, module.training if training is None else training) for module in model.modules()]
        self._constants = constants(model)
        named = dict(model.named_parameters())
        self._own = {name: p.dtype for name, p in named.items()}
        self._autocast = AutocastOff(next((p.device.type for p in named.values()), "cpu"))
        self._full = not any(is_low(p) and not p.requires_grad for p in named.values())
        self._low = any(map(is_low, [*named.values(), *self._constants.values()]))
        self._settled = False
        self._streams = streams or Streams(model)  # every run of one recorder draws the same dropout masks

    def rounding(self, value: Tensor) -> float:
        """Of the coarsest numbers on the way to a value that was returned."""
        dtypes = {value.dtype, *(at_least_single(dtype) for dtype in self._own.values())}
        if not self._full:
            dtypes.add(LOWEST)
        tf32 = 2.0**-10 if value.device.type == "cuda" else 0.0
        return max(tf32, *(torch.finfo(dtype).eps for dtype in dtypes))

    def run(self, parameters: Parameters, inputs: Inputs) -> list[Tensor]:
        """[x_N, activations at the locations …], in float32 at least."""
        try:
            if not self._full:
                own = {name: tensor.to(self._own[name]) for name, tensor in parameters.items()}
                return self._run(own, inputs, self._constants)
            self._low |= any(map(is_low, tensors_in(inputs)))
            with self._autocast:
                others = [(n, p) for n, p in self.model.named_parameters() if n not in parameters and is_low(p)]
                held = {name: p.detach() for name, p in others}
                return self._run(parameters, raised(inputs), raised({**held, **self._constants}))
        except RuntimeError as error:
            if not (self.lower(error) if self._full else self._settle(error)):
                raise
        return self.run(parameters, inputs)

    def lower(self, why: Exception) -> bool:
        """Go over to the model's own precision, if that is another one."""
        return self._full and (self._low or self._autocast.met) and self._settle(why)

    def _settle(self, why: Exception) -> bool:
        """Go over to the other precision, once, and say so."""
        if self._settled:
            return False
        what = "the model doesn't run in its own precision without autocast, and frozen layers are copied to float32"
        if self._full:
            what = "the model can't be linearised in float32, and U is fitted to it in its own precision"
        self._full, self._settled = not self._full, True
        warnings.warn(f"{what}: {why}", LLQRWarning, stacklevel=callers_level())
        return True

    def _run(self, parameters: Parameters, inputs: Inputs, constants: Parameters) -> list[Tensor]:
        tensors = {**constants, **parameters}
        written = {name: tensors[name].clone() for name in self._constants}
        with catching(self.model, self.locations) as caught, self._around(self._streams):
            output = call(self.model, {**tensors, **written}, inputs, self._call)
            if not self._whole and self._streams.drawn():
                raise LLQRError(
                    "the model draws random numbers (dropout?), other ones in chunks than in the whole batch: give the batch "
                    f"whole, or {EVALUATED}"
                )
        chosen = [self.selected(output)] if self._choose is None else self._choose(output)
        return [*map(raised, chosen), *(raised(caught[location]) for location in self.locations)]

    def rerun(self) -> Callable[[], AbstractContextManager[Any]]:
        """How to run a part of the model later as it runs now."""
        full, streams = self._full, Streams(self.model)
        return lambda: self._around(streams, self._autocast if full else nullcontext())

    def _around(self, streams: Streams, *more: AbstractContextManager[Any]) -> ExitStack:
        with ExitStack() as stack:
            plain = (unfused(self.model), without_checkpoints())
            for context in (in_modes(self._modes), streams.again(), _eager(), *plain, *more):
                stack.enter_context(context)
            return stack.pop_all()

    def selected(self, output: Any) -> Tensor:
        if self.select is not None:
            output = self.select(output)
        elif not isinstance(output, Tensor):
            output = output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
        if not isinstance(output, Tensor):
            raise LLQRError(
                f"the model returned a {type(output).__name__}: say which tensor in it is meant, as in "
                "output=lambda out: out[0] or out['logits']"
            )
        if not output.is_floating_point():
            raise LLQRError(f"the output is {output.dtype}, which has no derivatives")
        return output
