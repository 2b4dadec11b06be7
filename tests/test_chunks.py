"""Chunks give the numbers of the whole batch, or an error: whatever is cut by mistake, or can't be cut at all, is noticed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import QuadraticModel
from llqr.curvature import recorder
from llqr.divergences import KL, BasePoint, Divergence, GaussNewton, Intermediate, Newton, OutputTerm
from llqr.errors import LLQRError

LOSS = nn.CrossEntropyLoss()
BATCH = 6


def same(one: QuadraticModel, other: QuadraticModel) -> None:
    v = {name: torch.randn_like(g) for name, g in one.gradient.items()}
    for name, product in other.curvature(v).items():
        torch.testing.assert_close(other.gradient[name], one.gradient[name])
        torch.testing.assert_close(product, one.curvature(v)[name])


class Masked(nn.Module):
    """Attention under a (T, T) mask, that every example shares."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 1, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return self.head(self.mix(x, x, x, attn_mask=mask, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


class Looked(nn.Module):
    """Rows of a table that is an input: as many of them as there are examples, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, words: Tensor, table: Tensor) -> Tensor:
        return self.head(table[words % len(table)].tanh().sum(1))  # type: ignore[no-any-return]


class Biased(nn.Module):
    """One number a feature, that every example shares: broadcast over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(BATCH, 2)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.head((x + shift).tanh())  # type: ignore[no-any-return]


def masked() -> tuple[nn.Module, dict[str, Tensor], str]:
    mask = torch.full((BATCH, BATCH), -1.0).triu(1).double()
    return Masked().double(), {"mask": mask, "x": torch.randn(BATCH, BATCH, 4).double()}, "mask"


def looked() -> tuple[nn.Module, dict[str, Tensor], str]:
    table = torch.randn(BATCH, 4).double()
    return Looked().double(), {"words": torch.randint(BATCH, (BATCH, 3)), "table": table}, "table"


def biased() -> tuple[nn.Module, dict[str, Tensor], str]:
    return Biased().double(), {"x": torch.randn(BATCH, BATCH).double(), "shift": torch.randn(BATCH).double()}, "shift"


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 7])
@pytest.mark.parametrize("case", [masked, looked, biased])
def test_an_input_that_has_the_size_of_the_batch_by_chance(
    case: Callable[[], tuple[nn.Module, dict[str, Tensor], str]], size: int
) -> None:
    model, inputs, chance = case()
    targets = torch.randint(2, (BATCH,))
    for divergence in (KL(), Newton()):
        whole = QuadraticModel.build(model, inputs, targets, LOSS, divergence, 0.1)
        chunks = QuadraticModel.build(model, inputs, targets, LOSS, divergence, 0.1, size, shared=[chance])
        same(whole, chunks)
        position = list(inputs).index(chance)
        placed = QuadraticModel.build(
            model, tuple(inputs.values()), targets, LOSS, divergence, 0.1, size, shared=[position]
        )
        same(whole, placed)
        for given in ({"gradient": whole.gradient}, {}):
            if size < BATCH:
                with pytest.raises(LLQRError, match=f"shared=.*{chance}"):
                    QuadraticModel.build(model, inputs, targets, LOSS, divergence, 0.1, size, **given)  # type: ignore[arg-type]
            else:
                same(whole, QuadraticModel.build(model, inputs, targets, LOSS, divergence, 0.1, size))


def test_metrics_count_the_examples_and_not_what_is_shared() -> None:
    model, inputs, targets = Masked().double(), {"mask": torch.zeros(3, 3), "x": torch.randn(BATCH, 3, 4)}, None
    inputs, targets = {name: value.double() for name, value in inputs.items()}, torch.randint(2, (BATCH,))
    divergence = Intermediate({"head": 0.5})
    turned = {"x": inputs["x"], "mask": inputs["mask"]}
    expected = QuadraticModel.build(model, turned, targets, LOSS, divergence, 0.1)
    for size in (None, 2):
        same(expected, QuadraticModel.build(model, inputs, targets, LOSS, divergence, 0.1, size, shared=["mask"]))


