"""Promise: llqr.Exact says what is wrong with a closure, a model or a state before it steps, and leaves parameters alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llqr import Exact
from llqr.divergences import KL
from llqr.errors import LLQRError

X = torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (5 * X[:, :1]).sin()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def refused(match: str, optimizer: Exact, closure: Callable[[], Any] | None = None) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = copy.deepcopy(parameters)
    with pytest.raises(LLQRError, match=match):
        optimizer.step(closure)
    assert all(map(torch.equal, parameters, before))


@pytest.mark.parametrize("options", [{}, {"method": "cg"}, {"divergence": "newton"}, {"loss_fn": nn.MSELoss()}])
def test_another_model_in_the_closure(options: dict[str, Any]) -> None:
    model, other = network(), network()

    def closure() -> Any:
        return (model(X), Y) if "loss_fn" in options else model(X) - Y

    refused("another model", Exact(other, **options), closure)


@pytest.mark.parametrize("options", [{}, {"method": "cg"}, {"loss_fn": nn.MSELoss()}])
def test_a_parameter_in_a_variable_of_the_closure(options: dict[str, Any]) -> None:
    """It would be a constant in J; from the model it is stepped, through a variable that holds a module too."""
    model = network()
    model.k = nn.Parameter(torch.full((1, 1), 0.5).double())
    k, layer = model.k, model[0]
    part, before = layer.weight[0], model[:3](X) - Y  # type: ignore[index]

    def step(values: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: (values(), 0 * values().detach()) if "loss_fn" in options else values()

    for name, values in (
        (r"'k'.* model\.k ", lambda: torch.cat((model[:3](X) - Y, k - 2))),
        (r"'k'", lambda: k),
        (r"'0.weight'.* model\[0\]\.weight ", lambda: (model[:3](X) - Y) * part.sum()),
        (r"before step\(\)", lambda: before),
    ):
        refused(name, Exact(model, **options), step(values))
    optimizer = Exact(model, **options)
    for _ in range(10):
        optimizer.step(step(lambda: torch.cat((model[2](layer(X).tanh()) - Y, model.k - 2))))
    assert float(model.k.detach()) == pytest.approx(2, abs=1e-3)


def test_a_minimum_is_no_other_model() -> None:
    """A gradient of zero, though the output depends on the parameters."""
    model = network()
    values = model(X).detach()
    optimizer = Exact(model)
    assert float(optimizer.step(lambda: model(X) - values)) == 0
    assert optimizer.stats.stalled == 1


def test_other_parameters_than_those_that_were_given() -> None:
    def change(made: Callable[[nn.Sequential], object]) -> None:
        model = network()
        optimizer = Exact(model)
        optimizer.step(lambda: model(X) - Y)
        made(model)
        refused("make another", optimizer, lambda: model(X) - Y)

    change(lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn(6, 2).double())))
    change(lambda model: model.append(nn.Linear(1, 1).double()))
    change(lambda model: model[0].requires_grad_(False))


def test_the_same_loss_of_other_outputs() -> None:
    """Rows in another order in each call: the loss is the same, and J would be that of other rows than r."""
    model, generator = network(), torch.Generator().manual_seed(0)

    def shuffled() -> Tensor:
        order = torch.randperm(20, generator=generator)
        difference: Tensor = model(X[order]) - Y[order]
        return difference

    refused("one output and then another", Exact(model), shuffled)


@pytest.mark.parametrize("at", [2, 3, 4])
def test_another_number_of_rows_in_a_later_call(at: int) -> None:
    model, calls = network(), [0]

    def closure() -> Tensor:
        calls[0] += 1
        rows = 20 if calls[0] < at else 15
        difference: Tensor = model(X[:rows]) - Y[:rows]
        return difference

    refused("Draw batches", Exact(model), closure)


def test_other_points_in_a_later_call_where_the_closure_takes_derivatives() -> None:
    """The error isn't that of a closure which is run without a graph."""
    model, calls = network(), [0]

    def closure() -> Tensor:
        calls[0] += 1
        points = (X * calls[0] if calls[0] > 2 else X).clone().requires_grad_()
        slope: Tensor = torch.autograd.grad(model(points).sum(), points, create_graph=True)[0]
        return slope - 1

    refused("one output and then another", Exact(model), closure)


def test_a_family_that_is_not_the_losss() -> None:
    """Noticed in the first step, as in LLQR.paper; at a minimum of a cross-entropy, where the slope is rounding, nothing is."""
    model = nn.Linear(2, 3).double()
    targets, classes = torch.rand(20, 3).double(), torch.arange(20) % 3
    ngd = Exact(model, nn.MSELoss(), "ngd")
    refused("isn't that of a categorical distribution", ngd, lambda: (model(X), targets))
    gaussian = Exact(model, nn.CrossEntropyLoss(), KL(family="gaussian"))
    refused("is that of a categorical distribution", gaussian, lambda: (model(X), classes))
    probabilities = model(X).softmax(1).detach()
    for wanted in (classes, probabilities):
        Exact(model, nn.CrossEntropyLoss(), "ngd").step(lambda wanted=wanted: (model(X), wanted))  # type: ignore[misc]


class Itself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(2).double())

    def forward(self) -> Tensor:
        return self.p


