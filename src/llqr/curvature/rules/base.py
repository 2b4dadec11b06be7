"""A rule: one operation at one point, with Jᵀu and Jv, and how autograd records it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Maybe = Tensor | None


class BeyondRulesError(Exception):
    """A model does what rules aren't made for: it takes a gradient in its forward pass, for which they would have to be right
    to one order more than they are; or it looks at autograd's graph, which has other nodes with them."""


class ChangedError(RuntimeError):
    """A tensor that a rule reads was changed in place since; torch's own operation may have made a copy of it."""


class Pass:
    """A forward pass that is recorded by rules."""

    goes_on = True


class _Recording(threading.local):
    """The pass that is being recorded in this thread."""

    now: Pass | None = None


recording = _Recording()


def check_outside(during: Pass | None) -> None:
    """Raise while the pass in which something was recorded goes on. A GPU's backward passes are in another thread than it."""
    if during is not None and during.goes_on:
        raise BeyondRulesError("the model takes a gradient in its forward pass")


class _Transposed(torch.autograd.Function):
    """u ↦ Jᵀu with the derivative v ↦ Jv."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, rule: Rule) -> tuple[Maybe, ...]:
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        return rule.checked().pull(u)

    @staticmethod
    def backward(ctx: Any, *v: Maybe) -> tuple[Maybe, None]:
        return ctx.rule.push(v), None


class _Recorded(torch.autograd.Function):
    """y = f(inputs), whose backward is a node of its own."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, *inputs: Maybe) -> Tensor:
        ctx.rule, ctx.during = rule, recording.now
        rule.needed, rule.born = ctx.needs_input_grad[1:], _versions(rule.inputs)
        y = rule.forward()
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # a view couldn't be changed in place

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Maybe, ...]:
        check_outside(ctx.during)
        if not torch.is_grad_enabled():
            return None, *ctx.rule.checked().pull(u)
        return (None, *_Transposed.apply(u, ctx.rule))  # type: ignore[no-untyped-call]


class _TransposedOfAll(torch.autograd.Function):
    """(u, inputs) ↦ Jᵀu with the derivatives by u, which is v ↦ Jv, and by the inputs, which J depends on."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, rule: Twice, *inputs: Maybe) -> tuple[Maybe, ...]:
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(u)
        return rule.checked().pull(u)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *v: Maybe) -> tuple[Maybe, ...]:
        of_u, _, *of_inputs = ctx.needs_input_grad
        (u,) = ctx.saved_tensors
        by_u, *by_inputs = ctx.rule.twice(u, v, of_u, of_inputs)
        return by_u, None, *by_inputs


class _RecordedTwice(_Recorded):
    """The same, with a backward that can be differentiated by all that it depends on."""

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Maybe, ...]:
        check_outside(ctx.during)
        if not torch.is_grad_enabled():
            return None, *ctx.rule.checked().pull(u)
        return (None, *_TransposedOfAll.apply(u, ctx.rule, *ctx.rule.inputs))  # type: ignore[no-untyped-call]


class Rule(ABC):
    """One operation at one point: its value, Jᵀu and Jv."""

    inputs: tuple[Maybe, ...] = ()
    """As they are in the graph, where what follows can be recorded together with this."""
    born: tuple[int, ...] = ()
    """The inputs' versions when y was computed."""
    needed: Sequence[bool]
    """Which inputs a derivative is asked for."""
    kept: Sequence[Tensor] = ()
    """What the products read: nobody may change it meanwhile."""
    versions: tuple[int, ...] = ()

    def keep(self, *tensors: Tensor) -> None:
        self.kept, self.versions = tensors, _versions(tensors)

    def current(self) -> bool:
        """Whether the inputs are what y was computed from still."""
        return self.born == _versions(self.inputs)

    def check(self) -> None:
        """Raise as autograd does where a tensor that it saved was changed."""
        if self.versions != _versions(self.kept):
            raise ChangedError("a tensor that a derivative needs was changed by an in-place operation")

    def checked(self) -> Self:
        self.check()
        return self

    @abstractmethod
    def forward(self) -> Tensor:
        """y."""

    @abstractmethod
    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        """Jᵀu, one part for each input, None where not needed."""

    @abstractmethod
    def push(self, v: Sequence[Maybe]) -> Maybe:
        """Jv, from one part for each input, None for zero."""


class Twice(Rule):
    """One that is right to second order too."""

    @abstractmethod
    def twice(self, u: Tensor, v: Sequence[Maybe], of_u: bool, needed: Sequence[bool]) -> tuple[Maybe, ...]:
        """The gradient of ⟨v, Jᵀu⟩ by u, which is Jv, and by the inputs, which J depends on."""


def _versions(tensors: Sequence[Maybe]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors if tensor is not None and not tensor.is_inference())


def record(rule: Rule, *inputs: Maybe) -> Tensor:
    """y, with the rule for its derivative by these inputs."""
    return _Recorded.apply(rule, *inputs)  # type: ignore[no-untyped-call, no-any-return]


def record_twice(rule: Twice) -> Tensor:
    """y, with the rule for its first and second derivatives."""
    return _RecordedTwice.apply(rule, *rule.inputs)  # type: ignore[no-untyped-call, no-any-return]
