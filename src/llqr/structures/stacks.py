"""Which parameter gets which structure; and blocks of one structure and shape as a stack, which acts in one batched product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from llqr.curvature.precision import at_least_single
from llqr.errors import LLQRError, meant, unknown
from llqr.structures.base import Dense, Diagonal, Scalar, Structure
from llqr.structures.kronecker import EigenKronecker, Kronecker

NAMES: dict[str, Callable[[], Structure]] = {
    "scalar": Scalar,
    "diagonal": Diagonal,
    "kfac": Kronecker,
    "ekfac": EigenKronecker,
    "dense": Dense,
}

WILD = frozenset("*?[")

StructureSpec = str | Structure | Mapping[str, str | Structure]


def resolve(structure: str | Structure) -> Structure:
    """The structure that a name stands for; a structure stands for itself."""
    return meant("structure", structure, Structure, NAMES)


def assign(structure: StructureSpec, names: Collection[str]) -> dict[str, Structure]:
    """The structure of each parameter.

    In a mapping, a key is a parameter's name, a module's name (all it holds), or a pattern with * and ? for either. The first
    that matches wins, each has to match something, and nothing may be left over: a last "*" takes the rest.
    """
    if not isinstance(structure, Mapping):
        return dict.fromkeys(names, resolve(structure))
    modules = {name: list(accumulate(name.split("."), "{}.{}".format)) for name in names}  # that hold it, and itself
    known = dict.fromkeys(each for holding in modules.values() for each in holding)
    for pattern in structure:
        if not isinstance(pattern, str):
            raise LLQRError(f"a mapping of structures has name patterns for keys; {pattern!r} is not a string")
        if not _matches(pattern, known):
            raise unknown("parameter or module in the mapping of structures", pattern, known)
    resolved = {pattern: resolve(entry) for pattern, entry in structure.items()}
    firsts = {name: next((p for p in resolved if _matches(p, holding)), None) for name, holding in modules.items()}
    assigned = {name: resolved[first] for name, first in firsts.items() if first is not None}
    missing = [name for name in names if name not in assigned]
    if missing:
        listed = ", ".join(repr(name) for name in missing[:10]) + (", …" if len(missing) > 10 else "")
        raise LLQRError(f'no pattern of the structures matches {listed}: add a last "*" that says what the rest gets')
    return assigned


def _matches(pattern: str, names: Collection[str]) -> bool:
    """Whether it is one of the names or, as a pattern, fits one: patterns cost more, and most keys are names."""
    return pattern in names or (not WILD.isdisjoint(pattern) and any(fnmatchcase(name, pattern) for name in names))


STACK_LIMIT = 2**16
"""Parameters with more numbers than this are not stacked: their products fill a processor alone, and stacking copies them."""

BLOCK_LIMIT = 2 * 2**30
"""Bytes that one block may take."""


@dataclass(frozen=True)
class Group:
    """A stack of blocks, one for each of these parameters of one shape."""

    structure: Structure
    names: tuple[str, ...]
    shape: torch.Size
    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    def gather(self, values: Mapping[str, Tensor]) -> Tensor:
        """The stack (k, *shape) of the parameters' values."""
        blocks = [values[name].to(self.dtype) for name in self.names]
        return blocks[0].unsqueeze(0) if len(blocks) == 1 else torch.stack(blocks)

    def scatter(self, stack: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `gather`: each value in the dtype that it has in `like`."""
        return {name: block.to(like[name].dtype) for name, block in zip(self.names, stack.unbind(), strict=True)}

    def only(self, names: Collection[str]) -> Group | None:
        """The blocks of these parameters."""
        chosen = [i for i, name in enumerate(self.names) if name in names]
        if len(chosen) == len(self.names):
            return self
        tensors = {name: tensor[chosen] for name, tensor in self.tensors.items()}
        return replace(self, names=tuple(self.names[i] for i in chosen), tensors=tensors) if chosen else None

    def layout(self) -> Group:
        """The group without its numbers: enough to gather and scatter."""
        return replace(self, tensors={name: tensor.new_empty(0) for name, tensor in self.tensors.items()})

    def check(self, values: Mapping[str, Tensor]) -> None:
        """Raise for a value that isn't a dense tensor of real numbers of its shape, on the device of the block."""
        device = next(iter(self.tensors.values())).device
        for name in self.names:
            if name in values:
                _check_value(name, values[name], self.shape, device)


def _check_value(name: str, value: object, shape: torch.Size, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise LLQRError(f"the gradient of {name!r} is a {type(value).__name__}: where there is none, leave it out")
    if value.shape != shape:
        raise LLQRError(f"the gradient of {name!r} has shape {tuple(value.shape)}, and the parameter {tuple(shape)}")
    if value.layout != torch.strided:
        raise LLQRError(f"the gradient of {name!r} is sparse: give its to_dense(), or an embedding with sparse=False")
    if not value.is_floating_point():
        raise LLQRError(f"the gradient of {name!r} is {value.dtype}, not of real floating-point numbers")
    if value.device != device:
        raise LLQRError(f"the gradient of {name!r} is on {value.device}, its block on {device}: move one of them")


def identity_groups(parameters: Mapping[str, Tensor], structure: StructureSpec) -> list[Group]:
    """The blocks of U = I for parameters (or gradients) of these names, shapes, dtypes and devices.

    Blocks of one kind are stacked, unless they are too large for that.
    """
    stacks: dict[Any, list[str]] = {}
    for name, block in assign(structure, parameters).items():
        parameter = parameters[name]
        if not parameter.is_floating_point():
            raise LLQRError(f"{name!r} is of {parameter.dtype}; only real floating-point parameters have a structure")
        dtype = at_least_single(parameter.dtype)
        size = block.memory(parameter.shape, dtype.itemsize)
        if size > BLOCK_LIMIT:
            raise LLQRError(
                f"the {block!r} block of {name!r} would take {size / 2**30:,.1f} GB: use a structure with smaller blocks "
                'there, such as "diagonal", "kfac" or Kronecker(max_dim=...)'
            )
        alone = name if parameter.numel() > STACK_LIMIT else None
        stacks.setdefault((block, parameter.shape, dtype, parameter.device, alone), []).append(name)
    groups = []
    for (block, shape, dtype, device, _), names in stacks.items():
        like = torch.empty(0, dtype=dtype, device=device)
        groups.append(Group(block, tuple(names), shape, block.identity(shape, like, len(names))))
    return groups
