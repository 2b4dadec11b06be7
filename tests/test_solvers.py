"""Promise: SGDM and Adam are the textbook's; ScaleFree needs no learning rate, few products, and stays safe."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from llqr.errors import LLQRError
from llqr.preconditioner import Preconditioner
from llqr.refit import fit
from llqr.solvers import SGDM, Adam, ConjugateGradient, ScaleFree, Solver
from llqr.solvers.conjugate import _State
from llqr.structures import Dense, Diagonal, EigenKronecker, Kronecker, Scalar, Structure
from standins import DenseModel, network_model, random_model

STRUCTURES: list[Structure] = [
    Scalar(),
    Diagonal(),
    Dense(),
    Kronecker(),
    Kronecker(max_dim=3),
    EigenKronecker(),
    EigenKronecker(max_dim=3),
]
LINEAR = (Scalar, Diagonal, Dense)
Blocks = dict[str, dict[str, Tensor]]


def oracle(model: DenseModel, structure: Structure, update: Callable[[int, str, Tensor, Tensor], Tensor]) -> Blocks:
    """The double loop: 25 times, for every tensor of every block, ∇_U J by autograd and one update."""
    start = {name: structure.identity(tuple(g.shape), g, 1) for name, g in model.gradient.items()}
    blocks = {key: {name: t[0] for name, t in tensors.items()} for key, tensors in start.items()}

    def objective(blocks: Blocks) -> Tensor:
        stacks = {key: {name: t[None] for name, t in tensors.items()} for key, tensors in blocks.items()}
        return model.value({key: -structure.apply(stacks[key], g[None])[0] for key, g in model.gradient.items()})

    for iteration in range(25):
        gradient = torch.func.grad(objective)(blocks)
        for key, tensors in blocks.items():
            for name in tensors:
                tensors[name] = update(iteration, f"{key}/{name}", tensors[name], gradient[key][name])
    return blocks


def assert_same_blocks(u: Preconditioner, expected: Blocks, tolerance: float) -> None:
    assert u.blocks.keys() == expected.keys()
    for key, tensors in expected.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(u.blocks[key][name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize(("momentum", "clip", "damping"), [(0.9, None, 0.0), (0.9, 0.02, 0.3), (0.0, None, 0.3)])
def test_sgdm_is_the_double_loop(structure: Structure, momentum: float, clip: float | None, damping: float) -> None:
    """b ← μ b + ∇J (clipped tensor by tensor), U ← U - η b; 25 steps, to 1e-10."""
    model = random_model(damping=damping)
    buffers: dict[str, Tensor] = {}
    clipped = set()

    def update(iteration: int, key: str, tensor: Tensor, gradient: Tensor) -> Tensor:
        clipped.add(clip is not None and bool(gradient.norm() > clip))
        if clip is not None and gradient.norm() > clip:
            gradient = gradient * (clip / gradient.norm())
        buffers[key] = momentum * buffers.get(key, torch.zeros_like(gradient)) + gradient
        return tensor - 0.005 * buffers[key]

    u = fit(model, structure, SGDM(lr=0.005, momentum=momentum, clip=clip), steps=25)
    assert_same_blocks(u, oracle(model, structure, update), 1e-10)
    assert (True in clipped) == (clip is not None)
    assert model.products == 26
    assert len(u.history) == 26


@pytest.mark.parametrize("divergence", ["newton", "mean", "sum"])
@pytest.mark.parametrize("structure", [Diagonal(), Kronecker(), EigenKronecker()], ids=repr)
def test_sgdm_on_networks(structure: Structure, divergence: str) -> None:
    """The same on the curvature of a small convolutional network, with the clip that the sum needs."""
    model = network_model("cnn", divergence)
    clip = 5.0 if divergence == "sum" else None
    buffers: dict[str, Tensor] = {}

    def update(iteration: int, key: str, tensor: Tensor, gradient: Tensor) -> Tensor:
        if clip is not None and gradient.norm() > clip:
            gradient = gradient * (clip / gradient.norm())
        buffers[key] = 0.9 * buffers.get(key, torch.zeros_like(gradient)) + gradient
        return tensor - 0.005 * buffers[key]

    u = fit(model, structure, SGDM(clip=clip), steps=25)
    assert_same_blocks(u, oracle(model, structure, update), 1e-10)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("structure", [Diagonal(), Kronecker(), EigenKronecker()], ids=repr)
def test_adam_is_torchs(structure: Structure, clip: float | None) -> None:
    """U - lr · m̂ / (√v̂ + eps), as torch.optim.Adam does it, of slopes clipped to a norm."""
    model = random_model()
    optimizers: dict[str, tuple[Tensor, torch.optim.Adam]] = {}

    def update(iteration: int, key: str, tensor: Tensor, gradient: Tensor) -> Tensor:
        if key not in optimizers:
            parameter = tensor.clone().requires_grad_()
            optimizers[key] = parameter, torch.optim.Adam([parameter], lr=0.02, betas=(0.8, 0.99), eps=1e-7)
        parameter, optimizer = optimizers[key]
        parameter.grad = gradient.detach() * (1.0 if clip is None else min(1.0, clip / float(gradient.norm())))
        optimizer.step()
        return parameter.detach().clone()

    u = fit(model, structure, Adam(lr=0.02, betas=(0.8, 0.99), eps=1e-7, clip=clip), steps=25)
    assert_same_blocks(u, oracle(model, structure, update), 1e-10)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize(("gradient", "curvature"), [(1e-4, 1e-4), (1e4, 1e4), (1e-4, 1.0), (1e4, 1.0), (1.0, 1e4)])
def test_scale_free_is_free_of_scale(structure: Structure, gradient: float, curvature: float) -> None:
    """With a·g and b·H, U becomes U/b and J a²/b J: a multiple of the loss (a = b) leaves the step as it is."""
    model = network_model("mlp", "mean", damping=0.01)
    u = fit(model, structure, ScaleFree(), steps=10)
    v = fit(model.scaled(gradient, curvature), structure, ScaleFree(), steps=10)
    assert [j * gradient**2 / curvature for j in u.history[1:]] == pytest.approx(v.history[1:], rel=1e-6)
    for name, step in v.apply(model.gradient).items():
        expected = u.apply(model.gradient)[name] / curvature
        torch.testing.assert_close(step, expected, rtol=1e-5, atol=1e-5 * float(expected.norm()))
    assert u.history[-1] < u.history[1] < 0


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize(("gradient", "curvature"), [(1e-25, 1.0), (1e25, 1.0), (1e-20, 1e-20), (1e20, 1e20)])
def test_scale_free_in_float32_where_squares_are_not(structure: Structure, gradient: float, curvature: float) -> None:
    """Gradients whose squares float32 can't hold: the same U/b as in the middle of its range."""
    double = random_model(damping=0.1)
    model = DenseModel({name: g.float() for name, g in double.gradient.items()}, double.matrix.float())
    u = fit(model, structure, ScaleFree(), steps=6)
    v = fit(model.scaled(gradient, curvature), structure, ScaleFree(), steps=6)
    for name, step in v.apply(model.gradient).items():
        expected = u.apply(model.gradient)[name] / curvature
        torch.testing.assert_close(step, expected, rtol=1e-2, atol=1e-3 * float(expected.norm()))


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("divergence", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "deep"])
def test_scale_free_beats_sgdm_with_fewer_products(kind: str, divergence: str, structure: Structure) -> None:
    """J after 10 steps (at most 12 products, 11 where δ is linear in U) is below that of the paper's SGDM after 25."""
    model = network_model(kind, divergence)
    paper = fit(model, structure, SGDM(lr=0.005, momentum=0.9, clip=5.0 if divergence == "sum" else None), steps=25)
    model.products = 0
    u = fit(model, structure, ScaleFree(), steps=10)
    assert model.products <= (11 if isinstance(structure, LINEAR) else 12)
    value = float(model.value({name: -step for name, step in u.apply(model.gradient).items()}))
    assert value == pytest.approx(u.history[-1], rel=1e-9)
    assert value < paper.history[-1]
    assert value < 0


