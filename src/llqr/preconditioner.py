"""Preconditioner: the learned U, block by block.

Blocks of one structure and one shape are kept as a stack, a `Group`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llqr.checks import check_tensors
from llqr.errors import LLQRError, unknown
from llqr.structures.base import Structure
from llqr.structures.stacks import Group, StructureSpec, identity_groups


class Steered(NamedTuple):
    """Preconditioned gradients, and the blocks where they weren't finite."""

    gradients: dict[str, Tensor]
    nonfinite: list[str]


class Steering:
    """U for gradients of certain names and dtypes."""

    def __init__(self, groups: Sequence[Group], gradients: Mapping[str, Tensor]) -> None:
        self._key = _key(groups, gradients)
        self._held = list(groups)  # their tensors' ids, in the key, stay theirs
        self._order = list(gradients)
        self._factors: list[str] = []
        self._multipliers: list[Tensor] = []
        self._stacks: list[Group] = []
        self._zeros: dict[str, Tensor] = {}
        gradients = _fitting(groups, gradients)
        for group in groups:
            self._zeros.update(group.zeros_beside(gradients))
        names = gradients.keys() | self._zeros.keys()
        for group in groups:
            chosen = group.select(names)
            if chosen is None:
                continue
            multiplier = chosen.structure.multiplier(chosen.shape)
            if multiplier is not None and all(gradients[name].dtype == chosen.dtype for (name,) in chosen.members):
                self._factors += [name for (name,) in chosen.members]
                self._multipliers += chosen.tensors[multiplier].unbind()
            else:
                self._stacks.append(chosen)
        self._largest = [_largest(group, {**gradients, **self._zeros}) for group in self._stacks]

    def fits(self, groups: Sequence[Group], gradients: Mapping[str, Tensor]) -> bool:
        """Whether U and the names are still those that it was made for."""
        return self._key == _key(groups, gradients)

    def __call__(self, gradients: Mapping[str, Tensor]) -> Steered:
        """U g, block by block, and g itself where that isn't finite."""
        values = {**gradients, **self._zeros} if self._zeros else gradients
        plain = [values[name] for name in self._factors]
        products = list(torch._foreach_mul(plain, self._multipliers)) if plain else []
        stacks = [group.gather(values) for group in self._stacks]
        results = [group.structure.apply(group.tensors, x) for group, x in zip(self._stacks, stacks, strict=True)]
        finite = self._finite(products, results)
        steered = Steered({}, [])
        for i, name in enumerate(self._factors):
            if not finite[i]:
                products[i] = plain[i].clone()
                steered.nonfinite.append(name)
            steered.gradients[name] = products[i]
        at = len(products)
        for group, x, y in zip(self._stacks, stacks, results, strict=True):
            for i, key in enumerate(group.keys):
                if not finite[at + i]:
                    y[i] = x[i]
                    steered.nonfinite.append(key)
            at += len(group.keys)
            steered.gradients.update(group.scatter(y, values))
        return steered._replace(
            gradients={name: steered.gradients[name] for name in self._order if name in steered.gradients}
        )

    def _finite(self, products: list[Tensor], results: list[Tensor]) -> list[bool]:
        """Whether each block's U g is, in the dtype that it goes back to; in one transfer."""
        parts = [torch.stack([product.isfinite().all() for product in products])] if products else []
        parts += [_blocks_finite(y, largest) for y, largest in zip(results, self._largest, strict=True)]
        return torch.cat(parts).tolist() if parts else []


def _key(groups: Sequence[Group], gradients: Mapping[str, Tensor]) -> tuple[list[tuple[int, int]], list[object]]:
    tensors = [(id(tensor), tensor._version) for group in groups for tensor in group.tensors.values()]
    return tensors, [part for name, gradient in gradients.items() for part in (name, gradient.dtype, gradient.shape)]


