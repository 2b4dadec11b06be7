"""Where things sit in a model: the parameters to step, the modules that metrics sit on, the numbers on H's diagonal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from llqr.checks import check_parameter
from llqr.divergences import L2, ActivationTerm, Term
from llqr.errors import ChainError, LLQRError, unknown
from llqr.naming import PerLayer, per_parameter

Terms = Sequence[tuple[float, Term]]


def trainable(model: nn.Module, only: Collection[str] | None = None) -> dict[str, Tensor]:
    """The parameters that require a gradient (those of them that are named in `only`), by the names that the model gives."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if only is not None:
        for name in only:
            if name not in parameters:
                raise unknown("parameter that requires a gradient", name, parameters)
        parameters = {name: p for name, p in parameters.items() if name in only}
    if not parameters:
        raise ChainError("the model has no parameter that requires a gradient: there is nothing to step")
    for name, parameter in parameters.items():
        check_parameter(name, parameter)
    return {name: p.detach() for name, p in parameters.items()}


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside one that torch.compile has wrapped; any other itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def metric_modules(model: nn.Module, terms: Terms) -> dict[str | int, str]:
    """The name of the module that each place of the divergence means: its own, or a Sequential's child of that index."""
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    children = _children(model) if isinstance(uncompiled(model), nn.Sequential) else []
    places: dict[str | int, str] = {}
    for _, term in terms:
        if isinstance(term, ActivationTerm):
            place = term.place
            name = children[place] if isinstance(place, int) and 0 <= place < len(children) else str(place)
            if name not in known:
                raise unknown("module in Intermediate", place, known)
            places[place] = name
    return places


def segment_modules(model: nn.Module, segments: Collection[str], places: Collection[str] = ()) -> dict[str, nn.Module]:
    """The modules that names or patterns mean; one that is inside of another of them is a part of that one."""
    if isinstance(segments, str) or not isinstance(segments, Collection):
        raise LLQRError(
            f"segments is a list of modules' names or patterns, as in segments=['layers.*']; not {segments!r}"
        )
    known = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in segments:
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            raise unknown("module in segments", pattern, known)
        found |= {name: known[name] for name in matching if not isinstance(known[name], nn.ModuleList)}
    found = {name: each for name, each in found.items() if not any(name.startswith(f"{other}.") for other in found)}
    for place in places:
        inside = [name for name in found if place.startswith(f"{name}.")]
        if inside:
            raise LLQRError(
                f"the metric at {place!r} is inside of segment {inside[0]!r}: name other modules in segments"
            )
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
def catching(model: nn.Module, places: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """While in force, what the modules of these names return is put into the mapping."""
    caught: dict[str, Tensor] = {}

    def catcher(place: str) -> Callable[..., None]:
        def catch(module: nn.Module, args: Any, output: Tensor) -> None:
            if place in caught:
                raise LLQRError(f"module {place!r} is called more than once in a pass; a metric needs one place")
            if not isinstance(output, Tensor):
                raise LLQRError(f"module {place!r} returns a {type(output).__name__}; a metric needs a tensor")
            caught[place] = output.clone()  # what follows may work in place

        return catch

    hooks = [model.get_submodule(place).register_forward_hook(catcher(place)) for place in places]
    try:
        yield caught
    finally:
        for hook in hooks:
            hook.remove()
    missing = [place for place in places if place not in caught]
    if missing:
        raise LLQRError(f"module {missing[0]!r} isn't called in a forward pass: a metric can't sit on it")
