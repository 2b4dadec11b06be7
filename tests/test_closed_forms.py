"""Promise: U is the closed form that its structure says, of the curvature that was measured, to rounding."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from llqr import LLQR, QuadraticModel
from llqr.curvature import statistics
from llqr.curvature.linear_maps import DAMPING, MEMORY, Block, LinearMap, Stack, damping_after
from llqr.curvature.statistics import Sums
from llqr.curvature.uses import find_uses
from llqr.divergences import KL
from llqr.errors import LLQRError
from llqr.structures import Dense, Diagonal, EigenKronecker, Kronecker, Scalar
from llqr.structures.base import LEADING, LONG_SIDE, Structure, _start, damped_inverse, gram, kept, thin_inverse
from llqr.wrapper import often_at_first
from loops import STRUCTURES, backward, batch, network, sgd, train
from networks import relative

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def gaussian_sums(model: nn.Module, x: Tensor, root: Tensor, structure: Structure) -> dict[str, Sums]:
    """A and G without chance: every example once for each column of Q_N^½, which takes the place of a drawn slope."""
    copies = x.repeat_interleave(len(root), 0)
    output = model(copies)
    found = find_uses([output], {id(p): name for name, p in model.named_parameters()})
    slopes = root.T.repeat(len(x), 1) / len(x) ** 0.5
    pulled = torch.autograd.grad(output, [GradientEdge(use.node, 0) for use in found.uses], slopes)
    sums = {}
    for use, gradient in zip(found.uses, pulled, strict=True):
        sums[use.map.weight] = Sums(use.map, structure)
        sums[use.map.weight].add(use.sides(gradient))
    return sums


def hessian_block(model: nn.Module, x: Tensor, divergence: KL, map_: LinearMap) -> Tensor:
    """The block of H, by products with unit vectors, its numbers row by row of the map's matrix."""
    targets = torch.zeros(len(x), model(x).shape[1]).double()
    quadratic = QuadraticModel.build(copy.deepcopy(model), x, targets, functional.mse_loss, divergence)
    parameters = dict(model.named_parameters())
    rows: dict[int, Tensor] = {}
    for name in map_.members:
        for place in range(parameters[name].numel()):
            unit = {other: torch.zeros_like(p) for other, p in parameters.items()}
            unit[name].view(-1)[place] = 1
            rows[int(map_.read(unit).argmax())] = map_.read(quadratic.curvature(unit)).reshape(-1)
    return torch.stack([rows[index] for index in range(len(rows))])


def kronecker(moments: Mapping[str, Tensor], group: int = 0) -> Tensor:
    """A ⊗ G as one matrix, its numbers row by row of the map's matrix."""
    product = torch.ones(1, 1).double()
    for moment in moments.values():
        part = moment[group]
        product = torch.kron(product, part if part.dim() == 2 else part.diag())
    return product


