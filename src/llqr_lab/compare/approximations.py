"""Classical approximations of H, as steps to compare with: its diagonal, and K-FAC's Kronecker factors.

H = Jᵀ W J. With a root W = R Rᵀ, block by block for the variables of the output (an example, a token), and independent signs
ε_b = ±1 for them, the cotangents s = (ε_b R_b e_c)_b of all columns c have Σ_c E[s sᵀ] = W. What a layer receives for an
example depends on that example alone in most networks; then products of a single example are exact, whatever the signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr.checks import loss_gradient
from llqr.diagnostics.comparison import Reference, Step, flat, named
from llqr.divergences import L2, BasePoint, OutputTerm
from llqr.errors import LLQRError, SingularProblemError


@dataclass
class Seen:
    """What a layer was called with, and what it returned, once for each call."""

    module: nn.Linear | nn.Conv2d
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class Passes:
    """One forward pass at θ, and as many backward passes with the output's curvature as are asked for."""

    def __init__(self, reference: Reference, watched: dict[str, nn.Linear | nn.Conv2d] | None = None) -> None:
        _refuse_other_terms(reference)
        self.parameters = {name: p.clone().requires_grad_() for name, p in reference.parameters.items()}
        self.seen = {name: Seen(module) for name, module in (watched or {}).items()}
        with torch.enable_grad(), _watching(self.seen.values()):
            self._output = reference.recorder.run(self.parameters, reference.inputs)[0]
        self._root, self._dim = _root(reference, self._output.detach())

    @property
    def columns(self) -> int:
        return self._root.shape[-1]

    def cotangents(self, repeats: int, generator: torch.Generator) -> Iterator[Tensor]:
        """All the columns, so many times over with other signs; Σ E[s sᵀ] = repeats · W."""
        variables = self._root.shape[:-2]
        for _ in range(repeats):
            for column in range(self.columns):
                signs = torch.randint(0, 2, variables, generator=generator).to(self._root) * 2 - 1
                yield (self._root[..., column] * signs[..., None]).movedim(-1, self._dim)

    def pull(self, cotangent: Tensor, onto: Sequence[Tensor]) -> list[Tensor]:
        """The cotangents of these tensors."""
        return list(torch.autograd.grad(self._output, list(onto), cotangent, retain_graph=True, materialize_grads=True))


def _root(reference: Reference, output: Tensor) -> tuple[Tensor, int]:
    """R of each variable, (variables …, classes, columns), and the dimension of the output that classes are along."""
    loss, _ = loss_gradient(reference.loss_fn, output, reference.targets)
    base = BasePoint(output, loss, reference.weights)
    terms = [(weight, term) for weight, term in reference.divergence.terms() if isinstance(term, OutputTerm)]
    dims = {getattr(getattr(term, "family", None), "dim", -1) % output.dim() for _, term in terms}
    dim = dims.pop()

    def product(tangent: Tensor) -> Tensor:
        return sum((weight * term.hessian_product(tangent, base) for weight, term in terms), torch.zeros_like(tangent))

    classes = output.shape[dim]
    rows = []
    for index in range(classes):
        unit = torch.zeros_like(output)
        unit.select(dim, index).fill_(1)
        rows.append(product(unit).movedim(dim, -1))
    matrix = torch.stack(rows, -2)
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    by_blocks = (matrix @ probe.movedim(dim, -1)[..., None])[..., 0].movedim(-1, dim)
    truth = product(probe)
    if dims or (by_blocks - truth).norm() > torch.finfo(output.dtype).eps ** 0.5 * truth.norm():
        raise LLQRError(
            f"the curvature of {reference.divergence!r} at the output isn't one block for each variable (example, token), so "
            "there are no factors to take from it"
        )
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt()[..., None, :], dim


def _refuse_other_terms(reference: Reference) -> None:
    for _, term in reference.divergence.terms():
        if not isinstance(term, L2) and not (isinstance(term, OutputTerm) and term.flat):
            raise LLQRError(
                f"{term!r} isn't a curvature of the output alone: K-FAC's factors, and the diagonal of a large model, are "
                "there for KL, Rényi and Gauss–Newton"
            )


