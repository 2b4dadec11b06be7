"""plan: what structures cost, counted as they are stored; advice that can be taken; a model that is left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from llqr import LLQR, Plan, Preconditioner, costs, plan
from llqr.checks import Inputs
from llqr.errors import LLQRError
from llqr.structures import Diagonal, EigenKronecker, Kronecker
from llqr.structures.assign import assign


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(144, 5)
    )


class Words(nn.Module):
    """An embedding of many words, tied to nothing."""

    def __init__(self, words: int = 50_000, width: int = 8) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(words, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(tokens).mean(1))))


def test_memory_is_what_the_preconditioner_takes_and_costs_are_positive() -> None:
    model = convolutions()
    found = plan(model, torch.randn(4, 3, 8, 8), repeats=1)
    names = ["scalar", "diagonal", "kfac", 'kfac, modes="all"', "ekfac", 'ekfac, modes="all"', "dense"]
    assert list(found.costs) == names
    for cost in found.costs.values():
        assert cost.memory == Preconditioner.identity(dict(model.named_parameters()), cost.structure).memory
        assert cost.measured
        assert cost.apply is not None
        assert cost.apply > 0
        assert cost.refit is not None
        assert cost.refit > found.steps * found.product
    assert found.train_seconds > 0


def test_without_convolutions_there_are_no_modes_and_half_precision_is_counted_in_full() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(torch.bfloat16)
    found = plan(model, torch.randn(5, 4, dtype=torch.bfloat16), repeats=1)
    assert list(found.costs) == ["scalar", "diagonal", "kfac", "ekfac", "dense"]
    for name, cost in found.costs.items():
        assert cost.memory == Preconditioner.identity(dict(model.named_parameters()), name).memory


def test_a_vocabulary_gets_a_diagonal_and_a_dense_block_that_is_too_large_no_cost() -> None:
    model = Words()
    found = plan(model, torch.randint(50_000, (4, 6)), repeats=1, budget=1e6)
    assert assign(found.advised, dict(model.named_parameters()))["embed.weight"] == Diagonal()
    assert assign(found.advised, dict(model.named_parameters()))["hidden.weight"] == EigenKronecker()
    assert "50,000" in found.where["embed.weight"]
    assert found.memory == Preconditioner.identity(dict(model.named_parameters()), found.advised).memory
    assert found.memory < 2 * 50_000 * 8 * 4
    assert found.costs["dense"].apply is None
    assert found.costs["dense"].memory > 50_000**2
    assert "too large" in str(found)


def test_what_is_too_dear_is_diagonal_and_the_rest_keeps_its_factors() -> None:
    model = nn.Sequential(nn.Linear(400, 40), nn.Tanh(), nn.Linear(40, 5))
    generous = plan(model, torch.randn(4, 400), repeats=1, budget=1e6, memory=1e6)
    assert generous.advised == "ekfac"
    assert not generous.where
    tight = plan(model, torch.randn(4, 400), repeats=1, budget=1e6, memory=2.0)
    assert tight.advised == {"0.weight": "diagonal", "*": "kfac"}
    assert list(tight.where) == ["0.weight"]
    assert tight.memory == Preconditioner.identity(dict(model.named_parameters()), tight.advised).memory
    assert tight.memory <= 2 * sum(p.numel() * 4 for p in model.parameters())
    nothing = plan(model, torch.randn(4, 400), repeats=1, budget=1e-9)
    assert nothing.advised == "diagonal"
    assert "every" in nothing.why


@pytest.mark.filterwarnings("ignore:U would have turned")  # of a bias before BatchNorm, whose gradient is rounding
def test_advice_is_taken_by_the_optimizer() -> None:
    model, inputs = convolutions(), torch.randn(4, 3, 8, 8)
    for budget in (1e6, 1e-9):
        found = plan(model, inputs, repeats=1, budget=budget)
        optimizer = LLQR.paper(torch.optim.SGD(model.parameters(), lr=0.01), model, structure=found.advised, steps=1)
        model(inputs).square().mean().backward()
        optimizer.step()
        assert optimizer.memory_usage()["preconditioner"] == found.memory


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = convolutions(), torch.randn(4, 3, 8, 8)
    model(inputs).sum().backward()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    modes, flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    random, given = torch.get_rng_state(), inputs.clone()
    plan(model, inputs, repeats=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name][0]
        assert torch.equal(parameter.grad, grads[name][1])
    assert modes == [m.training for m in model.modules()]
    assert flags == [p.requires_grad for p in model.parameters()]
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(inputs, given)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.left(a) + self.right(b)


@pytest.mark.parametrize(
    "batch", [(torch.randn(4, 3), torch.randn(4, 3)), {"a": torch.randn(4, 3), "b": torch.randn(4, 3)}], ids=type
)
def test_batches_are_what_the_model_is_called_with(batch: Inputs) -> None:
    assert isinstance(plan(Sum(), batch, repeats=1), Plan)


def test_a_larger_u_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MADE", 2000)
    found = plan(nn.Linear(20, 10), torch.randn(4, 20), repeats=1)
    assert [name for name, cost in found.costs.items() if not cost.measured] == ["kfac", "ekfac", "dense"]
    assert "~" in found.row("kfac")[2]
    assert costs.multiplications(Kronecker(), (20, 10)) == 200 * 30
    assert costs.multiplications(Kronecker(max_dim=15), (20, 10)) == 200 * 10
    assert costs.multiplications(EigenKronecker(modes="all"), (20, 10, 3, 3)) == 2 * 1800 * 39


def test_the_table_names_every_structure_and_the_advice() -> None:
    found = plan(convolutions(), torch.randn(4, 3, 8, 8), repeats=1)
    for name in found.costs:
        assert name in repr(found)
    assert f"Advised: {found.advised!r}" in str(found)
    assert found.why in str(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "linear"}, "nn.Module"),
        ({"batch": "words"}, "a tensor, or a tuple or dict"),
        ({"batch": torch.zeros(0, 3)}, "empty"),
        ({"model": nn.Linear(3, 2).requires_grad_(False)}, "nothing to step"),
        ({"every": 0}, "every is a positive integer"),
        ({"steps": 0}, "steps is a positive integer"),
        ({"repeats": 1.5}, "repeats is a positive integer"),
        ({"budget": 0}, "budget is a positive number"),
        ({"memory": -1}, "memory is a positive number"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"model": nn.Linear(3, 2), "batch": torch.randn(4, 3), **change}
    with pytest.raises(LLQRError, match=message):
        plan(given.pop("model"), given.pop("batch"), **given)  # type: ignore[arg-type]
