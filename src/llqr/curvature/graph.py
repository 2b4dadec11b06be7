"""The graph that autograd recorded: its nodes, and what it tells, or hides, of second derivatives.

A `torch.autograd.Function` that computes with detached tensors, or keeps results of its forward in `ctx`, has right gradients
and silently wrong second derivatives. Torch's own operations don't, so only functions written by hand are checked: each as it
is called, in double precision where it can be. (`torch.autograd.gradgradcheck` does the same in time that grows with the size.)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from llqr.checks import frozen_rng, replaced
from llqr.errors import LLQRWarning, NotTwiceDifferentiableError, callers_level

MARK = "llqr"


def graph_nodes(tensors: Iterable[Tensor], mark: object = None) -> Iterator[Any]:
    """The nodes of the graph that autograd recorded behind some tensors, each once; with a mark, those alone that weren't
    found with it before."""
    waiting: list[Any] = list(dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    seen = {None, *waiting}
    while waiting:
        node = waiting.pop()
        if mark is not None:
            if node.metadata.get(MARK) is mark:
                continue
            node.metadata[MARK] = mark
        yield node
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def graph_numbers(tensors: Sequence[Tensor]) -> int:
    """How many numbers a backward pass goes through."""
    shapes = (each.shape for node in graph_nodes(tensors) for each in node._input_metadata)
    return sum(math.prod(shape) for shape in shapes)


def refuse_once_differentiable(gradients: Sequence[Tensor]) -> None:
    """Raise where a gradient came from a function marked `once_differentiable`.

    Torch leaves an error node in the graph in its place, but connected to nothing, so asking for the next derivative finds no
    dependence and would take it for zero.
    """
    if any(node.name() == "torch::autograd::Error" for node in graph_nodes(gradients)):
        raise RuntimeError("a function in it is marked as once differentiable")


STEPS = (1e-10, 1e-6, 1e-3)
"""Of finite differences: the shortest meets no kink and no sharp bend, the longest is for formulas that compute in float32."""

CLOSE = 0.001
"""How far from each other the two may be: relative to the difference, and to B itself for a change as large as x."""

Call = tuple[Any, list[Any]]
"""A function written by hand, and what it was called with."""


def handwritten(outputs: Sequence[Tensor]) -> list[str]:
    """The names of the functions in a graph whose backward isn't torch's own."""
    names: set[str] = set()
    for node in graph_nodes(outputs):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            ours = type(node)._forward_cls.__module__.startswith("llqr.")  # type: ignore[attr-defined]
            names.update(cast(Any, node).rule.handwritten if ours else [type(node).__name__.removesuffix("Backward")])
        elif "CppNode" in node.name():
            names.add(node.name())
    return sorted(names)


def check_handwritten(names: Sequence[str], run: Callable[[], object], what: str, instead: str) -> None:
    """Raise where a function of these names, as it is called in the `run`, hides a part of itself from the next derivative.

    Where one can't be called by itself, a warning says so.
    """
    if not names:
        return
    with _overheard() as calls, torch.enable_grad(), suppress(Exception):
        run()
    unconfirmed = set(names)
    for function, args in calls:
        if function.__name__ in names:
            confirmed = _confirmed(function, args)
            if confirmed is False:
                raise NotTwiceDifferentiableError(
                    f"the second derivatives of {what} are wrong, because a backward formula written by hand hides a part of "
                    f"itself from them ({function.__name__}): write it in "
                    f"differentiable operations of the inputs that ctx.save_for_backward saved; or {instead}"
                )
            if confirmed:
                unconfirmed.discard(function.__name__)
    if unconfirmed:
        warnings.warn(
            f"the backward formula of {', '.join(sorted(unconfirmed))} is written by hand, and can't be called by itself to "
            "see whether its second derivatives are right: compare them once with torch.autograd.gradgradcheck",
            LLQRWarning,
            stacklevel=callers_level(),
        )


@contextmanager
def _overheard() -> Iterator[list[Call]]:
    """The calls in there that a backward pass goes through, with copies of what was given."""
    calls: list[Call] = []

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not kwargs and any(map(_leads_back, args)):
            calls.append((function, [v.detach().clone().requires_grad_() if _leads_back(v) else v for v in args]))
        return super(_SingleLevelFunction, function).apply(*args, **kwargs)

    with replaced(_SingleLevelFunction, apply=classmethod(apply)):
        yield calls


def _leads_back(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _confirmed(function: Any, args: Sequence[Any]) -> bool | None:
    """Whether the gradients B(u, x) of a call have the derivatives that torch says; None where it can't be made again."""
    for dtype in (torch.float64, None):  # its own, where it doesn't run in double precision
        with suppress(Exception):
            return _right(function, args, dtype)
    return None


