"""The engine: a network's forward pass recorded once, and then products with its Jacobian and with Hessians.

One forward pass x = F(θ) is recorded by autograd, and one backward pass u ↦ Jᵀu with a cotangent u that is itself a variable.
After that

    pull(c) = Jᵀc    is a backward pass through the first graph,
    push(v) = Jv     is a backward pass through the second: Jᵀu is linear in u, and the transpose of Jᵀ is J,
    a Hessian product is a backward pass through the graph of a gradient,

and nothing is run forward, traced or compiled again, however many products follow. A training step is three matrix products
a layer; push and pull are two each. Operations whose second derivatives torch computes slowly are recorded by rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from llqr.checks import Inputs
from llqr.curvature.graph import (
    check_handwritten,
    graph_numbers,
    handwritten,
    refuse_once_differentiable,
    refuse_wrong_formulas,
)
from llqr.curvature.recorder import Parameters, Recorder
from llqr.curvature.replacements import hessian_rules, linear_rules, plain_rules
from llqr.curvature.rules import BeyondRulesError, ChangedError
from llqr.curvature.segments import in_segments, refuse_leaks
from llqr.errors import LLQRError, NotTwiceDifferentiableError


class Recording:
    """One forward pass at θ, recorded: its values, and Jᵀc by a backward pass."""

    _second = False
    """Whether second derivatives are asked for."""

    def __init__(self, recorder: Recorder, parameters: Parameters, inputs: Inputs, rules: TorchFunctionMode) -> None:
        self._recorder, self._inputs = recorder, inputs
        self._names = list(parameters)
        self._leaves = [p.detach().requires_grad_() for p in parameters.values()]
        self._record(rules)

    def _record(self, rules: TorchFunctionMode) -> None:
        try:
            segments = in_segments(self._recorder.segments, type(rules), self._second, self._recorder.rerun)
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), rules, segments as self._within:
                self._outputs = self._run(self._leaves)
        except BeyondRulesError:  # as gradient penalties, physics-informed networks and hooks do
            self._record(plain_rules())
            return
        refuse_leaks(self._outputs if self._recorder.segments else ())
        self.values = [output.detach() for output in self._outputs]
        if not self._outputs[0].requires_grad:
            raise LLQRError("the output doesn't depend on the parameters by anything differentiable (was it detached?)")
        none = 0 * self._leaves[0].reshape(-1)[:1].sum()  # an activation that no parameter moves has zero derivatives
        self._outputs = [value if value.requires_grad else value + none for value in self._outputs]

    def _run(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return self._recorder.run(dict(zip(self._names, parameters, strict=True)), self._inputs)

    def pull(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Jᵀc: one gradient a parameter, from one cotangent an output."""
        with _telling(_not_once):
            return _gradients(self._outputs, self._leaves, cotangents)

    def numbers(self) -> int:
        """How many numbers a backward pass goes through."""
        return graph_numbers(self._outputs)

    def depends(self) -> bool:
        """Whether a way leads from the outputs to a parameter."""
        zeros = [torch.zeros_like(value) for value in self.values]
        found = torch.autograd.grad(self._outputs, self._leaves, zeros, retain_graph=True, allow_unused=True)
        return any(gradient is not None for gradient in found)


class JacobianProducts(Recording):
    """F at one θ, for products with its Jacobian."""

    def __init__(
        self, recorder: Recorder, parameters: Parameters, inputs: Inputs, rules: TorchFunctionMode | None = None
    ) -> None:
        super().__init__(recorder, parameters, inputs, rules or linear_rules())
        self._cotangents: list[Tensor] | None = None
        self._transposed: list[GradientEdge | None] = []
        self._plain = False

    def pull_first(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Jᵀc, recorded on the way: u ↦ Jᵀu is linear, so its graph at u = c serves every later push."""
        variables = [cotangent.detach().clone().requires_grad_() for cotangent in cotangents]
        try:
            with torch.enable_grad():
                rows = torch.autograd.grad(
                    self._outputs, self._leaves, variables, create_graph=True, materialize_grads=True
                )
            refuse_once_differentiable(rows)
        except ChangedError as error:
            if self._plain and not self._recorder.lower(error):  # nor that autocast was off, and parameters converted
                raise
            self._plain = True
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self._recorder.lower(error):
                self.pull(cotangents)  # says where there isn't even a first derivative
                raise _no_jacobian(str(error)) from error
        else:
            self._cotangents, self._transposed = variables, _edges(rows)
            return [row.detach() for row in rows]
        self._record(plain_rules())
        return self.pull_first(cotangents)

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

    _second = True

    def __init__(self, recorder: Recorder, parameters: Parameters, inputs: Inputs) -> None:
        super().__init__(recorder, parameters, inputs, hessian_rules())
        self._slopes: Sequence[GradientEdge | None] = ()

    def of(self, scalar: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
        """Record the gradient of scalar([x_N, activations …]), and return it."""
        try:
            refuse_wrong_formulas(self._outputs)
            with torch.enable_grad():
                value = scalar(self._outputs)
                slopes = torch.autograd.grad(value, self._leaves, create_graph=True, materialize_grads=True)
            refuse_once_differentiable(slopes)
        except RuntimeError as error:
            if self._recorder.lower(error):
                self._record(plain_rules())
                return self.of(scalar)
            raise _not_twice(error) from error
        self._slopes = _edges(slopes)
        return [slope.detach() for slope in slopes]

    def examine(self) -> None:
        """Raise where products would be wrong."""
        names = sorted({*handwritten(self._outputs[:1]), *self._within})

        def run() -> None:
            with sdpa_kernel(SDPBackend.MATH), plain_rules():
                self._run(self._leaves)

        check_handwritten(names, run, "the model, which Newton asks for,", "use GaussNewton or KL")

    def product(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """Hv."""
        with _telling(_not_twice):
            return _gradients(self._slopes, self._leaves, tangents)


def _gradients(
    of: Sequence[Tensor | GradientEdge | None], by: Sequence[Tensor], along: Sequence[Tensor]
) -> list[Tensor]:
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
