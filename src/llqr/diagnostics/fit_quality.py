"""The spectra of U, and how much of what a fresh fit would gain it still gains on another batch.

Scalars and diagonals are their own eigenvalues. The singular values of a Kronecker product are the products of those of its
factors. Small blocks are formed. For the rest (E-KFAC: symmetric, but nothing keeps its bases orthogonal) the distribution of
eigenvalues is that of Lanczos quadrature: from random unit vectors, Ritz values with the squares of their first components as
weights; of UᵀU, for singular values, where U isn't symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from llqr.checks import Inputs, Loss
from llqr.diagnostics.comparison import dot
from llqr.errors import LLQRError
from llqr.paper import PaperLLQR
from llqr.preconditioner import Preconditioner
from llqr.refit import fit
from llqr.solvers import Quadratic, Solver
from llqr.structures import Kronecker
from llqr.structures.stacks import Group, StructureSpec

SMALL = 512
"""Numbers in a block up to which it is formed."""
LANCZOS_STEPS, PROBES = 48, 4
MOST = 2**20
"""Singular values of a Kronecker product that are kept; of longer factors, that many evenly chosen ones."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

Kind = Literal["eigenvalues", "singular values"]
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues or singular values of a block in increasing order, with weights that add up to 1."""

    values: Tensor
    weights: Tensor
    kind: Kind
    exact: bool
    """Or else an estimated distribution; its ends are good, and lie inside the true ones."""

    def quantiles(self, at: Sequence[float] = QUANTILES) -> list[float]:
        """The least value with at least so much of the weight at or below it."""
        reached = self.weights.cumsum(0)
        places = torch.searchsorted(reached, torch.tensor(at, dtype=reached.dtype) - 1e-9)
        return [float(value) for value in self.values[places.clamp_max(len(self.values) - 1)]]

    def histogram_sample(self, count: int = 1000) -> Tensor:
        """So many values that are distributed as the spectrum is, for plots that take samples."""
        return torch.tensor(self.quantiles([(i + 0.5) / count for i in range(count)]))


def spectra(u: Preconditioner, small: int = SMALL) -> dict[str, Spectrum]:
    """The spectrum of each block, under the names of `u.blocks`."""
    if not isinstance(u, Preconditioner):
        raise LLQRError(
            f"spectra are those of a Preconditioner, not of a {type(u).__name__}; LLQR.paper has one after its first refit, in "
            "optimizer.preconditioner"
        )
    if not u.is_finite():
        raise LLQRError("U isn't finite: it has no spectrum")
    return {key: _spectrum(group, i, small) for group in u.groups for i, key in enumerate(group.keys)}


def _spectrum(group: Group, index: int, small: int) -> Spectrum:
    structure, shape = group.structure, group.shape
    tensors = {name: stack[index : index + 1] for name, stack in group.tensors.items()}
    multiplier = structure.multiplier(shape)
    if multiplier is not None:
        return _listed(tensors[multiplier].reshape(-1), "eigenvalues")
    if isinstance(structure, Kronecker):
        return _of_factors([stack[0].cpu().double() for stack in tensors.values()])
    size = math.prod(shape)
    if size <= small:
        units = torch.eye(size, dtype=group.dtype, device=next(iter(tensors.values())).device)
        repeated = {name: stack.expand(size, *stack.shape[1:]) for name, stack in tensors.items()}
        columns = structure.apply(repeated, units.reshape(size, *shape)).reshape(size, size).mT
        return _of_matrix(columns.cpu().double())

    def product(vector: Tensor) -> Tensor:
        return structure.apply(tensors, vector.reshape(1, *shape)).reshape(-1)

    like = next(iter(tensors.values())).new_empty(size)
    return _by_lanczos(product, like)


def _listed(values: Tensor, kind: Kind, exact: bool = True) -> Spectrum:
    ordered = values.detach().cpu().double().sort().values
    return Spectrum(ordered, torch.full_like(ordered, 1 / len(ordered)), kind, exact)


def _of_matrix(matrix: Tensor) -> Spectrum:
    if (matrix - matrix.mT).norm() <= 1e-5 * matrix.norm():
        return _listed(torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT)), "eigenvalues")
    return _listed(torch.linalg.svdvals(matrix), "singular values")


def _of_factors(factors: Sequence[Tensor]) -> Spectrum:
    singular = [factor.abs() if factor.dim() == 1 else torch.linalg.svdvals(factor) for factor in factors]
    exact = math.prod(map(len, singular)) <= MOST
    if not exact:
        most = int(MOST ** (1 / len(singular)))
        singular = [_thinned(values, most) for values in singular]
    values = singular[0]
    for other in singular[1:]:
        values = torch.outer(values, other).reshape(-1)
    return _listed(values, "singular values", exact)


def _thinned(values: Tensor, most: int) -> Tensor:
    ordered = values.sort().values
    return ordered[torch.linspace(0, len(ordered) - 1, min(most, len(ordered))).round().long()]


def _by_lanczos(product: Product, like: Tensor) -> Spectrum:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(len(like), generator=generator).to(like) for _ in range(2))
    left, right = torch.dot(x, product(y)), torch.dot(product(x), y)
    symmetric = bool((left - right).abs() <= 1e-4 * x.norm() * product(y).norm())
    operator = product if symmetric else _squared(product, like)
    values, weights = [], []
    for _ in range(PROBES):
        start = torch.randn(len(like), generator=generator).to(like)
        nodes, shares = _lanczos(operator, start / start.norm())
        values.append(nodes)
        weights.append(shares / PROBES)
    nodes, shares = torch.cat(values), torch.cat(weights)
    if not symmetric:
        nodes = nodes.clamp_min(0).sqrt()
    order = nodes.argsort()
    return Spectrum(nodes[order], shares[order], "eigenvalues" if symmetric else "singular values", False)


def _squared(product: Product, like: Tensor) -> Product:
    """UᵀU; Uᵀ by the derivative of x ↦ U x, which is linear."""
    transposed = torch.func.vjp(product, torch.zeros_like(like))[1]
    return lambda vector: transposed(product(vector))[0]


def _lanczos(operator: Product, start: Tensor) -> tuple[Tensor, Tensor]:
    """Ritz values, and the weights that `start` gives them. Every vector is made orthogonal to all before it, twice."""
    basis = [start]
    diagonal, beside = [], []
    for _ in range(min(LANCZOS_STEPS, len(start))):
        vector = operator(basis[-1])
        diagonal.append(float(torch.dot(vector, basis[-1])))
        known = torch.stack(basis)
        for _ in range(2):
            vector = vector - known.mT @ (known @ vector)
        size = float(vector.norm())
        if size <= 1e-6 * max(map(abs, diagonal)):
            break
        beside.append(size)
        basis.append(vector / size)
    below = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(below, -1) + torch.diag(below, 1)
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors[0].square()


@dataclass(frozen=True)
class Objectives:
    """J of the identity, of the present U and of a freshly fitted one, on the same batch."""

    identity: float
    current: float
    fresh: float

    @property
    def staleness(self) -> float:
        """0 where the present U is as good as a fresh one, 1 where it is no better than the identity, more where it is worse.

        NaN where a fresh fit gains nothing over the identity.
        """
        gain = self.identity - self.fresh
        return (self.current - self.fresh) / gain if gain > 0 else math.nan


@dataclass(frozen=True)
class Staleness:
    """J(U) as it is, and at the best multiple of each U: the first tells of length and direction, the second of direction."""

    as_is: Objectives
    along: Objectives


def compare_fits(
    q: Quadratic,
    current: Preconditioner,
    structure: StructureSpec,
    solver: Solver | None = None,
    steps: int = 25,
) -> Staleness:
    """Hold a U against a fresh fit with this structure, solver and number of steps, and against the identity."""
    fresh = fit(q, structure, solver, steps)
    identity = Preconditioner.identity(q.gradient, "scalar")
    pairs = [_objectives(q, u) for u in (identity, current, fresh)]
    return Staleness(Objectives(*(pair[0] for pair in pairs)), Objectives(*(pair[1] for pair in pairs)))


def staleness(optimizer: PaperLLQR, inputs: Inputs, targets: Any, loss_fn: Loss) -> Staleness:
    """How stale the U of an optimizer is on a batch: by the objective, structure and solver of its own refits.

    A fresh fit is one from the identity, without the moving average. Neither model nor optimizer is changed.
    """
    if not isinstance(optimizer, PaperLLQR):
        raise LLQRError(f"staleness is that of the U of LLQR.paper; this is a {type(optimizer).__name__}")
    if optimizer.preconditioner is None:
        raise LLQRError("there is no U yet: it is the identity until the first refit")
    refuse_ranks(optimizer)
    q = optimizer.objective(inputs, targets, loss_fn)
    parameters = {name: p for name, p in optimizer.model.named_parameters() if name in q.gradient}
    current = optimizer._refit.current(parameters, optimizer.preconditioner)
    return compare_fits(q, current, current.structures, optimizer.solver, optimizer.steps)


def refuse_ranks(optimizer: Optimizer) -> None:
    """Raise where a look at one process would be taken for one at all that train together."""
    if isinstance(optimizer, PaperLLQR) and optimizer.processes.several:
        raise LLQRError(
            "how stale U is can be told where one process trains, and not yet among several: look at a training of one process"
        )


def _objectives(q: Quadratic, u: Preconditioner) -> tuple[float, float]:
    """J(U), and the least J(aU) for a ≥ 0."""
    step = {name: -part for name, part in u.apply(dict(q.gradient)).items()}
    decline, curved = dot(q.gradient, step), dot(step, q.curvature(step))
    best = max(0.0, -decline / curved) if curved > 0 else 1.0
    return decline + 0.5 * curved, best * decline + 0.5 * best**2 * curved
