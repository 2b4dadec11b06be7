"""A closure, run with the model as it is: what it returns is checked, and compared with what it returned before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss, check_finite
from llqr.curvature.graph import graph_nodes
from llqr.curvature.recorder import Streams
from llqr.errors import LLQRError, NonFiniteError
from llqr.exact.point import squares

Closure = Callable[[], Any]


class Live:
    """What a closure returns, run with the model as it is: one time for good, and again as often as a step is tried."""

    def __init__(self, model: nn.Module, loss_fn: Loss | None, closure: Closure, newton: bool) -> None:
        self._model, self._given, self._closure, self._newton = model, loss_fn, closure, newton
        self._dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
        self.loss_fn: Loss = loss_fn or squares
        self.targets: Any = None
        self._seen: Tensor | None = None
        self.groups: list[tuple[int, int]] = []
        calls: list[tuple[Any, ...]] = []
        self.streams = Streams(model)
        self._own = {id(p): name for name, p in model.named_parameters()}
        hook = model.register_forward_hook(lambda *seen: calls.append(seen), with_kwargs=True)
        try:
            with torch.enable_grad():
                output = self.output()
        finally:
            hook.remove()
        check_finite(output.detach(), "what the closure returned")
        self._first, self.loss = output.detach(), self._value(output)
        if not math.isfinite(self.loss):
            raise NonFiniteError(f"the loss is {self.loss}: start from other parameters, or look at the data")
        alone = len(calls) == 1 and not calls[0][2] and calls[0][3] is self._seen
        self.inputs: Inputs | None = calls[0][1] if alone else None

    def replaced(self) -> Tensor:
        """The output with other tensors in the place of the parameters; an error where one of the model's own is in it still,
        which would be a constant in J and move in trials."""
        output = self.output()
        for held in (output, *(getattr(node, "variable", None) for node in graph_nodes([output]))):
            if id(held) in self._own:
                name = self._own[id(held)]
                path = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))
                raise LLQRError(
                    f"the closure has the parameter {name!r} in a variable of its own, or returns what was computed of it "
                    f"before step(): take it from the model inside the closure, model{path} in each run"
                )
        return output.view_as(output) if output.is_leaf else output  # a parameter itself has no node in the graph

    def again(self) -> tuple[float, Tensor]:
        """The loss and the output at other parameters, with the same random numbers; buffers stay as they are."""
        buffers = {buffer: buffer.clone() for buffer in self._model.buffers()}
        try:
            with torch.enable_grad(), self.streams.again():
                output = self.output().detach()
                if output.shape != self._first.shape:
                    raise self._other(f"{self._first.numel()} numbers and then {output.numel()}")
                return self._value(output), output
        finally:
            for buffer, value in buffers.items():
                buffer.copy_(value)

    def slope(self, output: Tensor) -> Tensor:
        """∇ℓ at an output, in one vector."""
        leaf = output.requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.loss_fn(leaf, self.targets), leaf)[0].reshape(-1)

    def compare(self, output: Tensor) -> None:
        """Raise unless the output, and with its targets the loss, are those of the first run: both at the same parameters."""
        rounding, same = torch.finfo(output.dtype).eps ** 0.5, output.shape == self._first.shape
        if not same or (output - self._first).norm() > rounding * self._first.norm():
            raise self._other("one output and then another at the same parameters")
        loss = self._value(output)
        if abs(loss - self.loss) > rounding * abs(self.loss):
            raise self._other(f"a loss of {self.loss:g} and then {loss:g} at the same parameters")

    def _other(self, what: str) -> LLQRError:
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        with torch.enable_grad():  # closures may take derivatives
            self.output()
        changed = [name for name, b in self._model.named_buffers() if not torch.equal(b, before[name])]
        advice = f". Each run changes {changed[0]!r} (spectral_norm?): write model.eval()" if changed else ""
        return LLQRError(
            f"the closure gave {what}: it has to compute the same thing each time that a step calls it. Draw batches and "
            f"random points before step(); leave out autocast{advice}"
        )

    def _value(self, output: Tensor) -> float:
        with torch.no_grad():
            loss = self.loss_fn(output, self.targets)
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise LLQRError(f"loss_fn returned {loss.numel()} numbers: it must return their mean (reduction='mean')")
        return float(loss)

    def output(self) -> Tensor:
        """What the loss is a function of; its targets and groups are noted."""
        returned = self._closure()
        if self._given is not None:
            if not isinstance(returned, (tuple, list)) or len(returned) != 2:
                got = type(returned).__name__
                raise LLQRError(f"with a loss_fn the closure returns (output, targets), not a {got}")
            output: Tensor
            output, self.targets = returned
            self._check(output, "the output")
            self._seen = output
            examples = len(output) if output.dim() else 1
            self.groups = [(examples, output.numel() // examples)]
            return output
        if isinstance(returned, Tensor) and returned.dim() == 0:
            if not self._newton:
                raise LLQRError(
                    "the closure returned one number, a loss: return the residuals that it is the mean square of, or give a "
                    "loss_fn and return (output, targets), without backward(); of a loss alone divergence='newton' can be taken"
                )
            self._check(returned, "the loss")
            self.loss_fn, self.groups = _itself, [(1, 1)]
            return returned
        residuals = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        if not residuals:
            raise LLQRError("the closure returned no residuals: return a tensor, or a tuple of at least one")
        for residual in residuals:
            self._check(residual, "a residual")
            if residual.dim() == 0:
                raise LLQRError("a residual has no dimension: write residual.reshape(1), or return what it sums up")
        self.groups = [(len(r), r.numel() // len(r)) for r in residuals]
        return torch.cat([r.reshape(-1, 1) / r.numel() ** 0.5 for r in residuals])

    def _check(self, value: Any, what: str) -> None:
        if not isinstance(value, Tensor):
            raise LLQRError(f"{what} is a tensor, not a {type(value).__name__}")
        if not value.is_floating_point() or value.numel() == 0:
            raise LLQRError(f"{what} has {value.numel()} numbers of {value.dtype}: return floating-point numbers")
        if value.dtype != self._dtype:
            raise LLQRError(
                f"{what} is {value.dtype}, and the parameters are {self._dtype}: convert the data, or the model before Exact "
                "is made; leave out autocast"
            )


def _itself(loss: Tensor, targets: Any) -> Tensor:
    return loss
