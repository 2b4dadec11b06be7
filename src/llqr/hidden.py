"""Backward formulas written by hand, and whether they hide a part of themselves from the next derivative.

A `torch.autograd.Function` that computes with detached tensors, or keeps results of its forward in `ctx`, has right gradients
and silently wrong second derivatives. Torch's own operations don't, so only models in whose graph there is a formula written by
hand are looked at: there, differences of the gradient are held against its derivative. In double precision, whatever the model
is in: the steps can be so short then that no unit is at a kink between them, and rounding doesn't matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llqr.errors import NotTwiceDifferentiableError
from llqr.exact.derivatives import graph_nodes

STEP = 1e-9
"""Length of a difference, relative to the point."""
TOLERANCE = 1e-3
"""Relative; what is hidden is usually a large part of the whole."""
NOISE = 1e-14
"""Of the numbers that differences are taken of."""

Run = Callable[[list[Tensor]], Tensor]
Scalar = Callable[[list[Tensor]], Tensor]


def handwritten(outputs: Sequence[Tensor]) -> list[str]:
    """The names of the functions in a graph whose backward isn't torch's own."""
    names = set()
    for node in graph_nodes(outputs):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            if not type(node)._forward_cls.__module__.startswith("llqr.rules."):  # type: ignore[attr-defined]
                names.add(type(node).__name__.removesuffix("Backward"))
        elif "CppNode" in node.name():
            names.add(node.name())
    return sorted(names)


def check_model(outputs: Sequence[Tensor], run: Run, point: Sequence[Tensor], slope: Tensor) -> None:
    """Raise where a formula in the model's graph hides: `run` is the model in double precision, `slope` the loss's ∇ℓ(x_N)."""
    names = handwritten(outputs[:1])
    if not names:
        return
    start, slope = outputs[0].detach().double(), slope.double()
    size = float(slope.norm() * start.norm())
    stiffness = float(slope.norm() / (start.norm() + 1e-300))

    def curved(leaves: list[Tensor]) -> Tensor:
        """Any function of the output will do that has a slope (for what is kept) and a curvature (for what is cut)."""
        change = run(leaves) - start
        return (change * (slope + 0.5 * stiffness * change)).sum()

    if _judged(curved, [tensor.detach().double() for tensor in point], size):
        raise NotTwiceDifferentiableError(
            "the second derivatives that Newton asks for are wrong, because a backward formula written by hand hides a part "
            f"of itself from them ({', '.join(names)}): write it in differentiable operations of the inputs that "
            "ctx.save_for_backward saved, nothing detached or kept from the forward pass; or use GaussNewton or KL"
        )


def check_loss(loss: Callable[[Tensor], Tensor], output: Tensor) -> None:
    """Raise where a formula in the loss hides."""
    with torch.enable_grad():
        value = loss(output.detach().requires_grad_())
    names = handwritten([value])
    if names and _judged(lambda leaves: loss(leaves[0]), [output.detach().double()], abs(float(value.detach()))):
        raise NotTwiceDifferentiableError(
            "the second derivative of the loss is wrong, because a backward formula written by hand hides a part of itself "
            f"from it ({', '.join(names)}): use a loss of torch's own operations here, or KL, which doesn't need the loss's"
        )


def _judged(function: Scalar, point: Sequence[Tensor], size: float) -> bool:
    """`hides`, where that can be told."""

    def precise(leaves: list[Tensor]) -> Tensor:
        value = function(leaves)
        if value.dtype != torch.float64:
            raise TypeError("computed in another precision")
        return value

    try:
        with torch.autocast(point[0].device.type, enabled=False):
            return hides(precise, point, size)
    except Exception:  # it doesn't run in double precision: a kernel, a dtype that is written out
        return False


def hides(function: Scalar, point: Sequence[Tensor], size: float) -> bool:
    """Whether the second derivative of a scalar function isn't the derivative of its gradient, while the gradient is one.

    `point` is in double precision, and so is what the function computes; `size` is that of the numbers that its value is summed
    of. A gradient that isn't the function's own (straight-through estimators) is meant so: nothing is said about it.
    """
    direction = _direction(point)
    leaves = [tensor.detach().requires_grad_() for tensor in point]
    with torch.enable_grad():
        value = function(leaves)
        slope = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
    product = _product(slope, leaves, direction)
    along = _dot(slope, direction)
    for length in (STEP, -STEP):  # a kink in between is on one side
        moved = [
            tensor.detach().add(v, alpha=length).requires_grad_() for tensor, v in zip(point, direction, strict=True)
        ]
        with torch.enable_grad():
            other = function(moved)
            there = torch.autograd.grad(other, moved, materialize_grads=True)
        climbed = float(other.detach() - value.detach()) / length
        if abs(climbed - along) > TOLERANCE * max(abs(climbed), abs(along)) + NOISE / STEP * size:
            return False
        turned = [(b - a.detach()) / length for a, b in zip(slope, there, strict=True)]
        difference = _norm([a - b for a, b in zip(turned, product, strict=True)])
        scale = max(_norm(turned), _norm(product))
        if not difference > TOLERANCE * scale + NOISE / STEP * _norm(slope):
            return False
    return True


def _direction(point: Sequence[Tensor]) -> list[Tensor]:
    """Random, each tensor as large as the one it moves; the same at every call, and no draw from torch's stream."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device) for tensor in point]
    sizes = [float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0 for tensor in point]
    typical = max(sizes, default=0.0) or 1.0
    return [v * max(size, 1e-3 * typical) for v, size in zip(drawn, sizes, strict=True)]


def _product(slope: Sequence[Tensor], leaves: Sequence[Tensor], direction: Sequence[Tensor]) -> list[Tensor]:
    pairs = [(row, v) for row, v in zip(slope, direction, strict=True) if row.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    rows, along = zip(*pairs, strict=True)
    return list(torch.autograd.grad(rows, leaves, along, materialize_grads=True))


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((a.detach() * b).sum()) for a, b in zip(left, right, strict=True))


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.detach().square().sum()) for tensor in tensors))
