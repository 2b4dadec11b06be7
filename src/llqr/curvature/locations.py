"""Where things sit in a model: the parameters to step, the modules that metrics sit on, the numbers on H's diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from llqr.checks import bound, check_parameter, checked_number
from llqr.divergences import L2, ActivationTerm, BasePoint, Term
from llqr.errors import ChainError, LLQRError, unknown

PerLayer = float | Mapping[str, float] | Mapping[int, float] | Mapping[str | int, float]


def per_parameter(value: PerLayer, parameters: Iterable[str], modules: Iterable[str], kind: str) -> dict[str, float]:
    """The number that each parameter gets.

    A key names a parameter or a module that holds it; the longest that fits wins, and what no key names gets 0.
    An integer key counts the `modules`.
    """
    names, known = list(parameters), list(modules)
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, _number(value, kind))
    given: dict[str, float] = {}
    for key, entry in value.items():
        if isinstance(key, int) and not 0 <= key < len(known):
            raise LLQRError(f"{kind} names place {key}, but there are {len(known)} (0 to {len(known) - 1})")
        name = known[key] if isinstance(key, int) else key
        if not any(_holds(name, parameter) for parameter in names) and name not in known:
            raise unknown(f"module or parameter in {kind}", key, [*known, *names])
        if name in given:
            raise LLQRError(f"{kind} names {name!r} twice")
        given[name] = _number(entry, f"{kind} of {key!r}")
    by_length = sorted(given, key=len, reverse=True)
    return {parameter: next((given[name] for name in by_length if _holds(name, parameter)), 0.0) for parameter in names}


def _holds(module: str, parameter: str) -> bool:
    return parameter == module or parameter.startswith(module + ".")


def _number(value: object, kind: str) -> float:
    meaning = "a finite number, zero or more, or a mapping from names to such"
    return checked_number(kind, value, lambda number: 0 <= number < math.inf, meaning)


class Layout:
    """How tuples, lists and dicts of tensors lie in one tensor; one tensor lies as it is.

    Tensors with the same first dimension are put side by side for each of its rows, so that examples stay apart. What has no
    derivatives (masks, indices, None) isn't packed, and is what it was when the layout was made.
    """

    def __init__(self, value: Any) -> None:
        leaves, self._tree = tree_flatten(value)
        self.several = not isinstance(value, Tensor)
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._shapes = [leaf.shape for leaf in self._leaves if _varies(leaf)]
        if not self._shapes and self.several:
            raise ChainError(f"a {type(value).__name__} without tensors of real numbers has no derivatives")
        rows = {shape[:1] for shape in self._shapes}
        self._lead = next(iter(rows)) if len(rows) == 1 else torch.Size()

    def pack(self, value: Any) -> Tensor:
        if not self.several:
            return value  # type: ignore[no-any-return]
        return torch.cat([leaf.reshape(*self._lead, -1) for leaf in tree_flatten(value)[0] if _varies(leaf)], -1)

    def unpack(self, packed: Tensor) -> Any:
        if not self.several:
            return packed
        rows = self._lead.numel()
        parts = iter(torch.split(packed, [shape.numel() // rows for shape in self._shapes], -1))
        leaves = [next(parts).reshape(leaf.shape).to(leaf.dtype) if _varies(leaf) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._tree)


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


Terms = Sequence[tuple[float, Term | L2]]


def trainable(model: nn.Module, only: Collection[str] | None = None) -> dict[str, Tensor]:
    """The parameters that require a gradient (those of them that are named in `only`), by the names that the model gives."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name in only or ():
        if name not in parameters:
            raise unknown("parameter that requires a gradient", name, parameters)
    parameters = {name: p for name, p in parameters.items() if only is None or name in only}
    if not parameters:
        raise ChainError("the model has no parameter that requires a gradient: there is nothing to step")
    for name, parameter in parameters.items():
        check_parameter(name, parameter)
    return {name: p.detach() for name, p in parameters.items()}


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside one that torch.compile has wrapped; any other itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


