"""Solvers along conjugate directions: ConjugateGradient, with an exact line search, and ScaleFree, with lengths taken from the
curvature: no learning rate, one curvature product a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from llqr.preconditioner import Preconditioner, Stacks
from llqr.solvers.problem import Point, Problem, Solver, add, block_norms, positive, weighted

NOTHING_TO_GAIN = 1e-6
"""A line search that lowers J by less than this, relative to J, is the last."""
LONGEST = 10.0
"""The longest step, relative to the norm of U at the start."""
LONGEST_TRIAL = 1.0
"""The most that a tensor moves to a trial point, relative to its norm."""
STRETCH = (0.1, 3.0)
"""The least and the largest multiple of a trial's length that a step may have."""


class ConjugateDirections:
    """Polak–Ribière: d ← -M∇J + β⁺ d, with β⁺ = max(0, ⟨M∇J, ∇J - ∇J_before⟩ / ⟨M∇J_before, ∇J_before⟩); M = I by default."""

    def __init__(self, problem: Problem, metric: Stacks | None = None) -> None:
        self._problem, self._metric = problem, metric
        self._last: tuple[Stacks, float, Stacks] | None = None

    def next(self, gradient: Stacks, free: Stacks | None = None) -> Stacks | None:
        """The direction, of the blocks that are free to move (a factor for each); None where there is no descent left."""
        descent = [-part for part in gradient]
        for factors in (self._metric, free):
            descent = descent if factors is None else weighted(factors, descent)
        before = gradient if self._last is None else self._last[0]
        squared, overlap = (-number for number in self._problem.dots((descent, gradient), (descent, before)))
        if not 0 < squared < math.inf:
            return None
        direction = descent
        if self._last is not None:
            _, squared_before, direction_before = self._last
            kept = direction_before if free is None else weighted(free, direction_before)
            direction = add(descent, kept, max((squared - overlap) / squared_before, 0.0))
            if self._problem.dots((direction, gradient))[0] >= 0:
                direction = descent
        self._last = (gradient, squared, direction)
        return direction


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
        longest = LONGEST * problem.norm(u.tensors)
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
                steps_to = zip(trial, point.step, first, strict=True)
                second = [(t - s - length * f) / (length * length) for t, s, f in steps_to]
                second_product = problem.curvature(second)
                pairs = (slope, second), (first, second_product), (second, second_product)
                square, cubic, quartic = problem.dots(*pairs)
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
    units = 1.0, start, start * start, start * start * start
    a1, a2, a3, a4 = (a * unit for a, unit in zip(coefficients, units, strict=True))
    ratios = [-a / a1 if a1 else math.inf for a in (4 * a4, 3 * a3, 2 * a2)]
    if not all(map(math.isfinite, ratios)):
        return start
    companion = torch.zeros(3, 3, dtype=torch.float64)  # a₁s³ + 2a₂s² + 3a₃s + 4a₄ = 0 for s = 1/t
    companion.diagonal(-1).fill_(1)
    companion[:, 2] = torch.tensor(ratios, dtype=torch.float64)
    roots = [1 / s for s in torch.linalg.eigvals(companion).tolist() if s]
    candidates = [1.0, limit / start, *(t.real for t in roots if abs(t.imag) < 1e-6 * abs(t))]
    values = {t: t + t * t * (a2 + t * (a3 + t * a4)) / a1 for t in candidates if 0 < t <= limit / start}
    return start * max((t for t in values if math.isfinite(values[t])), key=values.__getitem__, default=1.0)


