"""Theorem 1 and appendix A: the global quadratic form is a layerwise one, and gradient descent is an LQR."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from llqr.divergences import KL, L2, Divergence, GaussNewton, Intermediate, Newton
from llqr.exact import Chain, Riccati, build
from networks import CLASSES, Dense, networks

DIVERGENCES: list[Divergence] = [Newton(), KL(), GaussNewton(), KL() + Intermediate({0: 0.4}), Newton() + L2(0.3)]


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets)


def hessian_of(truth: Dense, divergence: Divergence) -> Tensor:
    """∇²D from the definitions of the divergences, not from the library's products."""

    def value(flat: Tensor) -> Tensor:
        output = truth.run(flat)
        total = output.new_zeros(())
        if any(isinstance(term, Newton) for _, term in divergence.terms()):
            total = total + truth.loss(output)
        if any(isinstance(term, (KL, GaussNewton)) for _, term in divergence.terms()):  # one matrix for cross-entropy
            p, q = truth.output.log_softmax(-1), output.log_softmax(-1)
            total = total + (p.exp() * (p - q)).sum(-1).mean()
        if any(isinstance(term, L2) for _, term in divergence.terms()):
            total = total + 0.15 * (flat - truth.point).square().sum()
        if "Intermediate" in repr(divergence):
            total = total + 0.2 * (first(flat) - first(truth.point)).square().sum() / len(truth.inputs)
        return total

    def first(flat: Tensor) -> Tensor:
        stage = truth.model[0]
        own = {name[2:]: p for name, p in truth.named(flat).items() if name.startswith("0.")}
        return torch.func.functional_call(stage, own, (truth.inputs,))

    return truth.hessian(value)


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=repr)
@settings(max_examples=20)
@given(drawn=networks())
def test_theorem_1(divergence: Divergence, drawn: tuple[nn.Sequential, Tensor]) -> None:
    """δθᵀHδθ = δx_NᵀQ_Nδx_N + Σ_i [δx_i δθ_i] [Q_i M_iᵀ; M_i R_i] [δx_i; δθ_i] along δx_{i+1} = A_iδx_i + B_iδθ_i."""
    model, inputs = drawn
    targets = torch.randint(CLASSES, (len(inputs),))
    truth = Dense(model, inputs, lambda output: cross_entropy(output, targets))
    matrix = hessian_of(truth, divergence)
    lqr = build(Chain(model), inputs, targets, cross_entropy, divergence)
    for _ in range(3):
        direction = torch.randn_like(truth.point)
        step = truth.named(direction)
        scale = direction.abs() @ matrix.abs() @ direction.abs()  # δ·Hδ itself may cancel to nothing for Newton
        assert abs(lqr.quadratic_form(step) - direction @ matrix @ direction) <= 1e-10 * scale
        expected = truth.gradient @ direction + 0.5 * direction @ matrix @ direction
        assert abs(lqr.value(step) - expected) <= 1e-10 * (scale + truth.gradient.norm() * direction.norm())
        # eq. (linearization): the rollout is the network's Jacobian-vector product
        _, tangent = torch.func.jvp(truth.run, (truth.point,), (direction,))
        torch.testing.assert_close(lqr.rollout(step)[-1], tangent.reshape(-1), rtol=1e-10, atol=1e-12)
        product = torch.cat(lqr.curvature([stage.stack(step) for stage in lqr.stages]))
        torch.testing.assert_close(product, matrix @ direction, rtol=1e-9, atol=1e-10 * float(scale + 1))


@settings(max_examples=20)
@given(drawn=networks(), rate=st.floats(0.01, 10.0))
def test_gradient_descent_is_an_lqr(drawn: tuple[nn.Sequential, Tensor], rate: float) -> None:
    """Appendix A, eq. (control-equals-grad): with H = I/η the recursion returns -ηg, and λ_i = ∂L/∂x_i."""
    model, inputs = drawn
    targets = torch.randint(CLASSES, (len(inputs),))
    truth = Dense(model, inputs, lambda output: cross_entropy(output, targets))
    lqr = build(Chain(model), inputs, targets, cross_entropy, L2(1 / rate))
    solution = Riccati(lqr).solve()
    torch.testing.assert_close(torch.cat(solution.controls), -rate * truth.gradient, rtol=1e-12, atol=1e-14)

    state, states = inputs.clone().requires_grad_(), []
    for stage in model:
        state = stage(state)
        states.append(state)
    backpropagated = torch.autograd.grad(cross_entropy(state, targets), states)
    for found, expected in zip(solution.value_gradient, backpropagated, strict=True):
        torch.testing.assert_close(found, expected.reshape(-1), rtol=1e-12, atol=1e-15)


def test_adjoints_are_those_of_the_divergence() -> None:
    """p_i = A_iᵀp_{i+1}: ∂L/∂x_i for Newton; none for a divergence that is flat, whose Q_i, M_i, R_i all vanish."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    inputs, targets = torch.randn(2, 3).double(), torch.randint(CLASSES, (2,))
    state, states = inputs, []
    for stage in model:
        state = stage(state)
        states.append(state)
    expected = torch.autograd.grad(2 * cross_entropy(state, targets), states)
    newton = build(Chain(model), inputs, targets, cross_entropy, 2 * Newton())
    for found, truth in zip(newton.adjoints, expected, strict=True):
        torch.testing.assert_close(found, truth)
    flat = build(Chain(model), inputs, targets, cross_entropy, KL())
    assert flat.adjoints == [None, None, None]
    assert all(s.state_cost is None and s.cross_cost is None and s.param_cost is None for s in flat.stages)


def test_blocks_are_as_sparse_as_the_stage() -> None:
    """A is block-diagonal over examples, and over single numbers for an activation function; R of a linear stage is zero."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    inputs, targets = torch.randn(6, 3).double(), torch.randint(CLASSES, (6,))
    stages = build(Chain(model), inputs, targets, cross_entropy, Newton()).stages
    assert stages[1].state_jacobian is not None
    assert stages[2].state_jacobian is not None
    assert stages[1].state_jacobian.blocks.shape == (24, 1, 1)
    assert stages[2].state_jacobian.blocks.shape == (6, CLASSES, 4)
    assert stages[2].param_cost is None
    assert stages[2].cross_cost is not None


class Pairs(nn.Module):
    """Mixes each number with the one two places further: a coupling that a check of neighbours alone would miss."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.roll(2, dims=-1)


def test_hidden_couplings_are_found() -> None:
    model = nn.Sequential(nn.Linear(3, 8), Pairs(), nn.Linear(8, CLASSES)).double()
    inputs, targets = torch.randn(2, 3).double(), torch.randint(CLASSES, (2,))
    stage = build(Chain(model), inputs, targets, cross_entropy, KL()).stages[1]
    truth = torch.func.jacrev(Pairs())(model[0](inputs).detach()).reshape(16, 16)
    assert stage.state_jacobian is not None
    assert stage.state_jacobian.blocks.shape[0] == 2
    torch.testing.assert_close(stage.state_jacobian.dense(), truth)
