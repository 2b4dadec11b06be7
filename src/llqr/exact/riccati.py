"""The Riccati recursion: the LQR solved stage by stage, backwards for the value function, forwards for the step.

With the value function ½ δx·K_i δx + λ_i·δx of what is left from stage i on, S_i = R_i + B_iᵀ K_{i+1} B_i and
G_i = M_i + B_iᵀ K_{i+1} A_i,

    K_i = Q_i + A_iᵀ K_{i+1} A_i - G_iᵀ S_i⁻¹ G_i          K_N = Q_N
    λ_i = A_iᵀ λ_{i+1} - G_iᵀ S_i⁻¹ (B_iᵀ λ_{i+1} + r_i)    λ_N = g_N
    δθ_i = -S_i⁻¹ (G_i δx_i + B_iᵀ λ_{i+1} + r_i)

(r_i is a linear cost on δθ_i itself: none in the paper's problem, the residual when a solution is refined.) The S_i are
the pivots of a block LDLᵀ factorisation of H: all positive definite just where H is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.errors import DegenerateProblemError, IndefiniteProblemError, SingularProblemError
from llqr.exact.blocks import LQR, StageBlocks


class SymmetricFactor:
    """A factorised symmetric matrix: Cholesky, or by eigenvalues where it needn't be positive definite."""

    def __init__(self, matrix: Tensor, positive: bool, stage: str) -> None:
        matrix = (matrix + matrix.T) / 2
        if not matrix.isfinite().all():
            raise DegenerateProblemError(f"the recursion overflowed at stage {stage!r}: add damping", stage)
        self._cholesky: Tensor | None = None
        if positive:
            factor, failed = torch.linalg.cholesky_ex(matrix)
            if failed or not is_positive_definite(factor):
                raise degenerate(matrix, stage)
            self._cholesky = factor
        else:
            self._values, self._vectors = torch.linalg.eigh(matrix)
            if not self._values.all():
                raise SingularProblemError(
                    f"a pivot at stage {stage!r} is exactly singular: add a little damping", stage
                )

    def solve(self, right: Tensor) -> Tensor:
        if self._cholesky is not None:
            return torch.cholesky_solve(right, self._cholesky)
        solved: Tensor = self._vectors @ ((self._vectors.T @ right) / self._values[:, None])
        return solved


class DenseControl:
    """S_i⁻¹ with S_i formed: P × P."""

    def __init__(self, stage: StageBlocks, value_hessian: Tensor, positive: bool) -> None:
        self._B = stage.param_jacobian
        matrix = self._B.T @ (value_hessian @ self._B) + torch.diag(stage.diagonal)
        if stage.param_cost is not None:
            matrix = matrix + stage.param_cost
        self._factor = SymmetricFactor(matrix, positive, stage.name)

    def solve(self, costate: Tensor, control: Tensor | None) -> Tensor:
        """S⁻¹ (Bᵀ costate + control), column by column."""
        right = self._B.T @ costate
        return self._factor.solve(right if control is None else right + control)


class ThinControl:
    """S_i⁻¹ by the push-through identity, for P > n_{i+1} and R_i = D a positive diagonal: an n × n factorisation.

    With D^-½ Bᵀ = E T (E orthonormal, T n × n), S = D^½ (I + E T K Tᵀ Eᵀ) D^½, and on the range of E it is I + T K Tᵀ,
    outside of it the identity.
    """

    def __init__(self, stage: StageBlocks, value_hessian: Tensor, positive: bool) -> None:
        self._scale = stage.diagonal.rsqrt()[:, None]
        self._basis: Tensor
        self._triangle: Tensor
        self._basis, self._triangle = torch.linalg.qr(self._scale * stage.param_jacobian.T)
        inner = self._triangle @ value_hessian @ self._triangle.T
        inner.diagonal().add_(1)
        self._factor = SymmetricFactor(inner, positive, stage.name)

    def solve(self, costate: Tensor, control: Tensor | None) -> Tensor:
        """S⁻¹ (Bᵀ costate + control), column by column."""
        inside: Tensor = self._triangle @ costate
        if control is None:
            return self._scale * torch.mm(self._basis, self._factor.solve(inside))
        scaled = self._scale * control
        along = torch.mm(self._basis.T, scaled)
        outside = scaled - torch.mm(self._basis, along)
        return self._scale * (outside + torch.mm(self._basis, self._factor.solve(inside + along)))


@dataclass
class _Pivot:
    """What the forward rollout needs of a stage."""

    control: DenseControl | ThinControl | None
    coupling: Tensor | None
    """K_{i+1} A_i, n_{i+1} × n_i."""


@dataclass
class Solution:
    """The minimiser of an LQR, and the value function along the way."""

    controls: list[Tensor]
    """δθ_0 … δθ_{N-1}, one vector a stage."""
    state_steps: list[Tensor]
    """δx_1 … δx_N."""
    value_gradient: list[Tensor]
    """λ_1 … λ_N."""


