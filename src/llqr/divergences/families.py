"""Families of output distributions: what the numbers that a network returns are the parameters of.

A family knows three things about a pair of distributions of one random variable, given by network outputs `p` and `q`:
the Kullback–Leibler divergence, the Rényi divergence, and the product of the Fisher matrix with a vector. An output holds
many such variables (examples, tokens, pixels): `variables` is their shape, and the divergences come back one for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from llqr.errors import LLQRError, unknown


class Family(ABC):
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

    @abstractmethod
    def variables(self, output: Tensor) -> torch.Size:
        """The shape of the array of variables that an output holds; an error where it can't hold any."""

    @abstractmethod
    def spread(self, weights: Tensor) -> Tensor:
        """One weight a variable, shaped so that it multiplies an output."""


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

    def __repr__(self) -> str:
        return "Categorical()" if self.dim == -1 else f"Categorical(dim={self.dim})"


class Elementwise(Family):
    """A family in which every number of the output is a variable of its own."""

    def variables(self, output: Tensor) -> torch.Size:
        return output.shape

    def spread(self, weights: Tensor) -> Tensor:
        return weights

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Bernoulli(Elementwise):
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


class Gaussian(Elementwise):
    """Every number of the output is the mean of a Gaussian of fixed variance."""

    def __init__(self, variance: float = 1.0) -> None:
        if not 0 < variance < float("inf"):
            raise LLQRError(f"a Gaussian's variance is a positive number, not {variance!r}")
        self.variance = variance

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        return (p - q).square() / (2 * self.variance)

    def renyi(self, p: Tensor, q: Tensor, order: float) -> Tensor:
        return order * self.kl(p, q)

    def fisher_product(self, p: Tensor, v: Tensor) -> Tensor:
        return v / self.variance

    def draw(self, p: Tensor, generator: torch.Generator) -> Tensor:
        drawn: Tensor = standard_normal(p, generator) / self.variance**0.5
        return drawn

    def __repr__(self) -> str:
        return f"Gaussian(variance={self.variance})"


def standard_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


FAMILIES: dict[str, type[Family]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def resolve_family(family: str | Family) -> Family:
    """The family that a name stands for; a family stands for itself."""
    if isinstance(family, Family):
        return family
    if family not in FAMILIES:
        raise unknown("family", family, FAMILIES)
    return FAMILIES[family]()
