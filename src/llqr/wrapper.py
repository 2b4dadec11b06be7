"""What both optimizers around another one share: its groups, state and parameters, and which steps begin with a refit."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.checks import check_kind
from llqr.errors import LLQRError, LLQRWarning, callers_level

HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


class Wrapping(Optimizer):
    """An optimizer whose `param_groups`, `state` and `defaults` are those of the `base` inside."""

    base: Optimizer
    stats: Any

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self._begin()

    def _begin(self) -> None:
        """What isn't saved: torch's own hooks, and what was warned of."""
        for hooks in HOOKS:
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())
        self._patch_step_function()
        self._warned: set[str] = set()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return self.base.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def _pickled(self, made_again: frozenset[str], several: bool) -> dict[str, Any]:
        """What a copy or a pickle holds: not what `_begin` makes again, nor a step that a scheduler has wrapped."""
        if several:
            raise LLQRError(
                "an optimizer of several ranks holds their process group, which can't be copied or pickled: use state_dict()"
            )
        left_out = made_again | {"_unhook", "_warned", "_stepped", "_group", "step"}
        return {n: v for n, v in self.__dict__.items() if n not in left_out and not n.startswith("_optimizer_")}

    def _memory(self, own: int) -> dict[str, int]:
        """Bytes, with those of the base's state."""
        held = [value for entry in self.state.values() for value in entry.values() if isinstance(value, Tensor)]
        base = sum(tensor.numel() * tensor.element_size() for tensor in held)
        return {"preconditioner": own, "base": base, "total": own + base}

    def _warn(self, kind: str, message: str) -> None:
        """Once; what comes after is only counted, if it is."""
        if kind not in self._warned:
            self._warned.add(kind)
            counted = f"counted in optimizer.stats.{kind}; " if hasattr(self.stats, kind) else ""
            warnings.warn(f"{message} ({counted}said once)", LLQRWarning, stacklevel=callers_level())


def stepped_parameters(base: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The base's parameters by name, in the model's order; each has to be one of the model's."""
    stepped = {id(p): (number, p) for number, group in enumerate(base.param_groups) for p in group["params"]}
    named = _named(model, stepped)
    if len(named) < len(stepped) and _resharded(model):
        named = _named(model, stepped)
    strangers = stepped.keys() - {id(p) for p in named.values()}
    if strangers:
        number, parameter = stepped[min(strangers, key=list(stepped).index)]
        raise LLQRError(
            f"{len(strangers)} of the optimizer's {len(stepped)} parameters aren't in the model, the first of shape "
            f"{tuple(parameter.shape)} in group {number}: make the optimizer from model.parameters() of the same model (after "
            "the model was moved, wrapped or given new layers)"
        )
    return named


def _named(model: nn.Module, only: Container[int]) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if id(p) in only}


def _resharded(model: nn.Module) -> bool:
    """FSDP2 may have left whole parameters in the model, and the optimizer has the sharded ones."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from llqr.distributed import fsdp  # with torch's DTensor, which takes a second to import

    return fsdp.reshard(model)


def check_parameters(parameters: Mapping[str, Tensor]) -> None:
    """Raise for parameters that can't have a U: complex ones, integers, those without a shape yet."""
    for name, parameter in parameters.items():
        check_kind(name, parameter)  # values that aren't finite are the base's to step; a refit will say so


class Stepped:
    """`stepped_parameters`, looked up again only where the optimizer or the model holds other objects than the last time."""

    def __init__(self, base: Optimizer, model: nn.Module) -> None:
        self._base, self._model = base, model
        self._found: dict[str, Tensor] = {}
        self._groups: list[list[Tensor]] = []
        self._slots: list[tuple[Mapping[str, object], list[str], list[object]]] = []

    def __call__(self) -> dict[str, Tensor]:
        if not self._same():
            self._found = stepped_parameters(self._base, self._model)
            self._groups = [list(group["params"]) for group in self._base.param_groups]
            held: list[Mapping[str, object]] = []
            for module in self._model.modules():
                held += [module._modules, module._parameters]
            self._slots = [(mapping, list(mapping), list(mapping.values())) for mapping in held]
        return self._found

    def _same(self) -> bool:
        now = [group["params"] for group in self._base.param_groups]
        if len(now) != len(self._groups) or not all(map(_same_objects, now, self._groups)):
            return False
        return bool(self._slots) and all(
            list(mapping) == names and all(map(is_, mapping.values(), values)) for mapping, names, values in self._slots
        )


def _same_objects(now: Sequence[object], before: Sequence[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def gradients_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that are there, dense ones."""
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for name, gradient in found.items():
        if gradient.layout is not torch.strided:
            raise LLQRError(
                f"the gradient of {name!r} is sparse, and U acts on dense ones: make the layer with sparse=False, or step it "
                "by an optimizer of its own"
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
                f"every is a positive number of steps between refits, or a function of the step's number that tells whether "
                f"to refit; not {every!r}"
            )
        self.every = every
        self.go_to(0)

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


def check_base(base: Optimizer, model: nn.Module, name: str = "LLQR") -> None:
    """`name` is what the user wrote."""
    if not isinstance(base, Optimizer):
        raise LLQRError(
            f"{name} wraps an optimizer, as in {name}(torch.optim.SGD(model.parameters(), lr=0.1), model); got "
            f"{type(base).__name__}"
        )
    if isinstance(getattr(base, "optimizer", None), Optimizer):
        raise LLQRError(
            f"the base is a {type(base).__name__}, a framework's wrapper around an optimizer: give {name} the optimizer "
            f"inside, and what it returns to the framework, as in accelerator.prepare({name}(optimizer, model))"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise LLQRError(
            "LBFGS evaluates its closure several times a step, and U can't come between: wrap another optimizer"
        )
    if not isinstance(model, nn.Module):
        raise LLQRError(f"the second argument is the model, an nn.Module; got {type(model).__name__}")
