"""Divided: the quadratic model of all ranks' batches, for the parameters whose blocks this rank owns."""

from __future__ import annotations

import torch
from torch import Tensor

from llqr.curvature.quadratic import QuadraticModel
from llqr.distributed.division import Division


class Divided:
    """g and H·v of the joined batch. Each rank knows its batch's share of them, and asks for those of its own blocks.

    A product takes the direction from its owners to all ranks, runs on every rank's batch, and sums the shares up at the
    owners: each way as many numbers as there are parameters. Damping is added once, by the owner.
    """

    def __init__(self, model: QuadraticModel, division: Division, joined: bool) -> None:
        """`joined`: the model's gradient is that of all the batches already."""
        self._model, self._names, self.totals = model, division.names(), division.ranks
        self._own = division.own()
        self.gradient = {name: model.gradient[name] for name in self._own} if joined else self._summed(model.gradient)

    def curvature(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        whole = {
            name: direction[name].contiguous() if name in direction else torch.empty_like(g)
            for name, g in self._model.gradient.items()
        }
        self.totals.share(self._by_owner(whole))
        product, diagonal = self._summed(self._model.product(whole)), self._model.diagonal
        return {name: torch.add(product[name], v, alpha=diagonal[name]) for name, v in direction.items()}

    def _summed(self, shares: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._own, self.totals.collect(self._by_owner(shares)), strict=True))

    def _by_owner(self, tensors: dict[str, Tensor]) -> dict[int, list[Tensor]]:
        return {owner: [tensors[name] for name in names] for owner, names in self._names.items()}
