"""Promise: the models that people train are refitted right, or there is an error that says what to do.

Right is: U after the first step is the fit to the quadratic model of that batch, and the model holds what it held.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR, Preconditioner, QuadraticModel, fit
from llqr.divergences import KL, Divergence, GaussNewton, Newton
from llqr.errors import LLQRError, LLQRWarning
from llqr.paper import PaperLLQR
from llqr.solvers import SGDM, ScaleFree, Solver
from loops import assert_same, backward, batch, blocks_of, gradients_of, network, never, parameters_of, sgd, train
from zoo import Attention, cases, pick, token_loss

DAMPING, STEPS = 1.0, 3
ZOO = list(cases())
FLAT, FLAT_AND_NOT = KL(), [KL(), Newton()]


def wrapped(model: nn.Module, divergence: str | Divergence = FLAT, **options: Any) -> PaperLLQR:
    options = {"structure": "kfac", "steps": STEPS, "damping": DAMPING, "ema": 0.0, "solver": ScaleFree(), **options}
    return LLQR.paper(sgd(model, lr=0.01), model, divergence, **options)


def fitted(q: QuadraticModel, structure: Any = "kfac", solver: Solver | None = None) -> dict[str, Tensor]:
    u: Preconditioner = fit(q, structure, solver, steps=STEPS)
    return {f"{key} {name}": tensor for key, block in u.blocks.items() for name, tensor in block.items()}


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-8, atol=1e-10)


def called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def evaluation(
    model: nn.Module, optimizer: PaperLLQR, inputs: Any, loss: Callable[[Any], Tensor]
) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(called(model, inputs))
        value.backward()
        return value

    return closure


@pytest.mark.parametrize("divergence", [KL(), Newton(), GaussNewton()], ids=repr)
@pytest.mark.parametrize("case", ZOO)
def test_the_zoo(case: str, divergence: Divergence) -> None:
    """Tied weights, embeddings, grouped convolutions, BatchNorm, in-place activations, keywords, dicts of outputs."""
    model, inputs, targets, loss_fn = cases()[case]
    flat_output = case != "residual"
    solver = SGDM(0.002)  # small steps, which turn no gradient around
    options: dict[str, Any] = {"solver": solver} if flat_output else {"solver": solver, "output": pick}
    if isinstance(divergence, GaussNewton) and not flat_output:
        options |= {"loss_fn": loss_fn, "refit_batch": lambda: (inputs, targets)}
    optimizer = wrapped(model, divergence, **options)
    closure = evaluation(model, optimizer, inputs, lambda out: loss_fn(pick(out), targets))
    closure()
    twin = copy.deepcopy(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    alone = isinstance(divergence, KL)  # step() alone knows no loss: g and H are of the network that trains
    q = QuadraticModel.build(
        twin,
        inputs,
        targets,
        loss_fn if flat_output else lambda out, y: loss_fn(pick(out), y),
        divergence,
        DAMPING,
        output=options.get("output"),
        training=None if alone else False,
        gradient=gradients_of(model) if alone else None,
    )
    before = gradients_of(model)
    torch.manual_seed(7)
    if isinstance(divergence, KL):
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(7).get_state())
        assert_same(buffers, dict(model.named_buffers()))
        assert_same(before, gradients_of(model))
    else:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.0  # the closure's own passes would move the statistics
        optimizer.step(closure)
    assert_close(blocks_of(optimizer), fitted(q, "kfac", solver))
    assert modes == [module.training for module in model.modules()]
    for name, p in parameters_of(model).items():
        assert not torch.equal(p, twin.get_parameter(name)), name


def test_frozen_parameters() -> None:
    """They may be among the base's: U has no block for them, and a pattern for them alone is no mistake."""
    for structure in ("kfac", "dense", {"0": "kfac", "*": "diagonal"}):
        for warm_start in (False, True):
            model = network()
            model[0].requires_grad_(False)
            optimizer = wrapped(model, structure=structure, every=2, warm_start=warm_start)
            before = parameters_of(model)
            train(model, optimizer, range(4))
            assert optimizer.stats.refits == 2
            assert optimizer.preconditioner is not None
            assert not any(key.startswith("0") for key in optimizer.preconditioner.blocks)
            for name, p in parameters_of(model).items():
                assert torch.equal(p, before[name]) == name.startswith("0")