@pytest.mark.parametrize("method", ["dual", "primal", "cg"])
def test_outputs_that_are_put_together_and_parameters_themselves(method: Any) -> None:
    """A closure's own torch.cat isn't that of residuals; an output that is a parameter has no node in the graph."""
    weights = []
    for put in (lambda output: output, lambda output: torch.cat([output], 1)):
        torch.manual_seed(0)
        model = nn.Linear(2, 2).double()
        optimizer = Exact(model, nn.MSELoss(), method=method, tolerance=1e-9)
        optimizer.step(lambda model=model, put=put: (put(model(X)), X.sin()))  # type: ignore[misc]
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights)
    point = Itself()
    optimizer = Exact(point, nn.MSELoss(), method=method, damping=1e-6)
    optimizer.step(lambda: (point(), torch.zeros(2).double()))
    assert float(point.p.detach().norm()) < 1e-4


def test_spectral_norm_is_to_be_evaluated() -> None:
    """Its forward pass in training moves the singular vectors that it divides by; batch statistics change nothing."""
    model = network()
    nn.utils.parametrizations.spectral_norm(model[0])
    norm = model[0].parametrizations.weight[0]  # type: ignore[union-attr, index]
    norm._v.copy_(torch.tensor([0.6, 0.8]))  # not converged
    refused(r"0.parametrizations.weight.0._[uv].*model.eval\(\)", Exact(model), lambda: model(X) - Y)
    model.eval()
    optimizer = Exact(model)
    optimizer.step(lambda: model(X) - Y)
    assert optimizer.stats.stalled == 0


def test_what_a_closure_may_not_return() -> None:
    model = network()
    refused("needs a closure", Exact(model))
    refused("returned no residuals", Exact(model), lambda: ())
    single = network().float()
    for closure in (lambda: single(X.float()) - Y, lambda: (single(X.float()), single(X.float()) - Y)):
        refused("is torch.float64, and the parameters are torch.float32", Exact(single), closure)
    refused("torch.float64", Exact(single, divergence="newton"), lambda: (single(X.float()) - Y).square().mean())
    refused("reduction='mean'", Exact(model, nn.MSELoss(reduction="none")), lambda: (model(X), Y))


def test_a_closure_may_fail_on_a_trial() -> None:
    """An error of its own goes through, and the parameters are those from before."""
    point = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(point.weight, 5.0)

    def closure() -> Tensor:
        if point.weight.item() <= 0:
            raise ZeroDivisionError("outside")
        return point.weight.log() + 8

    optimizer = Exact(point)
    with pytest.raises(ZeroDivisionError, match="outside"):
        optimizer.step(closure)
    assert point.weight.item() == 5.0
    assert optimizer.stats.steps == 0


def test_there_is_no_rate_to_schedule() -> None:
    model = network()
    optimizer = Exact(model)
    for _ in range(2):
        with pytest.raises(LLQRError, match="no learning rate"):
            torch.optim.lr_scheduler.StepLR(optimizer, 3)
        optimizer.load_state_dict(optimizer.state_dict())


def test_states_of_other_kinds() -> None:
    optimizer = Exact(network())
    for state in ({}, None, {"state": {}}):
        with pytest.raises(LLQRError, match="this is no state"):
            optimizer.load_state_dict(state)  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match="one group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_a_state_in_which_no_step_was_taken_yet() -> None:
    model = network()
    values = model(X).detach()
    first, second = Exact(model), Exact(model)
    first.step(lambda: model(X) - values)
    second.load_state_dict(first.state_dict())
    assert second.stats.stalled == second.stats.steps == 1
    second.step(lambda: model(X) - Y)
    assert second.stats.stalled == 1


def test_a_state_of_another_precision() -> None:
    model, single = network(), network().float()
    first, second = Exact(model, momentum=0.5), Exact(single, momentum=0.5)
    first.step(lambda: model(X) - Y)
    second.load_state_dict(first.state_dict())
    second.step(lambda: single(X.float()) - Y.float())
    assert second.stats.steps == 2
    assert all(held["step"].dtype == torch.float32 for held in second.state.values())
    assert all(held["step"].dtype == torch.float64 for held in first.state.values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_steps_the_copy_of_the_model(copied: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = Exact(model, momentum=0.5)
    optimizer.step(lambda: model(X) - Y)
    other, second = copied((model, optimizer))
    before = copy.deepcopy(model.state_dict())
    second.step(lambda: other(X) - Y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.step(lambda: model(X) - Y)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert second.stats == optimizer.stats


def test_parameters_without_numbers_and_converted_ones() -> None:
    model = network()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3).double()))
    optimizer = Exact(model)
    losses = [float(optimizer.step(lambda: model[:3](X) - Y)) for _ in range(3)]
    assert losses[2] < losses[0]
    model.float()
    refused("converted since", optimizer, lambda: model[:3](X.float()) - Y.float())


def test_columns_that_come_by_products_are_counted() -> None:
    """A layer norm has 2 × 16 numbers that aren't a linear map's: 32 n numbers beside the chunks of J."""
    model = nn.Sequential(nn.Linear(2, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1)).double()
    inputs = torch.rand(3000, 2).double()
    size = sum(p.numel() for p in model.parameters())
    sides = 2 * 3000 * (2 * (16 + 1) + 2 + 1 + 16 + 1)  # gradients at both linear maps, inputs, and ones for biases
    least = 8 * (3 * size**2 + sides + 2 * size + 32)
    optimizer = Exact(model, memory=least)
    optimizer.step(lambda: model(inputs))
    assert optimizer.stats.method == "cg"
    refused(
        f"takes {sides + 96_000:,} numbers.* room for",
        Exact(model, method="primal", memory=least),
        lambda: model(inputs),
    )
    optimizer = Exact(model, memory=least + 8 * 32 * 3000)
    optimizer.step(lambda: model(inputs))
    assert optimizer.stats.method == "primal"
