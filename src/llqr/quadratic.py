"""QuadraticModel: m(δ) = g·δ + ½ δ·Hδ of a model, a batch and a divergence, as a gradient and products with H.

For terms that are flat at θ_k a product is Jᵀ W J v: one push through the network, one small product at the outputs, one pull
back (design fact: the LQR's rollout *is* the Jacobian-vector product, its backward sweep *is* the vector-Jacobian product).
Newton's term is a Hessian product. Damping and L2 terms are a diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import (
    Inputs,
    Loss,
    batch_size_of,
    check_finite,
    check_parameter,
    frozen_rng,
    loss_gradient,
    tensors_in,
)
from llqr.chunks import pieces
from llqr.divergences import L2, ActivationTerm, BasePoint, Divergence, OutputTerm, Term, resolve
from llqr.errors import LLQRError, unknown
from llqr.linearize import Linearization, Parameters, Recorder, SecondDerivative, Selector
from llqr.naming import PerLayer, per_parameter


class QuadraticModel:
    """g·δ + ½ δ·Hδ at the model's present parameters; build one with `QuadraticModel.build`."""

    def __init__(
        self, parameters: Parameters, parts: list[_Part], gradient: Parameters, diagonal: dict[str, float]
    ) -> None:
        self._parameters, self._parts, self._diagonal = parameters, parts, diagonal
        self._versions = [parameter._version for parameter in parameters.values()]
        self.gradient = gradient
        """g of the mean loss, by parameter name."""

    @classmethod
    def build(
        cls,
        model: nn.Module,
        inputs: Inputs,
        targets: Any,
        loss_fn: Loss | None,
        divergence: str | Divergence,
        damping: PerLayer = 0.0,
        chunk_size: int | None = None,
        *,
        output: Selector | None = None,
        weights: Tensor | None = None,
        training: bool | None = None,
        gradient: Parameters | None = None,
    ) -> QuadraticModel:
        """Build the model of one step.

        Args:
            model: any module. What it holds (buffers, `.grad`, modes, the random stream) is left as it was.
            inputs: what it is called with: a tensor, a tuple, or a dict of keywords.
            targets: passed on to `loss_fn`.
            loss_fn: `loss_fn(output, targets)`, the mean loss. None if `gradient` is given and the divergence needs no loss.
            divergence: an object of `llqr.divergences` or its name.
            damping: added to H's diagonal: one number, or a mapping from module or parameter names.
            chunk_size: examples at a time; the same numbers with the memory of a chunk, for about twice the work.
            output: picks the tensor that loss and divergence are about out of what the model returns.
            weights: one weight a variable (an example, a token): 0 for padding. The loss must ignore the same ones.
            training: run the modules in this mode (False: running BatchNorm statistics, no dropout). None: as they are.
            gradient: g, where it is known already.
        """
        terms = list(resolve(divergence).terms())
        _check_tensors(model, inputs)
        parameters = _trainable(model)
        needs_loss = gradient is None or any(_asks_for_loss(term) for _, term in terms)
        if loss_fn is None and needs_loss:
            raise LLQRError(f"{divergence!r} needs the loss and its targets: give loss_fn and targets")
        diagonal = _diagonal(model, parameters, terms, damping)
        places = _places(model, terms)
        recorder = Recorder(model, list(places.values()), output, training, whole=chunk_size is None)
        problem = _Problem(recorder, parameters, loss_fn if needs_loss else None, terms, places)
        parts = [
            _Part(problem, *piece, keep=chunk_size is None)
            for piece in pieces(model, inputs, targets, weights, chunk_size, training, bool(places))
        ]
        slope = _total(part.gradient() for part in parts) if gradient is None else _given(gradient, parameters)
        for name, value in slope.items():
            check_finite(value, f"the gradient of {name!r}")
        if chunk_size is not None and loss_fn is not None and gradient is None:
            _check_chunks(loss_fn, parts, targets)
        return cls(parameters, parts, slope, diagonal)

    def curvature(self, direction: Mapping[str, Tensor]) -> Parameters:
        """H·v, damping included."""
        self._check(direction)
        if self._versions != [parameter._version for parameter in self._parameters.values()]:
            raise LLQRError("the parameters were changed since this quadratic model was built: build it again")
        product = _total(part.curvature(direction) for part in self._parts)
        return {name: torch.add(product[name], v.detach(), alpha=self._diagonal[name]) for name, v in direction.items()}

    def _check(self, direction: Mapping[str, Tensor]) -> None:
        for name, v in direction.items():
            if name not in self.gradient:
                raise unknown("parameter in a direction", name, self.gradient)
            if v.shape != self.gradient[name].shape:
                shape = tuple(self.gradient[name].shape)
                raise LLQRError(f"the direction of {name!r} has shape {tuple(v.shape)}, and the parameter {shape}")
        missing = [name for name in self.gradient if name not in direction]
        if missing:
            raise LLQRError(
                f"the direction lacks {', '.join(map(repr, missing[:5]))}: it has a tensor for every parameter"
            )

    def value(self, step: Mapping[str, Tensor]) -> Tensor:
        """m(δ) = g·δ + ½ δ·Hδ."""
        curved = self.curvature(step)
        return torch.stack([((self.gradient[name] + 0.5 * curved[name]) * step[name]).sum() for name in step]).sum()


