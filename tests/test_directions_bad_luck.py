"""Promise: bad luck costs no more than the base's own step, counted and said once; bad input is a clear error."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from llqr import LLQR
from llqr.divergences import KL, GaussNewton, Intermediate
from llqr.errors import LLQRError, LLQRWarning
from loops import (
    CLASSES,
    SIZE,
    STRUCTURES,
    assert_same,
    backward,
    batch,
    closure_of,
    network,
    never,
    parameters_of,
    sgd,
    spoil,
    train,
)

INF = float("inf")


def base_alone(model: nn.Module, optimizer: LLQR) -> dict[str, Tensor]:
    """Where the base alone would step to from here."""
    other, base = copy.deepcopy((model, optimizer.base))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    base.step()
    return parameters_of(other)


def assert_nan_alike(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, tensor in truth.items():
        assert torch.equal(found[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name


# --- bad luck ---


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("value", [INF, float("nan")])
def test_gradients_that_are_not_finite(structure: str, value: float) -> None:
    """A layer whose gradient is spoiled is stepped as the base does, counted, said once; the others turn, U is unharmed."""
    model = network()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, structure=structure, every=100)
    train(model, optimizer, [0])
    moments = {key: dict(block.moments) for key, block in optimizer.blocks.items()}
    start = parameters_of(model)
    for number in (1, 2):
        model.load_state_dict(start)
        backward(model, batch(number))
        spoil(model, "0.weight", value)
        alone = base_alone(model, optimizer)
        if number == 1:
            with pytest.warns(LLQRWarning, match=r"'0.weight' isn't finite.*said once"):
                optimizer.step()
        else:
            optimizer.step()
        found = parameters_of(model)
        assert_nan_alike({"0.weight": found["0.weight"]}, {"0.weight": alone["0.weight"]})
        assert found["2.weight"].isfinite().all()
        assert not torch.equal(found["2.weight"], alone["2.weight"]) or structure == "scalar"
        assert optimizer.stats.nonfinite == number
    for key, block in optimizer.blocks.items():
        assert_same(block.moments, moments[key])


@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_activations_that_are_not_finite(divergence: str | None) -> None:
    """The refit is left out, counted, said once; U stays, the base steps as it would; the next refit is taken."""
    model = network()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, divergence)
    train(model, optimizer, [0])
    start = parameters_of(model)
    moments = {key: dict(block.moments) for key, block in optimizer.blocks.items()}
    for number in (1, 2):
        x, y = batch(number)
        x[0, 0] = float("nan")
        backward(model, (x, y))
        alone = base_alone(model, optimizer)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(heard) == (2 if number == 1 else 0), [str(warning.message) for warning in heard]
        assert_nan_alike(parameters_of(model), alone)
        model.load_state_dict(start)
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (1, 2)
    for key, block in optimizer.blocks.items():
        assert_same(block.moments, moments[key])
    train(model, optimizer, [3])
    assert optimizer.stats.refits == 2
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("make", [LLQR, LLQR.paper])
def test_what_is_not_finite_from_the_first_step_on(make: Any) -> None:
    """Counted and said though there is no U yet; once there is one, nothing more is counted."""
    model = network()
    optimizer = make(SGD(model.parameters(), lr=0.1), model, every=1)
    start = parameters_of(model)
    for number in (1, 2):
        x, y = batch(number)
        x[0, 0] = float("nan")
        backward(model, (x, y))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            optimizer.step()
        told = [str(warning.message) for warning in heard]
        assert len(told) == (2 if number == 1 else 0), told
        assert optimizer.stats.nonfinite == number * len(start)
        model.load_state_dict(start)
    assert optimizer.stats.rejected == 2
    train(model, optimizer, [3, 4])
    assert optimizer.stats.nonfinite == 2 * len(start)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_gradients(structure: str, dtype: torch.dtype) -> None:
    """Nothing moves and nothing is said; the steps after that are finite and no longer than the base's."""
    model = network(dtype=dtype)
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, structure=structure)
    x, y = batch(dtype=dtype)
    before = parameters_of(model)
    (functional.cross_entropy(model(x), y) * 0).backward()
    optimizer.step()
    assert_same(parameters_of(model), before)
    for number in range(1, 4):
        backward(model, batch(number, dtype=dtype))
        before = parameters_of(model)
        optimizer.step()
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert float((p.detach() - before[name]).norm()) == pytest.approx(0.1 * float(p.grad.norm()), rel=1e-4)
    assert (optimizer.stats.rejected, optimizer.stats.nonfinite) == (0, 0)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_dead_layer(structure: str) -> None:
    """Units that are always off: their rows have no curvature and no gradient, and don't move; the others do."""
    model = nn.Sequential(nn.Linear(SIZE, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    with torch.no_grad():
        model[0].bias[:3] = -1000.0
    optimizer = LLQR(sgd(model), model, structure=structure)
    before = parameters_of(model)
    train(model, optimizer, range(3))
    after = parameters_of(model)
    assert all(p.isfinite().all() for p in after.values())
    torch.testing.assert_close(after["0.weight"][:3], before["0.weight"][:3], rtol=1e-4, atol=1e-6)
    assert not torch.equal(after["0.weight"][3:], before["0.weight"][3:])


def test_a_layer_that_is_never_used() -> None:
    """It has no gradient: it stays, and it is told of."""
    model = network()
    model.add_module("spare", nn.Linear(2, 2).double())
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    optimizer = LLQR(sgd(model), model)
    before = parameters_of(model)
    train(model, optimizer, range(3))
    assert torch.equal(model.get_parameter("spare.weight"), before["spare.weight"])
    assert optimizer.assignments()["spare.weight"] == "by the base: in no linear map so far"
    assert optimizer.stats.refits == 3


def test_a_layer_that_is_used_now_and_then() -> None:
    """Where it isn't, it stays, with its U for the next time."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.extra, self.on = network(), nn.Linear(SIZE, SIZE).double(), True

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.extra(x) if self.on else x)

    model = Sometimes()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model)
    for number in range(4):
        model.on = number % 2 == 0
        before = parameters_of(model)
        train(model, optimizer, [number])
        assert torch.equal(before["extra.weight"], model.extra.weight) == (not model.on)
    assert optimizer.blocks["extra.weight"].refits == 2
    assert optimizer.blocks["inner.0.weight"].refits == 4


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_a_batch_of_one(structure: str, divergence: str | None) -> None:
    """A curvature of rank one, damped: a finite step of the base's length."""
    model = network()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, divergence, structure)
    backward(model, batch(size=1))
    before = parameters_of(model)
    optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert float((p.detach() - before[name]).norm()) == pytest.approx(0.1 * float(p.grad.norm()))
    assert optimizer.stats.nonfinite == 0


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("divergence", [None, KL()], ids=str)
def test_an_empty_batch(kind: str, divergence: Any) -> None:
    """No examples, no curvature: the refit is left out, said once, and nothing moves."""
    model: nn.Module = network()
    x = torch.zeros(0, SIZE).double()
    if kind == "convolution":
        model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, CLASSES)).double()
        x = torch.zeros(0, 1, 3, 3).double()
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model, divergence)
    before = parameters_of(model)
    model(x).sum().backward()
    with pytest.warns(LLQRWarning, match="refit was rejected"):
        optimizer.step()
    assert_same(parameters_of(model), before)
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (0, 1)


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD])
def test_no_learning_rate(base: Any) -> None:
    """lr = 0: nothing moves, bit for bit, and nothing is said."""
    model = network()
    optimizer = LLQR(base(model.parameters(), lr=0.0, weight_decay=0.1), model)
    before = parameters_of(model)
    train(model, optimizer, range(3))
    assert_same(parameters_of(model), before)
    assert optimizer.stats.refits == 3