@pytest.mark.parametrize("structure", ["ekfac", "dense"])
def test_freezing_and_thawing(structure: Any) -> None:
    """What is thawed is the identity until the next refit."""
    model = network()
    optimizer = wrapped(model, structure=structure, every=2)
    train(model, optimizer, range(1))
    model.get_parameter("2.bias").requires_grad_(False)
    train(model, optimizer, range(1, 4))
    held = model.get_parameter("2.bias").clone()
    train(model, optimizer, range(4, 5))
    assert torch.equal(held, model.get_parameter("2.bias"))
    model.get_parameter("2.bias").requires_grad_(True)
    optimizer.state.clear()
    backward(model, batch(5))
    g = gradients_of(model)["2.bias"]
    optimizer.step()
    torch.testing.assert_close(model.get_parameter("2.bias"), held - 0.01 * g)
    train(model, optimizer, range(6, 9))
    assert optimizer.stats.refits == 5
    assert optimizer.stats.rejected == 0


@pytest.mark.parametrize("structure", ["kfac", "dense"])
def test_unused_parameters(structure: Any) -> None:
    """A parameter without a gradient is left alone, as by the base; what a branch brings in later is stepped."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.side = nn.Linear(4, 3), nn.Linear(4, 3)
            self.gains = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))])

        def forward(self, x: Tensor, both: bool = False) -> Tensor:
            y: Tensor = self.trunk(x) * self.gains[0]
            return y + self.side(x) * self.gains[1] if both else y

    model = Branching().double()
    optimizer = wrapped(model, structure=structure, every=2)
    before = parameters_of(model)
    train(model, optimizer, range(3))
    for name, p in parameters_of(model).items():
        assert torch.equal(p, before[name]) == (name.startswith("side") or name == "gains.1"), name
    x, y = batch()
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(model(x, True), y).backward()
        optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in parameters_of(model).items())
    assert optimizer.stats.refits == 3


def test_parameters_without_dimensions() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.temperature = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.temperature  # type: ignore[no-any-return]

    for structure in ("scalar", "diagonal", "kfac", "ekfac", "dense"):
        model = Tempered().double()
        optimizer = wrapped(model, structure=structure)
        q = QuadraticModel.build(copy.deepcopy(model), *batch(), functional.cross_entropy, KL(), DAMPING)
        train(model, optimizer, [0])
        assert_close(blocks_of(optimizer), fitted(q, structure))
        assert model.temperature.item() != 0.5


def test_a_model_that_writes_into_its_inputs() -> None:
    """U is fitted on what the model was given, not on what it left of it."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.mul_(2.0))  # type: ignore[no-any-return]

    model = Doubling()
    q = QuadraticModel.build(copy.deepcopy(model), *batch(), functional.cross_entropy, KL(), DAMPING)
    optimizer = wrapped(model)
    backward(model, batch())
    optimizer.step()
    assert_close(blocks_of(optimizer), fitted(q))


def test_a_model_that_is_called_twice() -> None:
    """KL is about the last call, Newton about the whole loss; Gauss–Newton needs one output, and says so."""
    (x, y), (other, labels) = batch(0), batch(1)

    def both(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(other), labels) + functional.cross_entropy(model(x), y)

    model = network()
    optimizer = wrapped(model)
    both(model).backward()
    q = QuadraticModel.build(network(), x, None, None, KL(), DAMPING, gradient=gradients_of(model))
    optimizer.step()
    assert_close(blocks_of(optimizer), fitted(q))

    model = network()
    optimizer = wrapped(model, "newton")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = both(model)
        loss.backward()
        return loss

    twice = QuadraticModel.build(
        network(),
        torch.cat((x, other)),
        torch.cat((y, labels)),
        lambda out, targets: 2 * functional.cross_entropy(out, targets),
        "newton",
        DAMPING,
    )
    optimizer.step(closure)
    assert_close(blocks_of(optimizer), fitted(twice))

    model = network()
    optimizer = wrapped(model, "gauss-newton")
    before = parameters_of(model)
    with pytest.raises(LLQRError, match=r"calls the model 2 times.*loss_fn and a refit_batch"):
        optimizer.step(closure)
    assert_same(before, parameters_of(model))


