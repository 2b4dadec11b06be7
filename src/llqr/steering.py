"""Steering: U g at every step, for as little as it can cost, and g itself for a block where U g isn't finite.

A step pays this each time, so what is the same from step to step (which blocks have a gradient, which are a plain product of
numbers) is found once, and kept as long as U and the names of the gradients stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llqr.structures.stacks import Group


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