class Coupled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.head = how, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        coupled = {
            "mean": lambda: x - x.mean(0),
            "max": lambda: x / x.abs().amax(),
            "roll": lambda: x + x.roll(1, 0),
            "pairs": lambda: x @ x.T @ x,
            "sequence": lambda: x.cumsum(0),
        }[self.how]()
        return self.head(coupled.tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["mean", "max", "roll", "pairs", "sequence"])
def test_examples_that_see_each_other(how: str) -> None:
    model, inputs, targets = Coupled(how).double(), torch.randn(7, 3).double(), torch.randint(2, (7,))
    for size in (1, 2, 3, 6):
        with pytest.raises(LLQRError, match="depends on the other examples"):
            QuadraticModel.build(model, inputs, targets, LOSS, KL(), 0.0, size)
    QuadraticModel.build(model, inputs, targets, LOSS, KL(), 0.0, 7)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean(0, keepdim=True)  # type: ignore[no-any-return]


def test_outputs_that_are_not_of_examples() -> None:
    with pytest.raises(LLQRError, match="first dimension of the output"):
        QuadraticModel.build(
            Pooled(), torch.randn(6, 3), torch.randint(2, (1,)), LOSS, KL(), 0.0, 2
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_roundoff_is_no_difference(dtype: torch.dtype) -> None:
    """Chunks of other sizes round otherwise: deep networks in low precision pass."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64)]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).to(dtype)
    inputs, targets = torch.randn(33, 64).to(dtype), torch.randint(10, (33,))
    for size in (1, 5, 16, 32):
        QuadraticModel.build(model, inputs, targets, LOSS, KL(), 0.0, size)
    if dtype == torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            QuadraticModel.build(model, inputs, targets, LOSS, KL(), 0.0, 5, output=lambda out: out.float())


def test_shared_names() -> None:
    model, inputs, targets = nn.Linear(3, 2), torch.randn(6, 3), torch.randint(2, (6,))
    wrong: list[tuple[Any, Any, str]] = [
        ({"input": inputs}, ["inputt"], "'inputt'.*'input'"),
        ((inputs,), [1], "unknown input in shared 1"),
        ((inputs,), "0", "shared is a list"),
        (inputs, [0], "nothing is left"),
        (inputs, 0, "shared is a list"),
    ]
    for given, shared, match in wrong:
        with pytest.raises(LLQRError, match=match):
            QuadraticModel.build(model, given, targets, LOSS, KL(), 0.0, 2, shared=shared)


# --- what a chunk counts ---

SEVEN = 7
IGNORED = torch.tensor([1, 2, -100, 0, -100, -100, 2])
"""In chunks of two, one has ignored targets alone."""


def predictor() -> nn.Sequential:
    """As at initialisation: all losses are about log 3, whatever the targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[2].weight.data.mul_(1e-3)
    return model


class Squares(OutputTerm):
    """Of a user: it adds the examples up, and doesn't say so."""

    needs_loss = False

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        return (output - base.output).square().sum()


LOSSES: dict[str, tuple[Any, Tensor]] = {
    "ignored targets": (nn.CrossEntropyLoss(), IGNORED),
    "class weights": (nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.1]).double()), IGNORED.clamp_min(0)),
    "both": (nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.0]).double()), IGNORED),
    "a perfect fit": (nn.MSELoss(), torch.zeros(SEVEN, 3).double()),
    "Gaussians": (lambda output, y: (output - y).square().mean() + 3, torch.ones(SEVEN, 3).double()),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "divergence",
    [KL(), GaussNewton(), Newton(), KL() + 0.5 * Newton(), Squares(), GaussNewton(residual=torch.tanh)],
    ids=lambda divergence: type(divergence).__name__,
)
def test_losses_that_count_examples_as_they_like(case: str, size: int, divergence: Divergence) -> None:
    model, (loss, targets) = predictor(), LOSSES[case]
    if case == "a perfect fit":
        model[2].weight.data.zero_()
        model[2].bias.data.zero_()
    inputs = torch.randn(SEVEN, 4).double()
    whole = QuadraticModel.build(model, inputs, targets, loss, divergence, 0.1)
    same(whole, QuadraticModel.build(model, inputs, targets, loss, divergence, 0.1, size))