def test_a_model_that_is_called_otherwise_with_a_divergence() -> None:
    """By its forward, which no hook sees: the base's steps, bit for bit; said once."""
    model, plain = network(), network()
    optimizer, base = LLQR(sgd(model), model, "ngd"), sgd(plain)
    for number in range(3):
        x, y = batch(number)
        optimizer.zero_grad()
        functional.cross_entropy(model.forward(x), y).backward()
        if number == 0:
            with pytest.warns(LLQRWarning, match=r"wasn't called as model\(...\).*With a divergence.*said once"):
                optimizer.step()
        else:
            optimizer.step()
        train(plain, base, [number])
    assert_same(parameters_of(model), parameters_of(plain))
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (0, 3)


class Masters(SGD):
    """Steps weights of its own, and writes them over the parameters."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.own = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, own in zip(self.param_groups, self.own, strict=True):
            for p, weight in zip(group["params"], own, strict=True):
                p.data.copy_(weight)
        super().step(closure)
        for group, own in zip(self.param_groups, self.own, strict=True):
            for p, weight in zip(group["params"], own, strict=True):
                weight.copy_(p.data)


class Own(SGD):
    """As torch's; but LLQR can't know that."""


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_base_that_takes_steps_back(momentum: float) -> None:
    """One that steps from weights of its own is an error within twenty steps; any other base isn't, at whatever rate."""
    model = network()
    optimizer = LLQR(Masters(model.parameters(), lr=0.05, momentum=momentum), model)
    with pytest.raises(LLQRError, match="Masters takes back what LLQR puts in the place of its steps"):
        train(model, optimizer, range(20))
    for lr in (0.01, 0.1, 1.0):
        model = network()
        train(model, LLQR(Own(model.parameters(), lr=lr, momentum=momentum), model), range(32))