class Named(nn.Module):
    """Called in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor, shift: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.inner(x if shift is None else x + shift)
        return out * scale


CALLS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "positions": lambda model, x, shift: model(x, shift),
    "keywords": lambda model, x, shift: model(x=x, shift=shift, scale=1.0),
    "mixed": lambda model, x, shift: model(x, shift=shift),
    "mixed with a number": lambda model, x, shift: model(x, shift, scale=1.0),
    "expanded": lambda model, x, shift: model(shift=shift, x=x),
}


@pytest.mark.parametrize("way", CALLS)
def test_ways_to_call_a_model(way: str) -> None:
    (x, y), shift = batch(), torch.randn(6, 4).double()
    model = Named()
    optimizer = wrapped(model)
    q = QuadraticModel.build(Named(), (x, shift), y, functional.cross_entropy, KL(), DAMPING)
    functional.cross_entropy(CALLS[way](model, x, shift), y).backward()
    optimizer.step()
    assert_close(blocks_of(optimizer), fitted(q))


def test_tensors_inside_what_a_model_is_called_with() -> None:
    """Dicts and lists of tensors, whole and in chunks."""

    class Nested(Named):
        def forward(self, given: dict[str, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(given["x"], given["more"][0])

    (x, y), shift = batch(), torch.randn(6, 4).double()
    q = QuadraticModel.build(Named(), (x, shift), y, functional.cross_entropy, KL(), DAMPING)
    for chunk_size in (None, 4):
        model = Nested()
        optimizer = wrapped(model, chunk_size=chunk_size)
        functional.cross_entropy(model({"x": x, "more": [shift]}), y).backward()
        optimizer.step()
        assert_close(blocks_of(optimizer), fitted(q))


def test_calls_that_have_no_names_or_no_tensors() -> None:
    """An error at the step that refits, unless there is a refit_batch."""

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            x = args[0].x if isinstance(args[0], Held) else args[0]
            return self.inner(x)  # type: ignore[no-any-return]

    class Held:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    x, y = batch()
    for call, message in [
        (lambda model: model(x, scale=1.0), "call it with one kind, positions or keywords"),
        (lambda model: model(Held(x)), r"called with a Held and no tensor.*model\(\*\*batch\)"),
    ]:
        model = Loose()
        optimizer = wrapped(model)
        functional.cross_entropy(call(model), y).backward()
        before = parameters_of(model)
        with pytest.raises(LLQRError, match=message):
            optimizer.step()
        assert_same(before, parameters_of(model))
        given = wrapped(model, refit_batch=lambda: (x, None))
        given.step()
        assert given.stats.refits == 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x


def test_outputs_that_are_tuples() -> None:
    x, y = batch()
    for divergence in FLAT_AND_NOT:
        model = Pair()
        optimizer = wrapped(model, divergence, output=lambda out: out[0])
        optimizer.step(evaluation(model, optimizer, x, lambda out: functional.cross_entropy(out[0], y)))
        q = QuadraticModel.build(network(), x, y, functional.cross_entropy, divergence, DAMPING)
        found = {key.removeprefix("inner."): value for key, value in blocks_of(optimizer).items()}
        assert_close(found, fitted(q))

    model = Pair()
    before = parameters_of(model)
    optimizer = wrapped(model)
    with pytest.raises(LLQRError, match=r"returned a tuple.*output=lambda out: out\[0\]"):
        optimizer.step(evaluation(model, optimizer, x, lambda out: functional.cross_entropy(out[0], y)))
    optimizer = wrapped(model, "gauss-newton")
    with pytest.raises(LLQRError, match=r"returned a tuple.*loss_fn and a refit_batch"):
        optimizer.step(evaluation(model, optimizer, x, lambda out: functional.cross_entropy(out[0], y)))
    optimizer = wrapped(model, "gauss-newton", output=lambda out: out[0])
    with pytest.raises(LLQRError, match=r"output picks a part.*loss_fn.*refit_batch"):
        optimizer.step(evaluation(model, optimizer, x, lambda out: functional.cross_entropy(out[0], y)))
    assert_same(before, parameters_of(model))


@dataclass
class Answer:
    """What a model of the transformers library returns."""

    logits: Tensor
    loss: Tensor | None = None


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Answer:
        logits = self.inner(x)
        return Answer(logits, None if labels is None else functional.cross_entropy(logits, labels))


@pytest.mark.parametrize("divergence", FLAT_AND_NOT, ids=repr)
def test_outputs_that_carry_their_loss(divergence: Divergence) -> None:
    """step() alone is enough: Newton takes the loss that the model returns, KL its logits."""
    x, y = batch()
    model = WithLoss()
    optimizer = wrapped(model, divergence)
    loss = model(x, labels=y).loss
    loss.backward()
    optimizer.step()
    q = QuadraticModel.build(network(), x, y, functional.cross_entropy, divergence, DAMPING)
    assert_close({key.removeprefix("inner."): value for key, value in blocks_of(optimizer).items()}, fitted(q))


def test_outputs_that_carry_no_loss() -> None:
    x, y = batch()
    model = WithLoss()
    for divergence in ("newton", "gauss-newton"):
        optimizer = wrapped(model, divergence)
        functional.cross_entropy(model(x).logits, y).backward()
        with pytest.raises(LLQRError, match=r"needs the loss: call optimizer.step\(closure\)"):
            optimizer.step()


def test_padding_counts_for_nothing() -> None:
    """With weights, what the padded tokens are told is all the same to U."""
    torch.manual_seed(3)
    tokens, targets = torch.randint(1, 5, (4, 3)), torch.randint(5, (4, 3))
    tokens[0, 2] = tokens[2, 1] = tokens[2, 2] = 0
    targets[tokens == 0] = -100
    state = Attention().double().state_dict()

    def weights(inputs: Any) -> Tensor:
        return torch.as_tensor(inputs != 0).double()

    found = []
    for weighted in (True, False):
        model = Attention().double()
        model.load_state_dict(state)
        optimizer = wrapped(model, weights=weights if weighted else None)
        token_loss(model(tokens), targets).backward()
        q = QuadraticModel.build(
            copy.deepcopy(model), tokens, targets, token_loss, KL(), DAMPING, weights=weights(tokens)
        )
        optimizer.step()
        found.append(blocks_of(optimizer))
        if weighted:
            assert_close(found[0], fitted(q))
    assert not torch.allclose(found[0]["head.weight C"], found[1]["head.weight C"], rtol=1e-3)
    model = Attention().double()
    optimizer = wrapped(model, "newton", weights=weights, solver=SGDM(0.01))
    optimizer.step(evaluation(model, optimizer, tokens, lambda out: token_loss(out, targets)))
    assert optimizer.stats.refits == 1  # a closure's loss knows its padding


def test_two_optimizers_share_a_model() -> None:
    """Each has a U of its own parameters, held fixed in the other's fit."""
    model = network()
    halves = [model[0], model[2]]
    options: dict[str, Any] = {
        "structure": "kfac",
        "steps": STEPS,
        "damping": DAMPING,
        "ema": 0.0,
        "solver": ScaleFree(),
        "divergence": KL(),
    }
    optimizers = [LLQR.paper(torch.optim.SGD(half.parameters(), lr=0.1), model, **options) for half in halves]
    backward(model, batch())
    models = []
    for name in ("0", "2"):
        only = [f"{name}.weight", f"{name}.bias"]
        models.append(QuadraticModel.build(
            network(), *batch(), functional.cross_entropy, KL(), DAMPING, only=only))  # fmt: skip
    twin = network()
    optimizers[0].step()
    assert torch.equal(model.get_parameter("2.weight"), twin.get_parameter("2.weight"))
    assert not torch.equal(model.get_parameter("0.weight"), twin.get_parameter("0.weight"))
    assert_close(blocks_of(optimizers[0]), fitted(models[0]))
    model.load_state_dict(twin.state_dict())
    optimizers[1].step()
    assert_close(blocks_of(optimizers[1]), fitted(models[1]))


