"""ConjugateGradient: nonlinear conjugate gradients with an exact line search."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llqr.preconditioner import Preconditioner
from llqr.solvers.problem import NOTHING_TO_GAIN, ConjugateDirections, Problem, Solver, add

LONGEST = 10.0
"""The longest step, relative to the norm of U at the start."""


@dataclass(frozen=True)
class ConjugateGradient(Solver):
    """Polak–Ribière directions d ← -∇J + β⁺ d, with the length that minimises J along d.

    Along d, δ(a) = δ + a δ' + a² δ'' for Kronecker blocks, and J is a quartic in a whose coefficients two curvature products,
    Hδ' and Hδ'', give exactly; where δ is linear in U, δ'' = 0 and one does. For E-KFAC, whose δ is of degree five, δ'' is the
    remainder at the length that minimises J to second order, and a third product tells where the step has led.
    """

    def solve(self, problem: Problem, u: Preconditioner, steps: int) -> Preconditioner:
        point = problem.at(u)
        product = problem.curvature(point.step)
        longest = LONGEST * problem.norm([group.tensors for group in u.groups])
        degree = u.degree
        history = [problem.value(point.step, product)]
        directions = ConjugateDirections(problem)
        for _ in range(steps):
            slope = problem.slope(product)
            direction = directions.next(point.pullback(slope))
            if direction is None:
                break
            first = point.derivative(direction)
            first_product = problem.curvature(first)
            decline, curved = problem.dots((slope, first), (first, first_product))
            limit = longest / problem.norm(direction)
            length = min(-decline / abs(curved), limit) if curved else limit
            new_product = add(product, first_product, length)
            if degree > 1:
                trial = problem.at(u.moved(direction, length)).step
                second = [
                    (t - s - length * f) / (length * length) for t, s, f in zip(trial, point.step, first, strict=True)
                ]
                second_product = problem.curvature(second)
                square, cubic, quartic = problem.dots(
                    (slope, second), (first, second_product), (second, second_product)
                )
                coefficients = [decline, curved / 2 + square, cubic, quartic / 2]
                length = _minimum(coefficients, length, limit)
                new_product = add(add(product, first_product, length), second_product, length * length)
            new = problem.at(u.moved(direction, length))
            if degree > 2:
                new_product = problem.curvature(new.step)
            value = problem.value(new.step, new_product)
            gained = history[-1] - value
            if not (gained > 0 and new.u.is_finite()):
                break
            u, point, product = new.u, new, new_product
            history.append(value)
            if gained <= NOTHING_TO_GAIN * abs(value):
                break
        return u.with_history(history)


def _minimum(coefficients: list[float], start: float, limit: float) -> float:
    """The length in (0, limit] with the least a₁t + a₂t² + a₃t³ + a₄t⁴, among its stationary points, `start` and `limit`."""
    scaled, power = [], start  # in units of start, so that powers don't overflow
    for coefficient in coefficients:
        scaled.append(coefficient * power)
        power *= start
    top = max(map(abs, scaled))
    if not 0 < top < math.inf or not all(map(math.isfinite, scaled)):
        return start
    a1, a2, a3, a4 = (coefficient / top for coefficient in scaled)
    slope = [a1, 2 * a2, 3 * a3, 4 * a4]
    while len(slope) > 1 and abs(slope[-1]) < 1e-14:
        slope.pop()
    candidates = [1.0, limit / start]
    if len(slope) > 1:
        companion = torch.zeros(len(slope) - 1, len(slope) - 1, dtype=torch.float64)
        companion.diagonal(-1).fill_(1)
        companion[:, -1] = -torch.tensor(slope[:-1], dtype=torch.float64) / slope[-1]
        roots = torch.linalg.eigvals(companion)
        candidates += [float(root.real) for root in roots if abs(float(root.imag)) < 1e-6 * abs(complex(root))]
    values = {t: t * (a1 + t * (a2 + t * (a3 + t * a4))) for t in candidates if 0 < t <= limit / start}
    return start * min((t for t in values if math.isfinite(values[t])), key=values.__getitem__, default=1.0)
