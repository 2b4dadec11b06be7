"""Steering: U g at every step, with the guard that no block turns its gradient around, for as little as it can cost.

A step pays this each time, so what is the same from step to step (which blocks have a gradient, which are a plain product of
numbers, which of those are positive) is found once, and kept as long as U and the names of the gradients stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llqr.structures.stacks import Group


class Steered(NamedTuple):
    """Preconditioned gradients, and the blocks that U would have turned around, or that weren't finite."""

    gradients: dict[str, Tensor]
    turned: list[str]
    nonfinite: list[str]


class Factor(NamedTuple):
    """A block that multiplies its gradient number by number."""

    name: str
    tensor: Tensor
    positive: bool
    """All of it is: then ⟨g, U g⟩ > 0 for every g but 0, and what is left to ask is whether g is finite."""


class Steering:
    """U for gradients of certain names and dtypes."""

    def __init__(self, groups: Sequence[Group], gradients: Mapping[str, Tensor]) -> None:
        self._key = _key(groups, gradients)
        self._held = list(groups)  # their tensors' ids, in the key, stay theirs
        self._order = list(gradients)
        self._factors: list[Factor] = []
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
                self._factors += _factors(chosen, chosen.tensors[multiplier])
            else:
                self._stacks.append(chosen)
        self._multipliers = [factor.tensor for factor in self._factors]
        self._mixed = [i for i, factor in enumerate(self._factors) if not factor.positive]
        self._largest = [_largest(group, {**gradients, **self._zeros}) for group in self._stacks]

    def fits(self, groups: Sequence[Group], gradients: Mapping[str, Tensor]) -> bool:
        """Whether U and the names are still those that it was made for."""
        return self._key == _key(groups, gradients)

    def __call__(self, gradients: Mapping[str, Tensor]) -> Steered:
        """U g, block by block where ⟨g, U g⟩ > 0, and g itself where U would turn it around or it isn't finite."""
        values = {**gradients, **self._zeros} if self._zeros else gradients
        plain = [values[factor.name] for factor in self._factors]
        products = list(torch._foreach_mul(plain, self._multipliers)) if plain else []
        stacks = [group.gather(values) for group in self._stacks]
        results = [group.structure.apply(group.tensors, x) for group, x in zip(self._stacks, stacks, strict=True)]
        signs = self._signs(plain, products, stacks, results)
        steered = Steered({}, [], [])
        for i, factor in enumerate(self._factors):
            if not (math.isfinite(signs[i]) if factor.positive else 0 < signs[i] < math.inf):
                products[i] = plain[i].clone()
                _note(steered, factor.name, math.nan if factor.positive else signs[i])
            steered.gradients[factor.name] = products[i]
        at = len(products)
        for group, x, y in zip(self._stacks, stacks, results, strict=True):
            for i, key in enumerate(group.keys):
                if not 0 < signs[at + i] < math.inf:
                    y[i] = x[i]
                    _note(steered, key, signs[at + i])
            at += len(group.keys)
            steered.gradients.update(group.scatter(y, values))
        return steered._replace(
            gradients={name: steered.gradients[name] for name in self._order if name in steered.gradients}
        )

    def _signs(
        self, plain: list[Tensor], products: list[Tensor], stacks: list[Tensor], results: list[Tensor]
    ) -> list[float]:
        """⟨g, U g⟩ of each block, in one transfer. For positive factors it is the sum of U g, which is as finite as g is."""
        sums = [product.sum() for product in products]
        for i in self._mixed:
            sums[i] = torch.dot(plain[i].reshape(-1), products[i].reshape(-1))
        parts = [torch.stack(sums)] if sums else []
        parts += [_block_dots(x, y, m) for x, y, m in zip(stacks, results, self._largest, strict=True)]
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


def _factors(group: Group, stack: Tensor) -> list[Factor]:
    positive = (stack > 0).reshape(len(group.keys), -1).all(1).tolist()
    return [
        Factor(name, block, sure) for (name,), block, sure in zip(group.members, stack.unbind(), positive, strict=True)
    ]


def _note(steered: Steered, key: str, sign: float) -> None:
    if sign != 0:
        (steered.turned if sign < 0 else steered.nonfinite).append(key)


def _largest(group: Group, values: Mapping[str, Tensor]) -> Tensor | None:
    """The largest number that each block's gradients can hold, where that is less than what U g is computed in."""
    largest = [min(torch.finfo(values[name].dtype).max for name in names) for names in group.members]
    if min(largest) >= torch.finfo(group.dtype).max:
        return None
    return next(iter(group.tensors.values())).new_tensor(largest)


def _block_dots(x: Tensor, y: Tensor, largest: Tensor | None) -> Tensor:
    """⟨x, y⟩ of each block of a stack; infinite where y wouldn't be finite any more in the dtype that it goes back to."""
    count = x.shape[0]
    dots = torch.bmm(x.reshape(count, 1, -1), y.reshape(count, -1, 1)).reshape(count)
    return (
        dots if largest is None else dots.masked_fill((y.reshape(count, -1).abs() > largest[:, None]).any(1), math.inf)
    )