@pytest.mark.parametrize("key", ["0.weight", "2.weight"])
def test_one_example(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one example, H's block is a aᵀ ⊗ E[b bᵀ]: in any layer, for a categorical output."""
    monkeypatch.setattr(statistics, "PLACES", 10**6)
    model, x = network(), batch(size=1)[0]
    p = model(x)[0].detach().softmax(0)
    values, basis = torch.linalg.eigh(p.diag() - p[:, None] * p)
    sums = gaussian_sums(model, x, basis * values.clamp_min(0).sqrt(), Kronecker())[key]
    truth = hessian_block(model, x, KL(), sums.map)
    torch.testing.assert_close(kronecker(sums.moments()), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("key", ["0.weight", "1.weight", "2.weight"])
def test_deep_linear_network(key: str) -> None:
    """Many examples, a fixed metric at the output: b doesn't depend on the example, and the block is E[a aᵀ] ⊗ E[b bᵀ]."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2)).double()
    x = torch.randn(5, 4).double()
    sums = gaussian_sums(model, x, torch.eye(2).double() / 2**0.5, Kronecker())[key]
    truth = hessian_block(model, x, KL("gaussian"), sums.map)
    torch.testing.assert_close(kronecker(sums.moments()), truth, rtol=1e-9, atol=1e-12)


def test_last_layer() -> None:
    """Many examples, a Gaussian output, anything before: exact in the last layer, and in the one before it not."""
    model, x = network(), batch()[0]
    sums = gaussian_sums(model, x, torch.eye(3).double() / 3**0.5, Kronecker())
    for key, exact in [("2.weight", True), ("0.weight", False)]:
        truth = hessian_block(model, x, KL("gaussian"), sums[key].map)
        assert (relative(kronecker(sums[key].moments()), truth) < 1e-10) == exact


def curvature(structure: Structure, k: int = 2, r: int = 3, c: int = 8) -> dict[str, Tensor]:
    """Moments of random gradients, as a map of k matrices would have them."""
    rows, columns = torch.randn(k, 50, r).double(), torch.randn(k, 50, c).double() @ torch.randn(k, c, c).double()
    return structure.second_moments(rows, columns)


def whole(structure: Structure, moments: Mapping[str, Tensor], group: int) -> Tensor:
    """H of one matrix of the stack, as this structure knows it."""
    if isinstance(structure, Dense):
        return moments["whole"][group]
    if isinstance(structure, Diagonal):
        return moments["squares"][group].reshape(-1).diag()
    return kronecker(moments, group)


def as_matrix(structure: Structure, tensors: Mapping[str, Tensor], shape: tuple[int, ...], group: int) -> Tensor:
    """U of one matrix of the stack, by its action on unit vectors."""
    count = next(iter(tensors.values())).shape[0]
    units = torch.eye(torch.Size(shape).numel()).double()
    return torch.stack([structure.apply(tensors, unit.reshape(1, *shape).expand(count, *shape))[group].reshape(-1) for unit in units], 1)  # fmt: skip # noqa: E501


@pytest.mark.parametrize(
    "structure",
    [
        EigenKronecker(),
        Dense(),
        Diagonal(),
        EigenKronecker(max_dim=5),
        EigenKronecker(max_dim=1),
    ],
    ids=str,
)
def test_exact_inverses(structure: Structure) -> None:
    """U = (H + λ)⁻¹, λ a share of the mean of H's diagonal; H = A ⊗ G, the whole, or its diagonal."""
    moments = curvature(structure)
    assert len(moments) == (2 if isinstance(structure, EigenKronecker) else 1)
    u = structure.closed_form(moments, DAMPING)
    for group in range(2):
        h = whole(structure, moments, group)
        truth = torch.linalg.inv(h + DAMPING * h.diagonal().mean() * torch.eye(len(h)).double())
        found = as_matrix(structure, u, (3, 8), group)
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9 * float(truth.abs().max()))


@pytest.mark.parametrize("structure", [Kronecker(), Kronecker(max_dim=5), Kronecker(max_dim=1)], ids=str)
def test_split_damping(structure: Kronecker) -> None:
    """Kronecker's U = (G + √λ ḡ)⁻¹ ⊗ (A + √λ ā)⁻¹, each factor with a share of its own mean."""
    moments = curvature(structure)
    u = structure.closed_form(moments, DAMPING)
    for group in range(2):
        truth = torch.ones(1, 1).double()
        for moment in moments.values():
            factor = moment[group] if moment[group].dim() == 2 else moment[group].diag()
            damped = factor + DAMPING**0.5 * factor.diagonal().mean() * torch.eye(len(factor)).double()
            truth = torch.kron(truth, torch.linalg.inv(damped))
        found = as_matrix(structure, u, (3, 8), group)
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9 * float(truth.abs().max()))


def test_scalar() -> None:
    """u = tr H / tr((H + λ) H)."""
    moments = curvature(Scalar())
    u = Scalar().closed_form(moments, DAMPING)["u"]
    for group in range(2):
        h = kronecker(moments, group)
        damped = h + DAMPING * h.diagonal().mean() * torch.eye(len(h)).double()
        torch.testing.assert_close(u[group], h.trace() / (damped @ h).trace(), **TIGHT)


BLOCKS: list[Structure] = [Scalar(), Diagonal(), Dense(), Kronecker(), EigenKronecker(), EigenKronecker(max_dim=5)]