@dataclass(frozen=True)
class ScaleFree(Solver):
    """U = c·V: the scale c is exact at no cost, and V follows Polak–Ribière directions d in the metric of each block.

    *Scale.* δ is linear in c, so c = -g·δ/δ·Hδ needs no product beyond the Hδ that is there.
    *Metric.* ∇J of a block is of order ‖g_b‖²; dividing it by that (by the mean of g² for a diagonal) lets layers with small
    gradients move as far as the others. With a·g and b·H in place of g and H, U becomes U/b and J a²/b times what it was.
    *Length.* Where δ is linear in V: a = -⟨P, δ'⟩/⟨δ', Hδ'⟩ along δ' = dδ[d], after which Hδ + aHδ' is exact. Where it isn't
    (Kronecker, E-KFAC), the one product is spent on a trial point V + a₀d, with a₀ from the curvature last met, not on δ':
    so Hδ is exact there, second order in a₀ included, and errors can't pile up. Along the chord v from δ to the trial's δ,
    c and the multiple r of a₀ minimise a quadratic of two variables. The trial point is taken if it is better, at its own best
    c; r·a₀ says where to try next. A point between the two would have only the chord's value for Hδ, and such values drift.
    *Safety.* Negative curvature counts by its absolute value. The norm of each tensor of V may become `reach` times that at
    the start, and c `reach` times ‖δ‖/‖Hδ‖; a block that has come to its bound stays there. The U with the least J, negative
    curvature counted so, of those where it is known exactly is returned: J never rises where H is positive.
    """

    reach: float = 100.0

    def __post_init__(self) -> None:
        positive("reach", self.reach)

    def solve(self, problem: Problem, u: Preconditioner, steps: int) -> Preconditioner:
        problem, norm = problem.normalised()  # squares of tiny or huge gradients are beyond float32
        if not 0 < norm < math.inf:
            return u.with_history([0.0])
        solved = self._solve(problem, u, steps)
        return solved.with_history([norm**2 * value for value in solved.history])

    def _solve(self, problem: Problem, u: Preconditioner, steps: int) -> Preconditioner:
        point = problem.at(u)
        state = _State.of(problem, 1.0, point, point.step, problem.curvature(point.step))
        history = [state.value]
        bounds = _Bounds(u, self.reach)
        state = replace(state, scale=bounds.scale(problem, state))
        if not math.isfinite(history[0]) or state.along == 0:
            return u.with_history(history)
        best = state
        advance = _along_tangent if u.degree == 1 else _along_chord
        directions = ConjugateDirections(problem, _metric(problem))
        for _ in range(steps):
            before = state.value
            best = min(best, state, key=_State.merit)
            slope = problem.slope(state.product, state.scale)
            direction = directions.next(state.point.pullback(slope), bounds.free(state.point.u))
            moved = None if direction is None else advance(problem, state, slope, direction, bounds)
            if moved is None or not (moved.point.u.is_finite() and math.isfinite(moved.value)):
                break
            refused = moved.point is state.point  # a trial that was worse; the next is at another length
            state = moved
            history.append(state.value)
            if not refused and abs(before - history[-1]) <= NOTHING_TO_GAIN * abs(history[-1]):
                break
        best = min(best, state, key=_State.merit)
        if len(history) > 1:
            history[-1] = best.value
        return best.point.u.scaled(best.scale).with_history(history)


@dataclass(frozen=True)
class _State:
    """c, V with its derivatives, and its pair (δ, Hδ) for c = 1, with g·δ and δ·Hδ.

    `chord` is the last chord's Rayleigh quotient of H and the length of the step along it.
    """

    scale: float
    point: Point
    step: Stacks
    product: Stacks
    along: float
    curved: float
    chord: tuple[float, float] | None = None

    @classmethod
    def of(cls, problem: Problem, scale: float, point: Point, step: Stacks, product: Stacks) -> _State:
        along, curved = problem.dots((problem.gradient, step), (step, product))
        return cls(scale, point, step, product, along, curved)

    @property
    def value(self) -> float:
        """J."""
        return self.scale * self.along + 0.5 * self.scale**2 * self.curved

    def merit(self) -> float:
        """J with the curvature's absolute value: what steps are compared by, because J itself has no bottom where H is
        negative, and the longest step would win. The same as J where H is positive."""
        return self.value + self.scale**2 * max(0.0, -self.curved)


def _metric(problem: Problem) -> Stacks:
    """A weight for each block, tensor by tensor."""
    metric: Stacks = []
    for group, gradient in zip(problem.groups, problem.gradient, strict=True):
        squares = block_norms(gradient).square()
        weight = (group.structure.spread(group.shape) / squares).masked_fill(squares == 0, 0.0)
        metric += [weight] * len(group.tensors)
    return metric


