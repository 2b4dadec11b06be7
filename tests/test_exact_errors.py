"""What exact_step refuses, and how: an error of its own type that says where and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llqr import QuadraticModel, cg_step, dense_step, exact_step
from llqr.divergences import KL, L2, GaussNewton, Intermediate, Layerwise, Newton, Renyi
from llqr.errors import (
    ChainError,
    DegenerateProblemError,
    IndefiniteProblemError,
    LLQRError,
    NonFiniteError,
    NotTwiceDifferentiableError,
    SingularProblemError,
)
from networks import Dense

LOSS = nn.CrossEntropyLoss()


def network(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *extra, nn.Linear(4, 2)).double()


def data(batch: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3).double(), torch.randint(2, (batch,))


def saddle() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A product of two factors, u·v - 1 with u, v near zero: the Hessian of its square has eigenvalues of both signs."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(0.1)
        model[1].weight.fill_(0.2)
    return model, torch.ones(1, 1).double(), torch.ones(1, 1).double()


def test_singular_kl_names_the_stage() -> None:
    with pytest.raises(SingularProblemError, match=r"stage '2'.*damping") as caught:
        exact_step(network(), *data(), LOSS, KL())
    assert caught.value.stage == "2"
    with pytest.raises(SingularProblemError, match="damping"):
        dense_step(network(), *data(), LOSS, KL())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(()).double())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


@pytest.mark.parametrize("seed", range(12))
def test_a_singularity_below_the_last_stage_is_seen(seed: int) -> None:
    """Where later layers can do everything, only rounding is left for the first: singular, not indefinite, not solved."""
    torch.manual_seed(seed)
    square = [Scale(), nn.Tanh(), nn.Linear(3, 1, bias=False).double()]
    inputs, targets = torch.randn(3, 3).double(), torch.randn(3, 1).double()
    with pytest.raises(SingularProblemError) as caught:
        exact_step(square, inputs, targets, nn.MSELoss(), GaussNewton())
    assert caught.value.stage == "0"
    deep = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1, bias=False)).double()
    with pytest.raises(SingularProblemError):
        exact_step(deep, inputs[:2, :2], targets[:2], nn.MSELoss(), GaussNewton())


@pytest.mark.parametrize("batch", [2, 5, 20])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_least_norm_step_of_a_singular_problem(reduction: Any, batch: int) -> None:
    """-H⁺g: the minimum of least norm. It solves Hδ = -g, and has no part in the null space of H."""
    model, (inputs, targets) = network(), data(batch)
    arguments = (model, inputs, targets, LOSS, KL(reduction=reduction))
    step = exact_step(*arguments, degenerate="least-norm")
    truth = Dense(model, inputs, lambda output: LOSS(output, targets))
    base = truth.output.log_softmax(-1)
    count = batch if reduction == "mean" else 1
    matrix = truth.hessian(lambda flat: (base.exp() * (base - truth.run(flat).log_softmax(-1))).sum() / count)
    flat = truth.flat(step)
    assert (matrix @ flat + truth.gradient).norm() < 1e-6 * truth.gradient.norm()
    values, vectors = torch.linalg.eigh(matrix)
    null = vectors[:, values.abs() < 1e-15 * values.max()]
    assert (null.T @ flat).norm() < 1e-6 * flat.norm()
    dense = truth.flat(dense_step(*arguments, degenerate="least-norm"))
    assert (matrix @ (flat - dense)).norm() < 1e-6 * truth.gradient.norm()


def test_indefinite_newton() -> None:
    model, inputs, targets = saddle()
    loss = nn.MSELoss()
    for way in (exact_step, dense_step):
        with pytest.raises(IndefiniteProblemError, match="damping"):
            way(model, inputs, targets, loss, Newton())
    with pytest.raises(IndefiniteProblemError, match="negative curvature"):
        cg_step(model, inputs, targets, loss, Newton())
    step = exact_step(model, inputs, targets, loss, Newton(), degenerate="least-norm")
    matrix = torch.tensor([[2 * 0.04, 2 * (2 * 0.02 - 1)], [2 * (2 * 0.02 - 1), 2 * 0.01]], dtype=torch.float64)
    gradient = torch.tensor([2 * (0.02 - 1) * 0.2, 2 * (0.02 - 1) * 0.1], dtype=torch.float64)
    expected = -torch.linalg.solve(matrix, gradient)
    torch.testing.assert_close(torch.cat([s.reshape(-1) for s in step.values()]), expected, rtol=1e-9, atol=1e-12)


def test_no_solution_at_all() -> None:
    """A gradient along which H is flat: not even a least-norm step."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2).double())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    def loss(output: Tensor, _: Any) -> Tensor:
        return output[:, 0].square().mean() + output[:, 1].mean()

    for way in (exact_step, dense_step):
        with pytest.raises(SingularProblemError, match="without bound"):
            way([Line()], torch.ones(3, 2).double(), None, loss, Newton(), degenerate="least-norm")