@pytest.mark.parametrize("divergence", [KL(), GaussNewton(), Newton()], ids=repr)
def test_losses_that_compare_examples(divergence: Divergence) -> None:
    """The gradient is the whole batch's, whatever the loss does; H has to fall apart into the chunks', or is refused."""
    model, inputs, targets = predictor(), torch.randn(SEVEN, 4).double(), IGNORED.clamp_min(0)

    def contrast(output: Tensor, targets: Tensor) -> Tensor:
        return (output @ output.mT).logsumexp(1).mean()

    def bound(output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, IGNORED.clamp_min(0))

    def hardest(output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, targets, reduction="none").exp().mean().log()

    for loss in (contrast, bound, hardest):
        whole = QuadraticModel.build(model, inputs, targets, loss, divergence, 0.1)
        for size in (2, 6):
            if loss is bound or isinstance(divergence, KL):  # a gradient can be cut, and KL asks for nothing else
                same(whole, QuadraticModel.build(model, inputs, targets, loss, divergence, 0.1, size))
                continue
            with pytest.raises(LLQRError, match=r"compares examples.*isn't linear"):
                QuadraticModel.build(model, inputs, targets, loss, divergence, 0.1, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int32, torch.uint8, torch.bfloat16, torch.float16])
def test_weights_of_any_dtype(dtype: torch.dtype) -> None:
    """Their sums are those of the same numbers in double precision; a chunk of padding counts nothing."""
    model, inputs = predictor(), torch.randn(SEVEN, 4).double()
    weights = torch.tensor([0.1, 0.7, 0.0, 0.0, 1e-3, 3.3, 1.0]).mul(1 if dtype.is_floating_point else 10).to(dtype)
    gradient = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    expected = QuadraticModel.build(model, inputs, None, None, KL(), 0.1, gradient=gradient, weights=weights.double())
    for size in (None, 2, 3):
        found = QuadraticModel.build(model, inputs, None, None, KL(), 0.1, size, gradient=gradient, weights=weights)
        v = {name: torch.randn_like(g) for name, g in gradient.items()}
        for name, product in expected.curvature(v).items():
            torch.testing.assert_close(found.curvature(v)[name], product, rtol=1e-12, atol=1e-14)


# --- models that aren't the same in chunks ---


class Branching(nn.Module):
    def __init__(self, condition: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.head, self.condition = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), condition

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        return self.head(inner.tanh() if self.condition(x) else inner)  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_branch_that_the_batch_takes(size: int) -> None:
    """By one example in the middle, which no chunk but its own sees."""
    inputs, targets = torch.ones(7, 3).double(), torch.randint(2, (7,))
    inputs[3] = 100.0
    for condition in (lambda x: x.amax() > 50, lambda x: x.mean() > 5):
        with pytest.raises(LLQRError, match="depends on the other examples"):
            QuadraticModel.build(Branching(condition), inputs, targets, LOSS, KL(), 0.0, size)
    same(*(QuadraticModel.build(network, inputs, targets, LOSS, KL(), 0.0, s)
           for network in [Branching(lambda x: x.amax() > 0)] for s in (None, size)))  # fmt: skip


