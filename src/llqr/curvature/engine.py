"""The engine: a network's forward pass recorded once, and then products with its Jacobian and with Hessians.

One forward pass x = F(θ) is recorded by autograd, and one backward pass u ↦ Jᵀu with a cotangent u that is itself a variable.
After that

    pull(c) = Jᵀc    is a backward pass through the first graph,
    push(v) = Jv     is a backward pass through the second: Jᵀu is linear in u, and the transpose of Jᵀ is J,
    a Hessian product is a backward pass through the graph of a gradient,

and nothing is run forward, traced or compiled again, however many products follow. A training step is three matrix products
a layer; push and pull are two each. Operations whose second derivatives torch computes slowly are recorded by rules.

Segments are modules of which a recording keeps the inputs alone, and which are run again for every product. The paper's
appendix on chunking: "several execution stages can be traversed as one segment while retaining only the segment boundary
state". A segment y = f(x, θ) is one node of the graph, by a rule that holds x. With the adjoint u of y and a perturbation
v = (δx, δθ), its products are Jᵀu, Jv = A δx + B δθ, and the gradient of ⟨v, Jᵀu⟩ by x and θ, which is Q δx + Mᵀδθ and
M δx + R δθ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from llqr.checks import Inputs, call, replaced
from llqr.curvature.graph import (
    check_handwritten,
    graph_nodes,
    graph_numbers,
    handwritten,
    refuse_once_differentiable,
)
from llqr.curvature.recorder import Parameters, Recorder
from llqr.curvature.replacements import by_rules, plain_rules
from llqr.curvature.rules import BeyondRulesError, Maybe, Rule, record
from llqr.errors import LLQRError, NotTwiceDifferentiableError


class Recording:
    """One forward pass at θ, recorded: its values, and Jᵀc by a backward pass."""

    second = False
    """Whether second derivatives are asked for."""

    def __init__(self, recorder: Recorder, parameters: Parameters, inputs: Inputs) -> None:
        self._recorder, self._inputs = recorder, inputs
        self._parameters = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        self._leaves = list(self._parameters.values())
        self._record(self._rules())

    def _rules(self) -> Callable[[], TorchFunctionMode]:
        """How operations are replaced. Segments keep it, and are in the graph: it must not lead back to this recording."""
        return partial(by_rules, self.second)

    def _record(self, rules: Callable[[], TorchFunctionMode]) -> None:
        recorder, self._plain = self._recorder, rules is plain_rules
        try:
            segments = in_segments(recorder, rules, self.second)
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), rules(), segments:
                self._outputs = recorder.run(self._parameters, self._inputs)
        except BeyondRulesError:  # as gradient penalties, physics-informed networks and hooks do
            self._record(plain_rules)
            return
        refuse_leaks(self._outputs if recorder.segments else ())
        self.values = [output.detach() for output in self._outputs]
        if not self._outputs[0].requires_grad:
            raise LLQRError("the output doesn't depend on the parameters by anything differentiable (was it detached?)")
        none = 0 * self._leaves[0].reshape(-1)[:1].sum()  # an activation that no parameter moves has zero derivatives
        self._outputs = [value if value.requires_grad else value + none for value in self._outputs]

    def _recorded_otherwise(self, error: Exception) -> bool:
        """Whether there was another way: by plain operations, which copy what is changed in place, or in the model's own
        precision."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        if self._plain and not self._recorder.lower(error):
            return False
        self._record(plain_rules)
        return True

    def pull(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Jᵀc: one gradient a parameter, from one cotangent an output."""
        with _telling(_not_once):
            return _gradients(self._outputs, self._leaves, cotangents)

    def pull_first(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Jᵀc, before all other products."""
        return self.pull(cotangents)

    def numbers(self) -> int:
        """How many numbers a backward pass goes through."""
        return graph_numbers(self._outputs)

    def depends(self) -> bool:
        """Whether a way leads from the outputs to a parameter."""
        return not set(_leaves_of(self._outputs)).isdisjoint(self._leaves)


class JacobianProducts(Recording):
    """F at one θ, for products with its Jacobian."""

    def __init__(self, recorder: Recorder, parameters: Parameters, inputs: Inputs) -> None:
        super().__init__(recorder, parameters, inputs)
        self._cotangents: list[Tensor] | None = None
        self._transposed: list[GradientEdge | None] = []

    def pull_first(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Jᵀc, recorded on the way: u ↦ Jᵀu is linear, so its graph at u = c serves every later push."""
        variables = [cotangent.detach().clone().requires_grad_() for cotangent in cotangents]
        try:
            with torch.enable_grad():
                rows = torch.autograd.grad(
                    self._outputs, self._leaves, variables, create_graph=True, materialize_grads=True
                )
            refuse_once_differentiable(rows)
        except RuntimeError as error:
            if self._recorded_otherwise(error):
                return self.pull_first(cotangents)
            self.pull(cotangents)  # says where there isn't even a first derivative
            raise _no_jacobian(str(error)) from error
        self._cotangents, self._transposed = variables, _edges(rows)
        return [row.detach() for row in rows]

    def examine(self) -> None:
        """Raise where push isn't the transpose of pull: a backward formula in the model hides a part of itself from the next
        derivative.

        Whatever products are asked for, ⟨c, Jv⟩ is compared with ⟨Jᵀc, v⟩ for v along Jᵀc, scaled so that every parameter has
        the same part in it, 1, but for those whose part may be nothing but rounding.
        """
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(value.shape, generator=generator).to(value) for value in self.values]
        rows = self.pull_first(drawn) if self._cotangents is None else self.pull(drawn)
        sizes = [float(torch.linalg.vector_norm(row, dtype=torch.float64)) for row in rows]
        rounding = max(map(self._recorder.rounding, self.values))
        floor = rounding**0.5 * max(sizes) or 1.0
        scales = [max(size, floor) for size in sizes]
        tangents = [row / scale / scale for row, scale in zip(rows, scales, strict=True)]
        expected = sum((size / scale) ** 2 for size, scale in zip(sizes, scales, strict=True))
        found = sum(float((c * v).sum()) for c, v in zip(drawn, self.push(tangents), strict=True))
        if abs(found - expected) > rounding**0.4 * expected**0.5:  # not where it isn't finite
            raise _no_jacobian("a backward formula in it hides a part of itself, though nothing says so")

    def push(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """Jv: the tangents of the outputs, from one tangent a parameter."""
        if self._cotangents is None:
            self.pull_first([torch.zeros_like(value) for value in self.values])
        assert self._cotangents is not None
        with _telling(_no_jacobian):
            return _gradients(self._transposed, self._cotangents, tangents)


class HessianProducts(Recording):
    """The Hessian of a scalar function of what a model returns, as products; say which function with `of` first."""

    second = True

    def of(self, scalar: Callable[[list[Tensor]], Tensor]) -> None:
        """Record the gradient of scalar([x_N, activations …])."""
        try:
            with torch.enable_grad():
                value = scalar(self._outputs)
                slopes = torch.autograd.grad(value, self._leaves, create_graph=True, materialize_grads=True)
            refuse_once_differentiable(slopes)
        except RuntimeError as error:
            if not self._recorded_otherwise(error):
                raise _not_twice(error) from error
            self.of(scalar)
        else:
            self._slopes = _edges(slopes)

    def examine(self) -> None:
        """Raise where products would be wrong."""

        def run() -> None:
            with sdpa_kernel(SDPBackend.MATH), plain_rules():
                self._recorder.run(self._parameters, self._inputs)

        check_handwritten(
            handwritten(self._outputs[:1]), run, "the model, which Newton asks for,", "use GaussNewton or KL"
        )

    def product(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """Hv."""
        with _telling(_not_twice):
            return _gradients(self._slopes, self._leaves, tangents)


def _gradients(of: Sequence[Tensor | GradientEdge | None], by: list[Tensor], along: Sequence[Tensor]) -> list[Tensor]:
    """Σ alongᵀ ∂of/∂by, where None depends on nothing; the graph stays."""
    pairs = [(each, v) for each, v in zip(of, along, strict=True) if each is not None]
    if not pairs:
        return [torch.zeros_like(each) for each in by]
    sources, directions = zip(*pairs, strict=True)
    return list(torch.autograd.grad(sources, by, directions, retain_graph=True, materialize_grads=True))


@contextmanager
def _telling(tell: Callable[[Exception], LLQRError]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise tell(error) from error


def _edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Where a backward pass from them begins, without their values, which are as large as the parameters and of no use."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]


def _not_once(error: Exception) -> LLQRError:
    return LLQRError(
        f"the model can't be differentiated ({error}): loss.backward() has to work with it, also without checkpointed blocks"
    )


def _no_jacobian(why: object) -> NotTwiceDifferentiableError:
    return NotTwiceDifferentiableError(
        f"the model has an operation that can't be differentiated twice, and products with its Jacobian need that ({why}): "
        "replace the operation, or use LLQR(base, model) without a divergence, which asks for no second derivative"
    )


def _not_twice(error: Exception) -> NotTwiceDifferentiableError:
    return NotTwiceDifferentiableError(
        f"the model or its loss can't be differentiated twice, as Newton asks ({error}): replace the operation, or use KL if "
        "it is in the loss, or LLQR(base, model) without a divergence, which asks for no second derivative"
    )


# --- segments ---

Again = Callable[[], AbstractContextManager[Any]]
"""What a segment is run again in: the modes, precision and random streams that it was called with."""
Run = Callable[[Sequence[Tensor]], Tensor]
"""A call of a module as a function of the tensors that derivatives are by."""
OTHERS = "name other modules in segments"
MARK = "of_llqr_segment"


class Segment(Rule):
    """One call of a module, `run` as a function of these inputs: activations, then parameters."""

    def __init__(
        self, name: str, run: Run, inputs: Sequence[Tensor], rules: Callable[[], TorchFunctionMode], again: Again
    ) -> None:
        self.name, self._run, self._rules, self._context = name, run, rules, again
        self.inputs: tuple[Tensor, ...] = tuple(inputs)
        leaves = self._leaves()
        self._value = run(leaves)
        with torch._C.DisableTorchFunction():  # while rules are in force, who reads the graph is taken for the model
            self.handwritten = handwritten([self._value])
            strangers = set(_leaves_of([self._value])) - set(leaves)
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
def in_segments(recorder: Recorder, rules: Callable[[], TorchFunctionMode], second: bool) -> Iterator[None]:
    """While in force, a call of one of the recorder's segments is recorded as one node."""

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

        return record(Segment(name, run, inputs, rules, recorder.rerun()), *inputs, second=second)

    with ExitStack() as stack:
        for name, module in recorder.segments.items():
            stack.enter_context(replaced(module, forward=partial(called, name, module, module.forward)))
        yield


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
