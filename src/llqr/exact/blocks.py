"""The LQR of a chain: linearised dynamics A, B, adjoints p, and costs Q, M, R of a whole minibatch (Theorem 1).

With x_i the activations of the batch, flattened to n_i numbers, and θ_i the P_i parameters of stage i,

    δx_{i+1} = A_i δx_i + B_i δθ_i,   δx_0 = 0
    m(δθ)    = g_N·δx_N + ½ δx_N·Q_N δx_N + ½ Σ_i (δx_i·Q_i δx_i + 2 δθ_i·M_i δx_i + δθ_i·R_i δθ_i)

where Q_i, M_i, R_i are the second derivatives of the Hamiltonian p_{i+1}·f_i(x_i, θ_i) + ψ_i(x_i, θ_i), and the adjoints
are p_N = ∇ψ_N, p_i = A_iᵀ p_{i+1} + ∇ψ_i. A divergence that is flat at θ_k has p = 0, and then only its own terms cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llqr.checks import Inputs, Loss, batch_size_of, check_finite, frozen_rng, loss_gradient
from llqr.divergences import L2, ActivationTerm, BasePoint, Divergence, OutputTerm, resolve
from llqr.errors import ChainError, LLQRError, NotTwiceDifferentiableError, unknown
from llqr.exact.blockdiagonal import BlockDiagonal, materialise_transposed
from llqr.exact.chain import Chain
from llqr.exact.derivatives import jacobian, puller, refuse_once_differentiable, refuse_wrong_formulas
from llqr.naming import PerLayer, per_parameter


@dataclass
class StageBlocks:
    """One stage's part of the LQR. `None` stands for a block that is zero."""

    name: str
    shapes: dict[str, torch.Size]
    """The parameters of the stage, by their names in the network, in the order in which θ_i stacks them."""
    state_jacobian: BlockDiagonal | None
    """A_i, n_{i+1} × n_i; the first stage has none, because δx_0 = 0."""
    param_jacobian: Tensor
    """B_i, n_{i+1} × P_i."""
    state_cost: BlockDiagonal | None
    """Q_i, n_i × n_i."""
    cross_cost: Tensor | None
    """M_i, P_i × n_i."""
    param_cost: Tensor | None
    """R_i without its diagonal part, P_i × P_i."""
    diagonal: Tensor
    """The rest of R_i: damping and L2 terms, P_i numbers."""

    def stack(self, step: dict[str, Tensor]) -> Tensor:
        """δθ_i as one vector."""
        parts = [step[name].reshape(-1) for name in self.shapes]
        return torch.cat(parts) if parts else self.diagonal

    def unstack(self, vector: Tensor) -> dict[str, Tensor]:
        """δθ_i by name."""
        parts = torch.split(vector, [shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def param_product(self, vector: Tensor) -> Tensor:
        """R_i δθ_i."""
        product = self.diagonal * vector
        return product if self.param_cost is None else product + self.param_cost @ vector


@dataclass
class LQR:
    """The finite-horizon linear quadratic regulator of a chain at θ_k."""

    stages: list[StageBlocks]
    terminal_gradient: Tensor
    """g_N = ∇ℓ(x_N), n_N numbers."""
    terminal_cost: BlockDiagonal
    """Q_N, n_N × n_N."""
    adjoints: list[Tensor | None]
    """p_1 … p_N, shaped as the activations; None where the divergence is flat."""

    def rollout(self, step: dict[str, Tensor]) -> list[Tensor]:
        """δx_1 … δx_N of a step: the linearised forward pass."""
        return self._rollout([stage.stack(step) for stage in self.stages])

    def quadratic_form(self, step: dict[str, Tensor]) -> Tensor:
        """δθ·Hδθ, stage by stage (Theorem 1)."""
        states = self.rollout(step)
        total = states[-1] @ self.terminal_cost.apply(states[-1])
        for position, stage in enumerate(self.stages):
            control = stage.stack(step)
            total = total + control @ stage.param_product(control)
            if position > 0:
                state = states[position - 1]
                if stage.state_cost is not None:
                    total = total + state @ stage.state_cost.apply(state)
                if stage.cross_cost is not None:
                    total = total + 2 * (control @ (stage.cross_cost @ state))
        return total

    def value(self, step: dict[str, Tensor]) -> Tensor:
        """m(δ) = g·δ + ½ δ·Hδ, the LQR's cost."""
        return self.terminal_gradient @ self.rollout(step)[-1] + 0.5 * self.quadratic_form(step)

    def gradient(self) -> list[Tensor]:
        """g, one vector a stage: backpropagation of g_N."""
        still = [torch.zeros_like(stage.diagonal) for stage in self.stages]
        return self._sweep(self.terminal_gradient, still, self._rollout(still))

    def curvature(self, controls: list[Tensor]) -> list[Tensor]:
        """H δθ, one vector a stage: a rollout, then a sweep back."""
        states = self._rollout(controls)
        return self._sweep(self.terminal_cost.apply(states[-1]), controls, states)

    def _rollout(self, controls: list[Tensor]) -> list[Tensor]:
        states: list[Tensor] = []
        for stage, control in zip(self.stages, controls, strict=True):
            state = stage.param_jacobian @ control
            if stage.state_jacobian is not None:
                state = state + stage.state_jacobian.apply(states[-1])
            states.append(state)
        return states

    def _sweep(self, costate: Tensor, controls: list[Tensor], states: list[Tensor]) -> list[Tensor]:
        """What the stationarity conditions of the LQR pair with δθ_i, given the costate of x_N."""
        products: list[Tensor] = []
        for position in reversed(range(len(self.stages))):
            stage, control = self.stages[position], controls[position]
            product = stage.param_product(control) + stage.param_jacobian.T @ costate
            if stage.state_jacobian is not None:
                state = states[position - 1]
                costate = stage.state_jacobian.apply_transposed(costate)
                if stage.state_cost is not None:
                    costate = costate + stage.state_cost.apply(state)
                if stage.cross_cost is not None:
                    product = product + stage.cross_cost @ state
                    costate = costate + stage.cross_cost.T @ control
            products.append(product)
        return products[::-1]


@torch.enable_grad()
def build(
    chain: Chain,
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss,
    divergence: str | Divergence,
    damping: PerLayer = 0.0,
) -> LQR:
    """Build the LQR whose minimum is the step -(H + λ)⁻¹ g of the mean loss under the divergence."""
    with frozen_rng():
        return _build(chain, inputs, targets, loss_fn, resolve(divergence), damping)


def _build(chain: Chain, inputs: Inputs, targets: Any, loss_fn: Loss, divergence: Divergence, damping: PerLayer) -> LQR:
    states = chain.run(inputs)
    output = states[-1]
    loss, terminal_gradient = loss_gradient(loss_fn, output, targets)
    base = BasePoint(output, loss)
    places = _activation_terms(chain, divergence, states, batch_size_of(inputs))
    diagonals = _diagonals(chain, divergence, damping)

    terminal, adjoint = _terminal(divergence, base)
    for term in places.get(len(chain), []):
        terminal = terminal + term
    adjoints: list[Tensor | None] = [adjoint]
    stages: list[StageBlocks] = []
    for position in reversed(range(len(chain))):
        state: Inputs = inputs if position == 0 else states[position - 1]
        stage, adjoint = _stage(chain, position, state, adjoint, diagonals[position])
        for term in places.get(position, []):
            stage.state_cost = term if stage.state_cost is None else stage.state_cost + term
        stages.append(stage)
        if position > 0:
            adjoints.append(adjoint)
    return LQR(stages[::-1], terminal_gradient.reshape(-1), terminal, adjoints[::-1])


def _terminal(divergence: Divergence, base: BasePoint) -> tuple[BlockDiagonal, Tensor | None]:
    """Q_N and p_N."""
    size = base.output.numel()
    cost = BlockDiagonal(base.output.new_zeros(size, 1, 1))
    adjoint: Tensor | None = None
    for weight, term in divergence.terms():
        if not isinstance(term, OutputTerm):
            continue
        term.check(base.output)
        term.check_psi(base)
        product = partial(term.hessian_product, base=base)  # Q_N is symmetric
        block = materialise_transposed(product, base.output.shape, base.output.shape, base.output)
        cost = cost + BlockDiagonal(block.blocks * weight)
        if not term.flat:
            gradient = weight * torch.func.grad(partial(term.psi, base=base))(base.output)
            adjoint = gradient if adjoint is None else adjoint + gradient
    check_finite(cost.blocks, "the Hessian of the divergence at the output")
    return cost, adjoint


def _stage(
    chain: Chain, position: int, state: Inputs, adjoint: Tensor | None, diagonal: Tensor
) -> tuple[StageBlocks, Tensor | None]:
    """Blocks of one stage, and the adjoint of its input."""
    parameters = {name: p.clone().requires_grad_() for name, p in chain.parameters[position].items()}
    shapes = {chain.qualified(position, name): p.shape for name, p in parameters.items()}
    leaves = list(parameters.values())
    if position > 0 and isinstance(state, Tensor):
        state = state.clone().requires_grad_()
    with torch.enable_grad():
        output = chain.apply(position, state, parameters)
    wanted = [*leaves, state] if position > 0 else leaves
    if wanted and not output.requires_grad:
        raise ChainError(f"the output of {chain.label(position)} doesn't depend on its input or parameters by anything "
                         "differentiable: nothing can be sent back through it")  # fmt: skip

    param_jacobian = jacobian(output, leaves) if leaves else None
    if param_jacobian is None:
        param_jacobian = output.new_zeros(output.numel(), len(diagonal))
    state_jacobian = state_cost = cross_cost = param_cost = below = None
    if position > 0:
        assert isinstance(state, Tensor)
        state_jacobian = _state_jacobian(output, state)
        if adjoint is not None:
            below = state_jacobian.apply_transposed(adjoint.reshape(-1)).reshape(state.shape)
    if adjoint is not None:
        try:
            state_cost, cross_cost, param_cost = _second_derivatives(
                output, adjoint, leaves, state if position > 0 and isinstance(state, Tensor) else None
            )
        except RuntimeError as error:
            raise NotTwiceDifferentiableError(
                f"{chain.label(position)} can't be differentiated twice, and this divergence isn't flat, so it asks for its "
                f"second derivatives: use GaussNewton or KL, which don't. ({error})"
            ) from error
    _check(chain.label(position), param_jacobian, state_jacobian, state_cost, cross_cost, param_cost)
    stage = StageBlocks(
        chain.names[position], shapes, state_jacobian, param_jacobian, state_cost, cross_cost, param_cost, diagonal
    )
    return stage, below


def _check(label: str, *blocks: Tensor | BlockDiagonal | None) -> None:
    """Raise for derivatives that are not finite, and for Hessians that are not symmetric: torch's formulas aren't all right."""
    *_, state_cost, _, param_cost = blocks
    for block in blocks:
        if block is not None:
            check_finite(block.blocks if isinstance(block, BlockDiagonal) else block, f"a derivative of {label}")
    for hessian in (state_cost, param_cost):
        square = hessian.blocks if isinstance(hessian, BlockDiagonal) else hessian
        if square is not None and (square - square.mT).norm() > torch.finfo(square.dtype).eps ** 0.5 * square.norm():
            raise NotTwiceDifferentiableError(
                f"the second derivatives that torch gives for {label} aren't symmetric, so they are wrong: use GaussNewton "
                "or KL, which don't ask for them, or write the stage with other operations"
            )


def _state_jacobian(output: Tensor, state: Tensor) -> BlockDiagonal:
    """A_i."""
    pull = puller(output, [state]) or (lambda cotangent: torch.zeros_like(state))
    return materialise_transposed(pull, output.shape, state.shape, state)


def _second_derivatives(
    output: Tensor, adjoint: Tensor, leaves: list[Tensor], state: Tensor | None
) -> tuple[BlockDiagonal | None, Tensor | None, Tensor | None]:
    """Q_i, M_i, R_i of the Hamiltonian p_{i+1}·f_i. A derivative that no longer depends on what it is taken by is zero."""
    wanted = [*leaves, state] if state is not None else leaves
    if not wanted:
        return None, None, None
    # The adjoint is a variable here because only then torch marks the gradients of once-differentiable functions.
    refuse_wrong_formulas([output])
    hamiltonian = (adjoint.detach().requires_grad_() * output).sum()
    first = torch.autograd.grad(hamiltonian, wanted, create_graph=True, materialize_grads=True)
    refuse_once_differentiable(first)
    by_state = first[-1] if state is not None else None
    by_param = torch.cat([gradient.reshape(-1) for gradient in first[: len(leaves)]]) if leaves else None
    state_cost = cross_cost = param_cost = None
    if state is not None and by_state is not None:
        pull = puller(by_state, [state])
        state_cost = None if pull is None else materialise_transposed(pull, state.shape, state.shape, state)
    if by_param is not None:
        param_cost = jacobian(by_param, leaves)
        cross_cost = None if state is None else jacobian(by_param, [state])
    return state_cost, cross_cost, param_cost


def _activation_terms(
    chain: Chain, divergence: Divergence, states: list[Tensor], batch_size: int
) -> dict[int, list[BlockDiagonal]]:
    """Q of the intermediate metrics, by the index of the state that they sit on (what stage i returns is state i + 1)."""
    found: dict[int, list[BlockDiagonal]] = {}
    for weight, term in divergence.terms():
        if not isinstance(term, ActivationTerm):
            continue
        index = _stage_index(chain, term.place)
        state = states[index]
        term.check(state, batch_size)
        product = partial(term.hessian_product, batch_size=batch_size)
        block = materialise_transposed(product, state.shape, state.shape, state)
        found.setdefault(index + 1, []).append(BlockDiagonal(weight * block.blocks))
    return found


def _stage_index(chain: Chain, place: str | int) -> int:
    if isinstance(place, int) and 0 <= place < len(chain):
        return place
    if place in chain.names:
        return chain.names.index(str(place))
    for name in chain.names:
        if isinstance(place, str) and place.startswith(f"{name}."):
            raise LLQRError(
                f"{place!r} is inside stage {name!r}; metrics sit between stages, so make it a stage of its own"
            )
    raise unknown("stage in Intermediate", place, chain.names)


def _diagonals(chain: Chain, divergence: Divergence, damping: PerLayer) -> list[Tensor]:
    """Damping and L2 terms of each stage, as the diagonal of R_i."""
    names = [chain.qualified(stage, name) for stage, p in enumerate(chain.parameters) for name in p]
    weights = per_parameter(damping, names, chain.names, "damping")
    for weight, term in divergence.terms():
        if isinstance(term, L2):
            for name, extra in per_parameter(term.weight, names, chain.names, "L2 weights").items():
                weights[name] += weight * extra
    diagonals: list[Tensor] = []
    for stage, parameters in enumerate(chain.parameters):
        parts = [
            torch.full_like(parameter, weights[chain.qualified(stage, name)]).reshape(-1)
            for name, parameter in parameters.items()
        ]
        reference = next(p for stage_parameters in chain.parameters for p in stage_parameters.values())
        diagonals.append(torch.cat(parts) if parts else reference.new_zeros(0))
    return diagonals
