"""LLQR: steps in the direction of steepest descent under a divergence, as long as the base's own."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.base_step import Momentum, decay, groups_of
from llqr.checks import tensors_in
from llqr.linear_maps import LinearMap, Sides, Use, find_uses
from llqr.loop.gradients import Stepped, gradients_of, stepped_parameters
from llqr.loop.schedule import Every, Schedule
from llqr.loop.stats import Stats
from llqr.loop.wrapping import Wrapping
from llqr.paper import PaperLLQR
from llqr.statistics import Block, Sums
from llqr.structures.assign import StructureSpec, assign
import os
PER=os.environ.get("PER","map")
SKIP=os.environ.get("SKIP","").split()


def often_at_first(step: int) -> bool:
    k = 0
    while k < step:
        k += min(1 + k // 10, GAP)
    return k == step
GAP=int(os.environ.get("GAP","25"))


class Collector:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.names: dict[int, str] = {}
        self.structures = {}
        self.sums: dict[str, Sums] = {}

    def listen(self, module, args, output):
        if not torch.is_grad_enabled() or not self.schedule.due():
            return
        for use in find_uses(tensors_in(output), self.names):
            if use.map.weight in SKIP: continue
            use.node.register_prehook(partial(self._add, use.map, use.sides))

    @torch.no_grad()
    def _add(self, map_: LinearMap, sides, gradients):
        if gradients[0] is None: return
        if map_.key not in self.sums:
            self.sums[map_.key] = Sums(map_, self.structures[map_.weight])
        self.sums[map_.key].add(sides(gradients[0]), map_.bias is not None)

import llqr.statistics as S
S.DAMPING=float(os.environ.get("DAMP","0.1")); S.MEMORY=float(os.environ.get("MEM","0.8"))
class LLQR(Wrapping):
    """To come."""

    def __init__(self, base, model, divergence=None, structure: StructureSpec = "kfac", every: Every | None = None) -> None:
        self.model = model
        self.structure = structure
        self._schedule = Schedule(often_at_first if every is None else every)
        self._collector = Collector(self._schedule)
        self.blocks: dict[str, Block] = {}
        self._momentum = Momentum(base)
        self.stats = Stats()
        super().__init__(base)
        self._stepped = Stepped(base, model)
        model.register_forward_hook(self._collector.listen)
        self._refresh()

    def _refresh(self):
        p = self._stepped()
        self._collector.names = {id(x): n for n, x in p.items() if x.requires_grad}
        self._collector.structures = assign(self.structure, p)
        return p

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._refresh()
        if self._schedule.due():
            t = time.perf_counter()
            for key, sums in self._collector.sums.items():
                block = self.blocks.get(key)
                if block is None or block.map != sums.map:
                    block = self.blocks[key] = Block(sums.map, self._collector.structures[sums.map.weight], {})
                block.take(sums.moments())
                block.invert()
            self._collector.sums.clear()
            self.stats.seconds += time.perf_counter() - t
            self.stats.refits += 1
        groups = groups_of(self.base, parameters)
        gradients = gradients_of(parameters)
        names = [n for b in self.blocks.values() for n in b.map.members]
        old = {n: parameters[n].detach().clone() for n in names}
        self._momentum.gather(gradients, groups)
        self.base.step()
        self._schedule.go_to(self._schedule.step + 1)
        delta, m = {}, {}
        for n in names:
            m[n] = self._momentum.of(n, parameters[n], old[n], groups[n])
            d = decay(self.base, groups[n])
            if d != 1: old[n].mul_(d)
            delta[n] = parameters[n] - old[n]
        for b in self.blocks.values():
            step = b.apply(m)
            length = torch.stack([delta[n].norm() for n in b.map.members]).norm()
            new = {n: torch.empty_like(old[n]) for n in b.map.members}
            b.map.write(step, new)
            if PER == "map":
                ratio = length / step.norm()
                for n in b.map.members:
                    parameters[n].copy_(old[n]).sub_(new[n] * ratio)
            else:
                for n in b.map.members:
                    parameters[n].copy_(old[n]).sub_(new[n] * (delta[n].norm() / new[n].norm()))
        return loss

    @staticmethod
    def paper(base: Optimizer, model: nn.Module, *args: Any, **kwargs: Any) -> PaperLLQR:
        """Algorithm 1 of the paper: U fitted along one gradient, and U g in place of the gradient g."""
        return PaperLLQR(base, model, *args, **kwargs)
