"""The optimizer and the learning rate's schedule that a configuration asks for."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from llqr import LLQR
from llqr.divergences import Divergence, Intermediate, Renyi, resolve
from llqr.preconditioner import Preconditioner
from llqr.solvers import SGDM, ConjugateGradient, ScaleFree, Solver
from llqr.solvers import Adam as InnerAdam
from llqr.solvers.problem import Problem
from llqr.structures import EigenKronecker, Kronecker, Structure
from llqr_lab.data.batches import Batch
from llqr_lab.errors import ConfigError, suggestion
from llqr_lab.experiments.config import DISTRIBUTIONAL, Base, Config, Inner, Schedule, Wrapper
from llqr_lab.experiments.peers import PEERS
from llqr_lab.tasks import Task


@dataclass(frozen=True)
class Decaying(Solver):
    """A solver whose learning rate is times a share that falls in the course of the training."""

    solver: SGDM | InnerAdam
    share: Callable[[], float]

    def solve(self, problem: Problem, u: Preconditioner, steps: int) -> Preconditioner:
        return replace(self.solver, lr=self.share() * self.solver.lr).solve(problem, u, steps)


def optimizer(
    config: Config,
    model: nn.Module,
    task: Task | None = None,
    share: Callable[[], float] = lambda: 1.0,
    fresh: Callable[[], Batch] | None = None,
) -> Optimizer:
    """The base, with LLQR around it if it is asked for: nothing set, or the paper's, which has to be told of padding.

    `share` is of the inner learning rate now, `fresh` gives batches of their own to refits; both where a setting wants them.
    """
    alone, wrapper = base_of(config.base, model), config.llqr
    if config.default_llqr:
        return LLQR(alone, model)
    if wrapper is None:
        return alone
    own_batch = task is not None and wrapper.fresh_batch
    return LLQR.paper(
        alone,
        model,
        divergence=_divergence(wrapper, model),
        structure=_structure(wrapper),
        every=wrapper.every,
        steps=wrapper.steps,
        solver=_solver(wrapper.solver, share),
        ema=wrapper.ema,
        damping=wrapper.damping,
        chunk_size=wrapper.chunk_size or None,
        segments=wrapper.segments,
        warm_start=wrapper.warm_start,
        weights=task.weights if task else None,
        loss_fn=task.loss if task and own_batch else None,
        refit_batch=fresh if own_batch else None,
    )


def base_of(base: Base, model: nn.Module) -> Optimizer:
    if base.name in PEERS:
        return PEERS[base.name](base, model)
    if base.name == "sgdm":
        return SGD(model.parameters(), lr=base.lr, momentum=base.momentum, weight_decay=base.weight_decay)
    kind = Adam if base.name == "adam" else AdamW
    return kind(model.parameters(), lr=base.lr, betas=(base.momentum, base.beta2), weight_decay=base.weight_decay)


def _divergence(wrapper: Wrapper, model: nn.Module) -> Divergence:
    reduction = wrapper.reduction
    renyi = wrapper.divergence == "renyi"
    found = Renyi(wrapper.order, reduction=reduction) if renyi else resolve(wrapper.divergence, reduction)
    modules = dict(model.named_modules())
    for name in wrapper.intermediate:
        if name not in modules:
            raise ConfigError(f"'llqr.intermediate': the model has no module '{name}'{suggestion(name, modules)}")
    if not wrapper.intermediate:
        return found
    added = reduction if wrapper.divergence in DISTRIBUTIONAL else "mean"  # as the loss, which the others are of
    return found + Intermediate(dict.fromkeys(wrapper.intermediate, wrapper.intermediate_weight), reduction=added)


def _structure(wrapper: Wrapper) -> str | Structure:
    kind = {"kfac": Kronecker, "ekfac": EigenKronecker}.get(wrapper.structure)
    if kind is None or kind() == kind(max_dim=wrapper.max_dim):
        return wrapper.structure
    return kind(max_dim=wrapper.max_dim)


def _solver(inner: Inner, share: Callable[[], float]) -> Solver:
    if inner.name in ("cg", "scale-free"):
        return ConjugateGradient() if inner.name == "cg" else ScaleFree()
    clip = inner.clip or None
    sgdm = inner.name == "sgdm"
    found = SGDM(lr=inner.lr, momentum=inner.momentum, clip=clip) if sgdm else InnerAdam(lr=inner.lr, clip=clip)
    return found if inner.schedule == "constant" else Decaying(found, share)


def rate(schedule: Schedule, step: int, steps: int) -> float:
    """Of a step of so many, in units of the base's."""
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