@pytest.mark.parametrize("structure", [Diagonal(), Dense(), Kronecker(), EigenKronecker()], ids=repr)
def test_scale_free_serves_layers_with_small_gradients(structure: Structure) -> None:
    """Two layers of the same curvature that don't see each other, one with a 1000th of the gradient: the same U for both."""
    torch.manual_seed(0)
    root = torch.randn(12, 12, dtype=torch.float64)
    g = torch.randn(4, 3, dtype=torch.float64)
    block = root @ root.T / 12 + 0.1 * torch.eye(12)
    u = fit(DenseModel({"a": g, "b": 1e-3 * g}, torch.block_diag(block, block)), structure, ScaleFree(), steps=6)
    for name, tensor in u.blocks["a"].items():
        torch.testing.assert_close(u.blocks["b"][name], tensor, rtol=1e-6, atol=1e-6)
    assert u.history[-1] < u.history[1]


def test_scale_free_with_dense_blocks_is_conjugate_gradients() -> None:
    """For one dense block of n numbers δ runs through the iterates of CG: n steps reach H⁻¹g."""
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    model = DenseModel({"w": torch.randn(6, dtype=torch.float64)}, root @ root.T + torch.eye(6))
    u = fit(model, "dense", ScaleFree(reach=1e6), steps=6)
    exact = torch.linalg.solve(model.matrix, model.gradient["w"])
    torch.testing.assert_close(u.apply(model.gradient)["w"], exact, rtol=1e-6, atol=1e-8)


