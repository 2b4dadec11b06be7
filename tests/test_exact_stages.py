"""Stages of every kind: strides, groups, attention, reshaping, tokens, images as outputs, huge and tiny damping."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from llqr import cg_step, dense_step, exact_step
from llqr.divergences import KL, Categorical, Divergence, GaussNewton, Intermediate, Newton, ReverseKL
from llqr.exact import Chain, build
from llqr.exact.matrices import apply_to_each
from llqr.exact.steps import DenseControl, Riccati, ThinControl
from networks import Dense, relative


class Attention(nn.Module):
    """Mixes tokens; the fused kernel has no second derivative, so this one is written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + (q @ k.mT).softmax(-1) @ v


class Reshape(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape)


class Twice(nn.Module):
    """One parameter used twice, and one not at all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.idle = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh() @ self.weight.T


CASES: dict[str, tuple[list[nn.Module], tuple[int, ...]]] = {}


def case(name: str, shape: tuple[int, ...], *stages: nn.Module) -> None:
    CASES[name] = ([stage.double() for stage in stages], shape)


torch.manual_seed(0)
case("stride and padding", (3, 2, 6, 6), nn.Conv2d(2, 2, 3, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(18, 3))
case("groups", (2, 4, 3, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3))
case("transposed", (2, 2, 3), nn.ConvTranspose1d(2, 2, 2), nn.Softplus(), nn.Flatten(), nn.Linear(8, 3))
case("pooling", (2, 1, 6, 6), nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
case("attention", (2, 3, 4), nn.Linear(4, 4), Attention(4), nn.Flatten(), nn.Linear(12, 3))
case("tokens into rows", (2, 3, 4), nn.Linear(4, 4), Reshape(6, 4), nn.Tanh(), Reshape(2, 12), nn.Linear(12, 3))
case("group norm", (2, 4, 2), nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 3))
case("plain layer norm", (3, 4), nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 3))
case("twice and idle", (3, 4), nn.Linear(4, 4), Twice(4), nn.Linear(4, 3))
case("prelu", (3, 4), nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3))
case("many parameters", (1, 30), nn.Linear(30, 4), nn.Tanh(), nn.Linear(4, 3))
case("few parameters", (40, 2), nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))

LOSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("divergence", [Newton(), GaussNewton()], ids=repr)
def test_kinds_of_stages(name: str, divergence: Divergence) -> None:
    stages, shape = CASES[name]
    inputs, targets = torch.randn(shape).double(), torch.randint(3, shape[:1])
    truth = Dense(nn.Sequential(*stages), inputs, lambda output: LOSS(output, targets))
    matrix = truth.hessian(lambda flat: truth.loss(truth.run(flat)))
    if isinstance(divergence, GaussNewton):
        jacobian = torch.func.jacrev(lambda flat: truth.run(flat).reshape(-1))(truth.point)
        outer = torch.func.hessian(truth.loss)(truth.output).reshape(len(jacobian), -1)
        matrix = jacobian.T @ outer @ jacobian
    damping = 0.05 + max(0.0, -2 * float(torch.linalg.eigvalsh(matrix)[0]))
    for way in (exact_step, dense_step):
        step = way(stages, inputs, targets, LOSS, divergence, damping)
        assert relative(truth.flat(step), truth.step(matrix, damping)) < 1e-8


@pytest.mark.parametrize("dim", [1, -3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_classes_along_another_dimension(dim: int, reduction: str) -> None:
    """Outputs (B, C, H, W), as in segmentation: one categorical variable a pixel."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)).double()
    inputs, targets = torch.randn(2, 1, 2, 3).double(), torch.randint(3, (2, 2, 3))
    truth = Dense(model, inputs, lambda output: LOSS(output, targets))
    base = truth.output.log_softmax(1)
    count = 12 if reduction == "mean" else 1
    matrix = truth.hessian(lambda flat: (base.exp() * (base - truth.run(flat).log_softmax(1))).sum() / count)
    for kind in (KL, ReverseKL):
        divergence = kind(Categorical(dim), reduction)  # type: ignore[arg-type]
        for way in (exact_step, dense_step, cg_step):
            assert (
                relative(truth.flat(way(model, inputs, targets, LOSS, divergence, 0.1)), truth.step(matrix, 0.1)) < 1e-8
            )