@pytest.mark.parametrize("way", [exact_step, dense_step, cg_step])
def test_non_finite_values_are_located(way: Any) -> None:
    inputs, targets = data()
    bad = inputs.clone()
    bad[3, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"inputs.*nan at index \(3, 1\)"):
        way(network(), bad, targets, LOSS, KL(), 0.1)
    model = network()
    with torch.no_grad():
        model[2].weight[1, 2] = float("inf")
    with pytest.raises(NonFiniteError, match=r"parameter '2.weight'.*inf at index \(1, 2\)"):
        way(model, inputs, targets, LOSS, KL(), 0.1)
    with pytest.raises(NonFiniteError, match="targets"):
        way(network(), inputs, torch.full((5, 2), float("nan")).double(), nn.MSELoss(), KL(), 0.1)
    with pytest.raises(NonFiniteError, match="loss"):
        way(network(), inputs, targets, lambda output, _: (output - output).log().sum(), KL(), 0.1)


def test_overflow_inside_names_the_stage() -> None:
    class Explode(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (1000 * (x.abs() + 1)).exp()

    with pytest.raises(NonFiniteError, match=r"output of stage '2' \(Explode\)"):
        exact_step(network(Explode()), *data(), LOSS, KL(), 0.1)


def test_stages_that_do_not_compose() -> None:
    stages = [nn.Linear(3, 4), nn.Linear(5, 2)]
    with pytest.raises(
        ChainError, match=r"stage '1' \(Linear\) can't take the output of stage '0' \(Linear\), \(5, 4\)"
    ):
        exact_step(stages, torch.randn(5, 3), data()[1], LOSS, KL(), 0.1)
    with pytest.raises(ChainError, match=r"stage '0' .*torch.float32"):
        exact_step(network(), torch.randn(5, 3), data()[1], LOSS, KL(), 0.1)


def test_shared_parameters() -> None:
    layer = nn.Linear(3, 3).double()
    tied = [layer, nn.Tanh(), layer]
    with pytest.raises(ChainError, match=r"'2.weight' is the same parameter as '0.weight'.*one"):
        exact_step(tied, *data(), LOSS, KL(), 0.1)
    one_stage = exact_step([nn.Sequential(*tied)], *data(), LOSS, KL(), 0.1)
    assert set(one_stage) == {"0.0.weight", "0.0.bias"}


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Once(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OnceOnly.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_once_differentiable_stage() -> None:
    model, (inputs, targets) = network(Once()), data()
    with pytest.raises(NotTwiceDifferentiableError, match=r"stage '2' \(Once\).*GaussNewton or KL"):
        exact_step(model, inputs, targets, LOSS, Newton(), 1.0)

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square()

    same = network(Twice())
    same.load_state_dict(model.state_dict())
    step = exact_step(model, inputs, targets, LOSS, KL(), 1.0)  # a flat divergence asks for no second derivative
    expected = exact_step(same, inputs, targets, LOSS, KL(), 1.0)
    for name in step:
        torch.testing.assert_close(step[name], expected[name])


@pytest.mark.parametrize("way", [exact_step, dense_step, cg_step])
def test_inputs_that_are_no_inputs(way: Any) -> None:
    targets = data()[1]
    with pytest.raises(ChainError, match=r"can't take the inputs.*convert them, as in inputs\.double\(\)"):
        way(network(), torch.randint(5, (5, 3)), targets, LOSS, KL(), 0.1)
    with pytest.raises(LLQRError, match="empty"):
        way(network(), torch.zeros(0, 3).double(), targets[:0], LOSS, KL(), 0.1)
    with pytest.raises(LLQRError, match="inputs are a tensor"):
        way(network(), [[1.0, 2.0, 3.0]], targets, LOSS, KL(), 0.1)


def test_things_that_are_no_chain() -> None:
    inputs, targets = data()
    with pytest.raises(ChainError, match="no stages"):
        exact_step([], inputs, targets, LOSS, KL())
    with pytest.raises(ChainError, match=r"nn.Sequential or a list"):
        exact_step(nn.Linear(3, 2), inputs, targets, LOSS, KL())  # type: ignore[arg-type]
    with pytest.raises(ChainError, match=r"stage 1 is a builtin_function"):
        exact_step([nn.Linear(3, 2), torch.tanh], inputs, targets, LOSS, KL())  # type: ignore[list-item]
    with pytest.raises(ChainError, match="nothing to step"):
        exact_step([nn.Tanh()], inputs, targets, LOSS, KL())
    with pytest.raises(ChainError, match=r"random numbers.*eval"):
        exact_step(network(nn.Dropout(0.5)), inputs, targets, LOSS, KL(), 0.1)

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    with pytest.raises(
        ChainError, match=r"stage '3' \(Linear\) can't take the output of stage '2' \(Two\), several tensors"
    ):
        exact_step(network(Two()), inputs, targets, LOSS, KL(), 0.1)
    with pytest.raises(ChainError, match=r"stage '1' \(Two\) returned a tuple.*the last one returns one"):
        exact_step([nn.Linear(3, 4).double(), Two()], inputs, targets, LOSS, KL(), 0.1)

    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    with pytest.raises(ChainError, match=r"stage '2' \(Cut\)"):
        exact_step(network(Cut()), inputs, targets, LOSS, KL(), 0.1)
    whole = nn.Linear(3, 2)
    whole.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))
    with pytest.raises(ChainError, match="complex"):
        exact_step([whole], inputs, targets, LOSS, KL())