def _right(function: Any, args: Sequence[Any], dtype: torch.dtype | None) -> bool:
    """Whether each B_i(u, x) = (∂y/∂x_i)ᵀu has the derivative by u, in which it is linear, and along each x_j, that torch says.

    The latter is compared with central differences. One step that agrees is enough; one that changes no number of y, because
    rounding takes it away, is no sign.
    """
    reals = [isinstance(v, Tensor) and v.is_floating_point() for v in args]
    given = [v.detach().to(dtype or v.dtype) if real else v for v, real in zip(args, reals, strict=True)]
    positions = [i for i, value in enumerate(args) if _leads_back(value)]
    point = [given[i] for i in positions]
    generator = torch.Generator().manual_seed(0)

    def run(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        own = dict(zip(positions, leaves, strict=True))
        with frozen_rng():  # it draws the same each time; and it may change its arguments in place
            outputs = function.apply(*(own[i].clone() if i in own else value for i, value in enumerate(given)))
        return tuple(y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if _leads_back(y))

    def random(like: Tensor) -> Tensor:
        """Neither orthogonal to constants nor to the tensor itself, whose sums are what norms keep; as large as that."""
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
        size = float(like.detach().double().square().mean().sqrt()) or 1.0
        return (drawn + 1) * size + like.detach()

    def slopes(x: Sequence[Tensor], u: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[Tensor]]:
        leaves = [each.detach().requires_grad_() for each in x]
        y = run(leaves)
        return y, torch.autograd.grad(y, leaves, u, create_graph=True, materialize_grads=True), leaves

    def differences(j: int, v: Tensor) -> Iterator[list[Tensor]]:
        for step in (each for each in STEPS if each > torch.finfo(v.dtype).eps):
            (ahead, up, _), (_, down, _) = (
                slopes([x + sign * step * v if k == j else x for k, x in enumerate(point)], u) for sign in (1, -1)
            )
            if not all(map(torch.equal, ahead, y)):
                yield [(one - other).detach() / (2 * step) for one, other in zip(up, down, strict=True)]

    with torch.autocast(point[0].device.type, enabled=False), torch.enable_grad():
        nearby = [x + 0.01 * random(x) for x in point]  # where zeros, and kinks at them, are no matter
        outputs = run([x.detach().requires_grad_() for x in nearby])
        if all(bool(each.isfinite().all()) for each in outputs):
            point = nearby
        u, other = ([random(each).requires_grad_() for each in outputs] for _ in range(2))
        y, here, leaves = slopes(point, u)
        elsewhere = slopes(point, other)[1]
        along = [random(x) for x in point]
        changes = [list(differences(j, v)) for j, v in enumerate(along)]
        for i, b in enumerate(here):
            w = random(b)
            size = CLOSE * float((w * b).norm())
            said = [torch.zeros_like(x) for x in (*u, *leaves)]
            if b.requires_grad:
                said = list(torch.autograd.grad(b, (*u, *leaves), w, retain_graph=True, materialize_grads=True))
            truth = _dot([w], [elsewhere[i]])
            if abs(_dot(said[: len(u)], other) - truth) > CLOSE * abs(truth) + size:
                return False
            for of_x, v, found in zip(said[len(u) :], along, changes, strict=True):
                truths = [_dot([w], [change[i]]) for change in found]
                if truths and all(abs(_dot([of_x], [v]) - t) > CLOSE * abs(t) + size for t in truths):
                    return False
    return True


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((a.detach().double() * b.detach().double()).sum()) for a, b in zip(left, right, strict=True))
