"""What LLQR adds to the state of its base, looked at before anything is loaded, and what its refits came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from llqr.checks import check_amount, check_count, check_tensors
from llqr.curvature.precision import at_least_single
from llqr.errors import LLQRError, unknown
from llqr.preconditioner import Preconditioner
from llqr.statistics import Block, LinearMap
from llqr.structures.base import Structure


@dataclass
class Stats:
    """Counts since the first step; they are saved and loaded with the optimizer."""

    refits: int = 0
    """Refits whose U was taken."""
    rejected: int = 0
    """Refits whose U wasn't, because something wasn't finite. The U from before stayed."""
    nonfinite: int = 0
    """Blocks, or parameters where there is no U yet, whose step the base took as it would have alone, because something wasn't
    finite; summed over the steps."""
    objective_before: float | None = None
    """J of the last fit at its start, and"""
    objective_after: float | None = None
    """at its end."""
    seconds: float = 0.0
    """Time spent in refits."""
    memory: int = 0
    """Bytes of U."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Stats:
        """From a state, which may be of another version; an error where it has something else than numbers."""
        found = {f.name: saved[f.name] for f in fields(cls) if f.name in saved}
        for name, value in found.items():
            what = f"{name!r} in the state's 'stats'"
            if name.startswith("objective"):  # of a fit that failed it may be anything
                if value is not None and not isinstance(value, float):
                    raise LLQRError(f"{what} isn't a number or None")
            elif name == "seconds":
                check_amount(what, value)
            else:
                check_count(what, value)
        return cls(**found)

    def in_words(self) -> str:
        left = f", {self.nonfinite} steps of blocks left to the base" if self.nonfinite else ""
        refits = f"{self.refits} refits ({self.seconds:.1f} s), {self.rejected} rejected"
        return f"{refits}{left}, {self.memory / 2**20:.1f} MiB of curvature and U"

    def as_logs(self, prefix: str = "llqr/") -> dict[str, float]:
        """What a logger takes: numbers by name, without those that there aren't yet."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items() if value is not None}


KEY = "llqr"
"""Where `state_dict` keeps what isn't the base's."""


@dataclass
class State:
    """The number of the coming step, the state of U (None is the identity), and the counts."""

    step: int
    preconditioner: Mapping[str, Any] | None
    stats: Stats

    @classmethod
    def of(cls, step: int, u: Preconditioner | None, stats: Stats) -> State:
        return cls(step, None if u is None else u.state_dict(), stats)

    def as_dict(self) -> dict[str, Any]:
        """Tensors and builtins alone."""
        return {"step": self.step, "preconditioner": self.preconditioner, "stats": asdict(self.stats)}

    @classmethod
    def from_dict(cls, own: Any) -> State:
        parts: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
        step: Any = parts.get("step")
        u, stats = parts.get("preconditioner"), parts.get("stats")
        whole = u is None or (isinstance(u, Mapping) and isinstance(u.get("blocks"), Mapping))
        if not {"step", "preconditioner"} <= parts.keys() or not isinstance(stats, Mapping) or not whole:
            raise LLQRError(
                f"what the state has under {KEY!r} isn't what LLQR.state_dict() puts there: a 'step', a 'preconditioner' and "
                "'stats'"
            )
        check_count(f"'step' in the state, under {KEY!r},", step)
        return cls(step, u, Stats.of(stats))


def checked_state_dict(state: Any) -> dict[str, Any]:
    """A copy of what looks like the state of an optimizer."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise LLQRError(
            "this isn't the state_dict() of an optimizer, which has 'state' and 'param_groups'; was it that of the model, or a "
            "whole checkpoint?"
        )
    groups = state["param_groups"]
    if not isinstance(state["state"], Mapping) or not isinstance(groups, (list, tuple)):
        raise LLQRError("the state of an optimizer has a mapping under 'state', and a list under 'param_groups'")
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups):
        raise LLQRError("the 'param_groups' of the state aren't those of an optimizer: each is a mapping with 'params'")
    return dict(state)