@pytest.mark.parametrize("divergence", [GaussNewton(), GaussNewton() + 0.5 * KL(), Newton()], ids=repr)
def test_a_closure_is_as_good_as_a_loss_and_a_batch(divergence: Divergence) -> None:
    trained = []
    for closes in (True, False):
        model = network()
        options = {} if closes else {"loss_fn": functional.cross_entropy, "refit_batch": batch}
        optimizer = wrapped(model, divergence, **options)
        if closes:
            optimizer.step(
                evaluation(model, optimizer, batch()[0], lambda out: functional.cross_entropy(out, batch()[1]))
            )
        else:
            backward(model, batch())
            optimizer.step()
        trained.append(blocks_of(optimizer))
    assert_close(*trained)


def test_a_closure_and_a_batch_without_its_loss() -> None:
    """The closure is about the batch of the step: it can't stand in for the loss of another."""
    for divergence in ("newton", "gauss-newton"):
        model = network()
        optimizer = wrapped(model, divergence, refit_batch=lambda: batch(5))
        with pytest.raises(LLQRError, match=r"give LLQR\.paper a loss_fn and a refit_batch"):
            optimizer.step(
                evaluation(model, optimizer, batch()[0], lambda out: functional.cross_entropy(out, batch()[1]))
            )


def test_a_closure_that_clips() -> None:
    """As frameworks do it: what follows backward() doesn't touch the gradients at the second evaluation."""
    x, y = batch()
    model = network()
    optimizer = wrapped(model, "newton")

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    optimizer.step(closure)
    norm = torch.cat([g.reshape(-1) for g in gradients_of(model).values()]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.1).double(), rtol=1e-4, atol=0)
    g = gradients_of(model)
    q = QuadraticModel.build(network(), x, y, functional.cross_entropy, "newton", DAMPING, gradient=g)
    assert_close(blocks_of(optimizer), fitted(q))


