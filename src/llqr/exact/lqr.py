"""The LQR of a chain: linearised dynamics A, B, adjoints p, and costs Q, M, R of a whole minibatch (Theorem 1).

With x_i the activations of the batch, flattened to n_i numbers, and θ_i the P_i parameters of stage i,

    δx_{i+1} = A_i δx_i + B_i δθ_i,   δx_0 = 0
    m(δθ)    = g_N·δx_N + ½ δx_N·Q_N δx_N + ½ Σ_i (δx_i·Q_i δx_i + 2 δθ_i·M_i δx_i + δθ_i·R_i δθ_i)
               + Σ_i (q_i·δx_i + r_i·δθ_i)

where Q_i, M_i, R_i are the second derivatives of the Hamiltonian p_{i+1}·f_i(x_i, θ_i) + ψ_i(x_i, θ_i), q_i and r_i the slopes
of the loss's terms ℓ_i(x_i, θ_i) inside the network if it has any (footnote 1), and the adjoints are p_N = ∇ψ_N,
p_i = A_iᵀ p_{i+1} + ∇ψ_i. A divergence that is flat at θ_k has p = 0, and then only its own terms cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from llqr.checks import Inputs, Loss, batch_size_of, check_finite, frozen_rng, loss_gradient
from llqr.curvature.graph import refuse_once_differentiable
from llqr.curvature.locations import Location, PerLayer, Terms, catching, locations_of
from llqr.curvature.locations import diagonal as diagonal_of
from llqr.divergences import ActivationTerm, BasePoint, Divergence, LayerwiseLoss, OutputTerm, layerwise
from llqr.divergences.base import slope as slope_of
from llqr.errors import ChainError, LLQRError, NotTwiceDifferentiableError
from llqr.exact.chain import Chain
from llqr.exact.matrices import BlockDiagonal, jacobian, joined, materialise_transposed, puller, unflat

_AtState = tuple[float, OutputTerm | ActivationTerm]
_Inside = tuple[float, ActivationTerm, Location]


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
    state_gradient: Tensor | None = None
    """q_i, n_i numbers."""
    param_gradient: Tensor | None = None
    """r_i, P_i numbers."""

    def stack(self, step: dict[str, Tensor]) -> Tensor:
        """δθ_i as one vector."""
        return joined(step[name] for name in self.shapes) if self.shapes else self.diagonal

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
        return self._rollout(self._controls(step))

    def costs(self, step: dict[str, Tensor]) -> list[Tensor]:
        """What each stage adds to m(δ), and the output."""
        return [linear + 0.5 * curved for linear, curved in self._costs(self._controls(step))]

    def value(self, step: dict[str, Tensor]) -> Tensor:
        """m(δ) = g·δ + ½ δ·Hδ, the LQR's cost."""
        return torch.stack(self.costs(step)).sum()

    def quadratic_form(self, step: dict[str, Tensor]) -> Tensor:
        """δθ·Hδθ, stage by stage (Theorem 1)."""
        return self._form(self._controls(step))

    def gradient(self) -> list[Tensor]:
        """g, one vector a stage."""

        def slope(controls: list[Tensor]) -> Tensor:
            return torch.stack([linear for linear, _ in self._costs(controls)]).sum()

        return torch.func.grad(slope)([torch.zeros_like(stage.diagonal) for stage in self.stages])  # type: ignore[no-any-return]

    def curvature(self, controls: list[Tensor]) -> list[Tensor]:
        """H δθ, one vector a stage: half the derivative of δθ·Hδθ."""
        return [product / 2 for product in torch.func.grad(self._form)(controls)]

    def named(self, controls: list[Tensor]) -> dict[str, Tensor]:
        """A step by the names of its parameters, from one vector a stage."""
        pairs = zip(self.stages, controls, strict=True)
        return {name: part for stage, control in pairs for name, part in unflat(control, stage.shapes).items()}

    def _form(self, controls: list[Tensor]) -> Tensor:
        return torch.stack([curved for _, curved in self._costs(controls)]).sum()

    def _controls(self, step: dict[str, Tensor]) -> list[Tensor]:
        return [stage.stack(step) for stage in self.stages]

    def _costs(self, controls: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The linear and the quadratic part of each stage, and of the output."""
        states, parts = self._rollout(controls), []
        for position, (stage, control) in enumerate(zip(self.stages, controls, strict=True)):
            linear = control.new_zeros(()) if stage.param_gradient is None else stage.param_gradient @ control
            curved = control @ stage.param_product(control)
            if position > 0:
                state = states[position - 1]
                if stage.state_gradient is not None:
                    linear = linear + stage.state_gradient @ state
                if stage.state_cost is not None:
                    curved = curved + state @ stage.state_cost.apply(state)
                if stage.cross_cost is not None:
                    curved = curved + 2 * (control @ (stage.cross_cost @ state))
            parts.append((linear, curved))
        return [*parts, (self.terminal_gradient @ states[-1], states[-1] @ self.terminal_cost.apply(states[-1]))]

    def _rollout(self, controls: list[Tensor]) -> list[Tensor]:
        states: list[Tensor] = []
        for stage, control in zip(self.stages, controls, strict=True):
            state = stage.param_jacobian @ control
            if stage.state_jacobian is not None:
                state = state + stage.state_jacobian.apply(states[-1])
            states.append(state)
        return states


@torch.enable_grad()
def build(
    chain: Chain,
    inputs: Inputs,
    targets: Any,
    loss_fn: Loss | LayerwiseLoss,
    divergence: str | Divergence,
    damping: PerLayer = 0.0,
) -> LQR:
    """Build the LQR whose minimum is the step -(H + λ)⁻¹ g of the mean loss under the divergence."""
    output_loss, loss_terms, terms = layerwise(loss_fn, divergence)
    assert output_loss is not None
    with frozen_rng():
        states, examples = chain.run(inputs), batch_size_of(inputs)
        loss, terminal_gradient = loss_gradient(output_loss, states[-1], targets)
        diagonals = _diagonals(chain, terms, damping)
        between, inside = _sort(chain, terms)
        _, losses = _sort(chain, loss_terms)
        cost, adjoint = _at_state(between[-1], BasePoint(states[-1], loss, None, examples))
        terminal = cost or BlockDiagonal(states[-1].new_zeros(states[-1].numel(), 1, 1))
        check_finite(terminal.blocks, "the Hessian of the divergence at the output")
        adjoints: list[Tensor | None] = [adjoint]
        stages: list[StageBlocks] = []
        for position in reversed(range(len(chain))):
            state: Inputs = inputs if position == 0 else states[position - 1]
            own = (diagonals[position], inside[position], losses[position])
            stage, adjoint = _stage(chain, position, state, examples, adjoint, *own)
            stages.append(stage)
            if position > 0:
                cost, slope = _at_state(between[position], BasePoint(states[position - 1], loss, None, examples))
                stage.state_cost, adjoint = _add(stage.state_cost, cost), _add(adjoint, slope)
                adjoints.append(adjoint)
    return LQR(stages[::-1], terminal_gradient.reshape(-1), terminal, adjoints[::-1])


def _sort(chain: Chain, terms: Terms) -> tuple[list[list[_AtState]], list[list[_Inside]]]:
    """The terms by the state that they are functions of, x_1 … x_N, or by the stage that they are inside of."""
    between: list[list[_AtState]] = [[] for _ in range(len(chain) + 1)]
    inside: list[list[_Inside]] = [[] for _ in range(len(chain))]
    found = locations_of(chain.whole, terms)
    for weight, term in terms:
        if isinstance(term, OutputTerm):
            between[-1].append((weight, term))
        elif isinstance(term, ActivationTerm):
            stage, _, path = found[term.key].module.partition(".")
            index = chain.names.index(stage)
            if term.joint or path:
                inside[index].append((weight, term, Location(path, term.joint)))
            elif chain.packs(index):
                raise LLQRError(
                    f"{chain.label(index)} returns several tensors; a metric needs one: put it on a module inside"
                )
            else:
                between[index + 1].append((weight, term))
    return between, inside


def _at_state(terms: list[_AtState], base: BasePoint) -> tuple[BlockDiagonal | None, Tensor | None]:
    """Q and ∇ψ of the terms that are functions of one state."""
    cost: BlockDiagonal | None = None
    slopes: Tensor | None = None
    for weight, term in terms:
        cost = _add(cost, _hessian(weight, term, _checked(term, base)))
        if not term.flat:
            slopes = _add(slopes, weight * slope_of(partial(term.psi, base=base), base.output))
    return cost, slopes


def _checked(term: OutputTerm | ActivationTerm, base: BasePoint) -> BasePoint:
    term.check(base.output)
    term.check_psi(base)
    return base


def _hessian(weight: float, term: OutputTerm | ActivationTerm, base: BasePoint) -> BlockDiagonal:
    """∇²ψ, which is symmetric."""
    shape = base.output.shape
    block = materialise_transposed(partial(term.hessian_product, base=base), shape, shape, base.output)
    return BlockDiagonal(block.blocks * weight)


def _stage(
    chain: Chain,
    position: int,
    state: Inputs,
    examples: int,
    adjoint: Tensor | None,
    diagonal: Tensor,
    inside: list[_Inside],
    losses: list[_Inside],
) -> tuple[StageBlocks, Tensor | None]:
    """Blocks of one stage, and what it has sent back of the adjoint."""
    parameters = {name: p.clone().requires_grad_() for name, p in chain.parameters[position].items()}
    shapes = {chain.qualified(position, name): p.shape for name, p in parameters.items()}
    leaves, below = list(parameters.values()), None
    if position > 0 and isinstance(state, Tensor):
        state = below = state.clone().requires_grad_()
    with torch.enable_grad(), catching(chain.modules[position], [place for *_, place in (*inside, *losses)]) as caught:
        output = chain.apply(position, state, parameters)
    wanted = leaves if below is None else [*leaves, below]
    if wanted and not output.requires_grad:
        raise ChainError(f"the output of {chain.label(position)} has no derivative by its input or parameters")
    by_param = jacobian(output, leaves)
    B = output.new_zeros(output.numel(), len(diagonal)) if by_param is None else by_param
    A = None if below is None else _state_jacobian(output, below)
    stage = StageBlocks(chain.names[position], shapes, A, B, None, None, None, diagonal)

    for _, term, place in losses:
        base = _checked(term, place.base(caught[place], examples))
        _add_loss(stage, term.psi(caught[place], base), leaves, below)
    steep = None if adjoint is None else (adjoint.detach().requires_grad_() * output).sum()
    for weight, term, place in inside:
        base = _checked(term, place.base(caught[place], examples))
        if term.flat:
            _add_flat(stage, _hessian(weight, term, base), caught[place], leaves, below)
        else:
            variable = output.new_tensor(weight).requires_grad_()  # see _second_derivatives
            steep = _add(steep, variable * term.psi(caught[place], base))
    slopes, label = None, chain.label(position)
    if steep is not None and wanted:
        try:
            slopes = _second_derivatives(stage, steep, leaves, below)
        except RuntimeError as error:
            raise NotTwiceDifferentiableError(
                f"{label} can't be differentiated twice ({error}), and this divergence isn't flat: use GaussNewton or KL"
            ) from error
    _check(label, stage)
    return stage, slopes


def _add_loss(stage: StageBlocks, value: Tensor, leaves: list[Tensor], state: Tensor | None) -> None:
    """q_i and r_i of one ℓ_i(x_i, θ_i)."""
    wanted = leaves if state is None else [*leaves, state]
    if not value.requires_grad:
        return
    check_finite(value.detach(), "a term of the loss")
    slopes = torch.autograd.grad(value, wanted, retain_graph=True, materialize_grads=True)
    if leaves:
        stage.param_gradient = _add(stage.param_gradient, joined(slopes[: len(leaves)]))
    if state is not None:
        stage.state_gradient = _add(stage.state_gradient, slopes[-1].reshape(-1))


def _add_flat(stage: StageBlocks, W: BlockDiagonal, here: Tensor, leaves: list[Tensor], state: Tensor | None) -> None:
    """JᵀWJ of a flat ψ of something inside the stage, J its derivatives by x_i and θ_i."""
    by_param = jacobian(here, leaves)
    by_state = None if state is None else _state_jacobian(here, state)
    if by_state is not None:
        stage.state_cost = _add(stage.state_cost, W.congruence(by_state))
    if by_param is not None:
        curved = W.apply(by_param)
        stage.param_cost = _add(stage.param_cost, by_param.T @ curved)
        if by_state is not None:
            stage.cross_cost = _add(stage.cross_cost, by_state.apply_transposed(curved).T)


_Summand = TypeVar("_Summand", Tensor, BlockDiagonal)


def _add(left: _Summand | None, right: _Summand | None) -> _Summand | None:
    """A sum in which None is zero."""
    return right if left is None else left if right is None else left + right


def _check(label: str, stage: StageBlocks) -> None:
    """Raise for derivatives that are not finite, and for Hessians that are not symmetric: torch's formulas aren't all right."""
    squares = [stage.param_cost, stage.state_cost.blocks if stage.state_cost else None]
    jacobians = [stage.param_jacobian, stage.state_jacobian.blocks if stage.state_jacobian else None]
    for block in (*jacobians, stage.cross_cost, *squares):
        if block is not None:
            check_finite(block, f"a derivative of {label}")
    for square in squares:
        if square is not None and (square - square.mT).norm() > torch.finfo(square.dtype).eps ** 0.5 * square.norm():
            raise NotTwiceDifferentiableError(
                f"torch's second derivatives of {label} aren't symmetric, so they are wrong: use GaussNewton or KL, or write "
                "the stage with other operations"
            )


def _state_jacobian(output: Tensor, state: Tensor) -> BlockDiagonal:
    """A_i."""
    pull = puller(output, [state]) or (lambda cotangent: torch.zeros_like(state))
    return materialise_transposed(pull, output.shape, state.shape, state)


def _second_derivatives(
    stage: StageBlocks, hamiltonian: Tensor, leaves: list[Tensor], state: Tensor | None
) -> Tensor | None:
    """Add those of p_{i+1}·f_i + ψ_i to Q_i, M_i, R_i; its slope by x_i, which is p_i.

    Adjoint and weights are variables because only then torch marks the gradients of once-differentiable functions.
    """
    wanted = leaves if state is None else [*leaves, state]
    first = torch.autograd.grad(hamiltonian, wanted, create_graph=True, materialize_grads=True)
    refuse_once_differentiable(first)
    if leaves:
        by_param = joined(first[: len(leaves)])
        stage.param_cost = _add(stage.param_cost, jacobian(by_param, leaves))
        if state is not None:
            stage.cross_cost = _add(stage.cross_cost, jacobian(by_param, [state]))
    if state is None:
        return None
    pull = puller(first[-1], [state])
    if pull is not None:
        stage.state_cost = _add(stage.state_cost, materialise_transposed(pull, state.shape, state.shape, state))
    return first[-1].detach()


def _diagonals(chain: Chain, terms: Terms, damping: PerLayer) -> list[Tensor]:
    """Damping and L2 terms of each stage, as the diagonal of R_i."""
    stages = [{chain.qualified(i, n): p for n, p in own.items()} for i, own in enumerate(chain.parameters)]
    named = {name: p for own in stages for name, p in own.items()}
    weights, none = diagonal_of(chain.whole, named, terms, damping), next(iter(named.values())).new_zeros(0)
    return [joined([none, *(torch.full_like(p, weights[name]) for name, p in own.items())]) for own in stages]
