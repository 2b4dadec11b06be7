"""Values in one tensor: what a stage passes on, or an activation and parameters together, as the state that an LQR knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from llqr.errors import ChainError


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
        self._mixed = len({leaf.dtype for leaf in self._leaves if _varies(leaf)}) > 1
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
        leaves = [next(parts).reshape(leaf.shape) if _varies(leaf) else leaf for leaf in self._leaves]
        if self._mixed:
            leaves = [
                part.to(leaf.dtype) if _varies(leaf) else leaf for part, leaf in zip(leaves, self._leaves, strict=True)
            ]
        return tree_unflatten(leaves, self._tree)


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
