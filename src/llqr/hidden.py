"""Backward formulas written by hand, and whether they hide a part of themselves from the next derivative.

A `torch.autograd.Function` that computes with detached tensors, or keeps results of its forward in `ctx`, has right gradients
and silently wrong second derivatives. Torch's own operations don't, so only models in whose graph there is a formula written by
hand are looked at.

A formula is B_i(u, x) = (∂y/∂x_i)ᵀ u, one for each argument x_i. What torch gives for its derivative is compared with what it
is: linear in u, so that (∂B_i/∂u) u' = B_i(u', x); and along x_i the same as differences of B_j, since second derivatives are
symmetric, (∂B_i/∂x_j)ᵀ v_i = (∂B_j/∂x_i) v_i. Each pair of arguments is compared by itself, and so is each output: a large part
that is right hides no small one that is wrong. In double precision where that is possible; and with steps of several lengths,
because a formula may compute in float32 whatever it is given. The short ones meet no kink, the long ones no rounding.

Each formula is looked at where it is called: in the whole model it may have a small part, or stand beside another one whose
gradient isn't meant to be one. The whole model is looked at for what can't be called by itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from llqr.checks import frozen_rng
from llqr.errors import LLQRWarning, NotTwiceDifferentiableError, callers_level
from llqr.exact.derivatives import graph_nodes


class Step(NamedTuple):
    """How differences are taken: along how long a step, and what they may be off by."""

    length: float
    """Relative to the point."""
    tolerance: float
    noise: float
    """What rounding leaves of a number."""


STEPS = (Step(1e-9, 1e-3, 1e-14), *(Step(length, 1e-2, 1e-6) for length in (1e-4, 1e-3, 1e-2)))
"""For double precision; for float32, whose rounding asks for a long step, and a sharp function for a short one."""
BELIEVED = 0.1
"""How far the differences of both sides may be from each other, relative to their size. A kink, or rounding, is beyond."""
FLAT = 1e-6
"""A step that meets hardly any kink, and changes what is rounded to float32."""
NEARBY = 0.01
"""How far away from a point where a formula is zero it is looked at once more."""
UNSEEN = 1e-3
"""An argument that is smaller than this, compared with the others, is moved as they are."""

Run = Callable[[list[Tensor]], tuple[Tensor, ...]]
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


def check_model(outputs: Sequence[Tensor], run: Run, run_in_double: Run, point: Sequence[Tensor]) -> None:
    """Raise where a formula in the model's graph hides: `run` is the model, as a function of the `point`."""
    names = handwritten(outputs[:1])
    doubled = [tensor.detach().double() for tensor in point]
    if names and _any_hides(names, lambda: run(_leaves(point)), lambda: hides(*_joined(run_in_double, doubled))):
        raise NotTwiceDifferentiableError(
            "the second derivatives that Newton asks for are wrong, because a backward formula written by hand hides a part "
            f"of itself from them ({', '.join(names)}): write it in differentiable operations of the inputs that "
            "ctx.save_for_backward saved, nothing detached or kept from the forward pass; or use GaussNewton or KL"
        )


def check_loss(loss: Callable[[Tensor], Tensor], output: Tensor) -> None:
    """Raise where a formula in the loss hides."""
    with torch.enable_grad():
        names = handwritten([loss(output.detach().requires_grad_())])
    whole: Run = lambda leaves: (loss(leaves[0]),)  # noqa: E731
    if names and _any_hides(names, lambda: whole(_leaves([output])), lambda: hides(whole, [output.detach().double()])):
        raise NotTwiceDifferentiableError(
            "the second derivative of the loss is wrong, because a backward formula written by hand hides a part of itself "
            f"from it ({', '.join(names)}): use a loss of torch's own operations here, or KL, which doesn't need the loss's"
        )


def _any_hides(names: Sequence[str], run: Callable[[], object], whole: Callable[[], bool | None]) -> bool:
    """Whether one of these functions does: by itself, as it is called in the run, or in the whole where that can't be told."""
    with _overheard() as calls, torch.enable_grad(), suppress(Exception):
        run()
    judged: dict[str, bool] = {}
    for function, args in calls:
        if function.__name__ in names:
            verdict = hides(*_called(function, _doubled(args)))
            if verdict is None:  # it doesn't run in double precision
                verdict = hides(*_called(function, args))
            if verdict:
                return True
            judged[function.__name__] = judged.get(function.__name__, True) and verdict is not None
    unknown = [name for name in names if not judged.get(name)]
    verdict = whole() if unknown else False
    if verdict is None:
        warnings.warn(
            f"the backward formula of {', '.join(unknown)} is written by hand, and can't be called by itself to see whether "
            "its second derivatives, which Newton asks for, are right: compare them once with torch.autograd.gradgradcheck",
            LLQRWarning,
            stacklevel=callers_level(),
        )
    return bool(verdict)


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