# --- blocks of U ---


def block_state(block: Block) -> dict[str, Any]:
    """Tensors and builtins alone. U isn't among them: the curvature gives it again."""
    map_ = {f.name: getattr(block.map, f.name) for f in fields(block.map)}
    return {
        "map": {**map_, "shape": list(block.map.shape)},
        "refits": block.refits,
        "moments": dict(block.moments),
        "diagonal": block.diagonal,
    }


def map_from_state(key: str, state: Any, parameters: Mapping[str, Tensor]) -> LinearMap:
    """The map of a block's state; an error where anything in it isn't as `block_state` makes it, or not of these parameters."""
    what = f"the state's block for {key!r}"
    if not isinstance(state, Mapping) or not {"map", "refits", "moments", "diagonal"} <= state.keys():
        raise LLQRError(f"{what} has no 'map', 'refits', 'moments' and 'diagonal'")
    check_count(f"'refits' in {what}", state["refits"], 1)
    check_amount(f"'diagonal' in {what}", state["diagonal"])
    check_tensors(f"'moments' in {what}", state["moments"])
    try:
        parts = {f.name: state["map"][f.name] for f in fields(LinearMap)}
        map_ = LinearMap(**{**parts, "shape": tuple(parts["shape"])})
        whole = _is_map(map_) and map_.key == key
    except (TypeError, KeyError) as error:
        raise LLQRError(f"{what} has a 'map' that isn't one: {error}") from error
    if not whole:
        raise LLQRError(f"{what} has a 'map' that isn't one")
    for name in map_.members:
        if name not in parameters:
            raise unknown("parameter in the state", name, parameters)
    if not map_.lies_in(parameters):
        raise LLQRError(
            f"the state has a matrix of {map_.shape} for {key!r}, which has shape "
            f"{tuple(parameters[map_.weight].shape)} here"
        )
    return map_


def _is_map(map_: LinearMap) -> bool:
    """Whether each of its fields is of the type and size that it should be."""
    counts, places = (*map_.shape, map_.kernel, map_.first + 1), map_.places
    return (
        all(isinstance(name, str) for name in map_.members)
        and len(map_.shape) == 3
        and all(type(count) is int and count > 0 for count in counts)
        and map_.shape[2] % map_.kernel == 0
        and type(map_.inputs_on_rows) is type(map_.reads_data) is bool
        and (map_.first == 0 if places is None else _are_places(places, map_))
    )


def _are_places(places: object, map_: LinearMap) -> bool:
    return (
        isinstance(places, Tensor)
        and places.dtype == torch.int64
        and tuple(places.shape) == map_.shape
        and int(places.min()) == map_.first
        and len(set(places.reshape(-1).tolist())) == places.numel()
    )


def block_from_state(
    key: str, state: Mapping[str, Any], parameters: Mapping[str, Tensor], structures: Mapping[str, Structure]
) -> Block:
    """The block of a state, for the parameters that are here; an error where they don't fit."""
    map_ = map_from_state(key, state, parameters)
    weight, structure = parameters[map_.weight], structures[map_.weight]
    _, r, c = map_.joined
    like = torch.empty(0, dtype=at_least_single(weight.dtype), device="meta")
    probe = structure.second_moments(
        like.new_empty(map_.shape[0], 1, r), like.new_empty(map_.shape[0], 1, c), map_.kernel
    )
    wanted = {name: tuple(moment.shape) for name, moment in probe.items()}
    given = {name: tuple(moment.shape) for name, moment in state["moments"].items()}
    if wanted != given:
        raise LLQRError(f"the state has {given} for {key!r}, and {structure!r} has {wanted}: give the same structure")
    moments = {  # in the order in which the structure has them
        name: state["moments"][name].to(weight.device, at_least_single(weight.dtype), copy=True) for name in wanted
    }
    block = Block(map_, structure, moments, state["refits"], diagonal=float(state["diagonal"]))
    block.invert()
    return block