def moody() -> nn.Sequential:
    """A network that is another one in training than in evaluation."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5))
    return nn.Sequential(first, nn.Linear(5, 3)).double()


@pytest.mark.parametrize("divergence", [KL(), Newton(), GaussNewton()], ids=repr)
@pytest.mark.parametrize("how", ["step", "refit", "batch"])
def test_with_the_loss_gradient_and_curvature_are_of_the_evaluated_network(how: str, divergence: Divergence) -> None:
    """The paper's: J has g and H with running statistics and without dropout; the base steps with U times the gradient of the
    network that trains, and neither its `.grad` nor the random stream knows of the refit."""
    model, (x, y) = moody(), batch()
    options: dict[str, Any] = (
        {"loss_fn": functional.cross_entropy, "refit_batch": lambda: (x, y)} if how == "batch" else {}
    )
    options |= {"every": never} if how == "refit" else {}
    optimizer = wrapped(model, divergence, solver=SGDM(0.01), **options)
    closure = evaluation(model, optimizer, x, lambda out: functional.cross_entropy(out, y))
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    functional.cross_entropy(plain(x), y).backward()
    drawn, g = torch.get_rng_state(), gradients_of(plain)
    q = QuadraticModel.build(copy.deepcopy(plain), x, y, functional.cross_entropy, divergence, DAMPING, training=False)
    torch.manual_seed(3)
    if how == "refit":
        optimizer.refit(closure=closure)
    else:
        optimizer.step(closure)
    assert_close(blocks_of(optimizer), fitted(q, "kfac", SGDM(0.01)))
    assert_close(gradients_of(model), g)
    assert_same({"stream": drawn}, {"stream": torch.get_rng_state()})
    assert all(module.training for module in model.modules())
    cosine = functional.cosine_similarity(*(flat(each)[None] for each in (g, q.gradient)))
    assert cosine < 0.9  # so that it makes a difference


def test_without_the_loss_gradient_and_curvature_are_of_the_network_that_trains() -> None:
    """step() alone: batch statistics, and the dropout masks of the step, though the stream has gone on since."""
    model, (x, y) = moody(), batch()
    optimizer = wrapped(model)
    torch.manual_seed(3)
    backward(model, (x, y))
    twin = copy.deepcopy(model)
    twin.zero_grad()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    q = QuadraticModel.build(twin, x, y, functional.cross_entropy, KL(), DAMPING)
    torch.set_rng_state(after)
    torch.rand(3)
    assert_close(gradients_of(model), q.gradient)
    optimizer.step()
    assert_close(blocks_of(optimizer), fitted(q))


def trained(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The blocks of a fit to the network as it trains, with the dropout masks of seed 3."""
    torch.manual_seed(3)
    return fitted(QuadraticModel.build(model, x, y, functional.cross_entropy, KL(), DAMPING))


