"""Blocks of one structure and one shape, kept as a stack so that they act in one batched product."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llqr.errors import LLQRError
from llqr.precision import at_least_single
from llqr.structures.assign import StructureSpec, assign, owner
from llqr.structures.base import Linearization, Structure

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
    identity: tuple[tuple[int, int], ...] = ()
    """The tensors and their versions when they were made as the identity: as long as these are the same, they are it. (What is
    written to `.data` or to an array that shares the memory changes no version.)"""

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the structure sees: a parameter's own, or one vector for a layer."""
        return _seen(self.structure, self.shapes)

    def gather(self, values: Mapping[str, Tensor]) -> Tensor:
        """The stack (k, *shape) of the members' values; the parameters of a layer are joined to one vector."""
        blocks = [self._block([values[name] for name in names]) for names in self.members]
        return blocks[0].unsqueeze(0) if len(blocks) == 1 else torch.stack(blocks)

    def scatter(self, stack: Tensor, dtypes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `gather`: a value for each member, in the dtype of the tensor of that name in `dtypes`."""
        scattered = {}
        for names, block in zip(self.members, stack.unbind(), strict=True):
            parts = (
                [block] if self.structure.per == "parameter" else torch.split(block, [s.numel() for s in self.shapes])
            )
            for name, part, shape in zip(names, parts, self.shapes, strict=True):
                scattered[name] = part.reshape(shape).to(dtypes[name].dtype)
        return scattered

    def select(self, names: Collection[str]) -> Group | None:
        """The blocks that cover some of these parameters."""
        chosen = [i for i, members in enumerate(self.members) if any(name in names for name in members)]
        if not chosen:
            return None
        for i in chosen:
            missing = [name for name in self.members[i] if name not in names]
            if missing:
                raise LLQRError(
                    f"the block of module {self.keys[i]!r} covers {', '.join(map(repr, self.members[i]))}, and there is no "
                    f'gradient of {", ".join(map(repr, missing))}: give zeros for it, or use per="parameter"'
                )
        return self._subset(chosen)

    def only(self, keys: Collection[str]) -> Group | None:
        """The blocks of these names."""
        chosen = [i for i, key in enumerate(self.keys) if key in keys]
        return self._subset(chosen) if chosen else None

    def _subset(self, chosen: list[int]) -> Group:
        if len(chosen) == len(self.keys):
            return self
        rest = replace(self, keys=tuple(self.keys[i] for i in chosen), members=tuple(self.members[i] for i in chosen))
        return rest.holding({name: tensor[chosen] for name, tensor in self.tensors.items()})

    def holding(self, tensors: dict[str, Tensor]) -> Group:
        """The same blocks with other tensors."""
        return replace(self, tensors=tensors, identity=())

    def zeros_beside(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zeros for the members that have no value in blocks where others have one."""
        if self.structure.per == "parameter":
            return {}
        like = next(iter(self.tensors.values()))
        return {
            name: like.new_zeros(shape)
            for members in self.members
            if any(name in values for name in members)
            for name, shape in zip(members, self.shapes, strict=True)
            if name not in values
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "identity": ()}  # the versions of a copy's tensors begin anew

    def layout(self) -> Group:
        """The group without its numbers: enough to gather and scatter."""
        return self.holding({name: tensor.new_empty(0) for name, tensor in self.tensors.items()})

    def check(self, values: Mapping[str, Tensor]) -> None:
        """Raise for a member's value that isn't a dense tensor of real numbers of its shape, on the device of the block."""
        device = next(iter(self.tensors.values())).device
        for members in self.members:
            for name, shape in zip(members, self.shapes, strict=True):
                if name in values:
                    _check_value(name, values[name], shape, device)

    def linearize(self, stack: Tensor) -> Linearization:
        at_identity = bool(self.identity) and self.identity == _versions(self.tensors)
        linearize = self.structure.linearize_identity if at_identity else self.structure.linearize
        return linearize(self.tensors, stack)

    def _block(self, values: Sequence[Tensor]) -> Tensor:
        if self.structure.per == "parameter":
            return values[0].to(self.dtype)
        return torch.cat([value.reshape(-1).to(self.dtype) for value in values])


def _versions(tensors: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
    """None at all in inference mode, where tensors don't have one."""
    return tuple((id(tensor), tensor._version) for tensor in tensors.values() if not tensor.is_inference())


def _check_value(name: str, value: object, shape: torch.Size, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise LLQRError(
            f"the gradient of {name!r} is a {type(value).__name__}, not a tensor: where there is none, leave it out"
        )
    if value.shape != shape:
        raise LLQRError(f"the gradient of {name!r} has shape {tuple(value.shape)}, and the parameter {tuple(shape)}")
    if value.layout != torch.strided:
        raise LLQRError(
            f"the gradient of {name!r} is sparse: give value.to_dense(), or build the embedding with sparse=False"
        )
    if not value.is_floating_point():
        raise LLQRError(f"the gradient of {name!r} is {value.dtype}, not of real floating-point numbers")
    if value.device != device:
        raise LLQRError(f"the gradient of {name!r} is on {value.device}, its block on {device}: move one of them")


def identity_groups(parameters: Mapping[str, Tensor], structure: StructureSpec) -> list[Group]:
    """The blocks of U = I for parameters (or gradients) of these names, shapes, dtypes and devices."""
    stacks: dict[_Kind, list[tuple[str, tuple[str, ...]]]] = {}
    for key, members, block in _blocks(assign(structure, parameters)):
        kind = _Kind.of(block, key, [parameters[name] for name in members])
        stacks.setdefault(kind, []).append((key, members))
    groups = []
    for kind, entries in stacks.items():
        keys, covered = (tuple(column) for column in zip(*entries, strict=True))
        tensors = kind.identity(len(keys))
        identity = _versions(tensors) if _is_ours(kind.structure) else ()
        groups.append(Group(kind.structure, keys, covered, kind.shapes, tensors, identity))
    return groups


class _Kind(NamedTuple):
    """What blocks have to share to be in one stack; `alone` is the name of one that is too large for that."""

    structure: Structure
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    alone: str | None

    @classmethod
    def of(cls, structure: Structure, key: str, parameters: Sequence[Tensor]) -> _Kind:
        dtype = at_least_single(parameters[0].dtype)
        for parameter in parameters:
            if not parameter.is_floating_point():
                raise LLQRError(
                    f"{key!r} is of {parameter.dtype}; only real floating-point parameters have a structure"
                )
            dtype = torch.promote_types(dtype, parameter.dtype)
        numbers = sum(parameter.numel() for parameter in parameters)
        shapes = tuple(parameter.shape for parameter in parameters)
        kind = cls(structure, shapes, dtype, parameters[0].device, key if numbers > STACK_LIMIT else None)
        size = structure.memory(_seen(structure, shapes), dtype.itemsize)
        if size > BLOCK_LIMIT:
            raise LLQRError(
                f"the {structure!r} block of {key!r} would take {size / 2**30:,.1f} GB: use a structure with smaller blocks "
                'there, such as "diagonal", "kfac" or Kronecker(max_dim=...)'
            )
        return kind

    def identity(self, count: int) -> dict[str, Tensor]:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        shape = _seen(self.structure, self.shapes)
        tensors = self.structure.identity(shape, like, count)
        if not _is_ours(self.structure):
            _check_own(self.structure, tensors, like.new_empty(count, *shape))
        return tensors


def _is_ours(structure: Structure) -> bool:
    """Of the library, and not a class of the user's own, which may be derived from one of ours and act otherwise."""
    return type(structure).__module__.startswith("llqr.structures.")


def _check_own(structure: Structure, tensors: dict[str, Tensor], x: Tensor) -> None:
    """Raise for a structure of the user's own whose tensors aren't stacks, or whose identity isn't one."""
    count, shape = len(x), tuple(x.shape[1:])
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: (count, *size) for name, size in structure.sizes(shape).items()}
    if found != wanted:
        raise LLQRError(
            f"identity() of {structure!r} makes tensors {found} for {count} blocks of shape {shape}, where {wanted} is wanted: "
            "each has a leading dimension, the number of blocks (`count`)"
        )
    for name, tensor in tensors.items():
        if (tensor.dtype, tensor.device) != (x.dtype, x.device):
            raise LLQRError(
                f"identity() of {structure!r} makes {name!r} of {tensor.dtype} on {tensor.device}, not of {x.dtype} on "
                f"{x.device}: make it from `like`, as in like.new_ones(count, *shape)"
            )
    if not x.is_meta:
        x = torch.arange(1, x.numel() + 1, dtype=x.dtype, device=x.device).sin().reshape(x.shape)
    with torch.no_grad():
        y = structure.apply(tensors, x)
    if y.shape != x.shape:
        raise LLQRError(
            f"apply() of {structure!r} makes shape {tuple(y.shape)} of {tuple(x.shape)}: U x has the shape of x"
        )
    pulled = structure.linearize(tensors, x).pullback(x)
    if not isinstance(pulled, dict) or {name: tuple(part.shape) for name, part in pulled.items()} != wanted:
        raise LLQRError(f"pullback() of {structure!r} returns a dict with a gradient for each of {wanted}")
    if not x.is_meta and not _pulls_back(structure, tensors, x, pulled):
        raise LLQRError(
            f"pullback() of {structure!r} isn't the gradient of ⟨cotangent, apply(tensors, x)⟩ by the tensors, for shape "
            f"{shape}: leave it out, and it is found by differentiating apply()"
        )
    if not x.is_meta and not torch.allclose(y, x, rtol=1e-3, atol=1e-3):
        raise LLQRError(
            f"apply() of {structure!r} with the tensors of identity() doesn't give x back for shape {shape}"
        )


def _pulls_back(structure: Structure, tensors: dict[str, Tensor], x: Tensor, pulled: Mapping[str, Tensor]) -> bool:
    """Whether what was pulled back from x is what autograd finds."""
    free = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    with torch.enable_grad():
        value = torch.sum(x * structure.apply(free, x))
    if not value.requires_grad:
        return True
    found = torch.autograd.grad(value, list(free.values()), allow_unused=True)
    expected = [torch.zeros_like(t) if part is None else part for t, part in zip(free.values(), found, strict=True)]
    return all(
        torch.allclose(pulled[name], part, rtol=1e-2, atol=1e-3 * (1 + float(part.abs().max())))
        for name, part in zip(free, expected, strict=True)
    )


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