class Riccati:
    """The backward recursion for K_i, factorised once; then any number of linear terms can be solved for.

    `positive=False` lets pivots be indefinite: the solution is then the stationary point, not a minimum.
    """

    def __init__(self, lqr: LQR, positive: bool = True) -> None:
        self.lqr = lqr
        value = lqr.terminal_cost.dense()
        self.value_hessian: list[Tensor] = [value]
        """K_1 … K_N."""
        self._pivots: list[_Pivot] = []
        for position in reversed(range(len(lqr.stages))):
            stage = lqr.stages[position]
            control = _control(stage, value, positive) if stage.diagonal.numel() else None
            jacobian = stage.state_jacobian
            coupling = None if jacobian is None else jacobian.apply_transposed(value).T  # K A = (Aᵀ K)ᵀ
            self._pivots.append(_Pivot(control, coupling))
            if jacobian is None or coupling is None:
                continue
            below = jacobian.apply_transposed(coupling)
            if stage.state_cost is not None:
                below = below + stage.state_cost.dense()
            if control is not None:
                gain = control.solve(coupling, stage.cross_cost)
                below = below - coupling.T @ (stage.param_jacobian @ gain)
                if stage.cross_cost is not None:
                    below = below - stage.cross_cost.T @ gain
            value = (below + below.T) / 2
            self.value_hessian.append(value)
        self.value_hessian.reverse()
        self._pivots.reverse()

    def solve(self, terminal_gradient: Tensor, linear: list[Tensor] | None = None) -> Solution:
        """Minimise with g_N = `terminal_gradient` and r_i = `linear[i]`."""
        costate = terminal_gradient
        costates = [costate]
        for position in reversed(range(1, len(self._pivots))):
            stage, pivot = self.lqr.stages[position], self._pivots[position]
            assert stage.state_jacobian is not None
            assert pivot.coupling is not None
            below = stage.state_jacobian.apply_transposed(costate)
            if pivot.control is not None:
                response = self._respond(position, costate, None, linear)
                below = below - pivot.coupling.T @ (stage.param_jacobian @ response)
                if stage.cross_cost is not None:
                    below = below - stage.cross_cost.T @ response
            costate = below
            costates.append(costate)
        costates.reverse()

        controls: list[Tensor] = []
        states: list[Tensor] = []
        for position, (stage, pivot) in enumerate(zip(self.lqr.stages, self._pivots, strict=True)):
            state = states[-1] if states else None
            control = stage.diagonal
            if pivot.control is not None:
                control = -self._respond(position, costates[position], state, linear)
            following = stage.param_jacobian @ control
            if state is not None and stage.state_jacobian is not None:
                following = following + stage.state_jacobian.apply(state)
            controls.append(control)
            states.append(following)
        return Solution(controls, states, costates)

    def _respond(self, position: int, costate: Tensor, state: Tensor | None, linear: list[Tensor] | None) -> Tensor:
        """S⁻¹ (G δx + Bᵀ λ + r)."""
        stage, pivot = self.lqr.stages[position], self._pivots[position]
        assert pivot.control is not None
        direct = None if linear is None else linear[position]
        if state is not None:
            if pivot.coupling is not None:
                costate = costate + pivot.coupling @ state
            if stage.cross_cost is not None:
                crossed = stage.cross_cost @ state
                direct = crossed if direct is None else direct + crossed
        return pivot.control.solve(costate[:, None], None if direct is None else direct[:, None])[:, 0]


def _control(stage: StageBlocks, value_hessian: Tensor, positive: bool) -> DenseControl | ThinControl:
    states, size = stage.param_jacobian.shape
    if stage.param_cost is None and size > states and bool((stage.diagonal > 0).all()):
        return ThinControl(stage, value_hessian, positive)
    return DenseControl(stage, value_hessian, positive)


def is_positive_definite(cholesky: Tensor) -> bool:
    """Whether a Cholesky factor's pivots stand clear of rounding."""
    pivots = cholesky.diagonal().square()
    return bool(pivots.min() > len(pivots) * torch.finfo(pivots.dtype).eps * pivots.max())


def degenerate(matrix: Tensor, stage: str | None) -> DegenerateProblemError:
    """The error for a symmetric matrix that isn't positive definite."""
    values = torch.linalg.eigvalsh(matrix)
    noise = len(values) * torch.finfo(values.dtype).eps * float(values.abs().max())
    lowest = float(values[0])
    where = "H" if stage is None else f"stage {stage!r}"
    if lowest < -noise:
        return IndefiniteProblemError(
            f"the quadratic model is unbounded below at {where} (lowest eigenvalue {lowest:.3g}): it has a saddle there, no "
            f"minimum. Add damping ({-2 * lowest:.1g} is a start), use GaussNewton or KL, which are never indefinite for a "
            "convex loss, or ask for the stationary point with degenerate='least-norm'",
            stage,
        )
    return SingularProblemError(
        f"the quadratic model is singular at {where}: it has directions without curvature, so its minimum isn't unique. "
        "Add damping (damping=1e-3, say), or ask for the smallest solution with degenerate='least-norm'",
        stage,
    )