@contextmanager
def _watching(all_seen: Any) -> Iterator[None]:
    def watcher(seen: Seen) -> Any:
        def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen.inputs.append(args[0].detach().clone())
            seen.outputs.append(output)
            return output.clone()  # what follows may work in place

        return watch

    hooks = [seen.module.register_forward_hook(watcher(seen)) for seen in all_seen]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


EXACT_DIAGONAL = 1024
"""Parameters up to which H's diagonal is taken by as many products."""
DRAWS = 200
"""Backward passes for the diagonal of a larger one; its relative error is about √(2/draws)."""


def diagonal(reference: Reference, draws: int = DRAWS, seed: int = 0, exact: bool | None = None) -> dict[str, Tensor]:
    """diag(H + λ): by a product with each unit vector (`exact`, by default for small models), or estimated.

    The estimate is Σ (Jᵀs)² over cotangents s with E[s sᵀ] = W: unbiased, never negative, with a
    relative error that doesn't depend on what is off the diagonal.
    """
    count = flat(reference.gradient).numel()
    if count <= EXACT_DIAGONAL if exact is None else exact:
        return _by_products(reference)
    passes = Passes(reference)
    repeats = math.ceil(draws / passes.columns)
    total = {name: torch.zeros_like(g) for name, g in reference.gradient.items()}
    for cotangent in passes.cotangents(repeats, torch.Generator().manual_seed(seed)):
        for name, pulled in zip(total, passes.pull(cotangent, list(passes.parameters.values())), strict=True):
            total[name].addcmul_(pulled, pulled)
    own = reference.diagonal_terms
    return {name: value / repeats + own[name] for name, value in total.items()}


class Inverse:
    """An approximation of (H + λ)⁻¹, to be applied to the gradient of its batch or to others, as a `Preconditioner` is."""

    def __init__(self, diagonal: Mapping[str, Tensor], layers: Sequence[Factors] = ()) -> None:
        self._diagonal, self._layers = diagonal, layers

    def apply(self, gradients: Step) -> dict[str, Tensor]:
        found = {name: _divided(gradients[name], curvature, name) for name, curvature in self._diagonal.items()}
        for layer in self._layers:
            found.update(layer.apply(gradients))
        return {name: found[name] for name in gradients}


def diagonal_step(
    reference: Reference, draws: int = DRAWS, seed: int = 0, exact: bool | None = None
) -> dict[str, Tensor]:
    """-diag(H + λ)⁻¹ g."""
    return _step(Inverse(diagonal(reference, draws, seed, exact)), reference)


def kfac_inverse(
    reference: Reference,
    repeats: int = 1,
    draws: int = DRAWS,
    seed: int = 0,
    known_diagonal: Mapping[str, Tensor] | None = None,
) -> Inverse:
    """(A ⊗ G + λ)⁻¹ for Linear and Conv2d layers, and diag(H + λ)⁻¹ for the rest.

    A = mean of a aᵀ over what goes in (examples, tokens, patches; with a 1 for the bias), G = the sum of E[s sᵀ] over what
    comes back, by a pass for each class, `repeats` times: exact where examples don't mix, sampled signs where tokens do. The
    damping is exact, in the eigenbases of both (their mean, where weights and biases have different ones). Layers with shared
    weights, and convolutions that are grouped or padded otherwise than with zeros, count as the rest. `known_diagonal`: what
    `diagonal` gave, where it was asked already.
    """
    passes = Passes(reference, _kronecker_layers(reference))
    places = [(name, out) for name, seen in passes.seen.items() for out in seen.outputs]
    sums: dict[str, Tensor] = {}
    for cotangent in passes.cotangents(repeats, torch.Generator().manual_seed(seed)) if places else ():
        for (name, _), pulled in zip(places, passes.pull(cotangent, [out for _, out in places]), strict=True):
            rows = _positions(passes.seen[name].module, pulled)
            sums[name] = sums.get(name, 0) + rows.mT @ rows / repeats
    layers = [Factors(reference, name, passes.seen[name], factor) for name, factor in sums.items()]
    covered = {name for layer in layers for name in layer.names}
    rest = [name for name in reference.gradient if name not in covered]
    curvature = (known_diagonal or diagonal(reference, draws, seed)) if rest else {}
    return Inverse({name: curvature[name] for name in rest}, layers)