@dataclass
class _Problem:
    """What the chunks of one batch have in common."""

    recorder: Recorder
    parameters: Parameters
    loss_fn: Loss | None
    terms: list[tuple[float, Term]]
    places: dict[str | int, str]

    def steep(self) -> list[tuple[float, OutputTerm]]:
        """The terms that aren't flat, which take Hessian products."""
        return [(weight, term) for weight, term in self.terms if isinstance(term, OutputTerm) and not term.flat]

    def has_flat(self) -> bool:
        """Whether a term takes a push and a pull."""
        return any(term.flat and not isinstance(term, L2) for _, term in self.terms)


class _Part:
    """One chunk of the batch. `share` is its share of the mean over variables, `examples` of the mean over examples."""

    def __init__(
        self,
        problem: _Problem,
        inputs: Inputs,
        targets: Any,
        weights: Tensor | None,
        share: float,
        examples: float,
        keep: bool,
    ) -> None:
        self._problem, self._inputs, self._targets, self._weights = problem, inputs, targets, weights
        self._share, self._examples, self._keep = share, examples, keep
        self._recorded: _Recorded | None = None
        self._trusted = False
        self.share = share
        self.seen: BasePoint | None = None
        """Where ψ was last expanded: the chunk's output, and its loss."""

    def gradient(self) -> Parameters:
        """This chunk's share of g."""
        recorded = self._record()
        if recorded.gradient is None:
            raise LLQRError("there is no loss to take the gradient of")
        return self._named(recorded.gradient)

    def curvature(self, direction: Mapping[str, Tensor]) -> Parameters:
        problem, recorded = self._problem, self._record()
        tangents = [direction[name].detach() for name in problem.parameters]
        product: list[Tensor] | None = None
        if recorded.linear is not None:
            product = self._linear_product(recorded, recorded.linear, tangents)
        if recorded.second is not None:
            steep = recorded.second.product(tangents)
            product = steep if product is None else [a + b for a, b in zip(product, steep, strict=True)]
        return self._named([torch.zeros_like(v) for v in tangents] if product is None else product)

    def _linear_product(self, recorded: _Recorded, linear: Linearization, tangents: list[Tensor]) -> list[Tensor]:
        """JᵀWJv; the first is held against ⟨v, JᵀWJv⟩ = ⟨Jv, WJv⟩.

        They differ where a backward formula in the model hides a part of itself from the next derivative.
        """
        pushed = linear.push(tangents)
        curved = self._curve(recorded, pushed)
        product = linear.pull(curved)
        if not self._trusted:
            self._trusted = True
            outside, inside = _dot(tangents, product), _dot(pushed, curved)
            tolerance = max(torch.finfo(tensor.dtype).eps for tensor in pushed) ** 0.4
            if abs(outside - inside) > tolerance * max(abs(outside), abs(inside)):
                linear.use_forward_mode("a backward formula in it can't be differentiated, though nothing says so")
                return self._linear_product(recorded, linear, tangents)
        return product

    def _curve(self, recorded: _Recorded, tangents: list[Tensor]) -> list[Tensor]:
        """W J v: the output-space products of the flat terms."""
        curved = [torch.zeros_like(tangent) for tangent in tangents]
        places = list(self._problem.places)
        for weight, term in self._problem.terms:
            if isinstance(term, OutputTerm) and term.flat:
                curved[0] += term.hessian_product(tangents[0], recorded.base) * (weight * self._factor(term))
            elif isinstance(term, ActivationTerm):
                index = 1 + places.index(term.place)
                product = term.hessian_product(tangents[index], batch_size_of(self._inputs))
                curved[index] += product * (weight * self._factor(term))
        return curved

    def _factor(self, term: OutputTerm | ActivationTerm) -> float:
        if term.additive:
            return 1.0
        return self._share if isinstance(term, OutputTerm) else self._examples

    def _record(self) -> _Recorded:
        """Run the chunk and record what its products need; kept if the whole batch is one chunk."""
        if self._recorded is not None:
            return self._recorded
        problem = self._problem
        steep = [(weight * self._share, term) for weight, term in problem.steep()]
        arguments = (problem.recorder, problem.parameters, self._inputs)
        second = SecondDerivative(*arguments) if steep else None
        linear = Linearization(*arguments) if problem.has_flat() or second is None else None
        run = linear or second
        assert run is not None
        base, slope = self._base(run.values)
        self.seen = base
        gradient: list[Tensor] | None = None
        if second is not None:
            second.of(lambda x: torch.stack([weight * term.psi(x, base) for weight, term in steep]).sum())
        if slope is not None:
            cotangents = [slope * self._share, *(torch.zeros_like(value) for value in run.values[1:])]
            gradient = linear.pull_first(cotangents) if linear is not None else run.pull(cotangents)
        recorded = _Recorded(linear, second, base, gradient)
        if self._keep:
            self._recorded = recorded
        return recorded

    def _base(self, values: list[Tensor]) -> tuple[BasePoint, Tensor | None]:
        """The point that ψ is expanded around, checked, and ∇ℓ(x_N)."""
        problem, output = self._problem, values[0]
        check_finite(output, "the output")
        loss: Callable[[Tensor], Tensor] = _no_loss
        slope: Tensor | None = None
        if problem.loss_fn is not None:
            loss, slope = loss_gradient(problem.loss_fn, output, self._targets)
            _check_mean(problem.loss_fn, output, self._targets)
        for _, term in problem.terms:
            if isinstance(term, OutputTerm):
                term.check(output, self._weights)
            elif isinstance(term, ActivationTerm):
                activation = values[1 + list(problem.places).index(term.place)]
                term.check(activation, batch_size_of(self._inputs))
        return BasePoint(output, loss, self._weights), slope

    def _named(self, tensors: list[Tensor]) -> Parameters:
        return dict(zip(self._problem.parameters, tensors, strict=True))


