"""The exact step: by the Riccati recursion along the stages, by the dense matrix, by conjugate gradients.

With the value function ½ δx·K_i δx + λ_i·δx of what is left from stage i on, S_i = R_i + B_iᵀ K_{i+1} B_i and
G_i = M_i + B_iᵀ K_{i+1} A_i,

    K_i = Q_i + A_iᵀ K_{i+1} A_i - G_iᵀ S_i⁻¹ G_i          K_N = Q_N
    λ_i = q_i + A_iᵀ λ_{i+1} - G_iᵀ S_i⁻¹ (B_iᵀ λ_{i+1} + r_i)    λ_N = g_N
    δθ_i = -S_i⁻¹ (G_i δx_i + B_iᵀ λ_{i+1} + r_i)

with q_i and r_i the slopes of the loss's terms inside the network, if it has any. The S_i are the pivots of a block LDLᵀ
factorisation of H: all positive definite just where H is.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llqr.checks import Inputs, Loss, call, check_finite, check_model, kinds_of
from llqr.curvature.locations import PerLayer
from llqr.curvature.quadratic import QuadraticModel
from llqr.curvature.recorder import Streams
from llqr.curvature.replacements import constants
from llqr.divergences import Divergence, LayerwiseLoss
from llqr.errors import ChainError, DegenerateProblemError, NotTwiceDifferentiableError, unknown
from llqr.exact.chain import Chain, Row
from llqr.exact.lqr import LQR, StageBlocks, build
from llqr.exact.matrices import BlockDiagonal, apply_to_units, cholesky, conjugate_gradients, flat, least_norm, unflat


class DenseControl:
    """S_i⁻¹ with S_i formed: P × P."""

    def __init__(self, stage: StageBlocks, value_hessian: Tensor, open_loop: BlockDiagonal) -> None:
        self._B = stage.param_jacobian
        matrix = self._B.T @ (value_hessian @ self._B) + torch.diag(stage.diagonal)
        scale = (self._B * open_loop.apply(self._B)).abs().sum(0) + stage.diagonal
        if stage.param_cost is not None:
            matrix = matrix + stage.param_cost
            scale = scale + stage.param_cost.diagonal().abs()
        self._factor = cholesky(matrix, scale, stage.name)

    def solve(self, costate: Tensor, control: Tensor | None) -> Tensor:
        """S⁻¹ (Bᵀ costate + control), column by column."""
        right = self._B.T @ costate
        return torch.cholesky_solve(right if control is None else right + control, self._factor)


class ThinControl:
    """S_i⁻¹ for P > n_{i+1} and R_i = D a positive diagonal: an n × n factorisation.

    With D^-½ Bᵀ = E T (E orthonormal, T n × n), S = D^½ (I + E T K Tᵀ Eᵀ) D^½, and on the range of E it is I + T K Tᵀ,
    outside of it the identity.
    """

    def __init__(self, stage: StageBlocks, value_hessian: Tensor, open_loop: BlockDiagonal) -> None:
        self._scale = stage.diagonal.rsqrt()[:, None]
        self._basis: Tensor
        self._triangle: Tensor
        self._basis, self._triangle = torch.linalg.qr(self._scale * stage.param_jacobian.T)
        inner = torch.linalg.multi_dot((self._triangle, value_hessian, self._triangle.T))
        inner.diagonal().add_(1)
        scale = 1 + (self._triangle.T * open_loop.apply(self._triangle.T)).abs().sum(0)
        self._factor = cholesky(inner, scale, stage.name)

    def solve(self, costate: Tensor, control: Tensor | None) -> Tensor:
        """S⁻¹ (Bᵀ costate + control), column by column."""
        inside, outside = self._triangle @ costate, None
        if control is not None:
            scaled = self._scale * control
            along = self._basis.T @ scaled
            inside, outside = inside + along, scaled - self._basis @ along
        solved = self._basis @ torch.cholesky_solve(inside, self._factor)
        return self._scale * (solved if outside is None else outside + solved)


@dataclass
class _Pivot:
    """What the forward rollout needs of a stage."""

    control: DenseControl | ThinControl | None
    coupling: Tensor | None
    """K_{i+1} A_i, n_{i+1} × n_i."""


@dataclass
class Solution:
    """The minimiser of an LQR, and the value function's gradient along the way."""

    controls: list[Tensor]
    """δθ_0 … δθ_{N-1}, one vector a stage."""
    state_steps: list[Tensor]
    """δx_1 … δx_N."""
    value_gradient: list[Tensor]
    """λ_1 … λ_N."""