SOLVERS: list[Solver] = [SGDM(), SGDM(lr=10.0), Adam(), ConjugateGradient(), ScaleFree()]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("seed", [0, 1])
def test_indefinite_problems_stay_finite(seed: int, structure: Structure, solver: Solver) -> None:
    """Negative curvature: U is finite after many steps, and J but for the last, which tells; line searches never raise J."""
    u = fit(random_model(seed, indefinite=True), structure, solver, steps=60)
    assert u.is_finite()
    assert all(math.isfinite(value) for value in u.history[:-1])
    if isinstance(solver, ConjugateGradient | ScaleFree):
        assert u.history[-1] <= u.history[0]


@pytest.mark.parametrize("kind", ["mlp", "deep"])
def test_newton_stays_within_reach(kind: str) -> None:
    """U = c V with c ≤ reach · ‖g‖/‖Hg‖ and ‖V_b‖ ≤ reach · ‖I‖ for every block."""
    model = network_model(kind, "newton", trained=3)
    assert torch.linalg.eigvalsh(model.matrix)[0] < 0
    u = fit(model, "diagonal", ScaleFree(reach=3.0), steps=30)
    flat = model.flat(model.gradient)
    largest = 9.0 * float(flat.norm() / (model.matrix @ flat).norm())
    for block in u.blocks.values():
        assert float(block["d"].norm() / block["d"].numel() ** 0.5) <= largest * (1 + 1e-9)
    assert u.history[-1] < u.history[0]


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if isinstance(s, LINEAR)], ids=repr)
def test_scale_free_is_monotone_where_the_step_is_linear(structure: Structure) -> None:
    history = fit(network_model("cnn", "mean"), structure, ScaleFree(), steps=15).history
    assert all(after <= before + 1e-12 for before, after in pairwise(history))


@pytest.mark.parametrize("structure", [Diagonal(), Kronecker(), EigenKronecker()], ids=repr)
def test_line_search_of_conjugate_gradient_is_exact(structure: Structure) -> None:
    """After one step J has no slope left along the direction taken (quartic in the length; to second order for E-KFAC)."""
    model = random_model()
    u = fit(model, structure, ConjugateGradient(), steps=1)
    identity = Preconditioner.identity(model.gradient, structure)
    change = [after - before for after, before in zip(u.tensors, identity.tensors, strict=True)]
    lengths = torch.linspace(0.5, 1.5, 41, dtype=torch.float64)
    values = []
    for length in lengths:
        step = {name: -s for name, s in identity.moved(change, float(length)).apply(model.gradient).items()}
        values.append(float(model.value(step)))
    assert values[20] == pytest.approx(u.history[1], rel=1e-9)
    if not isinstance(structure, EigenKronecker):
        assert min(values) == values[20]
    assert u.history[1] < u.history[0]
    products = {1: 2, 2: 3, 5: 4}
    degree = 1 if isinstance(structure, Diagonal) else 5 if isinstance(structure, EigenKronecker) else 2
    assert model.products == products[degree]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("gradient", [1e-150, 1e-100, 1e-60, 1e60, 1e150])
def test_line_search_of_conjugate_gradient_at_the_ends_of_the_range(structure: Structure, gradient: float) -> None:
    """The longest step is as long as ∇J is short, and its powers aren't numbers any more."""
    u = fit(random_model(damping=0.1).scaled(gradient, 1.0), structure, ConjugateGradient(), steps=6)
    assert u.is_finite()
    assert all(after <= before for before, after in pairwise(u.history))


@pytest.mark.parametrize("solver", [ConjugateGradient(), ScaleFree()], ids=repr)
def test_line_searches_stop_when_nothing_is_left(solver: Solver) -> None:
    """One parameter, one scalar: exact at once, and not a hundred products."""
    model = DenseModel({"w": torch.ones(3, dtype=torch.float64)}, 2 * torch.eye(3, dtype=torch.float64))
    u = fit(model, "scalar", solver, steps=100)
    assert float(u.blocks["w"]["u"]) == pytest.approx(0.5, rel=1e-9)
    assert model.products <= 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGDM(lr=0.0),
        lambda: SGDM(momentum=1.0),
        lambda: SGDM(clip=-1.0),
        lambda: Adam(lr=float("nan")),
        lambda: Adam(betas=(0.9, 1.0)),
        lambda: Adam(betas=0.9),
        lambda: Adam(clip=0.0),
        lambda: ScaleFree(reach=0),
    ],
)
def test_bad_options_are_refused(make: Callable[[], Solver]) -> None:
    with pytest.raises(LLQRError):
        make()


def test_scale_free_compares_steps_by_the_size_of_the_curvature() -> None:
    """c g·δ + ½c²|δ·Hδ|: where H is negative J has no bottom, and the longest step would win."""
    up, down = (_State(2.0, None, [], [], -3.0, curved) for curved in (5.0, -5.0))
    assert up.merit() == down.merit() == 2 * -3.0 + 0.5 * 4 * 5.0
    assert (up.value, down.value) == (4.0, -16.0)