@pytest.mark.parametrize("how", ["the closure trains", "evaluated before the step", "another output in evaluation"])
def test_where_it_cannot_be_evaluated_both_are_of_the_network_that_trains(how: str) -> None:
    """g and H of one network all the same; and statistics move once."""
    model, (x, y) = moody(), batch()
    expected = trained(copy.deepcopy(model), x, y)
    if how == "another output in evaluation":
        model.register_forward_hook(lambda module, args, output: output if module.training else {"logits": output})
    optimizer = wrapped(model)

    def closure() -> Tensor:
        if how == "the closure trains":
            model.train()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    torch.manual_seed(3)
    if how == "evaluated before the step":
        backward(model, (x, y))
        model.eval()
        optimizer.step()
    elif how == "the closure trains":
        with pytest.warns(LLQRWarning, match="call model.train\\(\\) outside of it"):
            optimizer.step(closure)
    else:
        with pytest.warns(LLQRWarning, match="doesn't run with the modules in evaluation mode: TypeError"):
            optimizer.step(closure)
    assert_close(blocks_of(optimizer), expected)
    assert model.get_submodule("0.1").num_batches_tracked == 1


def test_gradients_in_memory_that_is_written_to_again() -> None:
    """As DDP's with gradient_as_bucket_view=True, where every backward pass writes to the same buckets."""
    model, (x, y) = moody(), batch()
    optimizer, buckets = wrapped(model), {p: torch.zeros_like(p) for p in model.parameters()}

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        for p, bucket in buckets.items():
            p.grad = bucket.copy_(torch.as_tensor(p.grad))
        return loss

    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    backward(plain, (x, y))
    torch.manual_seed(3)
    optimizer.step(closure)
    assert_close(gradients_of(model), gradients_of(plain))
    assert all(p.grad is bucket for p, bucket in buckets.items())


def test_generators_in_containers_are_drawn_from_again() -> None:
    """H has the noise that g had, from a generator that the model keeps in a dictionary."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.streams = nn.Linear(4, 3).double(), {"noise": torch.Generator().manual_seed(5)}

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.linear(x * torch.randn(x.shape, generator=self.streams["noise"]).double()))

    torch.manual_seed(0)
    model, (x, y) = Noisy(), batch()
    q = QuadraticModel.build(copy.deepcopy(model), x, y, functional.cross_entropy, KL(), DAMPING)
    optimizer = wrapped(model)
    backward(model, (x, y))
    optimizer.step()
    assert_close(blocks_of(optimizer), fitted(q))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def test_half_precision_parameters() -> None:
    """U is float32; the base sees gradients of the parameters' own dtype."""
    model = network(dtype=torch.bfloat16)
    optimizer = wrapped(model, every=2)
    train(model, optimizer, range(3))
    assert optimizer.stats.refits == 2
    assert {tensor.dtype for tensor in blocks_of(optimizer).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert LLQR.paper(sgd(model), model, every=never).preconditioner is None