@pytest.mark.parametrize("structure", BLOCKS, ids=str)
def test_stationary(structure: Structure) -> None:
    """∇J̄ = 0 at the closed form, J̄(U) = -tr(UH) + ½ tr(U(H + Λ)UH) by the tensors of U, and not beside it.

    Λ = λ I; for Kronecker it is what its split damping adds, (A + √λ ā) ⊗ (G + √λ ḡ) - A ⊗ G.
    """
    moments = {name: m[:1] for name, m in curvature(structure).items()}
    h = whole(structure, moments, 0)
    damping = DAMPING * h.diagonal().mean() * torch.eye(len(h)).double()
    if isinstance(structure, Kronecker):
        parts = [
            m[0] + DAMPING**0.5 * m[0].diagonal().mean() * torch.eye(m.shape[1]).double() for m in moments.values()
        ]
        damping = torch.kron(*parts) - h

    def objective(tensors: dict[str, Tensor]) -> Tensor:
        u = as_matrix(structure, tensors, (3, 8), 0)
        return -(u @ h).trace() + 0.5 * (u @ (h + damping) @ u @ h).trace()

    closed = structure.closed_form(moments, DAMPING)
    beside = {name: tensor * 1.01 for name, tensor in closed.items()}
    here, there = (torch.func.grad(objective)(tensors) for tensors in (closed, beside))
    for name in closed:
        assert float(there[name].norm()) > 0
        assert float(here[name].norm()) < 1e-8 * float(there[name].norm()), name


@pytest.mark.parametrize("structure", [*STRUCTURES, Kronecker(max_dim=5), EigenKronecker(max_dim=5)], ids=str)
def test_grouped_convolution(structure: Any) -> None:
    """A matrix for each group, each with its own curvature; U acts group by group, biases as one more column."""
    layers = nn.PReLU(), nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)
    model = nn.Sequential(*layers).double()
    optimizer = LLQR(sgd(model), model, structure=structure)
    functional.cross_entropy(model(torch.randn(5, 4, 4, 4).double()), torch.randint(3, (5,))).backward()
    optimizer.step()
    block = optimizer.blocks["1.weight"]
    assert block.map.shape == (2, 3, 18)
    assert block.map.bias == "1.bias"
    x = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    read = block.map.read(x)
    applied = Stack([block]).apply(read)
    for group in range(2):
        h = whole(block.structure, block.moments, group)
        if isinstance(block.structure, (EigenKronecker, Dense, Diagonal)):
            truth = torch.linalg.solve(
                h + damping_after(1) * h.diagonal().mean() * torch.eye(len(h)).double(), read[group].reshape(-1)
            )
            torch.testing.assert_close(
                applied[group].reshape(-1), truth, rtol=1e-7, atol=1e-9 * float(truth.abs().max())
            )
        else:
            alone = {name: tensor[group : group + 1] for name, tensor in block.inverse.items()}
            truth = block.structure.apply(alone, read[group : group + 1])[0]
            torch.testing.assert_close(applied[group], truth)


def test_mappings() -> None:
    """Name patterns say which structure each map has; a bias goes with its weight."""
    model = network()
    optimizer = LLQR(
        sgd(model), model, structure={"0.*": EigenKronecker(max_dim=3), "2.weight": "dense", "*": "diagonal"}
    )
    backward(model, batch())
    optimizer.step()
    assert {key: block.structure for key, block in optimizer.blocks.items()} == {
        "0.weight": EigenKronecker(max_dim=3),
        "2.weight": Dense(),
    }
    assert {name: tuple(m.shape) for name, m in optimizer.blocks["0.weight"].moments.items()} == {
        "rows": (1, 5),
        "columns": (1, 5),
    }
    assert "dense" in optimizer.assignments()["2.weight"]
    assert optimizer.assignments()["2.bias"] == "along U m, with 2.weight"


def test_averages_over_refits() -> None:
    """Σ MEMORY^(n-i) moments_i / Σ MEMORY^(n-i): bias-corrected, so that the first counts no more than the second would."""
    map_ = LinearMap("w", (1, 3, 4))
    block = Block(map_, Kronecker())
    seen = [curvature(Kronecker(), 1, 3, 4) for _ in range(6)]
    for count, moments in enumerate(seen, start=1):
        block.take(moments)
        weights = torch.tensor([MEMORY ** (count - number) for number in range(1, count + 1)], dtype=torch.float64)
        for name in ("rows", "columns"):
            truth = torch.einsum("i,i...->...", weights / weights.sum(), torch.stack([m[name] for m in seen[:count]]))
            torch.testing.assert_close(block.moments[name], truth, **TIGHT)