class _Bounds:
    """How far U may go."""

    def __init__(self, start: Preconditioner, reach: float) -> None:
        self._reach = reach
        self._start = [block_norms(tensor) for tensor in start.tensors]

    def scale(self, problem: Problem, state: _State) -> float:
        """The best c for a pair (δ, Hδ), or the one that is there if δ isn't a descent direction.

        |δ·Hδ| counts as ‖δ‖ ‖Hδ‖ / reach at least, so that a curvature that nearly cancels doesn't send c far away.
        """
        least = math.prod(problem.sizes(state.step, state.product)) / self._reach
        scale = _ratio(-state.along, max(abs(state.curved), least))
        return scale if 0 < scale < math.inf else state.scale

    def free(self, u: Preconditioner) -> Stacks:
        """For each block 1, or 0 where one of its tensors has come to the bound; tensor by tensor."""
        inside = (block_norms(t) < 0.99 * self._reach * start for t, start in zip(u.tensors, self._start, strict=True))
        masks: Stacks = []
        for group in u.groups:
            free = torch.stack([next(inside) for _ in group.tensors]).all(0)
            masks += [free.to(group.dtype)] * len(group.tensors)
        return masks

    def length(self, u: Preconditioner, direction: Stacks, relative: float = math.inf) -> float:
        """The longest a that leaves every tensor's norm within `reach` of that at the start, and moves none by more than
        `relative` of its norm (now or at the start, the larger)."""
        longest = math.inf
        for tensor, part, start in zip(u.tensors, direction, self._start, strict=True):
            norms, moves = block_norms(tensor), block_norms(part)
            room = (self._reach * start - norms).minimum(relative * norms.maximum(start))
            longest = min(longest, float((room.clamp_min(0) / moves).masked_fill(moves == 0, math.inf).min()))
        return longest


def _along_tangent(problem: Problem, state: _State, slope: Stacks, direction: Stacks, bounds: _Bounds) -> _State | None:
    """A step where δ is linear in V: exact with the product Hδ'."""
    tangent = state.point.derivative(direction)
    product = problem.curvature(tangent)
    longest = bounds.length(state.point.u, direction)
    decline, curved = problem.dots((slope, tangent), (tangent, product))
    length = min(_ratio(-decline, state.scale * abs(curved)), longest)
    if not 0 < length < math.inf:
        return None
    moved = problem.at(state.point.u.moved(direction, length))
    return _State.of(problem, state.scale, moved, add(state.step, tangent, length), add(state.product, product, length))


def _along_chord(problem: Problem, state: _State, slope: Stacks, direction: Stacks, bounds: _Bounds) -> _State | None:
    """A step where δ isn't linear in V: the product is spent on a trial point."""
    length = min(_predicted(problem, state, slope, direction), bounds.length(state.point.u, direction, LONGEST_TRIAL))
    if not 0 < length < math.inf:
        return None
    trial = problem.at(state.point.u.moved(direction, length))
    trial_product = problem.curvature(trial.step)
    chord, product = add(trial.step, state.step, -1.0), add(trial_product, state.product, -1.0)
    g_chord, step_chord, chord_chord, square = problem.dots(
        (problem.gradient, chord), (chord, state.product), (chord, product), (chord, chord)
    )
    multiple = min(max(_multiple(state, g_chord, step_chord, chord_chord), STRETCH[0]), STRETCH[1])
    quotient = _ratio(chord_chord, square)
    there = _State.of(problem, state.scale, trial, trial.step, trial_product)
    there = replace(there, scale=bounds.scale(problem, there))
    better = there if there.merit() < state.merit() else state
    return replace(better, chord=(quotient, multiple * length))


def _predicted(problem: Problem, state: _State, slope: Stacks, direction: Stacks) -> float:
    """a₀ if H is along d as it was along the last chord; the geometric mean of that and of the last length."""
    tangent = state.point.derivative(direction)
    decline, square, own = problem.dots((slope, tangent), (tangent, tangent), (state.step, state.step))
    quotient = state.chord[0] if state.chord else _ratio(state.curved, own)
    length = _ratio(-decline, state.scale * abs(quotient) * square)
    return math.sqrt(length * state.chord[1]) if state.chord and length > 0 else length


def _multiple(state: _State, g_chord: float, step_chord: float, chord_chord: float) -> float:
    """r of the (c, r) that minimise J(c (δ + r v)) for a chord v, given g·v, v·Hδ and v·Hv; with c as it is where no such
    pair is positive."""
    g_step, step_step = state.along, state.curved
    determinant = step_step * chord_chord - step_chord**2
    if step_step > 0 and chord_chord > 0 and determinant > 1e-12 * step_step * chord_chord:
        scale = (step_chord * g_chord - chord_chord * g_step) / determinant
        along = (step_chord * g_step - step_step * g_chord) / determinant
        if scale > 0 and along > 0:
            return along / scale
    return _ratio(-(g_chord + state.scale * step_chord), state.scale * abs(chord_chord))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.copysign(math.inf, numerator) if numerator else 0.0
