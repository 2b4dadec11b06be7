"""Promise: a divergence, a structure and a solver written from the guides are right, and work in fit, LLQR and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llqr import LLQR, QuadraticModel, exact_step, fit
from llqr.divergences import KL, L2, BasePoint, OutputTerm
from llqr.errors import LLQRError
from llqr.paper import PaperLLQR
from llqr.structures import Kronecker, Structure
from llqr.testing import check_divergence
from loops import assert_same, blocks_of, network, parameters_of, sgd, train
from networks import Dense, relative
from standins import random_model

GUIDES = Path(__file__).parent.parent / "docs" / "guides"
NAMES = {"own-divergence": "PoissonKL", "own-structure": "Neurons", "own-solver": "SteepestDescent"}


def block_of(page: str) -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```", (GUIDES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def guides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What is defined once the block of each guide has run, in an empty folder."""
    ran: dict[str, dict[str, Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("guides"))
        for page in NAMES:
            torch.manual_seed(0)
            ran[page] = {"__name__": "guide"}
            exec(compile(block_of(page), page, "exec"), ran[page])
            assert torch.load("optimizer.pt", weights_only=True)["llqr"]["stats"]["refits"] > 0
            Path("optimizer.pt").unlink()
    return ran


@pytest.fixture
def poisson(guides: dict[str, dict[str, Any]]) -> OutputTerm:
    found: OutputTerm = guides["own-divergence"]["PoissonKL"]()
    return found


def test_each_guide_is_one_short_block() -> None:
    assert {path.stem for path in GUIDES.glob("*.md")} == set(NAMES)
    for page in NAMES:
        assert block_of(page).count("\n") < 50


@pytest.mark.parametrize("page", NAMES)
def test_guides_fit_and_train(guides: dict[str, dict[str, Any]], page: str) -> None:
    """J has fallen in fit; LLQR has taken refits and refused none."""
    u, optimizer = guides[page]["u"], guides[page]["optimizer"]
    assert u.history[-1] < 1.2 * u.history[0] < 0
    assert optimizer.stats.refits >= 3
    assert optimizer.stats.rejected == 0


def counted(seed: int = 0) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, torch.randn(6, 4).double(), torch.poisson(torch.full((6, 2), 2.0)).double()


def test_own_divergence_has_the_dense_curvature(poisson: OutputTerm) -> None:
    """H = ∇²_θ mean(λ_k (z_k - z) + e^z - λ_k) at θ_k, by torch.func.hessian; products, in chunks too, and the exact step."""
    model, inputs, counts = counted()
    loss_fn = nn.PoissonNLLLoss()
    dense = Dense(model, inputs, lambda output: loss_fn(output, counts))
    rate = dense.output.exp()

    def divergence(flat: Tensor) -> Tensor:
        output = dense.run(flat)
        return (rate * (dense.output - output) + output.exp() - rate).sum() / rate.numel()

    truth = dense.hessian(divergence)
    jacobian = torch.func.jacrev(dense.run)(dense.point).reshape(rate.numel(), -1)
    torch.testing.assert_close(truth, jacobian.T @ (rate.reshape(-1, 1) * jacobian) / rate.numel())  # Jᵀ diag(λ) J / n
    direction = torch.randn_like(dense.point)
    for chunk_size in (None, 4):
        q = QuadraticModel.build(model, inputs, counts, loss_fn, poisson, chunk_size=chunk_size)
        product = dense.flat(q.curvature(dense.named(direction)))
        assert relative(product, truth @ direction) < 1e-12
    q = QuadraticModel.build(model, inputs, counts, loss_fn, 2.0 * poisson + L2(0.1))
    assert relative(dense.flat(q.curvature(dense.named(direction))), 2 * truth @ direction + 0.1 * direction) < 1e-12
    step = exact_step(model, inputs, counts, loss_fn, poisson, damping=0.01)
    assert relative(dense.flat(step), dense.step(truth, 0.01)) < 1e-10


def test_a_divergence_that_is_not_flat_says_so(poisson: OutputTerm) -> None:
    """∇ψ ≠ 0 at x_k makes H more than JᵀWJ: an error, or with flat = False the whole Hessian of ψ(x(θ))."""

    class Leaning(type(poisson)):  # type: ignore[misc]
        def psi(self, output: Tensor, base: BasePoint) -> Tensor:
            whole: Tensor = super().psi(output, base) + output.mean()
            return whole

    model, inputs, counts = counted()
    for run in (
        lambda: check_divergence(Leaning(), model(inputs)),
        lambda: exact_step(model, inputs, counts, nn.PoissonNLLLoss(), Leaning(), damping=0.1),
    ):
        with pytest.raises(LLQRError, match=r"gradient of psi\(\) of Leaning\(\) isn't zero .* flat=False"):
            run()
    Leaning.flat = False
    dense = Dense(model, inputs, lambda output: nn.PoissonNLLLoss()(output, counts))
    base = BasePoint(dense.output, dense.loss)
    truth = dense.hessian(lambda flat: Leaning().psi(dense.run(flat), base))
    direction = torch.randn_like(dense.point)
    q = QuadraticModel.build(model, inputs, counts, nn.PoissonNLLLoss(), Leaning())
    assert relative(dense.flat(q.curvature(dense.named(direction))), truth @ direction) < 1e-10


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0, 1e3])
def test_a_flat_divergence_is_never_refused(scale: float) -> None:
    """KL by its formula alone, in float32, from undecided to utterly sure predictions."""

    class Written(OutputTerm):
        needs_loss = False

        def psi(self, output: Tensor, base: BasePoint) -> Tensor:
            p, q = base.output.log_softmax(-1), output.log_softmax(-1)
            return (p.exp() * (p - q)).sum(-1).mean()

    model = nn.Linear(5, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    inputs, targets = torch.randn(64, 5), torch.randint(4, (64,))
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    own, ours = (
        QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), kind).curvature(direction)
        for kind in (Written(), KL())
    )
    for name in direction:
        torch.testing.assert_close(own[name], ours[name], rtol=1e-3, atol=1e-7)


