"""Backward formulas written by hand, and whether they hide a part of themselves from the next derivative.

A `torch.autograd.Function` that computes with detached tensors, or keeps results of its forward in `ctx`, has right gradients
and silently wrong second derivatives. Torch's own operations don't, so only models in whose graph there is a formula written by
hand are looked at: there, differences of the gradient are held against its derivative. In double precision, whatever the model
is in: the steps can be so short then that no unit is at a kink between them, and rounding doesn't matter.

Each formula is looked at by itself, where it is called: in the whole model it may have a small part, or stand beside another
one whose gradient isn't meant to be one. The whole model is looked at for what can't be called by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from llqr.checks import frozen_rng
from llqr.errors import NotTwiceDifferentiableError
from llqr.exact.derivatives import graph_nodes

STEP = 1e-9
"""Length of a difference, relative to the point."""
TOLERANCE = 1e-3
"""Relative; what is hidden is usually a large part of the whole."""
NOISE = 1e-14
"""Of the numbers that differences are taken of."""


class Fineness(NamedTuple):
    """How differences are taken: along how long a step, and what they may be off by."""

    step: float
    tolerance: float
    noise: float
    """What rounding leaves, relative to the numbers that a value is summed of."""
    coordinates: int | None = None
    """How many of each tensor are moved; None: all. Of a few, hardly any comes to a kink."""


FINE = Fineness(STEP, TOLERANCE, NOISE)
COARSE = Fineness(1e-3, 0.05, 1e-7, 64)
"""For functions that compute in float32, whatever they are given."""

Run = Callable[[list[Tensor]], Tensor]
Scalar = Callable[[list[Tensor]], Tensor]
Call = tuple[Any, list[Any]]
"""A function written by hand, and what it was called with."""


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
    doubled = [tensor.detach().double() for tensor in point]
    whole, size = _curved(run, start, slope)
    if _any_hides(names, lambda: run(_leaves(doubled)), lambda: _judged(whole, doubled, size)):
        raise NotTwiceDifferentiableError(
            "the second derivatives that Newton asks for are wrong, because a backward formula written by hand hides a part "
            f"of itself from them ({', '.join(names)}): write it in differentiable operations of the inputs that "
            "ctx.save_for_backward saved, nothing detached or kept from the forward pass; or use GaussNewton or KL"
        )


def check_loss(loss: Callable[[Tensor], Tensor], output: Tensor) -> None:
    """Raise where a formula in the loss hides."""
    with torch.enable_grad():
        value = loss(output.detach().requires_grad_())
    names, doubled = handwritten([value]), [output.detach().double()]
    if not names:
        return
    size = abs(float(value.detach()))
    if _any_hides(
        names, lambda: loss(*_leaves(doubled)), lambda: _judged(lambda leaves: loss(leaves[0]), doubled, size)
    ):
        raise NotTwiceDifferentiableError(
            "the second derivative of the loss is wrong, because a backward formula written by hand hides a part of itself "
            f"from it ({', '.join(names)}): use a loss of torch's own operations here, or KL, which doesn't need the loss's"
        )


def _curved(run: Run, start: Tensor, slope: Tensor) -> tuple[Scalar, float]:
    """A function of what `run` gives, and the size of its numbers. Any will do that has a slope, here at `start` (for what is
    kept), and a curvature (for what is cut)."""
    stiffness = float(slope.norm() / (start.norm() + 1e-300))

    def curved(leaves: list[Tensor]) -> Tensor:
        change = run(leaves) - start
        return (change * (slope + 0.5 * stiffness * change)).sum()

    return curved, float(slope.norm() * start.norm())


def _any_hides(names: Sequence[str], run: Callable[[], Tensor], whole: Callable[[], bool | None]) -> bool:
    """Whether one of these functions does: by itself, as it is called in the run, or in the whole where that can't be told."""
    with _overheard() as calls, torch.enable_grad(), suppress(Exception):  # it may not run in double precision
        run()
    judged = {}
    for function, args in calls:
        if function.__name__ in names:
            judged[function.__name__] = verdict = _hides_by_itself(function, args)
            if verdict:
                return True
    return any(judged.get(name) is None for name in names) and bool(whole())