class Location:
    """What a ψ sits on: what a module returns or, where it is `joint`, what it is called with and its parameters."""

    def __init__(self, module: str, joint: bool) -> None:
        self.module, self.joint = module, joint
        self._unpack: Callable[[Tensor], Any] | None = None

    def catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> Tensor:
        """The tensor that ψ is a function of; to be called before the module is if it is joint, after it if not."""
        if not self.joint:
            if not isinstance(output, Tensor):
                raise LLQRError(f"module {self.module!r} returns a {type(output).__name__}; a metric needs a tensor")
            return output.clone()  # what follows may work in place
        if args and kwargs:
            raise LLQRError(f"module {self.module!r} is called with keywords and without: give it all in one way")
        both = (kwargs or (args[0] if len(args) == 1 else args), dict(module.named_parameters()))
        layout = Layout(both)
        self._unpack = layout.unpack
        return layout.pack(both)

    def base(self, value: Tensor, examples: int) -> BasePoint:
        """The point that a ψ here is expanded around."""
        return BasePoint(value.detach(), bound(None, None), None, examples, self._unpack)


Locations = dict[tuple[str | int, bool], Location]


def locations_of(model: nn.Module, terms: Terms) -> Locations:
    """Where each term inside the network sits, by its key: on a module of that name, or a Sequential's child of that index."""
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    children = _children(model) if isinstance(uncompiled(model), nn.Sequential) else []
    locations: Locations = {}
    for _, term in terms:
        if isinstance(term, ActivationTerm):
            location = term.module
            name = children[location] if isinstance(location, int) and 0 <= location < len(children) else str(location)
            if name not in known:
                raise unknown(f"module in {'Layerwise' if term.joint else 'Intermediate'}", location, known)
            locations[term.module, term.joint] = Location(name, term.joint)
    return locations


def segment_modules(
    model: nn.Module, segments: Collection[str], locations: Collection[str] = ()
) -> dict[str, nn.Module]:
    """The modules that names or patterns mean; one that is inside of another of them is a part of that one."""
    listed = isinstance(segments, Collection) and not isinstance(segments, str)
    if not listed or not all(isinstance(each, str) for each in segments):
        raise LLQRError(f"segments is a list of modules' names or patterns, as in ['layers.*']; not {segments!r}")
    known = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in segments:
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            raise unknown("module in segments", pattern, known)
        found |= {name: known[name] for name in matching if not isinstance(known[name], nn.ModuleList)}
    found = {name: each for name, each in found.items() if not any(name.startswith(f"{other}.") for other in found)}
    for location in locations:
        inside = [name for name in found if location.startswith(f"{name}.")]
        if inside:
            raise LLQRError(f"the metric at {location!r} is inside of segment {inside[0]!r}: name other segments")
    return found


def diagonal(model: nn.Module, parameters: Mapping[str, Tensor], terms: Terms, damping: PerLayer) -> dict[str, float]:
    """What damping and L2 terms put on H's diagonal, for each parameter."""
    modules = _children(model)  # what an integer key counts
    modules += [name for name, _ in model.named_modules(remove_duplicate=False) if name and name not in modules]
    weights = per_parameter(damping, parameters, modules, "damping")
    for weight, term in terms:
        if isinstance(term, L2):
            for name, extra in per_parameter(term.weight, parameters, modules, "L2 weights").items():
                weights[name] += weight * extra
    return weights


def _children(model: nn.Module) -> list[str]:
    """The names of the model's children; those of the model inside, for one that torch.compile has wrapped."""
    if list(model._modules) == ["_orig_mod"]:
        return [f"_orig_mod.{name}" for name, _ in model.get_submodule("_orig_mod").named_children()]
    return list(model._modules)


@contextmanager
def catching(model: nn.Module, locations: Sequence[Location]) -> Iterator[dict[Location, Tensor]]:
    """While in force, what the network has at these locations is put into the mapping."""
    caught: dict[Location, Tensor] = {}

    def catch(location: Location, *seen: Any) -> None:
        if location in caught:
            raise LLQRError(f"module {location.module!r} is called more than once in a pass; a metric needs one place")
        caught[location] = location.catch(*seen)

    with ExitStack() as hooks:
        for location in locations:
            module = model.get_submodule(location.module)
            register = module.register_forward_pre_hook if location.joint else module.register_forward_hook
            hooks.callback(register(partial(catch, location), with_kwargs=True).remove)
        yield caught
    missing = [location.module for location in locations if location not in caught]
    if missing:
        raise LLQRError(f"module {missing[0]!r} isn't called in a forward pass: a metric can't sit on it")
