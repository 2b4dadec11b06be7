"""Families of output distributions: what the numbers that a network returns are the parameters of.

A family knows three things about a pair of distributions of one random variable, given by network outputs `p` and `q`:
the Kullback–Leibler divergence, the Rényi divergence, and the product of the Fisher matrix with a vector. An output holds
many such variables (examples, tokens, pixels): `variables` is their shape, and the divergences come back one for each.
Whether an output's family is that of the loss is told, as far as it goes, by the gradient that the loss sends back to it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from llqr.checks import ShownWithOptions, checked_number
from llqr.curvature.precision import raised
from llqr.errors import LLQRError


class Family(ShownWithOptions, ABC):
    """A distribution of one random variable, parametrised by network outputs."""

    @abstractmethod
    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """KL(p ‖ q) for each variable."""

    @abstractmethod
    def renyi(self, p: Tensor, q: Tensor, order: float) -> Tensor:
        """log Σ p^a q^(1-a) / (a-1) for each variable, a the order (not 1)."""

    @abstractmethod
    def fisher_product(self, p: Tensor, v: Tensor) -> Tensor:
        """F(p) v for each variable: the Hessian of KL at q = p."""

    def draw(self, p: Tensor, generator: torch.Generator) -> Tensor:
        """A random vector for each variable whose second moment is F(p): the slope of -log p at a value drawn from p."""
        raise LLQRError(f"{self!r} can't be drawn from: write draw(p, generator), with the second moment F(p)")

    def variables(self, output: Tensor) -> torch.Size:
        """The shape of the array of variables that an output holds; each number is one unless this says otherwise."""
        return output.shape

    def spread(self, weights: Tensor) -> Tensor:
        """One weight a variable, shaped so that it multiplies an output."""
        return weights


class Categorical(Family):
    """Logits of a categorical distribution along `dim`."""

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        log_p, log_q = p.log_softmax(self.dim), q.log_softmax(self.dim)
        return (log_p.exp() * (log_p - log_q)).sum(self.dim)

    def renyi(self, p: Tensor, q: Tensor, order: float) -> Tensor:
        log_p, log_q = p.log_softmax(self.dim), q.log_softmax(self.dim)
        return (order * log_p + (1 - order) * log_q).logsumexp(self.dim) / (order - 1)

    def fisher_product(self, p: Tensor, v: Tensor) -> Tensor:
        probability = p.softmax(self.dim)
        scaled = probability * v
        return scaled - probability * scaled.sum(self.dim, keepdim=True)

    def draw(self, p: Tensor, generator: torch.Generator) -> Tensor:
        probability = p.softmax(self.dim)
        classes = probability.movedim(self.dim, -1)
        label = torch.multinomial(classes.reshape(-1, classes.shape[-1]), 1, generator=generator)
        drawn = torch.zeros_like(classes).scatter_(-1, label.reshape(*classes.shape[:-1], 1), 1.0)
        return probability - drawn.movedim(-1, self.dim)

    def variables(self, output: Tensor) -> torch.Size:
        if not -output.dim() <= self.dim < output.dim() or output.shape[self.dim] < 2:
            raise LLQRError(
                f"categorical logits need at least two classes along dimension {self.dim}, but the output has shape "
                f"{tuple(output.shape)}; for one logit a variable write KL(family='bernoulli'), for regression "
                "KL(family='gaussian'), for classes along another dimension KL(family=Categorical(dim=…))"
            )
        shape = list(output.shape)
        del shape[self.dim]
        return torch.Size(shape)

    def spread(self, weights: Tensor) -> Tensor:
        return weights.unsqueeze(self.dim)


class Bernoulli(Family):
    """Every number of the output is the logit of a coin."""

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        return Categorical().kl(self._two_classes(p), self._two_classes(q))

    def renyi(self, p: Tensor, q: Tensor, order: float) -> Tensor:
        return Categorical().renyi(self._two_classes(p), self._two_classes(q), order)

    def fisher_product(self, p: Tensor, v: Tensor) -> Tensor:
        probability = p.sigmoid()
        return probability * (1 - probability) * v

    def draw(self, p: Tensor, generator: torch.Generator) -> Tensor:
        probability = p.sigmoid()
        return probability - torch.bernoulli(probability, generator=generator)

    @staticmethod
    def _two_classes(logit: Tensor) -> Tensor:
        return torch.stack((logit, torch.zeros_like(logit)), dim=-1)


class Gaussian(Family):
    """Every number of the output is the mean of a Gaussian of fixed variance."""

    def __init__(self, variance: float = 1.0) -> None:
        what = "a Gaussian's variance"
        self.variance = checked_number(what, variance, lambda v: 0 < v < math.inf, "a positive number")

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        return (p - q).square() / (2 * self.variance)

    def renyi(self, p: Tensor, q: Tensor, order: float) -> Tensor:
        return order * self.kl(p, q)

    def fisher_product(self, p: Tensor, v: Tensor) -> Tensor:
        return v / self.variance

    def draw(self, p: Tensor, generator: torch.Generator) -> Tensor:
        drawn: Tensor = standard_normal(p, generator) / self.variance**0.5
        return drawn


def standard_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


FAMILIES: dict[str, type[Family]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


# --- the family of a loss ---

NOT_CATEGORICAL = 0.1
"""How far from zero the gradient of a loss may sum up over the classes, as a share of its size; rounding leaves far less."""
ROUNDING = 1e-5
"""What rounding in float32 leaves of a sum that is zero, as a share of the size of what is summed."""
SUM = 1e-3
"""How far from a sum's gradient that of a loss may be, to be one."""
PROBABILITIES = 0.01
"""How far from one the sum of probabilities may be."""


