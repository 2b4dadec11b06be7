"""What exact_step takes: damping for all or by layer, a batch or one example, any first stage; and that it changes nothing."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from llqr import cg_step, dense_step, exact_step
from llqr.divergences import KL, Divergence, Intermediate, Newton
from networks import CLASSES, Dense, relative

LOSS = nn.CrossEntropyLoss()


def network() -> nn.Sequential:
    layers = {"enter": nn.Linear(3, 4), "bend": nn.Tanh(), "leave": nn.Linear(4, CLASSES)}
    return nn.Sequential(OrderedDict(layers)).double()


def data(batch: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3).double(), torch.randint(CLASSES, (batch,))


@pytest.mark.parametrize(
    ("damping", "expected"),
    [
        (0.3, {"enter": 0.3, "leave": 0.3}),
        ({"enter": 0.3, "leave": 0.7}, {"enter": 0.3, "leave": 0.7}),
        ({0: 0.3, 2: 0.7}, {"enter": 0.3, "leave": 0.7}),
        ({"enter": 0.3, 2: 0.7, "bend": 5.0}, {"enter": 0.3, "leave": 0.7}),
        ({"enter": 0.3, "leave": 0.7, "leave.bias": 2}, {"enter": 0.3, "leave.weight": 0.7, "leave.bias": 2.0}),
    ],
)
def test_damping_by_layer(damping: float | dict[str | int, float], expected: dict[str, float]) -> None:
    """R_i + λ_i I (appendix "Damping"): the diagonal of H gets the number of the layer, or of the parameter if it has one."""
    model, (inputs, targets) = network(), data()
    truth = Dense(model, inputs, lambda output: LOSS(output, targets))
    base = truth.output.log_softmax(-1)
    matrix = truth.hessian(lambda flat: (base.exp() * (base - truth.run(flat).log_softmax(-1))).sum(-1).mean())
    diagonal = {
        name: torch.full(shape, expected.get(name, expected.get(name.split(".")[0], 0.0)), dtype=torch.float64)
        for name, shape in truth.shapes.items()
    }
    wanted = truth.step(matrix + torch.diag(truth.flat(diagonal)))
    assert relative(truth.flat(exact_step(model, inputs, targets, LOSS, KL(), damping)), wanted) < 1e-8


@pytest.mark.parametrize("divergence", [KL(), KL(reduction="sum"), Newton(), KL() + Intermediate({0: 0.5})], ids=repr)
@pytest.mark.parametrize("way", [exact_step, dense_step, cg_step])
def test_one_example_is_a_batch_of_one(way: type, divergence: Divergence) -> None:
    model, (inputs, targets) = network(), data(1)
    whole = way(model, inputs, targets, LOSS, divergence, 2.0)  # type: ignore[call-arg]
    single = way(model, inputs[0], targets[0], LOSS, divergence, 2.0)  # type: ignore[call-arg]
    for name in whole:
        torch.testing.assert_close(single[name], whole[name], rtol=1e-9, atol=1e-12)


def test_batch_is_the_mean_of_its_examples() -> None:
    """A batch that repeats one example takes that example's step under the mean, and a smaller one under the sum."""
    model, (inputs, targets) = network(), data(1)
    repeated, labels = inputs.repeat(4, 1), targets.repeat(4)
    one = exact_step(model, inputs, targets, LOSS, KL(), 0.1)
    for name, step in exact_step(model, repeated, labels, LOSS, KL(), 0.1).items():
        torch.testing.assert_close(step, one[name], rtol=1e-9, atol=1e-12)
    quarter = exact_step(model, inputs, targets, LOSS, 4 * KL(), 0.1)
    for name, step in exact_step(model, repeated, labels, LOSS, KL(reduction="sum"), 0.1).items():
        torch.testing.assert_close(step, quarter[name], rtol=1e-9, atol=1e-12)


def test_names_are_those_of_the_sequential() -> None:
    model, (inputs, targets) = network(), data()
    step = exact_step(model, inputs, targets, LOSS, "ngd", 0.1)
    assert {name: s.shape for name, s in step.items()} == {name: p.shape for name, p in model.named_parameters()}
    listed = exact_step(list(model), inputs, targets, LOSS, "ngd", 0.1)
    assert list(listed) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for mine, theirs in zip(listed.values(), step.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_first_stage_takes_what_a_model_takes() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3).double())

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return (left + right) @ self.weight.T

    stages = [Add(), nn.Tanh(), nn.Linear(4, CLASSES).double()]
    (left, targets), right = data(), torch.randn(5, 3).double()
    as_tuple = exact_step(stages, (left, right), targets, LOSS, KL(), 0.1)
    as_dict = exact_step(stages, {"left": left, "right": right}, targets, LOSS, KL(), 0.1)
    linear = nn.Linear(3, 4, bias=False).double()
    linear.weight = stages[0].weight  # type: ignore[assignment]
    plain = exact_step([linear, *stages[1:]], left + right, targets, LOSS, KL(), 0.1)
    for name in plain:
        torch.testing.assert_close(as_tuple[name], plain[name])
        torch.testing.assert_close(as_dict[name], plain[name])


def test_frozen_parameters_are_constants() -> None:
    model, (inputs, targets) = network(), data()
    model.enter.bias.requires_grad_(False)
    model.leave.weight.requires_grad_(False)
    arguments = (model, inputs, targets, LOSS, Newton(), 1.0)
    step = exact_step(*arguments)
    assert set(step) == {"enter.weight", "leave.bias"}
    for name, expected in dense_step(*arguments).items():
        torch.testing.assert_close(step[name], expected, rtol=1e-8, atol=1e-12)


def test_in_place_stages_and_inputs_are_left_alone() -> None:
    linear, last = nn.Linear(3, 4).double(), nn.Linear(4, CLASSES).double()
    inputs, targets = data()
    before = inputs.clone()
    quiet = exact_step([nn.SELU(), linear, nn.SELU(), last], inputs, targets, LOSS, Newton(), 3.0)
    eager = exact_step([nn.SELU(True), linear, nn.SELU(True), last], inputs, targets, LOSS, Newton(), 3.0)
    assert torch.equal(inputs, before)
    for name in quiet:
        torch.testing.assert_close(quiet[name], eager[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", [exact_step, dense_step, cg_step])
def test_the_model_is_left_as_it_was(way: type) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    inputs, targets = data(6)
    LOSS(model(inputs), targets).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    way(model, inputs, targets, LOSS, KL() + Intermediate({2: 0.1}), 0.5)  # type: ignore[call-arg]
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    assert not any(module._forward_hooks for module in model.modules())


def test_works_under_no_grad_and_inference_data() -> None:
    model, (inputs, targets) = network(), data()
    expected = exact_step(model, inputs, targets, LOSS, Newton(), 2.0)
    with torch.no_grad():
        step = exact_step(model, inputs, targets, LOSS, Newton(), 2.0)
        dense = dense_step(model, inputs, targets, LOSS, Newton(), 2.0)
    for name in expected:
        assert torch.equal(step[name], expected[name])
        torch.testing.assert_close(dense[name], expected[name], rtol=1e-8, atol=1e-12)
        assert not step[name].requires_grad