def test_random_stages_never_slip_through() -> None:
    """A dropout that happens to drop nothing is still random, and the random stream isn't moved."""
    for seed in range(10):
        torch.manual_seed(seed)
        model, (inputs, targets) = network(nn.Dropout(0.01)), data(1)
        before = torch.get_rng_state()
        for way in (exact_step, dense_step, cg_step):
            with pytest.raises(ChainError, match="random numbers"):
                way(model, inputs, targets, LOSS, KL(), 0.1)
        assert torch.equal(torch.get_rng_state(), before)


def test_sequential_with_a_forward_of_its_own() -> None:
    class Skip(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)  # type: ignore[no-any-return]

    skip, (inputs, targets) = Skip(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double(), data()
    with pytest.raises(ChainError, match=r"forward of its own.*\[model\]"):
        exact_step(skip, inputs, targets, LOSS, KL(), 0.1)
    whole = exact_step([skip], inputs, targets, LOSS, KL(), 0.1)
    for name, expected in dense_step(skip, inputs, targets, LOSS, KL(), 0.1).items():
        torch.testing.assert_close(whole[f"0.{name}"], expected, rtol=1e-8, atol=1e-12)


def test_wrong_second_derivatives_are_noticed() -> None:
    class Lopsided(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square().sum(-1, keepdim=True).expand_as(x).clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * (x + x.roll(1, -1) * x) * gradient.sum(-1, keepdim=True)

    class Stage(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Lopsided.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    for way in (exact_step, dense_step):
        with pytest.raises(NotTwiceDifferentiableError, match="symmetric"):
            way(network(Stage()), *data(), LOSS, Newton(), 1.0)


def test_derivatives_that_are_not_finite() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.detach()).abs().sqrt()

    for way in (exact_step, dense_step, cg_step):
        with pytest.raises((NonFiniteError, NotTwiceDifferentiableError)):
            way(network(Root()), *data(), LOSS, KL(), 0.1)


def test_what_a_model_may_not_be() -> None:
    inputs, targets = data()
    with pytest.raises(ChainError, match=r"bfloat16.*model.float"):
        exact_step(network().bfloat16(), inputs.bfloat16(), targets, LOSS, KL(), 0.1)
    with pytest.raises(ChainError, match="not a NoneType"):
        exact_step(None, inputs, targets, LOSS, KL(), 0.1)  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match="inference_mode"), torch.inference_mode():
        exact_step(network(), inputs, targets, LOSS, KL(), 0.1)
    weight = nn.Parameter(torch.ones(2).double())
    with pytest.raises(LLQRError, match="other than through the output"):
        exact_step(network(), inputs, targets, lambda x, t: LOSS(x, t) + weight.square().sum(), KL(), 0.1)
    with pytest.raises(LLQRError, match="twice"):
        exact_step(network(), inputs, targets, LOSS, KL(), {0: 0.1, "0": 0.9})
    with pytest.raises(LLQRError, match="negative"):
        exact_step(network(), inputs, targets, LOSS, Intermediate({1: -torch.eye(4)}), 0.1)


def test_losses_that_are_no_loss() -> None:
    model, (inputs, targets) = network(), data()
    with pytest.raises(LLQRError, match=r"shape \(5,\).*mean over the batch"):
        exact_step(model, inputs, targets, nn.CrossEntropyLoss(reduction="none"), KL(), 0.1)
    with pytest.raises(LLQRError, match="returned float"):
        exact_step(model, inputs, targets, lambda output, _: 1.0, KL(), 0.1)  # type: ignore[arg-type, return-value]
    with pytest.raises(LLQRError, match="doesn't depend"):
        exact_step(model, inputs, targets, lambda output, _: output.detach().sum(), KL(), 0.1)


class Kept(nn.Module):
    """A stage that keeps what it returned."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        self.seen: Tensor = self.inner(x)
        return self.seen


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("way", [exact_step, dense_step, cg_step, QuadraticModel.build], ids=lambda way: way.__name__)
def test_losses_with_a_term_on_an_activation(way: Any, place: int) -> None:
    """That term's gradient doesn't come through the output, and would be lost."""
    model, (inputs, targets) = network(), data()
    kept = model[place] = Kept(model[place])
    with pytest.raises(LLQRError, match=r"activation.*let the model return"):
        way(model, inputs, targets, lambda x, t: LOSS(x, t) + kept.seen.square().mean(), KL(), 0.1)


def test_wrong_arguments() -> None:
    arguments = (network(), *data(), LOSS)
    with pytest.raises(LLQRError, match=r"'newtn'.*'newton'"):
        exact_step(*arguments, "newtn")
    with pytest.raises(LLQRError, match=r"KL\(\)"):
        exact_step(*arguments, KL)  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match="zero or more"):
        exact_step(*arguments, KL(), -1.0)
    with pytest.raises(LLQRError, match="unknown module or parameter in damping '7'"):
        exact_step(*arguments, KL(), {"7": 1.0})
    with pytest.raises(LLQRError, match="place 7"):
        exact_step(*arguments, KL(), {7: 1.0})
    with pytest.raises(LLQRError, match="unknown value of degenerate"):
        exact_step(*arguments, KL(), 0.1, degenerate="pinv")  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match="unknown module in Intermediate '9'"):
        exact_step(*arguments, Intermediate({"9": 1.0}), 0.1)
    with pytest.raises(LLQRError, match="4 × 4"):
        exact_step(*arguments, Intermediate({"1": torch.eye(3)}), 0.1)
    with pytest.raises(LLQRError, match="symmetric"):
        exact_step(*arguments, Intermediate({"1": torch.randn(4, 4)}), 0.1)
    with pytest.raises(LLQRError, match="two classes"):
        exact_step([nn.Linear(3, 1).double()], data()[0], torch.rand(5, 1).double(), nn.MSELoss(), KL(), 0.1)


def test_divergences_that_make_no_sense() -> None:
    for wrong in (
        lambda: Renyi(0),
        lambda: Renyi(-1.0),
        lambda: Renyi("a"),  # type: ignore[arg-type]
        lambda: Renyi(True),
        lambda: Layerwise({0: lambda x, own, x_k, own_k: x.sum()}, flat="no"),  # type: ignore[arg-type]
        lambda: L2(-1.0),
        lambda: KL(reduction="max"),  # type: ignore[arg-type]
        lambda: KL(family="poisson"),
        lambda: -1 * KL(),
        lambda: 0 * GaussNewton(),
        lambda: Intermediate({}),
        lambda: Intermediate({"0": -1.0}),
        lambda: Intermediate({"0": torch.full((2, 2), float("nan"))}),
    ):
        with pytest.raises(LLQRError):
            wrong()
    with pytest.raises(TypeError):
        KL() + 1  # type: ignore[operator]


def test_every_error_is_a_value_error() -> None:
    for error in (ChainError, DegenerateProblemError, NonFiniteError):
        assert issubclass(error, ValueError)
