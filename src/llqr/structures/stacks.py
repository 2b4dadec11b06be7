"""Which parameter gets which structure; and blocks of one structure and shape as a stack, which acts in one batched product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

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


def owner(name: str) -> str:
    """The module that owns a parameter: the name up to the last dot."""
    return name.rpartition(".")[0]


STACK_LIMIT = 2**16
"""Parameters with more numbers than this are not stacked: their products fill a processor alone, and stacking copies them."""

BLOCK_LIMIT = 2 * 2**30
"""Bytes that one block may take."""


@dataclass(frozen=True)
class Group:
    """A stack of blocks: `members[i]` are the parameters that block `keys[i]` covers, all of the same `shapes`."""

    structure: Structure
    keys: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    shapes: tuple[torch.Size, ...]
    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the structure sees: a parameter's own, or one vector for a layer."""
        return _seen(self.structure, self.shapes)

    def gather(self, values: Mapping[str, Tensor]) -> Tensor:
        """The stack (k, *shape) of the members' values; the parameters of a layer are joined to one vector."""
        if self.structure.per == "parameter":
            blocks = [values[name].to(self.dtype) for (name,) in self.members]
        else:
            blocks = [torch.cat([values[n].reshape(-1).to(self.dtype) for n in names]) for names in self.members]
        return blocks[0].unsqueeze(0) if len(blocks) == 1 else torch.stack(blocks)

    def scatter(self, stack: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `gather`: a value for each member that is in `like`, in the dtype that it has there."""
        scattered = {}
        for names, block in zip(self.members, stack.unbind(), strict=True):
            whole = self.structure.per == "parameter"
            parts = [block] if whole else torch.split(block, [shape.numel() for shape in self.shapes])
            for name, part, shape in zip(names, parts, self.shapes, strict=True):
                if name in like:
                    scattered[name] = part.reshape(shape).to(like[name].dtype)
        return scattered

    def covering(self, names: Collection[str]) -> Group | None:
        """The blocks that cover some of these parameters."""
        return self._at([i for i, members in enumerate(self.members) if any(name in names for name in members)])

    def only(self, keys: Collection[str]) -> Group | None:
        """The blocks of these names."""
        return self._at([i for i, key in enumerate(self.keys) if key in keys])

    def _at(self, chosen: list[int]) -> Group | None:
        if len(chosen) == len(self.keys):
            return self
        tensors = {name: tensor[chosen] for name, tensor in self.tensors.items()}
        keys, members = tuple(self.keys[i] for i in chosen), tuple(self.members[i] for i in chosen)
        return replace(self, keys=keys, members=members, tensors=tensors) if chosen else None

    def zeros_beside(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zeros for the members that have no value."""
        like, members = (
            next(iter(self.tensors.values())),
            (zip(names, self.shapes, strict=True) for names in self.members),
        )
        return {name: like.new_zeros(shape) for block in members for name, shape in block if name not in values}

    def layout(self) -> Group:
        """The group without its numbers: enough to gather and scatter."""
        return replace(self, tensors={name: tensor.new_empty(0) for name, tensor in self.tensors.items()})

    def check(self, values: Mapping[str, Tensor]) -> None:
        """Raise for a member's value that isn't a dense tensor of real numbers of its shape, on the device of the block."""
        device = next(iter(self.tensors.values())).device
        for members in self.members:
            for name, shape in zip(members, self.shapes, strict=True):
                if name in values:
                    _check_value(name, values[name], shape, device)


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
    stacks: dict[Any, list[tuple[str, tuple[str, ...]]]] = {}
    for key, names, block in _blocks(assign(structure, parameters)):
        members = [parameters[name] for name in names]
        for member in members:
            if not member.is_floating_point():
                raise LLQRError(f"{key!r} is of {member.dtype}; only real floating-point parameters have a structure")
        dtype = reduce(torch.promote_types, (member.dtype for member in members), torch.float32)
        shapes = tuple(member.shape for member in members)
        size = block.memory(_seen(block, shapes), dtype.itemsize)
        if size > BLOCK_LIMIT:
            raise LLQRError(
                f"the {block!r} block of {key!r} would take {size / 2**30:,.1f} GB: use a structure with smaller blocks "
                'there, such as "diagonal", "kfac" or Kronecker(max_dim=...)'
            )
        alone = key if sum(map(Tensor.numel, members)) > STACK_LIMIT else None
        stacks.setdefault((block, shapes, dtype, members[0].device, alone), []).append((key, names))
    groups = []
    for (block, shapes, dtype, device, _), entries in stacks.items():
        keys, covered = (tuple(column) for column in zip(*entries, strict=True))
        like = torch.empty(0, dtype=dtype, device=device)
        groups.append(Group(block, keys, covered, shapes, block.identity(_seen(block, shapes), like, len(keys))))
    return groups


def _seen(structure: Structure, shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    return tuple(shapes[0]) if structure.per == "parameter" else (sum(shape.numel() for shape in shapes),)


def _blocks(assigned: Mapping[str, Structure]) -> Iterator[tuple[str, tuple[str, ...], Structure]]:
    """The name, the parameters and the structure of each block."""
    layers: dict[str, tuple[Structure, list[str]]] = {}
    for name, structure in assigned.items():
        if structure.per == "parameter":
            yield name, (name,), structure
            continue
        module = owner(name)
        first, members = layers.setdefault(module, (structure, []))
        if first != structure:
            raise LLQRError(f'module {module!r} has two structures per="layer", {first!r} and {structure!r}: use one')
        members.append(name)
    for module, (structure, members) in layers.items():
        yield module, tuple(members), structure