@dataclass
class _Recorded:
    """What one run of a chunk left behind."""

    linear: Linearization | None
    second: SecondDerivative | None
    base: BasePoint
    gradient: list[Tensor] | None
    """Jᵀ∇ℓ(x_N), where there is a loss."""


def _dot(left: list[Tensor], right: list[Tensor]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(left, right, strict=True))


def _no_loss(output: Tensor) -> Tensor:
    raise LLQRError("this divergence needs the loss: give loss_fn and targets")


def _asks_for_loss(term: Term) -> bool:
    return isinstance(term, OutputTerm) and term.needs_loss


def _trainable(model: nn.Module) -> Parameters:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise LLQRError("the model has no parameter that requires a gradient: there is nothing to step")
    for name, parameter in parameters.items():
        check_parameter(name, parameter)
    return {name: p.detach() for name, p in parameters.items()}


def _check_tensors(model: nn.Module, inputs: Inputs) -> None:
    if torch.is_inference_mode_enabled():
        raise LLQRError("torch.inference_mode() is on, and nothing can be differentiated under it: leave it first")
    if not isinstance(model, nn.Module):
        raise LLQRError(f"the model is a {type(model).__name__}, not an nn.Module")
    tensors = tensors_in(inputs)
    if not tensors:
        raise LLQRError(f"inputs are a tensor, or a tuple or dict with tensors in it; got {type(inputs).__name__}")
    devices = {p.device for p in model.parameters()} | {b.device for b in model.buffers()}
    if len(devices) > 1:
        raise LLQRError(f"the model is on several devices ({', '.join(sorted(map(str, devices)))}): move it to one")
    elsewhere = {tensor.device for tensor in tensors} - devices
    if devices and elsewhere:
        raise LLQRError(f"the inputs are on {elsewhere.pop()}, the model on {devices.pop()}: move one of them")
    for tensor in tensors:
        if tensor.numel() == 0:
            raise LLQRError(f"the inputs are empty, shape {tuple(tensor.shape)}: give at least one example")
        check_finite(tensor, "the inputs")