def kfac_step(reference: Reference, repeats: int = 1, draws: int = DRAWS, seed: int = 0) -> dict[str, Tensor]:
    """-(A ⊗ G + λ)⁻¹ g, as `kfac_inverse` has it."""
    return _step(kfac_inverse(reference, repeats, draws, seed), reference)


class Factors:
    """A ⊗ G + λ of one layer, with a column for the bias beside the weights, in the eigenbases of A and G."""

    def __init__(self, reference: Reference, layer: str, seen: Seen, g_factor: Tensor) -> None:
        weight, bias = (f"{layer}.{part}" if layer else part for part in ("weight", "bias"))
        self.names = [name for name in (weight, bias) if name in reference.gradient]
        rows = torch.cat([_patches(seen.module, inputs) for inputs in seen.inputs])
        columns, damping = rows.shape[1], reference.diagonal_terms[weight]
        if bias in self.names:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
            damping = (columns * damping + reference.diagonal_terms[bias]) / (columns + 1)
        a_values, self._a = torch.linalg.eigh(rows.mT @ rows / len(rows))
        g_values, self._g = torch.linalg.eigh(g_factor)
        self._curvature = g_values.clamp_min(0)[:, None] * a_values.clamp_min(0) + damping

    def apply(self, gradients: Step) -> dict[str, Tensor]:
        weight, *bias = (gradients[name] for name in self.names)
        joined = torch.cat([weight.flatten(1), *(part[:, None] for part in bias)], 1)
        found = self._g @ _divided(self._g.mT @ joined @ self._a, self._curvature, self.names[0]) @ self._a.mT
        parts = [found[:, : joined.shape[1] - len(bias)].reshape(weight.shape), *found[:, -1:].mT[: len(bias)]]
        return dict(zip(self.names, parts, strict=True))


def _step(inverse: Inverse, reference: Reference) -> dict[str, Tensor]:
    return {name: -part for name, part in inverse.apply(reference.gradient).items()}


def _kronecker_layers(reference: Reference) -> dict[str, nn.Linear | nn.Conv2d]:
    owners: dict[int, int] = {}
    for module in reference.model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found: dict[str, nn.Linear | nn.Conv2d] = {}
    for name, module in reference.model.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if _fits(module) and weight in reference.gradient and owners[id(module.weight)] == 1:
            found[name] = module
    return found


def _fits(module: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


def _patches(module: nn.Linear | nn.Conv2d, inputs: Tensor) -> Tensor:
    """What meets the weights, one row for each place that they are used at."""
    if isinstance(module, nn.Linear):
        return inputs.reshape(-1, inputs.shape[-1])
    columns = functional.unfold(inputs, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
    return columns.mT.reshape(-1, columns.shape[-2])


def _positions(module: nn.Linear | nn.Conv2d, cotangent: Tensor) -> Tensor:
    """What comes back at each of these places."""
    if isinstance(module, nn.Linear):
        return cotangent.reshape(-1, cotangent.shape[-1])
    return cotangent.flatten(-2).mT.reshape(-1, cotangent.shape[-3])


def _by_products(reference: Reference) -> dict[str, Tensor]:
    gradient = flat(reference.gradient)
    entries = torch.empty_like(gradient)
    unit = torch.zeros_like(gradient)
    for index in range(len(gradient)):
        unit[index] = 1
        entries[index] = flat(reference.quadratic.curvature(named(unit, reference.gradient)))[index]
        unit[index] = 0
    return named(entries, reference.gradient)


def _divided(gradient: Tensor, curvature: Tensor, name: str) -> Tensor:
    """gradient / curvature; zero where both are."""
    if bool(((curvature <= 0) & (gradient != 0)).any()):
        raise SingularProblemError(
            f"the approximated curvature of {name!r} is zero or negative where the gradient isn't: give a damping"
        )
    return gradient / curvature.masked_fill(curvature <= 0, 1.0)