@pytest.mark.parametrize("lr", [0.03, 0.1, 0.3])
def test_a_base_that_overshoots_takes_nothing_back(lr: float) -> None:
    """Of a quadratic loss Δ_{k+1} = b - lr H t: that is no sign, for as long as steps don't grow."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), torch.randn(64, 8)
    optimizer = LLQR(Own(model.parameters(), lr=lr, momentum=0.9, nesterov=True), model)
    for _ in range(40):
        optimizer.zero_grad()
        functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_a_model_without_linear_maps(divergence: str | None) -> None:
    """Only norms are trained: the base's steps, bit for bit; nothing went wrong, and nothing is said."""
    models = [nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, CLASSES)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model[1].requires_grad_(False)
    optimizer = LLQR(sgd(models[0]), models[0], divergence)
    train(models[0], optimizer, range(3))
    train(models[1], sgd(models[1]), range(3))
    assert_same(parameters_of(models[0]), parameters_of(models[1]))
    assert optimizer.blocks == {}
    assert optimizer.assignments()["0.weight"] == "by the base: used by a layer norm"


def test_a_step_without_gradients() -> None:
    """Nothing to do, as for the base."""
    model = network()
    optimizer = LLQR(sgd(model), model, every=never)
    before = parameters_of(model)
    optimizer.step()
    assert_same(parameters_of(model), before)