def test_what_a_training_measures() -> None:
    """The blocks of LLQR after some steps, from the batches' own gradients, written out by hand."""
    model = network()
    optimizer = LLQR(sgd(model), model)
    inputs, gradients = [], []
    for number in range(3):
        x, y = batch(number)
        hidden = model[:2](x).detach()
        slope = (model(x).detach().softmax(1) - functional.one_hot(y, 3)) / len(x)
        inputs.append(torch.cat((hidden, torch.ones(len(x), 1).double()), 1))
        gradients.append(slope)
        train(model, optimizer, [number])
    weights = torch.tensor([MEMORY**2, MEMORY, 1.0], dtype=torch.float64)
    a = sum(w * x.T @ x / len(x) for w, x in zip(weights, inputs, strict=True)) / weights.sum()
    g = sum(w * b.T @ b for w, b in zip(weights, gradients, strict=True)) / weights.sum()
    block = optimizer.blocks["2.weight"]
    torch.testing.assert_close(block.moments["columns"][0], a, **TIGHT)
    torch.testing.assert_close(block.moments["rows"][0], g, **TIGHT)
    assert all(map(often_at_first, range(3)))


def test_a_structure_without_a_closed_form() -> None:
    """Said when the optimizer is made, with what to write."""

    class Own(Structure):
        def identity(self, shape: Any, like: Tensor, count: int = 1) -> dict[str, Tensor]:
            return {"u": torch.ones(count)}

        def apply(self, tensors: Any, x: Tensor) -> Tensor:
            return x

        def degree(self, shape: Any) -> int:
            return 1

        def scaled(self, tensors: Any, factor: float) -> dict[str, Tensor]:
            return dict(tensors)

    model = network()
    with pytest.raises(
        LLQRError, match=r"no closed form: write second_moments\(\) and closed_form\(\), or use LLQR.paper"
    ):
        LLQR(sgd(model), model, structure={"0": Own(), "*": "kfac"})


def few_directions(side: int, samples: int) -> Tensor:
    """Two stacks of T rows, which span fewer directions than a thin factor has columns."""
    return torch.randn(2, samples, side).double() * torch.linspace(5, 50, samples).double()[:, None]


def test_a_long_side_with_few_directions_is_inverted_exactly() -> None:
    """(M + γ)⁻¹ = diag(w) - B Bᵀ, where M is of a rank of no more than r."""
    torch.manual_seed(0)
    side = LONG_SIDE + 8
    moment = gram(few_directions(side, 20))
    thin, diagonal = thin_inverse(moment, 0.3)
    assert thin.shape == (2, side, LEADING)
    found = torch.diag_embed(diagonal) - thin @ thin.mT
    torch.testing.assert_close(found, damped_inverse(moment, 0.3), rtol=1e-9, atol=1e-9 * float(found.abs().max()))
    assert torch.equal(thin, thin_inverse(moment, 0.3)[0])  # it depends on M alone


def test_a_long_side_is_inverted_by_nystroms_approximation() -> None:
    """diag(w) - B Bᵀ = (N + τ + γ)⁻¹ with N = MΩ (ΩᵀMΩ)⁻¹ ΩᵀM and τ = tr(M - N)/(n - r), Ω = M times the fixed start."""
    torch.manual_seed(0)
    side = LONG_SIDE + 8
    moment = gram(torch.randn(1, 400, side).double() / torch.arange(1, side + 1).double())[0]
    columns = torch.linalg.qr(moment @ _start(side, torch.float64, torch.device("cpu"))).Q
    image = moment @ columns
    nystrom = image @ torch.linalg.inv(columns.mT @ image) @ image.mT
    shift = (moment - nystrom).trace() / (side - LEADING) + 0.3 * moment.trace() / side
    expected = torch.linalg.inv(nystrom + shift * torch.eye(side).double())
    thin, diagonal = thin_inverse(moment[None], 0.3)
    found = torch.diag_embed(diagonal[0]) - thin[0] @ thin[0].mT
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(found.abs().max()))


