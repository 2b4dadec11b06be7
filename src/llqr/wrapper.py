"""What both optimizers around another one share: its groups, state and parameters; which steps begin with a refit, and the
processes that take part; what is saved; what their refits came to."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.checks import check_count, check_kind, refuse_scripted
from llqr.curvature.locations import uncompiled
from llqr.distributed.processes import processes_of, sharding, standing, unwrapped
from llqr.errors import LLQRError, LLQRWarning, callers_level
from llqr.reporting import Stats

HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")

KEY = "llqr"
"""Where `state_dict` keeps what isn't the base's."""


def _of_base(name: str) -> Any:
    """An attribute that is the base's own."""
    return property(lambda self: getattr(self.base, name), lambda self, value: setattr(self.base, name, value))


class Wrapping(Optimizer):
    """An optimizer whose `param_groups`, `state` and `defaults` are those of the `base` inside.

    One that is derived from it says what it keeps, how it listens to the model, and how it goes on from a state.
    """

    kind: ClassVar[str]
    """What the user has written."""
    saved: ClassVar[dict[str, Any]]
    """What it adds to the state beside its step and its counts, as before the first step."""
    made_again: ClassVar[frozenset[str]]
    """Attributes that a copy or a pickle leaves out."""

    def __init__(self, base: Optimizer, model: nn.Module, every: Every, process_group: Any) -> None:
        check_base(base, model, self.kind)
        self.base = base
        plain = uncompiled(model)
        inside = unwrapped(plain)
        self._wrapped, self._group = plain, process_group
        self.model, self._called = uncompiled(inside), model if inside is plain else inside
        refuse_scripted(self.model)
        self._schedule = Schedule(every)
        self.stats = Stats()

    def _begin(self) -> None:
        """What isn't saved: torch's own hooks, ours, the processes, and what was warned of."""
        for hooks in HOOKS:
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())
        self._patch_step_function()
        self._warned: set[str] = set()
        self.processes = processes_of(self._wrapped, self._group)
        """Those that train this model together."""
        self._standing = standing(self.model.parameters())
        self._stepped = Stepped(self.base, self.model)

    def _listen(self, attach: Callable[[nn.Module], Callable[[], None]], forget: Callable[[], None]) -> None:
        """By hooks on the model; `forget` drops what they have heard since the last step."""
        self._unhook, self._forget = weakref.finalize(self, attach(self._called)), forget

    # --- what is derived from it has ---

    def _check(self, parameters: dict[str, Tensor]) -> None:
        """Raise now for what the first refit would raise for."""
        for name, parameter in parameters.items():
            check_kind(name, parameter)  # values that aren't finite are the base's to step; a refit will say so

    def _memory(self) -> int:
        """Bytes of U, and of the curvature that it is found from."""
        raise NotImplementedError

    def _learned(self, gathered: bool) -> dict[str, Any]:
        """What `saved` names; without `gathered`, as far as it is here."""
        raise NotImplementedError

    def _checked(self, own: Mapping[str, Any], parameters: dict[str, Tensor]) -> Callable[[], None]:
        """What takes over such a state, once all of it is known to be right."""
        raise NotImplementedError

    # --- the base's ---

    param_groups, state, defaults = _of_base("param_groups"), _of_base("state"), _of_base("defaults")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the base. The new parameters are stepped by the base alone until the next refit."""
        self.base.add_param_group(param_group)
        try:
            self._check(stepped_parameters(self.base, self.model))
        except LLQRError:
            self.base.param_groups.pop()
            raise
        self._meet()

    def close(self) -> None:
        """Take the hook off the model. U stays as it is; only `refit` of LLQR.paper still changes it."""
        self._unhook()
        self._forget()

    def _meet(self, loads: bool = False) -> dict[str, Tensor]:
        """The parameters that are stepped. Processes may have met, and parameters been sharded, since this was made: as where
        a framework prepares the model.

        `loads`: another U is about to take the place of the one that is there.
        """
        parameters = self._stepped()
        now = standing(parameters.values())
        if now != self._standing:
            processes = processes_of(self._wrapped, self._group)
            if processes.several and self.stats.memory and not loads:
                raise LLQRError(
                    "torch.distributed was initialised, or the model sharded, after U was made or loaded, so ranks may have a "
                    "U each: call init_process_group() and fully_shard first, and load_state_dict() after them"
                )
            self.processes, self._standing = processes, now
        return parameters

    # --- counts and warnings ---

    def _warn(self, kind: str, message: str) -> None:
        """Once; what comes after is only counted, if it is."""
        if kind not in self._warned:
            self._warned.add(kind)
            counted = f"counted in optimizer.stats.{kind}; " if hasattr(self.stats, kind) else ""
            warnings.warn(f"{message} ({counted}said once)", LLQRWarning, stacklevel=callers_level())

    def _reject(self, why: str) -> bool:
        self.stats.rejected += 1
        self._warn("rejected", f"a refit was rejected, and U stays as it was: {why}")
        return False

    def _left_to_base(self, names: Sequence[str], why: str) -> None:
        """Count and tell what the base steps as it would have alone; in `why` the first of them stands for {}."""
        if names:
            self.stats.nonfinite += len(set(names))
            self._warn("nonfinite", why.format(repr(names[0])))

    def memory_usage(self) -> dict[str, int]:
        """Bytes of what is kept for U, of the base's state, and of both; not of what a step works with."""
        held = [value for entry in self.state.values() for value in entry.values() if isinstance(value, Tensor)]
        own, base = self._memory(), sum(tensor.numel() * tensor.element_size() for tensor in held)
        return {"preconditioner": own, "base": base, "total": own + base}

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """The base's, with what LLQR adds under "llqr": tensors and builtins alone. Where `fully_shard` has sharded the model,
        all ranks have to call it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state: dict[str, Any] = {**self.base.state_dict(), KEY: self._own_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def _own_state(self, gathered: bool = True) -> dict[str, Any]:
        return {"step": self._schedule.step, "stats": asdict(self.stats), **self._learned(gathered)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the other left off; devices and dtypes are those of the parameters here.

        A state of the base alone is taken too, and U begins anew. A state that doesn't fit changes nothing.
        """
        state_dict = checked_state_dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        own = state_dict.pop(KEY, None)
        resume = self._resuming(own, self._meet(loads=True))
        self.base.load_state_dict(state_dict)
        resume()
        if own is None:
            warnings.warn("the state is of a plain optimizer: U begins anew", LLQRWarning, stacklevel=callers_level())
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _resuming(self, own: Any, parameters: dict[str, Tensor]) -> Callable[[], None]:
        """What goes on from what LLQR has added to a state, with a base and a model that do; an error where it doesn't fit."""
        own = {"step": 0, "stats": {}, **self.saved} if own is None else own
        if not isinstance(own, Mapping) or not {"step", "stats", *self.saved} <= own.keys():
            kinds = [
                kind
                for kind in Wrapping.__subclasses__()
                if isinstance(own, Mapping) and kind.saved.keys() <= own.keys()
            ]
            what = f"of {kinds[0].kind}" if kinds else f"not of {self.kind}.state_dict()"
            raise LLQRError(f"what the state has under {KEY!r} is {what}: load it into an optimizer of the same kind")
        check_count(f"'step' in the state, under {KEY!r},", own["step"])
        stats, take_over = Stats.of(own["stats"]), self._checked(own, parameters)

        def resume() -> None:
            take_over()
            self.stats, stats.memory = stats, self._memory()
            self._schedule.go_to(own["step"])
            self._forget()

        return resume

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: not what `_begin` makes again, nor a step that a scheduler has wrapped."""
        if self.processes.several:
            raise LLQRError("the process group of several ranks can't be copied or pickled: use state_dict()")
        again = self.made_again | {"processes", "_unhook", "_forget", "_warned", "_stepped", "_group", "step"}
        return {n: v for n, v in self.__dict__.items() if n not in again and not n.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_group": None})
        self._begin()

    def _shown(self, *own: str) -> str:
        """For `repr`."""
        base = repr(self.base).replace("\n", "\n  ")
        lines = [*own, f"at step {self._schedule.step}: {self.stats.in_words()}", f"base={base}"]
        return f"{self.kind}(\n  " + "\n  ".join(lines) + "\n)"


def checked_state_dict(state: Any) -> dict[str, Any]:
    """A copy of what looks like the state of an optimizer."""
    if isinstance(state, Mapping) and isinstance(state.get("state"), Mapping):
        groups = state.get("param_groups")
        if isinstance(groups, (list, tuple)) and all(
            isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
        ):
            return dict(state)
    raise LLQRError(
        "this isn't the state_dict() of an optimizer, which has 'state' and 'param_groups', a mapping and a list of mappings "
        "with 'params'; was it that of the model, or a whole checkpoint?"
    )


# --- the parameters that are stepped ---


def stepped_parameters(base: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The base's parameters by name, in the model's order; each has to be one of the model's."""
    stepped = {id(p): (number, p) for number, group in enumerate(base.param_groups) for p in group["params"]}
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if id(p) in stepped}
    shards = sharding() if len(found) < len(stepped) else None
    if shards is not None and shards.reshard(model):  # FSDP2 had left whole parameters in the model
        found = {name: p for name, p in model.named_parameters() if id(p) in stepped}
    strangers = stepped.keys() - {id(p) for p in found.values()}
    if strangers:
        number, parameter = stepped[min(strangers, key=list(stepped).index)]
        raise LLQRError(
            f"{len(strangers)} of the optimizer's {len(stepped)} parameters aren't in the model, the first of shape "
            f"{tuple(parameter.shape)} in group {number}: make the optimizer from model.parameters() of the same model (after "
            "the model was moved, wrapped or given new layers)"
        )
    return found