@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_a_step_without_a_backward_pass(divergence: str | None) -> None:
    """A refit that has heard no gradient is none: it is counted, and said once."""
    model = network()
    optimizer = LLQR(sgd(model), model, divergence)
    before = parameters_of(model)
    model(batch()[0])
    with pytest.warns(LLQRWarning, match=r"backward\(\) comes first"):
        optimizer.step()
    model(batch()[0])
    optimizer.step()
    assert_same(parameters_of(model), before)
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (0, 2)
    backward(model, batch())
    optimizer.step()
    assert (optimizer.stats.refits, len(optimizer.blocks)) == (1, 2)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_base_that_clears_the_gradients(momentum: float) -> None:
    """m is what the base remembers, without this step's gradient; where it remembers nothing, its own step stays."""
    model = network()
    base = SGD(model.parameters(), lr=0.1, momentum=momentum)
    base.register_step_post_hook(lambda *_: base.zero_grad())
    optimizer = LLQR(base, model, structure="scalar")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            backward(model, batch(number))
            before, slopes = parameters_of(model), {n: p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
            for name, p in model.named_parameters():
                m = base.state[p]["momentum_buffer"] if momentum else slopes[name]
                torch.testing.assert_close(p.detach(), before[name] - 0.1 * m, rtol=1e-9, atol=1e-12)
    assert len(said) == (not momentum)
    assert optimizer.stats.nonfinite == (0 if momentum else 6)


def test_a_sparse_gradient() -> None:
    """An error that says what to change."""
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    optimizer = LLQR(SGD(model.parameters(), lr=0.1), model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(LLQRError, match="sparse=False"):
        optimizer.step()


# --- bad input ---


def test_wrong_arguments() -> None:
    model = network()
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "base": ({"base": 3}, "LLQR wraps an optimizer"),
        "model": ({"model": model.forward}, "the model, an nn.Module"),
        "another model's": ({"base": sgd(network(1))}, "aren't in the model"),
        "divergence": ({"divergence": "ndg"}, "did you mean 'ngd'"),
        "a class": ({"divergence": KL}, r"write KL\(\)"),
        "structure": ({"structure": "kfca"}, "did you mean 'kfac'"),
        "a pattern": ({"structure": {"0.weigth": "kfac", "*": "kfac"}}, "did you mean '0.weight'"),
        "what is left over": ({"structure": {"0": "kfac"}}, 'add a last "\\*"'),
        "every": ({"every": 0}, "positive number of steps"),
        "every, a string": ({"every": "x"}, "positive number of steps"),
        "every, a truth": ({"every": True}, "positive number of steps"),
        "output": ({"output": 1}, "output"),
        "a place": ({"divergence": Intermediate({"9": 1.0})}, "unknown module in Intermediate"),
        "LLQR": ({"base": LLQR(sgd(model), model)}, "is an LLQR already"),
        "the paper's": ({"base": LLQR.paper(sgd(model), model)}, "is an LLQR already"),
        "LBFGS": ({"base": torch.optim.LBFGS(model.parameters())}, "LBFGS"),
    }
    for options, match in wrong.values():
        with pytest.raises(LLQRError, match=match):
            LLQR(**{"base": sgd(model), "model": model, **options})
    hooks = len(model._forward_hooks)
    with pytest.raises(LLQRError):
        LLQR(sgd(model), model, Intermediate({"9": 1.0}))
    assert len(model._forward_hooks) == hooks


@pytest.mark.parametrize("divergence", ["newton", "gauss-newton", KL() + GaussNewton()], ids=str)
def test_a_loss_that_is_not_told(divergence: Any) -> None:
    """Before anything is changed; with a closure it works."""
    model = network()
    optimizer = LLQR(sgd(model), model, divergence)
    backward(model, batch())
    before = parameters_of(model)
    for _ in range(2):
        with pytest.raises(LLQRError, match=r"needs the loss: call optimizer.step\(closure\)"):
            optimizer.step()
    assert_same(parameters_of(model), before)
    assert optimizer.state_dict()["llqr"]["step"] == 0
    assert not optimizer.state
    optimizer.step(closure_of(model, optimizer, batch()))
    assert optimizer.stats.refits == 1


def test_a_closure_without_a_loss() -> None:
    """Its gradients are enough, unless there is a divergence, which may ask for the loss: then nothing is stepped."""
    model = network()
    optimizer = LLQR(sgd(model), model, "gauss-newton")
    before = parameters_of(model)
    with pytest.raises(LLQRError, match="must return the loss"):
        optimizer.step(lambda: backward(model, batch()) and None)
    assert_same(parameters_of(model), before)
    optimizer = LLQR(sgd(model), model)
    assert optimizer.step(lambda: backward(model, batch()) and None) is None
    assert optimizer.stats.refits == 1


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x


def test_which_output() -> None:
    """A divergence is about one tensor: `output` says which, and without it there is an error before anything is changed."""
    model = Several()
    optimizer = LLQR(sgd(model), model, "ngd")
    x, y = batch()
    before = parameters_of(model)
    functional.cross_entropy(model(x)[0], y).backward()
    with pytest.raises(LLQRError, match=r"output=lambda out: out\[0\]"):
        optimizer.step()
    assert_same(parameters_of(model), before)
    with pytest.raises(LLQRError, match="name a divergence"):
        LLQR(sgd(model), model, output=lambda out: out[0])
    optimizer = LLQR(sgd(model), model, "ngd", output=lambda out: out[0])
    functional.cross_entropy(model(x)[0], y).backward()
    optimizer.step()
    assert set(optimizer.blocks) == {"inner.0.weight", "inner.2.weight"}


@pytest.mark.parametrize("kind", [LLQR, LLQR.paper])
@pytest.mark.parametrize("loss", ["squares", "binary"])
def test_a_family_that_does_not_fit_the_loss(loss: str, kind: Any) -> None:
    """The logits' gradient of a cross-entropy sums to 0 over the classes; where it doesn't, there are no such classes."""
    model = network()
    optimizer = kind(sgd(model), model, "ngd")
    x, y = batch()
    before = parameters_of(model)
    targets = functional.one_hot(y, CLASSES).double()
    output = model(x)
    if loss == "squares":
        functional.mse_loss(output, targets).backward()
    else:
        functional.binary_cross_entropy_with_logits(output, targets).backward()
    with pytest.raises(LLQRError, match="the loss isn't that of a categorical distribution"):
        optimizer.step()
    assert_same(parameters_of(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_that_fit(dtype: torch.dtype) -> None:
    """Cross-entropies with smoothing, class weights, padding, in half precision; a squared error with Gaussians."""
    losses: list[Any] = [
        lambda output, y: functional.cross_entropy(output, y, label_smoothing=0.1),
        lambda output, y: functional.cross_entropy(output, y, weight=torch.tensor([1.0, 2, 3], dtype=dtype)),
        lambda output, y: functional.cross_entropy(output, y.masked_fill(y == 0, -100)),
        lambda output, y: 1e4 * functional.cross_entropy(output, y),
    ]
    for loss in losses:
        model = network(dtype=dtype)
        optimizer = LLQR(sgd(model), model, "ngd")
        x, y = batch(dtype=dtype)
        loss(model(x), y).backward()
        optimizer.step()
        assert optimizer.stats.refits == 1
    model = nn.Sequential(network(dtype=dtype), nn.LogSoftmax(1))
    optimizer = LLQR(sgd(model), model, "ngd")
    functional.nll_loss(model(batch(dtype=dtype)[0]), batch()[1]).backward()
    optimizer.step()
    assert optimizer.stats.refits == 1
    model = network(dtype=dtype)
    optimizer = LLQR(sgd(model), model, KL("gaussian"))
    model(batch(dtype=dtype)[0]).square().mean().backward()
    optimizer.step()
    assert optimizer.stats.refits == 1


class TurnedSteps(nn.Module):
    """Classes along dimension 1 of three."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        return logits.unflatten(0, (2, -1)).mT


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_family_without_classes_for_a_cross_entropy(family: str, dtype: torch.dtype) -> None:
    """With smoothing and padding too, and classes along dimension 1."""
    x, y = batch(dtype=dtype)
    cases: list[tuple[nn.Module, Tensor, dict[str, Any], str]] = [
        (network(dtype=dtype), y, {}, "'categorical'"),
        (network(dtype=dtype), y, {"label_smoothing": 0.1, "reduction": "sum"}, "'categorical'"),
        (network(dtype=dtype), y.masked_fill(y == 0, -100), {}, "'categorical'"),
        (TurnedSteps().to(dtype), y.unflatten(0, (2, -1)), {}, "Categorical(dim=1)"),
    ]
    for model, targets, options, right in cases:
        optimizer = LLQR(sgd(model), model, KL(family))
        before = parameters_of(model)
        functional.cross_entropy(model(x), targets, **options).backward()
        message = (
            rf"is that of a categorical distribution.*In place of KL\(family=.*write KL\(family={re.escape(right)}\)"
        )
        with pytest.raises(LLQRError, match=message):
            optimizer.step()
        assert_same(parameters_of(model), before)


SLOPES: dict[str, tuple[str, nn.Module, Any]] = {
    "squares": ("gaussian", nn.Identity(), lambda output, right: output - right),
    "binary": ("bernoulli", nn.Identity(), lambda output, right: output.sigmoid() - right),
    "nearly centred": ("gaussian", nn.Identity(), lambda output, right: output.softmax(1) - right + 1e-4),
    "centred": ("gaussian", nn.Identity(), lambda output, right: right - output.softmax(1)),
    "squares of probabilities": ("gaussian", nn.Softmax(1), lambda output, right: output - right),
    "one output": ("gaussian", nn.Linear(CLASSES, 1), lambda output, right: output - 1),
    "two outputs": (
        "gaussian",
        nn.Linear(CLASSES, 2),
        lambda output, right: torch.ones_like(output) * torch.tensor([-1, 1]),
    ),
    "no slope": ("gaussian", nn.Identity(), lambda output, right: 0 * output),
}


@pytest.mark.parametrize("case", SLOPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_slopes_that_are_not_of_a_cross_entropy(case: str, dtype: torch.dtype) -> None:
    """One negative number in each row, the rest positive, and their sum zero to rounding: any of it may miss."""
    family, last, slope = SLOPES[case]
    x, y = batch(dtype=dtype)
    model = nn.Sequential(network(), copy.deepcopy(last)).to(dtype)
    optimizer = LLQR(sgd(model), model, KL(family))
    output = model(x)
    output.backward(slope(output.detach(), functional.one_hot(y, CLASSES)))
    optimizer.step()
    assert optimizer.stats.refits == 1


@pytest.mark.parametrize("of", ["weights", "inputs"])
def test_gradients_that_the_loop_asks_for_itself(of: str) -> None:
    """torch.autograd.grad, as in penalties, adds nothing to `.grad`, and nothing to the curvature."""
    alone, beside = network(), network()
    optimizers = [LLQR(sgd(model), model) for model in (alone, beside)]
    x, y = batch()
    x.requires_grad_()
    loss = functional.cross_entropy(beside(x), y)
    torch.autograd.grad(loss, list(beside.parameters()) if of == "weights" else [x], retain_graph=True)
    loss.backward()
    functional.cross_entropy(alone(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same(parameters_of(alone), parameters_of(beside))


class Experts(nn.Module):
    """Each example goes to one expert; all are called, also those that no example goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(network() for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        parts = [expert(x[chosen == number]) for number, expert in enumerate(self.experts)]
        return torch.cat(parts)


def test_a_map_that_met_no_example_leaves_the_others_alone() -> None:
    """Its block stays as it was, or isn't there yet; no refit is left out for it."""
    model = Experts()
    optimizer = LLQR(sgd(model), model)
    for k in range(3):
        x, y = batch(k)
        chosen = torch.zeros(len(x)).long() if k < 2 else torch.arange(len(x)) % 2
        optimizer.zero_grad()
        functional.cross_entropy(model(x, chosen), y).backward()
        optimizer.step()
        assert len(optimizer.blocks) == (2 if k < 2 else 4)
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (3, 0)
    assert optimizer.blocks["experts.0.0.weight"].refits == 3
    assert optimizer.blocks["experts.1.0.weight"].refits == 1
