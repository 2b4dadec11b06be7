"""Preconditioner: the learned U, block by block.

Blocks of one structure and one shape are kept as a stack, a `Group`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llqr.checks import check_tensors, checked_number
from llqr.errors import LLQRError, unknown
from llqr.structures.base import Structure
from llqr.structures.stacks import Group, StructureSpec, identity_groups


class Preconditioned(NamedTuple):
    """Preconditioned gradients, and the blocks where they weren't finite."""

    gradients: dict[str, Tensor]
    nonfinite: list[str]


Stacks = list[Tensor]
"""One for every tensor of a preconditioner, group by group: a change of it, say."""


class Preconditioner:
    """U = diag(U_0, U_1, …): learned inverse curvature, one structured block for each parameter.

    `blocks` maps the name of a parameter to its block's tensors; `history` is the objective J at the start of the fit and after
    each of its steps.
    """

    def __init__(self, groups: Sequence[Group], history: Sequence[float] = ()) -> None:
        self.groups = list(groups)
        self.history = list(history)

    @classmethod
    def identity(cls, parameters: Mapping[str, Tensor], structure: StructureSpec) -> Preconditioner:
        """U = I for parameters (or gradients) of these names, shapes, dtypes and devices."""
        return cls(identity_groups(parameters, structure))

    def apply(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """U g for the parameters that are given."""
        if not isinstance(gradients, Mapping):
            raise LLQRError(
                f"gradients are a mapping from parameter names to tensors, not a {type(gradients).__name__}"
            )
        known = {name for group in self.groups for name in group.names}
        for name in gradients:
            if name not in known:
                raise unknown("parameter", name, known)
        for group in self.groups:
            group.check(gradients)
        applied: dict[str, Tensor] = {}
        for group, _, y in self._products(gradients):
            applied.update(group.scatter(y, gradients))
        return {name: applied[name] for name in gradients}

    def _products(self, gradients: Mapping[str, Tensor]) -> Iterator[tuple[Group, Tensor, Tensor]]:
        """The blocks that these gradients are of, with g and U g."""
        for each in self.groups:
            group = each.only(gradients.keys())
            if group is not None:
                x = group.gather(gradients)
                yield group, x, group.structure.apply(group.tensors, x)

    def precondition(self, gradients: Mapping[str, Tensor]) -> Preconditioned:
        """U g, block by block, and g itself where that isn't finite, in the dtype that it goes back to.

        Parameters that U doesn't know, or knows by another shape, are left out. Every step pays for this: whether all is finite
        is asked once.
        """
        shapes = {name: group.shape for group in self.groups for name in group.names}
        values = {name: gradient for name, gradient in gradients.items() if shapes.get(name) == gradient.shape}
        products = list(self._products(values))
        finite = [_blocks_finite(group, y, values) for group, _, y in products]
        good = iter(torch.cat(finite).tolist() if finite else [])
        found, bad = dict[str, Tensor](), list[str]()
        for group, x, y in products:
            for i, key in enumerate(group.names):
                if not next(good):
                    y[i] = x[i]
                    bad.append(key)
            found.update(group.scatter(y, values))
        return Preconditioned({name: found[name] for name in values}, bad)

    @property
    def blocks(self) -> dict[str, dict[str, Tensor]]:
        return {
            key: {name: stack[i] for name, stack in group.tensors.items()}
            for group in self.groups
            for i, key in enumerate(group.names)
        }

    @property
    def structures(self) -> dict[str, Structure]:
        """The structure of each block, under the names of `blocks`."""
        return {name: group.structure for group in self.groups for name in group.names}

    def layout(self) -> dict[str, tuple[Structure, torch.Size]]:
        """The structure of each block, and the shape of its parameter."""
        return {name: (group.structure, group.shape) for group in self.groups for name in group.names}

    @property
    def memory(self) -> int:
        """Bytes of all the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def tensors(self) -> Stacks:
        """Those of all blocks, as they are stacked."""
        return [tensor for group in self.groups for tensor in group.tensors.values()]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Preconditioner:
        """The same blocks of other tensors."""
        each = iter(tensors)
        groups = [replace(group, tensors={name: next(each) for name in group.tensors}) for group in self.groups]
        return Preconditioner(groups, self.history)

    def with_history(self, history: Sequence[float]) -> Preconditioner:
        """The same blocks, under another history."""
        return Preconditioner(self.groups, history)

    def clone(self) -> Preconditioner:
        return self.with_tensors(tensor.clone() for tensor in self.tensors)

    def moved(self, change: Stacks, length: float) -> Preconditioner:
        """U + length · change."""
        return self.with_tensors(t.add(part, alpha=length) for t, part in zip(self.tensors, change, strict=True))

    def move_(self, change: Stacks, length: float) -> None:
        """U ← U + length · change."""
        for tensor, part in zip(self.tensors, change, strict=True):
            tensor.add_(part, alpha=length)

    def scaled(self, factor: float) -> Preconditioner:
        """factor · U, for a positive factor."""
        groups = [replace(g, tensors=g.structure.scaled(g.tensors, factor)) for g in self.groups]
        return Preconditioner(groups, self.history)

    @property
    def degree(self) -> int:
        """The degree of U g as a polynomial in the tensors: 1 where every structure is linear."""
        return max((group.structure.degree(group.shape) for group in self.groups), default=1)

    def blend(self, other: Preconditioner, ema: float) -> Preconditioner:
        """ema · U + (1 - ema) · other, tensor by tensor."""
        checked_number("ema", ema, lambda share: 0 <= share <= 1, "a number between 0 and 1")
        self.check_same_blocks(other)
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self.with_tensors(torch.lerp(theirs, mine, float(ema)) for mine, theirs in pairs)

    def take(self, other: Preconditioner) -> None:
        """Take over the blocks that both have, of the same structure and shape; the others stay."""
        mine, theirs, known = self.blocks, other.blocks, other.layout()
        for key, block in self.layout().items():
            if known.get(key) == block:
                for name, tensor in mine[key].items():
                    tensor.copy_(theirs[key][name])

    def is_finite(self) -> bool:
        """By the sums: a NaN or an infinity anywhere makes one, and a sum is the cheapest pass over a tensor."""
        return all(bool(tensor.sum().isfinite()) for tensor in self.tensors)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and builtins alone: the blocks by name, and the history."""
        return {"blocks": self.clone().blocks, "history": list(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the blocks of a preconditioner with the same names and structures; device and dtype stay."""
        blocks, history = (state.get(key) if isinstance(state, Mapping) else None for key in ("blocks", "history"))
        numbers = isinstance(history, Sequence) and all(isinstance(value, float) for value in history)
        if not isinstance(blocks, Mapping) or not isinstance(history, Sequence) or not numbers:
            raise LLQRError("this isn't the state_dict() of a Preconditioner: 'blocks', and a 'history' of numbers")
        mine = self.blocks
        for key, block in blocks.items():
            check_tensors(f"the state's block for {key!r}", block)
            if key not in mine:
                raise unknown("block", key, mine)
        for key, tensors in mine.items():
            if key not in blocks:
                raise LLQRError(f"the state has no block for {key!r}")
            wanted, given = ({n: tuple(t.shape) for n, t in block.items()} for block in (tensors, blocks[key]))
            if wanted != given:
                raise LLQRError(f"the state's block for {key!r} has tensors {given}, and here it has {wanted}")
        for key, tensors in mine.items():
            for name, tensor in tensors.items():
                tensor.copy_(blocks[key][name])
        self.history = list(history)

    def check_same_blocks(self, other: Preconditioner) -> None:
        """Raise unless the two have blocks of the same names, structures and shapes."""
        if not isinstance(other, Preconditioner):
            raise LLQRError(f"a Preconditioner is wanted here, not {type(other).__name__}")
        mine, theirs = self.layout(), other.layout()
        different = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        if different:
            raise LLQRError(f"the preconditioners don't have the same block for {', '.join(map(repr, different[:5]))}")

    def __repr__(self) -> str:
        lines = [f"Preconditioner({sum(len(group.names) for group in self.groups)} blocks, {self.memory:,} bytes"]
        for group in self.groups:
            sizes = ", ".join(f"{name}{tuple(tensor.shape[1:])}" for name, tensor in group.tensors.items())
            names = ", ".join(group.names[:3]) + (f", … ({len(group.names)})" if len(group.names) > 3 else "")
            lines.append(f"  {group.structure!r}: {sizes} for {names}")
        return "\n".join(lines) + ")"


def _blocks_finite(group: Group, y: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Whether each block of a stack is, in the dtypes of the values that it goes back to."""
    rows = y.reshape(len(y), -1)
    largest = [torch.finfo(values[name].dtype).max for name in group.names]
    if min(largest) >= torch.finfo(group.dtype).max:
        return rows.isfinite().all(1)
    return (rows.abs() <= y.new_tensor(largest)[:, None]).all(1)
