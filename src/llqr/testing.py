"""Checks for structures and divergences of your own: call them once, in a test, before a training is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llqr.checks import bound
from llqr.divergences import BasePoint, Divergence, OutputTerm
from llqr.errors import LLQRError
from llqr.structures.base import Structure

SHAPES = ((4, 3), (5,), (3, 2, 2, 2))
"""Of a matrix, a bias and a convolution."""
DRAWS = 4000


def check_structure(structure: Structure, shapes: Sequence[Sequence[int]] = SHAPES) -> None:
    """Raise an error that says what is wrong with a structure of your own, for parameters of these shapes.

    `identity` makes stacks and leaves x as it is; each block of a stack acts as it does alone; what `linearize` gives,
    `scaled` and `degree` are right; and a `closed_form`, where there is one, is positive.
    """
    for shape in map(tuple, shapes):
        _check_structure(structure, shape)


def _check_structure(structure: Structure, shape: tuple[int, ...]) -> None:
    like = torch.empty(0, dtype=torch.float64)
    tensors: Any = structure.identity(shape, like, 2)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise LLQRError(
            f"identity() of {structure!r} returns a dict of tensors by name, not a {type(tensors).__name__}"
        )
    for name, tensor in tensors.items():
        if tensor.shape[:1] != (2,) or tuple(tensor.shape[1:]) != structure.sizes(shape)[name]:
            raise LLQRError(
                f"identity() of {structure!r} makes {name!r} of shape {tuple(tensor.shape)} for 2 blocks of {shape}: each "
                "tensor has a leading dimension, the number of blocks (`count`)"
            )
        if tensor.dtype != like.dtype:
            raise LLQRError(
                f"identity() of {structure!r} makes {name!r} of {tensor.dtype}, not of {like.dtype}: make it from `like`, as "
                "in like.new_ones(count, *shape)"
            )
    x = _numbers(2, *shape)

    def expect(found: object, wanted: Tensor, what: str) -> None:
        close = isinstance(found, Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted, 1e-6, 1e-8)
        if not close:
            raise LLQRError(f"{what}, of {structure!r} for shape {shape}")

    before, y = x.clone(), structure.apply(tensors, x)
    expect(x, before, "apply() changes x in place")
    if y.shape != x.shape:
        raise LLQRError(
            f"apply() of {structure!r} makes shape {tuple(y.shape)} of {tuple(x.shape)}: U x has the shape of x"
        )
    expect(y, x, "apply() with the tensors of identity() doesn't give x back")

    moved = {name: tensor + 0.3 * _numbers(*tensor.shape).cos() for name, tensor in tensors.items()}
    y = structure.apply(moved, x)
    alone = [structure.apply({n: t[i : i + 1] for n, t in moved.items()}, x[i : i + 1]) for i in range(2)]
    expect(torch.cat(alone), y, "a block of a stack doesn't act as it does alone")
    change, h = {name: _numbers(*tensor.shape) for name, tensor in tensors.items()}, 1e-5
    there, back = (structure.apply({n: t + h * sign * change[n] for n, t in moved.items()}, x) for sign in (1, -1))
    at, cotangent, slope = structure.linearize(moved, x), x.cos(), (there - back) / (2 * h)
    expect(at.value(), y, "the value() of linearize() isn't apply()")
    expect(at.derivative(change), slope, "derivative() isn't how apply() changes with the tensors")
    pulled: Any = at.pullback(cotangent)
    if not isinstance(pulled, dict) or pulled.keys() != moved.keys():
        raise LLQRError(f"pullback() of {structure!r} returns a dict with a gradient for each of {list(moved)}")
    gradient = torch.func.vjp(lambda t: structure.apply(t, x), moved)[1](cotangent)[0]
    for name, part in gradient.items():
        expect(pulled[name], part, f"pullback() isn't the gradient of ⟨P, apply(tensors, x)⟩ by {name!r}")
    expect(structure.apply(structure.scaled(moved, 2.5), x), 2.5 * y, "scaled(tensors, 2.5) doesn't act as 2.5 · U")
    degree = structure.degree(shape)
    along = [structure.apply({n: s * t for n, t in moved.items()}, x) for s in range(degree + 2)]
    expect(torch.stack(along).diff(degree + 1, 0)[0] / 10.0**degree, torch.zeros_like(y), "degree() is too low")
    if type(structure).closed_form is not Structure.closed_form and len(shape) == 2:
        moments = structure.second_moments(_numbers(2, 9, shape[0]), _numbers(2, 9, shape[1]).cos())
        curved = structure.apply(structure.closed_form(moments, 0.1), x)
        if not bool(((x * curved).flatten(1).sum(1) > 0).all()):
            raise LLQRError(f"closed_form() of {structure!r} isn't positive: x·Ux has to be, for every x")


def check_divergence(
    divergence: Divergence,
    output: Tensor,
    targets: Any = None,
    loss_fn: Callable[[Tensor, Any], Tensor] | None = None,
) -> None:
    """Raise an error that says what is wrong with a divergence of your own, at such an output.

    ψ is one number, depends on the output, and is flat where it says so; `hessian_product` is its second derivative; what
    `draw` gives has that for its second moment, by 4,000 draws. The loss is for a ψ that needs it.
    """
    point = output.detach().double()
    base = BasePoint(point, bound(loss_fn, targets))
    for _, term in divergence.terms():
        if isinstance(term, OutputTerm):
            term.check(point)
            term.check_psi(base)
            if term.flat:
                _check_draws(term, base)


def _check_draws(term: OutputTerm, base: BasePoint) -> None:
    along = torch.zeros_like(base.output)
    along[0] = _numbers(*along[0].shape)  # draws are independent example by example
    expected = float((along * term.hessian_product(along, base)).sum())
    generator = torch.Generator().manual_seed(0)
    found = sum(float((along * term.draw(base, generator)).sum()) ** 2 for _ in range(DRAWS)) / DRAWS
    if abs(found - expected) > 0.15 * abs(expected):
        raise LLQRError(
            f"draw() of {term!r} has the second moment {found:.4g} along a direction in which the curvature is {expected:.4g}: "
            "it has to be that of hessian_product()"
        )


def _numbers(*shape: int) -> Tensor:
    return torch.linspace(1, 40, int(torch.Size(shape).numel()), dtype=torch.float64).sin().reshape(shape)