def _doubled(args: Sequence[Any]) -> list[Any]:
    return [
        value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in args
    ]


def _called(function: Any, args: Sequence[Any]) -> tuple[Run, list[Tensor]]:
    """A call as a function of the arguments that a backward pass goes through, and those."""
    places = [place for place, value in enumerate(args) if _leads_back(value)]

    def run(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        given = list(args)
        for place, leaf in zip(places, leaves, strict=True):
            given[place] = leaf.clone()  # it may be changed in place
        with frozen_rng():  # it draws the same each time
            outputs = function.apply(*given)
        return tuple(y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if _leads_back(y))

    return run, [args[place].detach() for place in places]


def _joined(run: Run, point: Sequence[Tensor]) -> tuple[Run, list[Tensor]]:
    """With all arguments in one, each as large as the others."""
    sizes = _sizes(point)
    shapes = [tensor.shape for tensor in point]

    def joined(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        parts = torch.split(leaves[0], [shape.numel() for shape in shapes])
        return run([part.view(shape) * size for part, shape, size in zip(parts, shapes, sizes, strict=True)])

    return joined, [torch.cat([tensor.reshape(-1) / size for tensor, size in zip(point, sizes, strict=True)])]


def hides(run: Run, point: Sequence[Tensor]) -> bool | None:
    """Whether a derivative of a function's gradient isn't what it says it is; None where that can't be told.

    A gradient that isn't the function's own (straight-through estimators) is meant so: nothing is said about it.
    """
    try:
        with torch.autocast(point[0].device.type, enabled=False), torch.enable_grad():
            looks = [_Look(run, place, point) for place in range(len(run(_leaves(point))))]
            if any(look.hides() for look in looks):
                return True
            level = [place for place, look in enumerate(looks) if look.is_level()]
            with suppress(Exception):  # there it may have no value
                return any(_Look(run, place, looks[place].nearby()).hides() for place in level)
            return False
    except Exception:  # it can't be called once more, or not in this precision
        return None


class _Look:
    """At one output of a function: y, a cotangent u, and B_i(u, x) for each argument x_i."""

    def __init__(self, run: Run, place: int, point: Sequence[Tensor]) -> None:
        self._run, self._place, self._point = run, place, point
        self._generator, self._sizes = torch.Generator().manual_seed(0), _sizes(point)
        self._leaves = _leaves(point)
        y = self._value(self._leaves)
        self._y = y.detach()
        self._u = self._cotangent().requires_grad_()
        self._slopes = torch.autograd.grad(y, self._leaves, self._u, create_graph=True, materialize_grads=True)

    def is_level(self) -> bool:
        """Whether some B_i is zero, as where another argument is zero at the start: nothing of it is seen here."""
        return not all(bool(slope.any()) for slope in self._slopes)

    def nearby(self) -> list[Tensor]:
        """A point where it isn't."""
        return [x + NEARBY * size * self._random(x) for x, size in zip(self._point, self._sizes, strict=True)]

    def hides(self) -> bool:
        arguments = range(len(self._point))
        steps = [[step for step in STEPS if self._climbs(i, step)] for i in arguments]
        for i in arguments:
            if not steps[i]:
                continue
            v = self._random(self._point[i]) * self._sizes[i] + self._point[i]
            try:
                of_u, *products = self._derivative(i, v)
            except RuntimeError:  # it has none, which torch says itself
                return False
            if self._hides_u(i, v, of_u):
                return True
            doubted, agreed = set[int](), self._flat(i, v, products)
            for step in steps[i]:
                judged = [j for j in arguments if step in steps[j] and j not in agreed]
                for j, verdict in self._turned(i, v, products, step, judged):
                    (doubted if verdict else agreed).add(j)
            if doubted - agreed:
                return True
        return False

    def _climbs(self, i: int, step: Step) -> bool:
        """Whether B_i is the function's gradient, as far as this step can tell. No part of the sum cancels another."""
        slope = self._slopes[i].detach()
        v = torch.where(slope < 0, -self._sizes[i], self._sizes[i]).to(slope)
        ahead, behind = (self._value(self._moved(i, v, length)) for length in (step.length, -step.length))
        u = self._u.detach()
        climbed = _total((ahead - behind).detach() * u) / (2 * step.length)
        along = _total(slope * v)
        floor = step.noise / step.length * _norm((u * self._y)[ahead != behind])
        larger = max(abs(climbed), abs(along))
        return abs(climbed - along) <= step.tolerance * larger + floor and larger > 2 * floor

    def _derivative(self, i: int, v: Tensor) -> tuple[Tensor, ...]:
        """(∂B_i/∂u)ᵀ v and (∂B_i/∂x_j)ᵀ v for each j."""
        of = [self._u, *self._leaves]
        if not self._slopes[i].requires_grad:
            return tuple(torch.zeros_like(each) for each in of)
        return torch.autograd.grad(self._slopes[i], of, v, retain_graph=True, materialize_grads=True)

    def _hides_u(self, i: int, v: Tensor, of_u: Tensor) -> bool:
        """Whether v·(∂B_i/∂u) u' isn't v·B_i(u', x), for some u'."""
        tolerance = STEPS[0].tolerance if v.dtype == torch.float64 else STEPS[1].tolerance
        for _ in range(2):
            u = self._cotangent()
            leaves = _leaves(self._point)
            slope = torch.autograd.grad(self._value(leaves), leaves[i], u, materialize_grads=True)[0]
            found, truth = _total(of_u * u), _total(v * slope)
            scale = max(_norm(of_u) * _norm(u) / math.sqrt(max(u.numel(), 1)), abs(truth))
            if abs(found - truth) > tolerance * scale + 1e-5 * _norm(v * slope):
                return True
        return False

    def _flat(self, i: int, v: Tensor, products: Sequence[Tensor]) -> set[int]:
        """The B_j that don't change at all, to the last bit, and whose derivative is zero: kinks further away are no sign."""
        ahead, behind = (self._slopes_at(self._moved(i, v, length)) for length in (FLAT, -FLAT))
        equal = [torch.equal(one, other) for one, other in zip(ahead, behind, strict=True)]
        return {j for j, product in enumerate(products) if equal[j] and not product.any()}

    def _turned(
        self, i: int, v: Tensor, products: Sequence[Tensor], step: Step, judged: Sequence[int]
    ) -> Iterator[tuple[int, bool]]:
        """For each B_j that differences along v tell something about: whether they contradict what torch says."""
        ahead, behind = (self._slopes_at(self._moved(i, v, length)) for length in (step.length, -step.length))
        for j in judged:
            here, product = self._slopes[j].detach(), products[j]
            one, other = (ahead[j] - here) / step.length, (here - behind[j]) / step.length
            noise = step.noise / step.length * _norm(here) / math.sqrt(max(here.numel(), 1))
            changed = torch.maximum(torch.maximum(one.abs(), other.abs()), product.abs()) > noise
            believed = changed & ((one - other).abs() <= BELIEVED * (one.abs() + other.abs()))
            count = int(believed.sum())
            if count == 0 or 2 * count < int(changed.sum()):
                continue
            one, other, product = one[believed], other[believed], product[believed]
            middle = 0.5 * (one + other)
            scale = max(_norm(middle), _norm(product))
            allowed = step.tolerance * scale + noise * math.sqrt(count)
            if step is STEPS[0]:  # where it isn't rounding: what the third derivative may come to
                allowed += _norm((one - other).square() / (one.abs() + other.abs()))
            yield j, _norm(middle - product) > allowed

    def _value(self, leaves: list[Tensor]) -> Tensor:
        return self._run(leaves)[self._place]

    def _slopes_at(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._value(leaves), leaves, self._u.detach(), materialize_grads=True)

    def _moved(self, i: int, v: Tensor, length: float) -> list[Tensor]:
        return _leaves([x.add(v, alpha=length) if place == i else x for place, x in enumerate(self._point)])

    def _cotangent(self) -> Tensor:
        """Random, and neither orthogonal to constants nor to y itself, whose sums are what norms hide."""
        return self._random(self._y) + 1 + self._y / _sizes([self._y])[0]

    def _random(self, like: Tensor) -> Tensor:
        """The same at every look, and no draw from torch's stream."""
        return torch.randn(like.shape, generator=self._generator, dtype=torch.float64).to(like)


def _leaves(point: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in point]


def _sizes(point: Sequence[Tensor]) -> list[float]:
    sizes = [_norm(tensor) / math.sqrt(max(tensor.numel(), 1)) for tensor in point]
    typical = max(sizes, default=0.0) or 1.0
    return [size if size > UNSEEN * typical else typical for size in sizes]


def _total(tensor: Tensor) -> float:
    return float(tensor.detach().double().sum())


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())
