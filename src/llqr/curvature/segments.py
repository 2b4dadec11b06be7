"""Segments: modules of which a recording keeps the inputs alone, and which are run again for every product.

The paper's appendix on chunking: "several execution stages can be traversed as one segment while retaining only the segment
boundary state". A segment y = f(x, θ) is one node of the graph, by a rule that holds x. With the adjoint u of y and a
perturbation v = (δx, δθ), its products are Jᵀu, Jv = A δx + B δθ, and the gradient of ⟨v, Jᵀu⟩ by x and θ, which is
Q δx + Mᵀδθ and M δx + R δθ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from llqr.checks import call, replaced
from llqr.curvature.graph import graph_nodes, handwritten, refuse_once_differentiable, refuse_wrong_formulas
from llqr.curvature.rules import Maybe, Rule, record, record_twice
from llqr.errors import LLQRError

Again = Callable[[], AbstractContextManager[Any]]
"""What a segment is run again in: the modes, precision and random streams that it was called with."""
Run = Callable[[Sequence[Tensor]], Tensor]
"""A call of a module as a function of the tensors that derivatives are by."""
OTHERS = "name other modules in segments"
MARK = "of_llqr_segment"


class Segment(Rule):
    """One call of a module, `run` as a function of these inputs: activations, then parameters."""

    def __init__(
        self, name: str, run: Run, inputs: Sequence[Tensor], rules: type[TorchFunctionMode], again: Again
    ) -> None:
        self.name, self._run, self._rules, self._context = name, run, rules, again
        self.inputs: tuple[Tensor, ...] = tuple(inputs)
        leaves = self._leaves()
        self._value = run(leaves)
        with torch._C.DisableTorchFunction():  # while rules are in force, who reads the graph is taken for the model
            self.handwritten = handwritten([self._value])
            ids = {id(leaf) for leaf in leaves}
            strangers = any(id(leaf) not in ids for leaf in _leaves_of([self._value]))
        if strangers:
            raise LLQRError(
                f"segment {name!r} reads a tensor that is neither an input nor a parameter of its own, and the derivative by "
                f"it would be lost: {OTHERS}"
            )
        self.keep(*(x.detach() for x in inputs))

    def changed(self) -> Exception:
        return LLQRError(f"what segment {self.name!r} was called with is changed in place later on: {OTHERS}")

    def forward(self) -> Tensor:
        y = self._value.detach()
        del self._value  # with its graph
        return y

    def pull(self, u: Tensor) -> tuple[Maybe, ...]:
        y, leaves = self._recorded()
        return torch.autograd.grad(y, leaves, u, allow_unused=True)

    def push(self, v: Sequence[Maybe]) -> Maybe:
        return self._gradient(None, v)[0]

    def twice(self, u: Tensor, v: Sequence[Maybe], of_u: bool, needed: Sequence[bool]) -> tuple[Maybe, ...]:
        return self._gradient(u, v)

    def _gradient(self, u: Maybe, v: Sequence[Maybe]) -> tuple[Maybe, ...]:
        """Of ⟨v, Jᵀu⟩: by u, which it is linear in; and where a u is given, by the inputs."""
        y, leaves = self._recorded()
        cotangent = (torch.zeros_like(y) if u is None else u).detach().requires_grad_()
        with torch.enable_grad():
            rows = torch.autograd.grad(y, leaves, cotangent, create_graph=True, allow_unused=True)
        pairs = [(row, part) for row, part in zip(rows, v, strict=True) if row is not None and part is not None]
        refuse_once_differentiable([row for row, _ in pairs])
        by = [cotangent]
        if u is not None:
            refuse_wrong_formulas([y])
            by += leaves
        if not pairs:
            return (None,) * len(by)
        of, along = zip(*pairs, strict=True)
        return torch.autograd.grad(of, by, along, allow_unused=True)

    def _recorded(self) -> tuple[Tensor, list[Tensor]]:
        leaves = self._leaves()
        with torch.enable_grad(), self._context(), sdpa_kernel(SDPBackend.MATH), self._rules():
            return self._run(leaves), leaves

    def _leaves(self) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        for leaf in leaves:
            setattr(leaf, MARK, self.name)
        return leaves


@contextmanager
def in_segments(
    modules: Mapping[str, nn.Module], rules: type[TorchFunctionMode], second: bool, rerun: Callable[[], Again]
) -> Iterator[list[str]]:
    """While in force, a call of one of these modules is a segment; for `second` derivatives, or for products with J alone.

    Yields the names of the functions in them whose backward isn't torch's own, which the graph doesn't show.
    """
    noted: list[str] = []

    def called(name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given, spec = tree_flatten((args, kwargs))
        parameters = dict(module.named_parameters())
        positions = [i for i, value in enumerate(given) if isinstance(value, Tensor) and value.requires_grad]
        names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        inputs = [*(given[i] for i in positions), *(parameters[each] for each in names)]
        if not inputs:
            return forward(*args, **kwargs)
        buffers = {each: buffer.detach().clone() for each, buffer in module.named_buffers()}

        def run(leaves: Sequence[Tensor]) -> Tensor:
            own = {i: value.clone() for i, value in enumerate(given) if isinstance(value, Tensor)}
            own |= {i: leaf.clone() for i, leaf in zip(positions, leaves, strict=False)}
            tensors = {**parameters, **{each: buffer.clone() for each, buffer in buffers.items()}}
            tensors |= dict(zip(names, leaves[len(positions) :], strict=True))
            values, options = tree_unflatten([own.get(i, value) for i, value in enumerate(given)], spec)
            y = call(module, tensors, (), lambda: forward(*values, **options))
            if not isinstance(y, Tensor):
                raise LLQRError(f"segment {name!r} returns a {type(y).__name__}, and not one tensor: {OTHERS}")
            if any(copy._version for copy in own.values()):
                raise LLQRError(f"segment {name!r} changes what it is called with, in place: {OTHERS}")
            return y

        segment = Segment(name, run, inputs, rules, rerun())
        noted.extend(segment.handwritten)
        return record_twice(segment) if second else record(segment, *segment.inputs)

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(replaced(module, forward=partial(called, name, module, module.forward)))
        yield noted


def refuse_leaks(outputs: Sequence[Tensor]) -> None:
    """Raise where something inside of a segment has got out by another way than its output."""
    for leaf in _leaves_of(outputs):
        if hasattr(leaf, MARK):
            raise LLQRError(
                f"a tensor from inside of segment {getattr(leaf, MARK)!r} is used outside of it, and its derivative would be "
                f"lost: {OTHERS}"
            )


def _leaves_of(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors at which a graph ends."""
    for node in graph_nodes(outputs):
        if hasattr(node, "variable"):
            yield node.variable