class Drawing(nn.Module):
    """Scales what it has by a number that it draws somewhere; the same number for all examples."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.head, self.where = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), where
        self.torchs = torch.Generator().manual_seed(0)
        self.pythons, self.numpys, self.old = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)

    def draw(self) -> float:
        return {
            "torch": lambda: float(torch.rand(())),
            "Python": random.random,
            "numpy": np.random.rand,
            "a generator": lambda: float(torch.rand((), generator=self.torchs)),
            "a Random": self.pythons.random,
            "numpy's generator": self.numpys.random,
            "numpy's old one": self.old.rand,
        }[self.where]()

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.inner(x) * (self.draw() > 0.5)).tanh())  # type: ignore[no-any-return]


PLACES = ["torch", "Python", "numpy", "a generator", "a Random", "numpy's generator", "numpy's old one"]


@pytest.mark.parametrize("where", PLACES)
def test_models_that_draw(where: str) -> None:
    """Whatever from: the whole batch has the same numbers each time, streams stay where they are, and chunks are refused."""
    model, inputs, targets = Drawing(where), torch.randn(7, 3).double(), torch.randint(2, (7,))
    before = copy.deepcopy(model)
    random.seed(0)
    np.random.seed(0)
    first = (random.getstate(), np.random.get_state()[2], torch.get_rng_state())
    one, other = (QuadraticModel.build(model, inputs, targets, LOSS, Newton(), 0.1) for _ in range(2))
    with pytest.raises(LLQRError, match="draws random numbers"):
        QuadraticModel.build(model, inputs, targets, LOSS, KL(), 0.0, 6)
    assert (random.getstate(), np.random.get_state()[2]) == first[:2]
    assert torch.equal(torch.get_rng_state(), first[2])
    same(one, other)
    if where not in ("torch", "Python", "numpy"):
        assert model.draw() == before.draw()


def test_models_that_draw_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As dropout does on a GPU, from the GPU's generator; here it is one of our own."""
    stream = torch.Generator().manual_seed(0)

    class Device:
        @staticmethod
        def get_rng_state(device: Any) -> Tensor:
            return stream.get_state()

        @staticmethod
        def set_rng_state(state: Tensor, device: Any) -> None:
            stream.set_state(state)

    class Dropping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out * (torch.rand(out.shape, generator=stream) > 0.5)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Device)
    monkeypatch.setattr(recorder, "accelerators", lambda model: {torch.device("cuda", 0)})
    model, inputs, targets = Dropping(3, 4).double(), torch.randn(7, 3).double(), torch.randint(4, (7,))
    before = stream.get_state()
    same(*(QuadraticModel.build(model, inputs, targets, LOSS, Newton(), 0.1) for _ in range(2)))
    with pytest.raises(LLQRError, match="draws random numbers"):
        QuadraticModel.build(model, inputs, targets, LOSS, KL(), 0.0, 2)
    assert torch.equal(stream.get_state(), before)


def test_a_model_that_counts_its_calls() -> None:
    """Chunks are run again for every product: they have to be the same then."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.calls += 1
            return super().forward(x) * (1 if Counting.calls < 6 else 2)

    model, inputs, targets = Counting(3, 4).double(), torch.randn(4, 3).double(), torch.randint(4, (4,))
    q = QuadraticModel.build(model, inputs, targets, LOSS, KL(), 0.0, 2)
    with pytest.raises(LLQRError, match="another output each time"):
        q.curvature(q.gradient)


@pytest.mark.parametrize("divergence", [GaussNewton(), Newton()])
def test_a_loss_that_adds_examples_up_is_evaluated_chunk_by_chunk(divergence: Divergence) -> None:
    """The loss of all eight examples is differentiated as often with eight chunks as with two; class weights included."""
    model, weights = nn.Linear(3, 4).double(), torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 4
    seen: list[int] = []

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(output))
        return functional.cross_entropy(output, targets, weight=weights)

    whole, products = [], []
    for size in (None, 4, 1):
        seen.clear()
        q = QuadraticModel.build(model, x, y, loss, divergence, chunk_size=size)
        products.append(q.curvature({name: torch.ones_like(p) for name, p in model.named_parameters()}))
        whole.append(seen.count(8))
    assert whole[1] == whole[2]
    for name, product in products[0].items():
        torch.testing.assert_close(products[2][name], product, rtol=1e-10, atol=1e-12)