def _fitting(groups: Sequence[Group], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without those of parameters that have another shape than when U was learned: it doesn't know these."""
    shapes = {
        name: shape
        for group in groups
        for names in group.members
        for name, shape in zip(names, group.shapes, strict=True)
    }
    return {
        name: gradient for name, gradient in gradients.items() if shapes.get(name, gradient.shape) == gradient.shape
    }


def _largest(group: Group, values: Mapping[str, Tensor]) -> Tensor | None:
    """The largest number that each block's gradients can hold, where that is less than what U g is computed in."""
    largest = [min(torch.finfo(values[name].dtype).max for name in names) for names in group.members]
    if min(largest) >= torch.finfo(group.dtype).max:
        return None
    return next(iter(group.tensors.values())).new_tensor(largest)


def _blocks_finite(y: Tensor, largest: Tensor | None) -> Tensor:
    """Of a stack of blocks."""
    rows = y.reshape(len(y), -1)
    return (rows.isfinite() if largest is None else rows.abs() <= largest[:, None]).all(1)


Change = list[dict[str, Tensor]]
"""A change of every tensor of a preconditioner, group by group."""


class Preconditioner:
    """U = diag(U_0, U_1, …): learned inverse curvature, one structured block for each parameter or layer.

    `blocks` maps the name of a parameter (of a module, for blocks `per="layer"`) to that block's tensors; `history` is the
    objective J at the start of the fit and after each of its steps.
    """

    def __init__(self, groups: Sequence[Group], history: Sequence[float] = ()) -> None:
        self.groups = list(groups)
        self.history = list(history)
        self._steering: Steering | None = None

    @classmethod
    def identity(cls, parameters: Mapping[str, Tensor], structure: StructureSpec) -> Preconditioner:
        """U = I for parameters (or gradients) of these names, shapes, dtypes and devices."""
        return cls(identity_groups(parameters, structure))

    def apply(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """U g for the parameters that are given."""
        if not isinstance(gradients, Mapping):
            raise LLQRError(
                f"the gradients are a mapping from parameter names to tensors, not a {type(gradients).__name__}"
            )
        known = {name for group in self.groups for members in group.members for name in members}
        for name in gradients:
            if name not in known:
                raise unknown("parameter", name, known)
        applied: dict[str, Tensor] = {}
        for group in self.groups:
            chosen = group.select(gradients.keys())
            if chosen is not None:
                chosen.check(gradients)
                stack = chosen.structure.apply(chosen.tensors, chosen.gather(gradients))
                applied.update(chosen.scatter(stack, gradients))
        return {name: applied[name] for name in gradients}

    def steer(self, gradients: Mapping[str, Tensor]) -> Steered:
        """U g, block by block, and g itself where that isn't finite.

        Parameters that U doesn't know are left out; those of a layer's block that have no gradient count as zero.
        """
        if self._steering is None or not self._steering.fits(self.groups, gradients):
            self._steering = Steering(self.groups, gradients)
        return self._steering(gradients)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steering": None}  # it is about these tensors, not those of a copy

    @property
    def blocks(self) -> dict[str, dict[str, Tensor]]:
        return {
            key: {name: stack[i] for name, stack in group.tensors.items()}
            for group in self.groups
            for i, key in enumerate(group.keys)
        }

    @property
    def structures(self) -> dict[str, Structure]:
        """The structure of each block, under the names of `blocks`."""
        return {key: group.structure for group in self.groups for key in group.keys}

    @property
    def memory(self) -> int:
        """Bytes of all the tensors."""
        return sum(t.numel() * t.element_size() for group in self.groups for t in group.tensors.values())

    def with_history(self, history: Sequence[float]) -> Preconditioner:
        """The same blocks, under another history."""
        return Preconditioner(self.groups, history)

    def clone(self) -> Preconditioner:
        return self._replaced([{name: t.clone() for name, t in group.tensors.items()} for group in self.groups])

    def moved(self, change: Change, length: float) -> Preconditioner:
        """U + length · change."""
        return self._replaced(
            [
                {name: tensor.add(part[name], alpha=length) for name, tensor in group.tensors.items()}
                for group, part in zip(self.groups, change, strict=True)
            ]
        )

    def move_(self, change: Change, length: float) -> None:
        """U ← U + length · change."""
        for group, part in zip(self.groups, change, strict=True):
            for name, tensor in group.tensors.items():
                tensor.add_(part[name], alpha=length)

    def scaled(self, factor: float) -> Preconditioner:
        """factor · U, for a positive factor."""
        return self._replaced([group.structure.scaled(group.tensors, factor) for group in self.groups])

    @property
    def degree(self) -> int:
        """The degree of U g as a polynomial in the tensors: 1 where every structure is linear."""
        return max((group.structure.degree(group.shape) for group in self.groups), default=1)

    def blend(self, other: Preconditioner, ema: float) -> Preconditioner:
        """ema · U + (1 - ema) · other, tensor by tensor."""
        if isinstance(ema, bool) or not isinstance(ema, Real) or not 0 <= ema <= 1:
            raise LLQRError(f"ema is a number between 0 and 1, not {ema!r}")
        self.check_same_blocks(other)
        return self._replaced(
            [
                {name: torch.lerp(theirs.tensors[name], tensor, float(ema)) for name, tensor in mine.tensors.items()}
                for mine, theirs in zip(self.groups, other.groups, strict=True)
            ]
        )

    def take(self, other: Preconditioner) -> None:
        """Take over the blocks that both have; the others stay."""
        theirs = other.blocks
        for key, tensors in self.blocks.items():
            for name, tensor in tensors.items():
                if key in theirs:
                    tensor.copy_(theirs[key][name])

    def restricted(self, keys: Collection[str]) -> Preconditioner:
        """The blocks of these names."""
        groups = [group.only(keys) for group in self.groups]
        return Preconditioner([group for group in groups if group is not None], self.history)

    def is_finite(self) -> bool:
        """By the sums: a NaN or an infinity anywhere makes one, and a sum is the cheapest pass over a tensor."""
        return all(bool(tensor.sum().isfinite()) for group in self.groups for tensor in group.tensors.values())

    def state_dict(self) -> dict[str, Any]:
        """Tensors and builtins alone: the blocks by name, and the history."""
        return {"blocks": self.clone().blocks, "history": list(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the blocks of a preconditioner with the same names and structures; device and dtype stay."""
        blocks = _blocks_of(state)
        mine = self.blocks
        for key in blocks:
            if key not in mine:
                raise unknown("block", key, mine)
        for key, tensors in mine.items():
            if key not in blocks:
                raise LLQRError(f"the state has no block for {key!r}")
            wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            given = {name: tuple(tensor.shape) for name, tensor in blocks[key].items()}
            if wanted != given:
                raise LLQRError(f"the state's block for {key!r} has tensors {given}, and here it has {wanted}")
        for key, tensors in mine.items():
            for name, tensor in tensors.items():
                tensor.copy_(blocks[key][name])
        self.history = list(state["history"])

    def check_same_blocks(self, other: Preconditioner) -> None:
        """Raise unless the two have blocks of the same names, structures and shapes."""
        if not isinstance(other, Preconditioner):
            raise LLQRError(f"a Preconditioner is wanted here, not {type(other).__name__}")
        mine, theirs = (
            {key: (group.structure, group.shapes) for group in u.groups for key in group.keys} for u in (self, other)
        )
        different = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        if different:
            raise LLQRError(
                f"the two preconditioners don't have the same block for {', '.join(map(repr, different[:5]))}"
            )

    def __repr__(self) -> str:
        lines = [f"Preconditioner({sum(len(group.keys) for group in self.groups)} blocks, {self.memory:,} bytes"]
        for group in self.groups:
            sizes = ", ".join(f"{name}{tuple(tensor.shape[1:])}" for name, tensor in group.tensors.items())
            keys = ", ".join(group.keys[:3]) + (f", … ({len(group.keys)})" if len(group.keys) > 3 else "")
            lines.append(f"  {group.structure!r}: {sizes} for {keys}")
        return "\n".join(lines) + ")"

    def _replaced(self, tensors: Sequence[dict[str, Tensor]]) -> Preconditioner:
        groups = [group.holding(mapping) for group, mapping in zip(self.groups, tensors, strict=True)]
        return Preconditioner(groups, self.history)


def _blocks_of(state: object) -> Mapping[str, Mapping[str, Tensor]]:
    """The blocks in a state, which has to look like one."""
    if not isinstance(state, Mapping) or not isinstance(state.get("history"), Sequence):
        raise _no_state()
    blocks = state.get("blocks")
    if not isinstance(blocks, Mapping) or not all(isinstance(block, Mapping) for block in blocks.values()):
        raise _no_state()
    if not all(isinstance(tensor, Tensor) for block in blocks.values() for tensor in block.values()):
        raise _no_state()
    if not all(isinstance(value, float) for value in state["history"]):
        raise LLQRError("the 'history' of the state isn't a list of numbers")
    for key, block in blocks.items():
        check_tensors(f"the state's block for {key!r}", block)
    return blocks


def _no_state() -> LLQRError:
    return LLQRError(
        "this isn't the state_dict() of a Preconditioner, which has 'blocks' with mappings of tensors, and a 'history'"
    )