def check_families(terms: Iterable[object], slope: Tensor, output: Tensor) -> None:
    """Raise where the family of a term is one of classes and the loss, which has sent this slope back, isn't; or the loss is
    and no term's family.

    A loss of classes doesn't change by logits that move together.
    """
    if not output.numel():
        return
    families = {repr(term): term.family for term in terms if isinstance(getattr(term, "family", None), Family)}  # type: ignore[attr-defined]
    has_classes = any(isinstance(family, Categorical) for family in families.values())
    for name, family in families.items():
        if isinstance(family, Categorical):
            if float(raised(output).logsumexp(family.dim).abs().max()) < PROBABILITIES:
                continue  # log-probabilities, which a log_softmax has made: their loss sees where they move together
            if float(raised(slope).sum(family.dim).norm()) > NOT_CATEGORICAL * float(raised(slope).norm()):
                raise LLQRError(
                    f"the loss isn't that of a categorical distribution along dimension {family.dim} of the output: its "
                    f"gradient there doesn't sum to zero. In place of {name} write KL(family='bernoulli') for one logit a "
                    "variable, KL(family='gaussian') for regression, KL(family=Categorical(dim=…)) for classes along another "
                    "dimension, or take LLQR or Exact without a divergence"
                )
        elif not has_classes and isinstance(family, (Bernoulli, Gaussian)):
            dim = _dimension_of_classes(slope, output)
            if dim is not None:
                right = "'categorical'" if dim == output.dim() - 1 else f"Categorical(dim={dim})"
                raise LLQRError(
                    f"the loss is that of a categorical distribution along dimension {dim} of the output: its gradient there "
                    f"is that of a cross-entropy. In place of {name} write KL(family={right}), or take LLQR or Exact without "
                    "a divergence"
                )


def summed(term: object, slope: Tensor, output: Tensor) -> int:
    """How many variables a loss adds up, where the gradient tells that it does; else 0.

    That of a sum of cross-entropies is p - y at each variable, of a mean it is that over their number. A mean that a GradScaler
    has multiplied by just that number looks the same: in float16, where there may be one, nothing is said.
    """
    family = getattr(term, "family", None)
    if slope.dtype == torch.float16 or not isinstance(family, (Bernoulli, Categorical)):
        return 0
    rounding = max(SUM, 2 * torch.finfo(slope.dtype).eps)
    slope, output = raised(slope), raised(output)
    if isinstance(family, Bernoulli):
        p, count = output.sigmoid(), slope.numel()
    else:
        seen = slope.ne(0).any(family.dim, keepdim=True)  # what isn't is padding
        p, count = output.softmax(family.dim) * seen, int(seen.sum())
    gap = slope - (p - (p - slope).round().clamp(0, 1))
    size = float(slope.norm())
    return count if count > 1 and size > 0 and float(gap.norm()) <= rounding * size else 0


def _dimension_of_classes(slope: Tensor, output: Tensor) -> int | None:
    """The dimension of logits whose cross-entropy has this slope: class probabilities, less 1 for the class that was right.

    They sum to zero, and one at most is negative: losses that don't see the mean of the output have many that are. Outputs
    that are probabilities themselves are left out, since their squared error has such a slope too.
    """
    rounding = max(ROUNDING, torch.finfo(slope.dtype).eps)
    slope = raised(slope)
    size = float(slope.norm())
    for dim in sorted({output.dim() - 1, 1} & set(range(1, output.dim())), reverse=True):
        if (
            output.shape[dim] > 2
            and 0 < size < math.inf
            and float(slope.sum(dim).norm()) <= rounding * size
            and int((slope < 0).sum(dim).max()) == 1
            and float((output.sum(dim) - 1).abs().max()) > PROBABILITIES
        ):
            return dim
    return None