@pytest.mark.parametrize("damping", [1e-8, 1e-4, 1.0, 1e4, 1e8])
def test_damping_of_any_size(damping: float) -> None:
    """The error is that of the condition number, 1/λ, and no more."""
    stages, shape = CASES["many parameters"]
    inputs, targets = torch.randn(shape).double(), torch.randint(3, shape[:1])
    truth = Dense(nn.Sequential(*stages), inputs, lambda output: LOSS(output, targets))
    base = truth.output.log_softmax(-1)
    matrix = truth.hessian(lambda flat: (base.exp() * (base - truth.run(flat).log_softmax(-1))).sum() / len(inputs))
    step = truth.flat(exact_step(stages, inputs, targets, LOSS, KL(), damping))
    condition = 1 + float(matrix.norm()) / damping
    assert relative(step, truth.step(matrix, damping)) < 1e-14 * condition


def test_undamped_and_well_posed() -> None:
    """More examples than parameters: H is positive definite by itself, also with features of very different size."""
    model = nn.Sequential(nn.Linear(3, 1)).double()
    inputs = torch.randn(20, 3).double() * torch.tensor([1e5, 1.0, 1e-4]).double()
    targets = torch.randn(20, 1).double()
    truth = Dense(model, inputs, lambda output: (output - targets).square().mean())
    design = torch.cat((inputs, torch.ones(20, 1).double()), dim=1)
    expected = torch.linalg.lstsq(design, targets - truth.output).solution[:, 0]
    step = truth.flat(exact_step(model, inputs, targets, nn.MSELoss(), GaussNewton()))
    torch.testing.assert_close(step, expected, rtol=1e-6, atol=1e-12)


def test_the_solve_is_on_the_smaller_side() -> None:
    """R_i = λI and P > n_{i+1}: the push-through identity; otherwise, or with a full R_i, S_i itself."""
    inputs, targets = torch.randn(2, 30).double(), torch.randint(3, (2,))
    stages, _ = CASES["many parameters"]
    for divergence in (KL(), Newton()):
        riccati = Riccati(build(Chain(stages), inputs, targets, LOSS, divergence, 20.0))
        first = riccati._pivots[0].control
        assert isinstance(first, ThinControl)
        assert first._factor.shape == (8, 8)  # two examples of four numbers, against 124 parameters
    stages, shape = CASES["few parameters"]
    wide = build(Chain(stages), torch.randn(shape).double(), torch.randint(3, shape[:1]), LOSS, KL(), 1.0)
    assert isinstance(Riccati(wide)._pivots[0].control, DenseControl)


def test_batched_products_are_not_believed() -> None:
    """An operator whose vmap rule is wrong is applied one by one; at any scale."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: object, inputs: object, output: object) -> None:
            pass

        @staticmethod
        def vmap(info: object, in_dims: object, x: Tensor) -> tuple[Tensor, int]:
            return 3 * x, 0

    for scale in (1.0, 1e-12, 1e12):
        vectors = scale * torch.randn(4, 5).double()
        found = apply_to_each(lambda v: Wrong.apply(v), vectors)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(found, 2 * vectors)


def test_intermediate_mean_is_over_the_inputs() -> None:
    """Stages that fold tokens into rows don't change what "mean over the batch" means."""
    stages, shape = CASES["tokens into rows"]
    inputs, targets = torch.randn(shape).double(), torch.randint(3, shape[:1])
    mean = KL() + Intermediate({2: 1.0})
    half = KL() + 0.5 * Intermediate({2: 1.0}, reduction="sum")  # two examples
    for way in (exact_step, dense_step):
        one, other = (way(stages, inputs, targets, LOSS, divergence, 0.1) for divergence in (mean, half))
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-12)