def _check_mean(loss_fn: Loss, output: Tensor, targets: Any) -> None:
    """A mean doesn't change when the batch is given twice; a sum doubles."""
    if not isinstance(targets, Tensor) or targets.dim() == 0 or output.dim() == 0 or len(targets) != len(output):
        return
    try:
        with torch.no_grad(), frozen_rng():
            once = float(loss_fn(output, targets))
            twice = float(loss_fn(torch.cat((output, output)), torch.cat((targets, targets))))
    except Exception:  # a loss that knows its batch proves nothing
        return
    if abs(once) > 1e-6 and abs(twice - 2 * once) < 1e-4 * abs(once):
        raise LLQRError("loss_fn adds the examples up: it must return their mean (reduction='mean')")


def _check_chunks(loss_fn: Loss, parts: list[_Part], targets: Any) -> None:
    """The losses of the chunks have to add up to the loss of the batch."""
    seen = [(part.share, part.seen) for part in parts if part.seen is not None]
    outputs = torch.cat([base.output for _, base in seen])
    with torch.no_grad(), frozen_rng():
        whole = float(loss_fn(outputs, targets))
        pieces = sum(share * float(base.loss(base.output)) for share, base in seen)
    if abs(whole - pieces) > 1e-3 * abs(whole):
        raise LLQRError(
            f"the losses of the chunks add up to {pieces:.6g}, and the loss of the batch is {whole:.6g}: it isn't a mean over "
            "examples (class weights, ignored targets?). Give `weights` that say how much each variable counts, or the batch "
            "whole"
        )


def _places(model: nn.Module, terms: list[tuple[float, Term]]) -> dict[str | int, str]:
    """The names of the modules that the divergence sits on."""
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    children = list(model._modules) if isinstance(model, nn.Sequential) else []
    places: dict[str | int, str] = {}
    for _, term in terms:
        if isinstance(term, ActivationTerm):
            place = term.place
            name = children[place] if isinstance(place, int) and 0 <= place < len(children) else str(place)
            if name not in known:
                raise unknown("module in Intermediate", place, known)
            places[place] = name
    return places


def _diagonal(
    model: nn.Module, parameters: Parameters, terms: list[tuple[float, Term]], damping: PerLayer
) -> dict[str, float]:
    modules = list(model._modules)  # what an integer key counts
    modules += [name for name, _ in model.named_modules(remove_duplicate=False) if name and name not in modules]
    weights = per_parameter(damping, parameters, modules, "damping")
    for weight, term in terms:
        if isinstance(term, L2):
            for name, extra in per_parameter(term.weight, parameters, modules, "L2 weights").items():
                weights[name] += weight * extra
    return weights


def _given(gradient: Parameters, parameters: Parameters) -> Parameters:
    for name, value in gradient.items():
        if name not in parameters:
            raise unknown("parameter in the gradient", name, parameters)
        if not isinstance(value, Tensor) or value.shape != parameters[name].shape:
            raise LLQRError(f"the gradient of {name!r} isn't a tensor of shape {tuple(parameters[name].shape)}")
    return {name: gradient.get(name, torch.zeros_like(p)).detach() for name, p in parameters.items()}


def _total(parts: Iterator[Parameters]) -> Parameters:
    total = next(parts)
    for part in parts:
        total = {name: value + part[name] for name, value in total.items()}  # gradients may share memory
    return total
