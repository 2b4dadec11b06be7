"""H cut to blocks: the step that ignores what couples them, and what that loses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from llqr.diagnostics.comparison import Reference, Step, Verdict, dot, flat, layers, named, norm, only
from llqr.exact.conjugate import conjugate_gradients
from llqr.structures.base import Per, check_per


class BlockStep(NamedTuple):
    """-(H_bb + λ)⁻¹ g_b for each block b, and the largest residual ‖(H_bb + λ)δ_b + g_b‖ of them, relative to ‖g‖."""

    step: dict[str, Tensor]
    residual: float


def block_step(
    reference: Reference, per: Per = "layer", tolerance: float = 1e-5, max_steps: int | None = None
) -> BlockStep:
    """The exact step of H cut to its diagonal blocks, of layers (what a module owns itself) or of single parameters.

    Each block is solved by conjugate gradients on products with all of H, so it costs as many times as there are blocks.
    """
    check_per(per)
    blocks = layers(reference.gradient) if per == "layer" else {name: [name] for name in reference.gradient}
    total = norm(reference.gradient)
    step, residual = {}, 0.0
    for names in blocks.values():
        own = {name: reference.gradient[name] for name in names}
        size = norm(own)
        limit = max_steps or min(2 * flat(own).numel(), 2_000)
        # relative to ‖g‖: a block with hardly any gradient needn't be solved to its own last digit
        goal = min(0.5, tolerance * total / size) if size else 1.0
        solved = conjugate_gradients(_Block(reference, names), flat(own), goal, limit)
        residual = max(residual, solved.residual * size / total)
        step.update(named(solved.step, own))
    return BlockStep({name: step[name] for name in reference.gradient}, residual)


class _Block:
    """Products with H_bb + λ."""

    def __init__(self, reference: Reference, names: Collection[str]) -> None:
        self._whole, self._curvature = reference.gradient, reference.quadratic.curvature
        self._own = {name: reference.gradient[name] for name in names}

    def __call__(self, vector: Tensor) -> Tensor:
        own = named(vector, self._own)
        padded = {
            name: own[name] if name in own else g.new_zeros(()).expand(g.shape) for name, g in self._whole.items()
        }
        product = self._curvature(padded)
        return flat({name: product[name] for name in own})


@dataclass(frozen=True)
class Coupling:
    """What is lost when H is cut to blocks: verdicts on the steps of the blocks, and how the exact step's layers interact."""

    layer: Verdict
    """Of the step with H cut to layers, and"""
    parameter: Verdict
    """to single parameters."""
    energy: dict[str, dict[str, float]]
    """δ*_i·H_ij δ*_j / δ*·(H + λ)δ* for layers i, j: sums to 1; what isn't on the diagonal is what the cut leaves out."""
    residual: float

    @property
    def lost(self) -> dict[str, float]:
        """The share of the attainable decrease that is out of reach along the steps of the blocks, at their best length."""
        return {"layer": 1 - self.layer.fraction_along, "parameter": 1 - self.parameter.fraction_along}


def coupling(reference: Reference, tolerance: float = 1e-5, max_steps: int | None = None) -> Coupling:
    """Cut H to its diagonal blocks and see what of the attainable decrease, and of the direction, is lost."""
    by_layer = block_step(reference, "layer", tolerance, max_steps)
    by_parameter = block_step(reference, "parameter", tolerance, max_steps)
    return Coupling(
        layer=reference.judge(by_layer.step, by_layer=False),
        parameter=reference.judge(by_parameter.step, by_layer=False),
        energy=_energy(reference),
        residual=max(by_layer.residual, by_parameter.residual),
    )


def _energy(reference: Reference) -> dict[str, dict[str, float]]:
    groups = layers(reference.gradient)
    whole = dot(reference.step, reference.product)

    def part(step: Step, names: Collection[str]) -> dict[str, Tensor]:
        return {name: step[name] for name in names}

    found = {}
    for row, names in groups.items():
        product = reference.quadratic.curvature(only(reference.step, names))
        found[row] = {
            column: dot(part(reference.step, others), part(product, others)) / whole
            for column, others in groups.items()
        }
    return found