@pytest.mark.parametrize("size", [1e-24, 1e24])
def test_a_long_side_in_any_units(size: float) -> None:
    """(s M + s γ)⁻¹ = (M + γ)⁻¹ / s, in single precision too, where squares of s M would be 0 or infinite."""
    torch.manual_seed(0)
    moment = gram(few_directions(LONG_SIDE + 8, 20)).float()
    expected, found, nothing = (
        torch.diag_embed(w) - b @ b.mT
        for b, w in (thin_inverse(m, 0.3) for m in (moment, size * moment, torch.zeros_like(moment)))
    )
    torch.testing.assert_close(found * size, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert bool(nothing.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decay", [1.0, 3.0, 5.0])
def test_a_long_side_whose_numbers_are_far_apart(decay: float, dtype: torch.dtype) -> None:
    """U (M + γ) has eigenvalues near 1 where rounding makes products of rank 64 indefinite, and U itself is positive."""
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(512, 400, dtype=torch.float64) * torch.exp(-torch.arange(400) / decay)
        moment = gram((x - 2 * x.mean(1, keepdim=True))[None]).to(dtype)
        thin, diagonal = thin_inverse(moment, 0.3)
        found = (torch.diag_embed(diagonal) - thin @ thin.mT)[0].double()
        damped = moment[0].double() + 0.3 * moment[0].double().diagonal().mean() * torch.eye(400).double()
        ratios = torch.linalg.eigvals(found @ damped).real
        assert 0.95 < float(ratios.min()) <= float(ratios.max()) < (1.001 if dtype == torch.float64 else 1.3)
        assert float(torch.linalg.eigvalsh(found).min()) > 0


def test_one_wrong_matrix_leaves_the_others_of_its_stack() -> None:
    torch.manual_seed(0)
    moment = gram(few_directions(LONG_SIDE + 8, 20))
    alone = thin_inverse(moment[:1], 0.3)
    moment[1] = torch.nan
    for together, expected in zip(thin_inverse(moment, 0.3), alone, strict=True):
        torch.testing.assert_close(together[:1], expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
        assert not bool(together[1].isfinite().all())


def test_what_is_kept_is_made_anew_among_fake_tensors() -> None:
    calls = []

    @kept
    def zeros(size: int) -> Tensor:
        calls.append(size)
        return torch.zeros(size)

    with FakeTensorMode():
        assert isinstance(zeros(3), FakeTensor)
    with torch.inference_mode():
        assert zeros(3).is_inference()
    assert type(zeros(3)) is Tensor
    assert not zeros(3).is_inference()
    assert calls == [3, 3, 3]


@pytest.mark.parametrize("on_rows", [True, False])
def test_kronecker_with_a_long_side(on_rows: bool) -> None:
    """C X D with the long side's factor thin, on either side: as by the whole matrices."""
    torch.manual_seed(0)
    side, short = LONG_SIDE + 8, 5
    long = few_directions(side, 20)
    other = torch.randn(2, long.shape[1], short).double()
    rows, columns = (long, other) if on_rows else (other, long)
    moments = Kronecker().second_moments(rows, columns)
    u = Kronecker().closed_form(moments, DAMPING)
    assert u["C" if on_rows else "D"].shape == (2, side, LEADING)
    x = torch.randn(2, rows.shape[2], columns.shape[2]).double()
    c, d = (damped_inverse(moments[name], DAMPING**0.5) for name in ("rows", "columns"))
    expected = c @ x @ d
    torch.testing.assert_close(Kronecker().apply(u, x), expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))


def test_a_long_side_of_any_spectrum() -> None:
    """What is left out is taken by its mean: U stays positive, and exact along the leading directions."""
    torch.manual_seed(0)
    side = LONG_SIDE + 8
    x = torch.randn(1, 2000, side).double() * torch.linspace(0.01, 1, side).double() ** 8
    moment = gram(x)
    thin, diagonal = thin_inverse(moment, 0.3)
    found = torch.diag_embed(diagonal) - thin @ thin.mT
    exact = damped_inverse(moment, 0.3)
    assert float(torch.linalg.eigvalsh(found).min()) == pytest.approx(
        float(torch.linalg.eigvalsh(exact).min()), rel=1e-3
    )
    leading = torch.linalg.eigh(moment).eigenvectors[0, :, -5:]
    torch.testing.assert_close(leading.mT @ found[0] @ leading, leading.mT @ exact[0] @ leading, rtol=1e-2, atol=1e-6)


def test_a_structure_with_moments_of_its_own_says_what_l2_needs() -> None:
    """L2 is compared with the mean of H's diagonal, which nobody knows of moments that only their structure reads."""

    class Own(Diagonal):
        mean_curvature = Structure.mean_curvature

    moments = Own().second_moments(torch.ones(1, 4, 3), torch.ones(1, 4, 2))
    with pytest.raises(LLQRError, match=r"moments of its own, 'squares'.*write mean_curvature\(moments\)"):
        Own().mean_curvature(moments)