class Riccati:
    """The backward recursion for K_i; raises a DegenerateProblemError at the stage whose pivot isn't positive definite.

    Beside K_i runs the open-loop K̄_i = Q_i + A_iᵀ K̄_{i+1} A_i, from which nothing is subtracted: R_i + B_iᵀ K̄_{i+1} B_i is
    H's own diagonal block, the scale that tells a small pivot from a rounded zero. It stays block-diagonal, so it is cheap.
    """

    def __init__(self, lqr: LQR) -> None:
        self.lqr = lqr
        value, open_loop = lqr.terminal_cost.dense(), lqr.terminal_cost
        self.value_hessian: list[Tensor] = [value]
        """K_1 … K_N."""
        self._pivots: list[_Pivot] = []
        for stage in reversed(lqr.stages):
            control = None
            if stage.diagonal.numel():
                control = (ThinControl if _is_thin(stage) else DenseControl)(stage, value, open_loop)
            jacobian = stage.state_jacobian
            coupling = None if jacobian is None else jacobian.apply_transposed(value).T  # K A = (Aᵀ K)ᵀ
            self._pivots.append(_Pivot(control, coupling))
            if jacobian is None or coupling is None:
                continue
            open_loop = open_loop.congruence(jacobian)
            value = jacobian.apply_transposed(coupling)
            if stage.state_cost is not None:
                open_loop = open_loop + stage.state_cost
                value = value + stage.state_cost.dense()
            if control is not None:
                value = value - _feedback(stage, coupling, control.solve(coupling, stage.cross_cost))
            value = (value + value.T) / 2
            self.value_hessian.append(value)
        self.value_hessian.reverse()
        self._pivots.reverse()

    def solve(self) -> Solution:
        """The backward sweep for λ_i and the forward rollout."""
        costate = self.lqr.terminal_gradient
        costates = [costate]
        for position in reversed(range(1, len(self._pivots))):
            stage, pivot = self.lqr.stages[position], self._pivots[position]
            assert stage.state_jacobian is not None
            assert pivot.coupling is not None
            below = stage.state_jacobian.apply_transposed(costate)
            if pivot.control is not None:
                below = below - _feedback(stage, pivot.coupling, self._respond(position, costate, None))
            costate = below if stage.state_gradient is None else below + stage.state_gradient
            costates.append(costate)
        costates.reverse()

        controls: list[Tensor] = []
        states: list[Tensor] = []
        for position, (stage, pivot) in enumerate(zip(self.lqr.stages, self._pivots, strict=True)):
            state = states[-1] if states else None
            control = stage.diagonal
            if pivot.control is not None:
                control = -self._respond(position, costates[position], state)
            following = stage.param_jacobian @ control
            if state is not None and stage.state_jacobian is not None:
                following = following + stage.state_jacobian.apply(state)
            controls.append(control)
            states.append(following)
        return Solution(controls, states, costates)

    def _respond(self, position: int, costate: Tensor, state: Tensor | None) -> Tensor:
        """S⁻¹ (G δx + Bᵀ λ + r)."""
        stage, pivot = self.lqr.stages[position], self._pivots[position]
        assert pivot.control is not None
        direct = stage.param_gradient
        if state is not None:
            if pivot.coupling is not None:
                costate = costate + pivot.coupling @ state
            if stage.cross_cost is not None:
                product = stage.cross_cost @ state
                direct = product if direct is None else direct + product
        return pivot.control.solve(costate[:, None], None if direct is None else direct[:, None])[:, 0]


def _is_thin(stage: StageBlocks) -> bool:
    """Whether S_i is solved with on the side of the states."""
    states, size = stage.param_jacobian.shape
    return stage.param_cost is None and size > states and bool((stage.diagonal > 0).all())


def _feedback(stage: StageBlocks, coupling: Tensor, response: Tensor) -> Tensor:
    """Gᵀ response, with the product Aᵀ K B response in the cheaper order."""
    states, size = stage.param_jacobian.shape
    if response.dim() > 1 and size < states:
        product = (coupling.T @ stage.param_jacobian) @ response
    else:
        product = coupling.T @ (stage.param_jacobian @ response)
    return product if stage.cross_cost is None else product + stage.cross_cost.T @ response


Degenerate = Literal["error", "least-norm"]


def exact_step(
    stages: nn.Sequential | Sequence[nn.Module],
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss | LayerwiseLoss,
    divergence: str | Divergence,
    damping: PerLayer = 0.0,
    *,
    degenerate: Degenerate = "error",
) -> dict[str, Tensor]:
    """The minimiser δθ* = -(H + λ)⁻¹ g of g·δ + ½ δ·(H + λ)δ, by name of the parameter.

    Args:
        stages: the network as an `nn.Sequential` or a sequence of modules; names are those that the Sequential gives.
        inputs: what the first stage is called with; a batch, or a single example without a batch dimension.
        targets: passed on to `loss_fn`.
        loss_fn: `loss_fn(output, targets)`, one number: the mean loss of the batch; or a `LayerwiseLoss`.
        divergence: an object of `llqr.divergences`, or its name ("newton", "gauss-newton", "ngd", "renyi", "reverse-kl").
        damping: λ_i, one number or a mapping from stage (index or name) or parameter name to a number.
        degenerate: what to do where H + λ isn't positive definite. "error": raise a `SingularProblemError` or an
            `IndefiniteProblemError` that names the stage. "least-norm": return the smallest solution of (H + λ)δ = -g (the
            minimum of least norm where H is singular, the stationary point where it is indefinite); that forms H.
    """
    lqr = build(Chain(stages), inputs, targets, loss_fn, divergence, damping)
    return solve(lqr, degenerate)