@contextmanager
def _overheard() -> Iterator[list[Call]]:
    """The calls in there that a backward pass goes through, with copies of what was given."""
    calls: list[Call] = []

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not kwargs and any(_leads_back(value) for value in args):
            calls.append((function, [_copied(value) for value in args]))
        return super(_SingleLevelFunction, function).apply(*args, **kwargs)

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _leads_back(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _copied(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _hides_by_itself(function: Any, args: Sequence[Any]) -> bool | None:
    places = [place for place, value in enumerate(args) if _leads_back(value)]

    def run(leaves: list[Tensor]) -> Tensor:
        given = list(args)
        for place, leaf in zip(places, leaves, strict=True):
            given[place] = leaf.clone()  # it may be changed in place
        with frozen_rng():  # it draws the same each time
            outputs = function.apply(*given)
        each = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.cat([output.reshape(-1) for output in each if _leads_back(output)])

    point = [args[place].detach() for place in places]
    try:
        with torch.enable_grad():
            start = run(_leaves(point)).detach()
    except Exception:  # it can't be called once more
        return None
    curved, size = _curved(run, start, torch.linspace(-40, 40, start.numel()).sin().to(start))
    verdict = _judged(curved, point, size)
    return _judged(curved, point, size, COARSE) if not verdict and _in_single(run, point) else verdict


def _in_single(run: Run, point: Sequence[Tensor]) -> bool:
    """Whether a function that is given doubles, or its gradient, has numbers of float32 alone."""
    if any(tensor.dtype != torch.float64 for tensor in point):
        return False
    with torch.enable_grad():
        leaves = _leaves(point)
        output = run(leaves)
        slope = torch.linspace(-40, 40, output.numel()).sin().to(output)
        try:
            found = [output, *torch.autograd.grad(output, leaves, slope, materialize_grads=True)]
        except RuntimeError:
            return False
    return any(bool(each.any()) and torch.equal(each, each.float().to(each.dtype)) for each in found)


def _leaves(point: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in point]


def _judged(function: Scalar, point: Sequence[Tensor], size: float, fineness: Fineness = FINE) -> bool | None:
    """`hides`, where that can be told; else None."""

    def precise(leaves: list[Tensor]) -> Tensor:
        value = function(leaves)
        if fineness is FINE and value.dtype != torch.float64:
            raise TypeError("computed in another precision")
        return value

    try:
        with torch.autocast(point[0].device.type, enabled=False):
            return hides(precise, point, size, fineness)
    except Exception:  # it doesn't run in double precision: a kernel, a dtype that is written out
        return None


def hides(function: Scalar, point: Sequence[Tensor], size: float, fineness: Fineness = FINE) -> bool:
    """Whether the second derivative of a scalar function isn't the derivative of its gradient, while the gradient is one.

    `point` is in double precision, and so is what the function computes; `size` is that of the numbers that its value is summed
    of. A gradient that isn't the function's own (straight-through estimators) is meant so: nothing is said about it.
    """
    step, tolerance, noise, coordinates = fineness
    direction = _direction(point, coordinates)
    leaves = _leaves(point)
    with torch.enable_grad():
        value = function(leaves)
        slope = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
    product = _product(slope, leaves, direction)
    along = _dot(slope, direction)
    for length in (step, -step):  # a kink in between is on one side
        moved = [
            tensor.detach().add(v, alpha=length).requires_grad_() for tensor, v in zip(point, direction, strict=True)
        ]
        with torch.enable_grad():
            other = function(moved)
            there = torch.autograd.grad(other, moved, materialize_grads=True)
        climbed = float(other.detach() - value.detach()) / length
        larger, floor = max(abs(climbed), abs(along)), noise / step * size
        if abs(climbed - along) > tolerance * larger + floor or (fineness is COARSE and larger < 2 * floor):
            return False
        turned = [(b - a.detach()) / length for a, b in zip(slope, there, strict=True)]
        difference = _norm([a - b for a, b in zip(turned, product, strict=True)])
        scale = max(_norm(turned), _norm(product))
        if not difference > tolerance * scale + noise / step * _norm(slope):
            return False
    return True


def _direction(point: Sequence[Tensor], coordinates: int | None = None) -> list[Tensor]:
    """Random, each tensor as large as the one it moves; the same at every call, and no draw from torch's stream."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device) for tensor in point]
    for v in drawn if coordinates is not None else ():
        v.view(-1)[torch.randperm(v.numel(), generator=generator)[coordinates:].to(v.device)] = 0
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
