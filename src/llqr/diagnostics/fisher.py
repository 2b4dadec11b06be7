"""Curvature as it is at the output, W = ∇²ψ(x_N), and backward passes that carry it to the layers.

H = Jᵀ W J. With a root W = R Rᵀ, block by block for the variables of the output (an example, a token), and independent signs
ε_b = ±1 for them, the cotangents s = (ε_b R_b e_c)_b of all columns c have Σ_c E[s sᵀ] = W. What a layer receives for an
example depends on that example alone in most networks; then products of a single example are exact, whatever the signs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import loss_gradient
from llqr.diagnostics.judging import Reference
from llqr.divergences import L2, BasePoint, OutputTerm
from llqr.errors import LLQRError


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