def solve(lqr: LQR, degenerate: Degenerate = "error") -> dict[str, Tensor]:
    """The solution of an LQR as a step by name."""
    _check_degenerate(degenerate)
    try:
        controls = Riccati(lqr).solve().controls
    except DegenerateProblemError:
        if degenerate == "error":
            raise
        controls = _least_norm(lqr)
    return lqr.named(controls)


def _check_degenerate(degenerate: str) -> None:
    if degenerate not in ("error", "least-norm"):
        raise unknown("value of degenerate", degenerate, ("error", "least-norm"))


def _least_norm(lqr: LQR) -> list[Tensor]:
    """-H⁺ g. Which directions are null is a question about all of H, so here it is formed, by the LQR's own products."""
    sizes = [len(stage.diagonal) for stage in lqr.stages]
    gradient = torch.cat(lqr.gradient())
    matrix = apply_to_units(lambda v: torch.cat(lqr.curvature(list(torch.split(v, sizes)))), gradient)
    return list(torch.split(least_norm(matrix, gradient), sizes))


def dense_step(
    model: nn.Module | Sequence[nn.Module],
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss | LayerwiseLoss,
    divergence: str | Divergence,
    damping: PerLayer = 0.0,
    *,
    degenerate: Degenerate = "error",
) -> dict[str, Tensor]:
    """-(H + λ)⁻¹ g with H formed, P × P, and factorised. Arguments as for `exact_step`; any module will do."""
    _check_degenerate(degenerate)
    products = _Products(model, inputs, targets, loss_fn, divergence, damping)
    matrix, gradient = apply_to_units(products.curvature, products.gradient), products.gradient
    check_finite(matrix, "the Hessian of the divergence")
    if (matrix - matrix.T).norm() > torch.finfo(matrix.dtype).eps ** 0.5 * matrix.norm():
        raise NotTwiceDifferentiableError(
            "torch's second derivatives of this model aren't symmetric, so they are wrong"
        )
    if degenerate == "least-norm":
        return products.named(least_norm(matrix, gradient))
    factor = cholesky(matrix, matrix.diagonal().abs(), None)
    return products.named(-torch.cholesky_solve(gradient[:, None], factor)[:, 0])


def cg_step(
    model: nn.Module | Sequence[nn.Module],
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss | LayerwiseLoss,
    divergence: str | Divergence,
    damping: PerLayer = 0.0,
    *,
    tolerance: float = 1e-10,
    max_steps: int | None = None,
) -> dict[str, Tensor]:
    """-(H + λ)⁻¹ g by conjugate gradients on products with H; for models too big for the other two ways. Where H is singular,
    the least-norm step.

    Stops when the residual is `tolerance` times the gradient; warns if that takes more than `max_steps` (default: twice the
    number of parameters, at most 10,000).
    """
    products = _Products(model, inputs, targets, loss_fn, divergence, damping)
    limit = min(2 * len(products.gradient), 10_000) if max_steps is None else max_steps
    solved = conjugate_gradients(products.curvature, products.gradient, tolerance, limit)
    if solved.residual > tolerance:
        warnings.warn(
            f"cg_step stopped at a relative residual of {solved.residual:.1e}, not {tolerance:.1e}", stacklevel=2
        )
    return products.named(solved.step)


class _Products:
    """g, and products with H + λ, of a whole network, as flat vectors."""

    def __init__(self, model: nn.Module | Sequence[nn.Module], inputs: Inputs, *problem: Any) -> None:
        whole = _as_module(model)
        check_model(whole, inputs)
        streams = Streams(whole)
        with torch.no_grad(), streams.again():
            try:
                call(whole, {**constants(whole), **{name: p.clone() for name, p in whole.named_parameters()}}, inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ChainError(f"the model can't take the inputs, {kinds_of(inputs)}: {error}") from error
            if streams.drawn():
                raise ChainError("the model draws random numbers (dropout?): call .eval() on it first")
        self._q = QuadraticModel.build(whole, inputs, *problem)
        self.gradient = flat(self._q.gradient)

    def curvature(self, direction: Tensor) -> Tensor:
        return flat(self._q.curvature(self.named(direction)))

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        return unflat(vector, {name: g.shape for name, g in self._q.gradient.items()})


def _as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    own_forward = isinstance(model, nn.Module) and type(model).forward is not nn.Sequential.forward
    if isinstance(model, nn.Module) and own_forward and not isinstance(model, nn.ModuleList):
        return model
    return Row(model)  # type: ignore[arg-type]
