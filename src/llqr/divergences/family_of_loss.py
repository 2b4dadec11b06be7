"""Whether an output's family is that of the loss, as far as the gradient tells that the loss sends back to the output."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from llqr.curvature.precision import raised
from llqr.divergences import OutputTerm
from llqr.divergences.families import Bernoulli, Categorical, Gaussian
from llqr.errors import LLQRError

NOT_CATEGORICAL = 0.1
"""How far from zero the gradient of a loss may sum up over the classes, as a share of its size; rounding leaves far less."""
ROUNDING = 1e-5
"""What rounding in float32 leaves of a sum that is zero, as a share of the size of what is summed."""
SUM = 1e-3
"""How far from a sum's gradient that of a loss may be, to be one."""
PROBABILITIES = 0.01
"""How far from one the sum of probabilities may be."""


def check_families(terms: Iterable[object], slope: Tensor, output: Tensor) -> None:
    """`check_family` for all terms of an output."""
    about = [term for term in terms if isinstance(term, OutputTerm)]
    has_classes = any(isinstance(getattr(term, "family", None), Categorical) for term in about)
    for term in about:
        check_family(term, slope, output, has_classes)


def check_family(term: OutputTerm, slope: Tensor | None, output: Tensor, has_classes: bool) -> None:
    """Raise where the family is one of classes and the loss isn't, or the loss is and no term `has_classes`.

    A loss of classes doesn't change by logits that move together.
    """
    family = getattr(term, "family", None)
    if slope is None:
        return
    without = not has_classes and isinstance(family, (Bernoulli, Gaussian))
    if without and (dim := _dimension_of_classes(slope, output)) is not None:
        right = "'categorical'" if dim == output.dim() - 1 else f"Categorical(dim={dim})"
        raise LLQRError(
            f"the loss is that of a categorical distribution along dimension {dim} of the output: its gradient there is that "
            f"of a cross-entropy. In place of {term!r} write KL(family={right}), or take LLQR or Exact without a divergence"
        )
    if not isinstance(family, Categorical):
        return
    if float(raised(output).logsumexp(family.dim).abs().max()) < PROBABILITIES:
        return  # log-probabilities, which a log_softmax has made: their loss sees where they move together
    slope = raised(slope)
    if float(slope.sum(family.dim).norm()) > NOT_CATEGORICAL * float(slope.norm()):
        raise LLQRError(
            f"the loss isn't that of a categorical distribution along dimension {family.dim} of the output: its gradient there "
            f"doesn't sum to zero. In place of {term!r} write KL(family='bernoulli') for one logit a variable, "
            "KL(family='gaussian') for regression, KL(family=Categorical(dim=…)) for classes along another dimension, or take "
            "LLQR or Exact without a divergence"
        )


def summed(term: OutputTerm, slope: Tensor, output: Tensor) -> int:
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