class Stepped:
    """`stepped_parameters`, looked up again only where the optimizer or the model holds other objects than the last time."""

    def __init__(self, base: Optimizer, model: nn.Module) -> None:
        self._base, self._model = base, model
        self._found: dict[str, Tensor] = {}
        self._given: list[Tensor] = []
        self._slots: list[tuple[Mapping[str, object], dict[str, object]]] = []

    def __call__(self) -> dict[str, Tensor]:
        given = [parameter for group in self._base.param_groups for parameter in group["params"]]
        same = _same(given, self._given) and all(
            slot.keys() == held.keys() and _same(slot.values(), held.values()) for slot, held in self._slots
        )
        if not same or not self._slots:
            self._found = stepped_parameters(self._base, self._model)
            self._given = given
            modules = self._model.modules()
            self._slots = [(slot, dict(slot)) for m in modules for slot in (m._modules, m._parameters)]
        return self._found


def _same(now: Collection[object], before: Collection[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def gradients_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that are there, dense ones."""
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for name, gradient in found.items():
        if gradient.layout is not torch.strided:
            raise LLQRError(
                f"the gradient of {name!r} is sparse: make the layer with sparse=False, or step it by an optimizer of its own"
            )
    return found


@contextmanager
def replaced(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Other gradients for a while; None for none. In the parameters' memory layout, which fused kernels take for granted."""
    kept = [(parameters[name], parameters[name].grad) for name in gradients]
    for name, gradient in gradients.items():
        parameter = parameters[name]
        if gradient is not None and gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
        parameter.grad = gradient
    try:
        yield
    finally:
        for parameter, before in kept:
            parameter.grad = before


def not_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """The names of those that hold a NaN or an infinity; of shards, in the part that is here."""
    here = {name: getattr(gradient, "to_local", lambda g=gradient: g)() for name, gradient in gradients.items()}
    return [name for name, gradient in here.items() if not bool(gradient.isfinite().all())]


# --- which steps begin with a refit ---

Every = int | Callable[[int], bool]


class Schedule:
    """Counts steps from 0; step k begins with a refit where k mod `every` = 0, or where `every(k)` is true.

    A callable is asked once a step, when its answer is first needed: by the forward pass or by the step itself. What it raises
    is raised by the step, where all ranks learn of it.
    """

    def __init__(self, every: Every) -> None:
        if isinstance(every, bool) or not (callable(every) or (isinstance(every, int) and every >= 1)):
            raise LLQRError(
                f"every is a positive number of steps, or a function from a step's number to bool; not {every!r}"
            )
        self.every = every
        self.go_to(0)

    @property
    def is_fixed(self) -> bool:
        """Every process has the same answers."""
        return isinstance(self.every, int) or self.every is often_at_first

    def go_to(self, step: int) -> None:
        self.step = step
        self._answer: bool | None = None

    def may_be_due(self) -> bool:
        """For the forward pass: whether the coming step refits, or will have to say why that can't be told."""
        try:
            return self.due()
        except Exception:
            return True

    def due(self) -> bool:
        if isinstance(self.every, int):
            return self.step % self.every == 0
        if self._answer is None:
            self._answer = bool(self.every(self.step))
        return self._answer


LONGEST = 40
"""Steps between refits at the most, with the default schedule."""


def often_at_first(step: int) -> bool:
    """Whether the default schedule refits before a step: the first eleven, and then after a tenth of the steps so far."""
    regular = 11 * LONGEST  # from before here on the gaps are all the longest
    if step > regular:
        step = regular - (regular - step) % LONGEST
    at = 0
    while at < step:
        at += min(1 + at // 10, LONGEST)
    return at == step


def check_base(base: Optimizer, model: nn.Module, name: str) -> None:
    """`name` is what the user wrote."""
    if not isinstance(base, Optimizer):
        usual = f"{name}(torch.optim.SGD(model.parameters(), lr=0.1), model)"
        raise LLQRError(f"{name} wraps an optimizer, as in {usual}; got {type(base).__name__}")
    if isinstance(base, Wrapping):
        raise LLQRError("the base is an LLQR already: wrap the optimizer inside it")
    if isinstance(getattr(base, "optimizer", None), Optimizer):
        raise LLQRError(
            f"the base is a {type(base).__name__}, a framework's wrapper around an optimizer: give {name} the optimizer "
            f"inside, and what it returns to the framework, as in accelerator.prepare({name}(optimizer, model))"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise LLQRError("LBFGS evaluates its closure several times a step: wrap another optimizer")
    if not isinstance(model, nn.Module):
        raise LLQRError(f"the second argument is the model, an nn.Module; got {type(model).__name__}")