def test_weights_that_a_divergence_does_not_know_are_refused(poisson: OutputTerm) -> None:
    model, inputs, counts = counted()
    optimizer = LLQR.paper(sgd(model), model, poisson, weights=lambda inputs: torch.ones(6, 2))
    nn.PoissonNLLLoss()(model(inputs), counts).backward()
    with pytest.raises(LLQRError, match=r"PoissonKL\(\) takes no weights"):
        optimizer.step()


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (2, 3, 2, 2)])
def test_own_structure(guides: dict[str, dict[str, Any]], shape: tuple[int, ...]) -> None:
    """U X = r ∘ X row by row, and dU X = dr ∘ X; stacks of two."""
    structure: Structure = guides["own-structure"]["Neurons"]()
    x, tensors, change = torch.randn(2, *shape).double(), *({"r": torch.randn(2, *shape[:1]).double()} for _ in "td")
    rows = "ki,ki...->ki..." if shape else "k,k->k"
    torch.testing.assert_close(structure.apply(tensors, x), torch.einsum(rows, tensors["r"], x))
    torch.testing.assert_close(structure.linearize(tensors, x).derivative(change), torch.einsum(rows, change["r"], x))
    assert structure.sizes(shape) == {"r": shape[:1]}
    assert torch.equal(structure.apply(structure.identity(shape, x, 2), x), x)


@dataclass(frozen=True)
class Written(Structure):
    """C X Dᵀ for matrices and d ∘ x for the rest, with nothing but what a Structure has to say."""

    def identity(self, shape: Any, like: Tensor, count: int = 1) -> dict[str, Tensor]:
        if len(shape) < 2:
            return {"d": like.new_ones(count, *shape)}
        sizes = (shape[0], int(torch.Size(shape[1:]).numel()))
        eyes = (torch.eye(size, dtype=like.dtype, device=like.device) for size in sizes)
        return {name: eye.expand(count, -1, -1).clone() for name, eye in zip("CD", eyes, strict=True)}

    def apply(self, tensors: Any, x: Tensor) -> Tensor:
        if "d" in tensors:
            return tensors["d"] * x
        return (tensors["C"] @ x.flatten(2) @ tensors["D"].mT).reshape(x.shape)

    def degree(self, shape: Any) -> int:
        return 2 if len(shape) > 1 else 1

    def scaled(self, tensors: Any, factor: float) -> dict[str, Tensor]:
        return {name: tensor * factor ** (1 / len(tensors)) for name, tensor in tensors.items()}


