"""The optimizer and the learning rate's schedule that a configuration asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from llqr import LLQR
from llqr.divergences import KL, Divergence
from llqr.solvers import SGDM, Adam, ConjugateGradient, ScaleFree, Solver
from llqr.structures import EigenKronecker, Kronecker, Structure
from llqr_lab.experiments.config import Base, Config, Inner, Schedule, Wrapper
from llqr_lab.experiments.peers import PEERS


def optimizer(config: Config, model: nn.Module, weights: Callable[[Any], Tensor] | None = None) -> Optimizer:
    """The base, with LLQR around it if it is asked for: nothing set, or the paper's, which has to be told of padding."""
    alone, wrapper = base_of(config.base, model), config.llqr
    if config.default_llqr:
        return LLQR(alone, model)
    if wrapper is None:
        return alone
    return LLQR.paper(
        alone,
        model,
        divergence=_divergence(wrapper),
        structure=_structure(wrapper),
        every=wrapper.every,
        steps=wrapper.steps,
        solver=_solver(wrapper.solver),
        ema=wrapper.ema,
        damping=wrapper.damping,
        chunk_size=wrapper.chunk_size or None,
        warm_start=wrapper.warm_start,
        sample=wrapper.sample,
        weights=weights,
    )


def fits(optimizer: Optimizer) -> int:
    """Refits of LLQR so far, taken or not; 0 of any other."""
    stats = getattr(optimizer, "stats", None)
    return int(getattr(stats, "refits", 0)) + int(getattr(stats, "rejected", 0))


def base_of(base: Base, model: nn.Module) -> Optimizer:
    if base.name in PEERS:
        return PEERS[base.name](base, model)
    if base.name == "sgdm":
        return SGD(model.parameters(), lr=base.lr, momentum=base.momentum, weight_decay=base.weight_decay)
    betas = (base.momentum, base.beta2)
    return AdamW(model.parameters(), lr=base.lr, betas=betas, weight_decay=base.weight_decay)


def _divergence(wrapper: Wrapper) -> str | Divergence:
    if wrapper.divergence != "ngd":
        return wrapper.divergence
    return KL(reduction=cast(Literal["mean", "sum"], wrapper.reduction))


def _structure(wrapper: Wrapper) -> str | Structure:
    kinds = {"kfac": Kronecker, "ekfac": EigenKronecker}
    kind = kinds.get(wrapper.structure)
    if kind is None or kind() == kind(max_dim=wrapper.max_dim):
        return wrapper.structure
    return kind(max_dim=wrapper.max_dim)


def _solver(inner: Inner) -> Solver:
    clip = inner.clip or None
    match inner.name:
        case "sgdm":
            return SGDM(lr=inner.lr, momentum=inner.momentum, clip=clip)
        case "adam":
            return Adam(lr=inner.lr)
        case "cg":
            return ConjugateGradient()
        case _:
            return ScaleFree()


def scheduler(schedule: Schedule, optimizer: Optimizer, steps: int) -> LambdaLR:
    """The rate of step k of `steps`, in units of the base's."""
    return LambdaLR(optimizer, lambda step: rate(schedule, step, steps))


def rate(schedule: Schedule, step: int, steps: int) -> float:
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    match schedule.name:
        case "cosine":
            part = (step - schedule.warmup) / max(1, steps - schedule.warmup)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, part)))
        case "inverse-sqrt":
            return math.sqrt(schedule.warmup / (step + 1))
        case "piecewise":
            return 0.1 ** sum(step >= part * steps for part in schedule.milestones)
        case _:
            return 1.0
