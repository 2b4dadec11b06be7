"""Chunks give the numbers of the whole batch, or an error: whatever is cut by mistake, or can't be cut at all, is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llqr import QuadraticModel
from llqr.divergences import KL, Intermediate, Newton
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
