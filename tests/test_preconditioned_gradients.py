"""Steering gives U g at every step, whatever its sign, and g itself for a block where U g isn't finite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from llqr import LLQR, Preconditioner
from llqr.errors import LLQRError
from llqr.paper import PaperLLQR
from llqr.structures import EigenKronecker, Kronecker
from llqr.structures.stacks import StructureSpec

STRUCTURES = ["scalar", "diagonal", "kfac", "ekfac", "dense"]
STRUCTURES += [Kronecker(max_dim=6), EigenKronecker(max_dim=4), {"0": "diagonal", "*": "kfac"}]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3), nn.Linear(3, 3))


def random_u(structure: StructureSpec, model: nn.Module) -> Preconditioner:
    u = Preconditioner.identity(dict(model.named_parameters()), structure)
    for group in u.groups:
        for tensor in group.tensors.values():
            tensor.mul_(0.5 + torch.rand_like(tensor))
    return u


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_u_g_again_after_u_has_changed_and_for_some_of_the_gradients(
    structure: StructureSpec, dtype: torch.dtype
) -> None:
    model = network().to(dtype)
    u = random_u(structure, model)
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for _ in range(3):
        steered, applied = u.precondition(gradients), u.apply(gradients)
        assert list(steered.gradients) == list(applied)
        for name, value in applied.items():
            assert torch.equal(steered.gradients[name], value)
            assert steered.gradients[name].dtype == dtype
        u.groups[0].tensors[next(iter(u.groups[0].tensors))].mul_(2)
    some = {name: value for name, value in gradients.items() if name.startswith("3.")}
    assert all(torch.equal(value, u.apply(some)[name]) for name, value in u.precondition(some).gradients.items())
    assert list(u.precondition(some).gradients) == list(some)


@pytest.mark.parametrize("structure", ["scalar", "diagonal", "kfac"])
def test_blocks_that_turn_are_u_g_and_what_is_not_finite_is_left_alone(structure: str) -> None:
    model = network()
    u = random_u(structure, model)
    for name, tensor in u.blocks["3.bias"].items():
        tensor.neg_()
        assert name in ("u", "d")
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    gradients["0.weight"][0, 0, 0, 0] = torch.inf
    gradients["4.bias"][1] = torch.nan
    gradients["1.bias"].zero_()
    steered = u.precondition(gradients)
    assert float((steered.gradients["3.bias"] * gradients["3.bias"]).sum()) < 0
    assert torch.equal(steered.gradients["3.bias"], u.apply(gradients)["3.bias"])
    assert sorted(steered.nonfinite) == ["0.weight", "4.bias"]
    for name in ("0.weight", "4.bias", "1.bias"):
        torch.testing.assert_close(steered.gradients[name], gradients[name], rtol=0, atol=0, equal_nan=True)
        assert steered.gradients[name] is not gradients[name]


def test_gradients_whose_squares_leave_float32_are_steered() -> None:
    model = nn.Linear(2, 1, bias=False)
    for structure in ("diagonal", "kfac"):
        u = Preconditioner.identity(dict(model.named_parameters()), structure)
        next(iter(u.blocks["weight"].values())).mul_(2)
        for size in (1e-30, 1e30):
            steered = u.precondition({"weight": torch.tensor([[size, -size]])})
            assert torch.equal(steered.gradients["weight"], torch.tensor([[2 * size, -2 * size]]))


def test_a_replaced_parameter_or_layer_is_noticed_at_the_next_step() -> None:
    def stepped() -> tuple[nn.Sequential, PaperLLQR]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = LLQR.paper(torch.optim.SGD(model.parameters(), lr=0.1), model, every=lambda step: False)
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = stepped()
    model[1] = nn.Linear(3, 2)
    with pytest.raises(LLQRError, match="aren't in the model"):
        optimizer.step()
    model, optimizer = stepped()
    model[0].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(LLQRError, match="aren't in the model"):
        optimizer.step()
    model, optimizer = stepped()
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": model[2].parameters()})
    before = copy.deepcopy(model[2].weight)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[2].weight, before)