def test_a_structure_of_few_words() -> None:
    """C X Dᵀ, written with nothing but what a structure has to say, is fitted to the same U as `Kronecker`."""
    model = random_model()
    assert Written().sizes((2, 3, 2, 2)) == Kronecker().sizes((2, 3, 2, 2))
    theirs, own = fit(model, Kronecker(), steps=8), fit(model, Written(), steps=8)
    assert own.history == pytest.approx(theirs.history, rel=1e-9)
    for key, block in theirs.blocks.items():
        torch.testing.assert_close(own.blocks[key], block, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("structure", ["scalar", "diagonal", "kfac", "ekfac", "dense"])
def test_own_solver_lowers_j(guides: dict[str, dict[str, Any]], structure: str) -> None:
    """J falls at every step, and is that of the U which comes back: J(U) = g·δ + ½ δ·Hδ with δ = -U g."""
    model = random_model()
    u = fit(model, structure, guides["own-solver"]["SteepestDescent"](), steps=20)
    assert len(u.history) > 5
    assert all(after < before for before, after in zip(u.history, u.history[1:], strict=False))
    step = {name: -part for name, part in u.apply(model.gradient).items()}
    assert u.history[-1] == pytest.approx(float(model.value(step)), rel=1e-10)


def test_own_solver_takes_the_best_length(guides: dict[str, dict[str, Any]]) -> None:
    """For one number, δ = -u g: a single step ends at the minimum, u = g·g / g·Hg."""
    model = random_model()
    model = type(model)({"a.weight": model.gradient["a.weight"]}, model.matrix[:12, :12])
    u = fit(model, "scalar", guides["own-solver"]["SteepestDescent"](), steps=1)
    g = model.flat(model.gradient)
    assert float(u.blocks["a.weight"]["u"]) == pytest.approx(float(g @ g / (g @ model.matrix @ g)), rel=1e-10)


def own_optimizers(guides: dict[str, dict[str, Any]]) -> dict[str, Callable[[nn.Module], PaperLLQR]]:
    kinds = {page: guides[page][name] for page, name in NAMES.items()}
    return {
        "own-divergence": lambda model: LLQR.paper(
            sgd(model), model, kinds["own-divergence"](), "kfac", 3, steps=4, ema=0.5
        ),
        "own-structure": lambda model: LLQR.paper(
            sgd(model), model, "ngd", kinds["own-structure"](), 3, steps=4, ema=0.5
        ),
        "own-solver": lambda model: LLQR.paper(
            sgd(model), model, "ngd", "ekfac", 3, steps=4, solver=kinds["own-solver"](), ema=0.5
        ),
    }


@pytest.mark.parametrize("page", NAMES)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    guides: dict[str, dict[str, Any]], page: str, tmp_path: Path
) -> None:
    """Four steps, torch.save, a fresh model and optimizer by torch.load(weights_only=True), four more: as eight in one go."""
    make = own_optimizers(guides)[page]
    whole = network()
    first = make(whole)
    train(whole, first, range(8))
    assert first.stats.refits == 3

    model = network()
    optimizer = make(model)
    train(model, optimizer, range(4))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    fresh = network(seed=1)
    resumed = make(fresh)
    fresh.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(fresh, resumed, range(4, 8))
    assert_same(parameters_of(fresh), parameters_of(whole))
    assert_same(blocks_of(resumed), blocks_of(first))
    moved = [float((tensor - tensor.round()).abs().max()) for tensor in blocks_of(first).values()]
    assert max(moved) > 1e-3, "U is still the identity, and there was nothing to lose"
    assert f"{NAMES[page]}()" in repr(resumed)


def test_own_ones_are_shown_with_their_options() -> None:
    class Cautious(KL):
        __repr__ = OutputTerm.__repr__

        def __init__(self, share: float) -> None:
            self.share = share

    assert repr(Cautious(0.5)) == "Cautious(share=0.5)"
