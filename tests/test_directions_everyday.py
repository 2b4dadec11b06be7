"""Promise: around any loop LLQR is what its base is: it saves, loads, copies, clips, accumulates and leaves no trace."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from llqr import LLQR
from llqr.errors import LLQRError, LLQRWarning
from llqr.paper import PaperLLQR
from llqr.structures import EigenKronecker, Kronecker, Scalar
from loops import (
    CLASSES,
    SIZE,
    STRUCTURES,
    assert_same,
    backward,
    batch,
    closure_of,
    gradients_of,
    network,
    parameters_of,
    sgd,
    train,
)

END = 7
KINDS: list[Any] = [*STRUCTURES, Kronecker(max_dim=4), EigenKronecker(max_dim=4), {"0": "dense", "*": "kfac"}]
Model = Callable[[], nn.Module]


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(4, CLASSES)).double()


def fresh(structure: Any = "kfac", seed: int = 0, **options: Any) -> tuple[nn.Module, LLQR]:
    model = network(seed)
    return model, LLQR(sgd(model), model, structure=structure, every=3, **options)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def moments_of(optimizer: LLQR) -> dict[str, Tensor]:
    return {f"{key} {name}": m.clone() for key, block in optimizer.blocks.items() for name, m in block.moments.items()}


# --- saving, loading, copying ---


@pytest.mark.parametrize("structure", KINDS, ids=str)
@pytest.mark.parametrize("stop", [0, 1, 3, 4])
def test_going_on(structure: Any, stop: int) -> None:
    """Bit for bit as if it hadn't stopped: before the first step, after a refit, before one, after the second."""
    model, optimizer = fresh(structure)
    train(model, optimizer, range(stop))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(stop, END))
    again, loaded = fresh(structure, seed=1)
    train(again, loaded, range(20, 24))
    again.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    train(again, loaded, range(stop, END))
    assert_same(parameters_of(model), parameters_of(again))
    assert_same(moments_of(optimizer), moments_of(loaded))
    assert optimizer.stats.refits == loaded.stats.refits == 3


@pytest.mark.parametrize("base", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.AdamW])
def test_going_on_around_other_bases(base: Any) -> None:
    """An average of our own, where the base shows none, is saved too."""
    model = network()
    optimizer = LLQR(base(model.parameters(), lr=0.01), model)
    train(model, optimizer, range(3))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(3, END))
    again = network(1)
    loaded = LLQR(base(again.parameters(), lr=0.5), again)
    again.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    train(again, loaded, range(3, END))
    assert_same(parameters_of(model), parameters_of(again))


class Attention(nn.Module):
    """Cross attention: its in_proj_weight is cut into parts, each a map of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        keys = x[:, None].sin()
        return self.head(self.attention(x[:, None], keys, keys, need_weights=False)[0][:, 0])


def test_parts_of_a_weight_are_saved() -> None:
    """Their places in the parameter are tensors, and come back."""
    torch.manual_seed(0)
    model = Attention().double()
    start = copy.deepcopy(model)
    optimizer = LLQR(sgd(model), model)
    train(model, optimizer, range(3))
    assert [key for key in optimizer.blocks if "[" in key]
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(3, END))
    loaded = LLQR(sgd(start), start)
    start.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    train(start, loaded, range(3, END))
    assert_same(parameters_of(model), parameters_of(start))


def test_what_was_saved_does_not_move_on() -> None:
    model, optimizer = fresh()
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    before = copy.deepcopy(state["llqr"])
    train(model, optimizer, range(1, END))
    for key, block in before["blocks"].items():
        assert_same(block["moments"], state["llqr"]["blocks"][key]["moments"])
    assert state["llqr"]["step"] == 1


def test_what_was_loaded_does_not_move_on() -> None:
    """The state that was given stays as it was, whatever the optimizer that loaded it does."""
    model, optimizer = fresh()
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    before = copy.deepcopy(state["llqr"]["blocks"])
    again, loaded = fresh()
    loaded.load_state_dict(state)
    train(again, loaded, range(1, END))
    for key, block in before.items():
        assert_same(block["moments"], state["llqr"]["blocks"][key]["moments"])


def test_a_state_of_the_base_alone() -> None:
    """The base goes on, U begins anew, and that is said."""
    model = network()
    base = sgd(model)
    train(model, base, range(3))
    other, optimizer = fresh()
    train(other, optimizer, range(2))
    other.load_state_dict(model.state_dict())
    with pytest.warns(LLQRWarning, match="plain optimizer"):
        optimizer.load_state_dict(base.state_dict())
    assert optimizer.blocks == {}
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(base.state[p]["momentum_buffer"], optimizer.state[q]["momentum_buffer"])
    train(other, optimizer, [3])
    assert optimizer.stats.refits == 1


def wrong_states() -> dict[str, tuple[Any, str]]:
    model = network()
    paper = LLQR.paper(sgd(model), model)
    wider = nn.Sequential(nn.Linear(SIZE, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    named = nn.Sequential(nn.Tanh(), nn.Linear(SIZE, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    states: dict[str, tuple[Any, str]] = {"the paper's": (paper.state_dict(), "is of LLQR.paper")}
    for name, other, match in [("wider", wider, "shape"), ("other names", named, "unknown parameter in the state")]:
        optimizer = LLQR(sgd(other), other)
        train(other, optimizer, range(1))
        states[name] = (optimizer.state_dict(), match)
    diagonal = LLQR(sgd(model), model, structure="diagonal")
    train(model, diagonal, range(1))
    states["another structure"] = (diagonal.state_dict(), "give the same structure")
    states["no state"] = ({"weights": 1}, "isn't the state_dict")
    states["something under llqr"] = ({**sgd(model).state_dict(), "llqr": [1]}, "not of LLQR.state_dict")
    return states


WRONG = ["the paper's", "wider", "other names", "another structure", "no state", "something under llqr"]


@pytest.mark.parametrize("case", WRONG)
def test_a_state_that_does_not_fit(case: str) -> None:
    """An error that says what is wrong, and nothing is changed."""
    state, match = wrong_states()[case]
    model, optimizer = fresh()
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(LLQRError, match=match):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["llqr"]["step"] == before["llqr"]["step"] == 2
    for index, entry in before["state"].items():
        assert_same(entry, after["state"][index])
    for key, block in before["llqr"]["blocks"].items():
        assert_same(block["moments"], after["llqr"]["blocks"][key]["moments"])


def entries(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the entries of a state are, the mappings too."""
    if path:
        yield path
    for key in state if isinstance(state, dict) else ():
        yield from entries(state[key], (*path, key))


def edited(state: dict[str, Any], path: tuple[Any, ...], value: Any = None, gone: bool = False) -> dict[str, Any]:
    """A copy with one entry replaced, or without it."""
    *above, last = path
    parts = [{**state}]
    for key in above:
        parts[-1][key] = {**parts[-1][key]}
        parts.append(parts[-1][key])
    if gone:
        del parts[-1][last]
    else:
        parts[-1][last] = value
    return parts[0]


def spelled(state: Any) -> str:
    """All of it, to be compared whatever is in it."""
    return str(tree_map(lambda value: value.tolist() if isinstance(value, Tensor) else value, state))


def refused(optimizer: LLQR | PaperLLQR, state: dict[str, Any]) -> bool:
    """By an error of ours, with nothing changed."""
    before = spelled(optimizer.state_dict())
    try:
        optimizer.load_state_dict(state)
    except LLQRError:
        return spelled(optimizer.state_dict()) == before
    return False


NAN = float("nan")


@pytest.mark.parametrize("paper", [False, True])
def test_every_entry_of_a_state_is_looked_at(paper: bool) -> None:
    """Each replaced by what it can't be, and left out."""
    torch.manual_seed(0)
    model = Attention().double()
    base = torch.optim.RMSprop(model.parameters(), lr=0.01)
    optimizer = LLQR.paper(base, model, every=1) if paper else LLQR(base, model, every=1)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    own = state["llqr"]
    places = list(entries(own))
    assert len(places) > 25
    for path in places:
        value: Any = own
        for key in path:
            value = value[key]
        wrong: list[Any] = ["text", [1], {"a": 1}, -1, NAN, 10**5000]
        if isinstance(value, Tensor):
            wrong += [value[..., :0], value.to(torch.complex64)]
            wrong += [] if path[0] == "averages" else [value * NAN if value.is_floating_point() else value + 1000]
        if path[-1] in ("objective_before", "objective_after"):  # whatever a fit that failed came to
            wrong = ["text", [1], {"a": 1}, 10**5000]
        elif path == ("stats",):
            wrong.remove({"a": 1})  # counts of another version
        elif value is not None and path != ("preconditioner",):  # U may be the identity
            wrong.append(None)
        for other in wrong:
            assert refused(optimizer, edited(state, ("llqr", *path), other)), (path, type(other))
        # counts of another version, maps that no refit has met
        may_lack = (("stats",), ("blocks",), ("averages",), ("lengths",), ("preconditioner", "blocks"))
        if path[:-1] not in may_lack:
            assert refused(optimizer, edited(state, ("llqr", *path), gone=True)), (path, "left out")
    for key, values in {"state": ([], "text"), "param_groups": ({}, "text", [1], [{}])}.items():
        for other in values:
            assert refused(optimizer, edited(state, (key,), other)), (key, other)
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize(
    "base", [sgd, lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01)], ids=["SGD", "RMSprop"]
)
def test_copies(how: Callable[[Any], Any], base: Callable[[nn.Module], Any]) -> None:
    """Model and optimizer together: both go on alike, neither disturbs the other."""
    model = network()
    optimizer = LLQR(base(model), model, every=3)
    train(model, optimizer, range(2))
    other, twin = how((model, optimizer))
    assert twin.model is other
    train(other, twin, range(2, END))
    train(model, optimizer, range(2, END))
    assert_same(parameters_of(model), parameters_of(other))
    assert optimizer.stats.refits == twin.stats.refits == 3


def test_a_copy_of_the_model_alone() -> None:
    """It carries a hook that does nothing: the optimizer hears of its own model only."""
    model, optimizer = fresh()
    other = copy.deepcopy(model)
    backward(other, batch())
    assert optimizer._collector.sums == {}
    pickle.loads(pickle.dumps(model))
    backward(model, batch())
    optimizer.step()
    assert optimizer.stats.refits == 1


# --- the loop ---


def test_schedulers() -> None:
    """The step's length follows the learning rate that a scheduler sets."""
    model, optimizer = fresh()
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.25][min(step, 1)])
    lengths = []
    for _ in range(2):
        backward(model, batch())
        optimizer.base.state.clear()
        before = parameters_of(model)
        optimizer.step()
        scheduler.step()
        p = model.get_parameter("0.weight")
        assert p.grad is not None
        lengths.append(float((p.detach() - before["0.weight"]).norm() / p.grad.norm()))
    assert lengths == pytest.approx([0.1, 0.025])


def test_clipping() -> None:
    """Lengths are of the clipped gradients; the curvature is of what came back, clipped or not."""
    model, optimizer = fresh()
    backward(model, batch())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before, clipped = parameters_of(model), gradients_of(model)
    optimizer.step()
    for name, p in model.named_parameters():
        assert float((p.detach() - before[name]).norm()) == pytest.approx(0.1 * float(clipped[name].norm()))
    other, plain = fresh()
    backward(other, batch())
    plain.step()
    assert_same(moments_of(optimizer), moments_of(plain))


def test_accumulation() -> None:
    """A batch in two halves, each with half of the loss: the same curvature, gradient and step as of the whole."""
    (whole, first), (halves, second) = fresh(), fresh()
    for number in range(4):
        x, y = batch(number)
        for model, optimizer, parts in [(whole, first, [slice(None)]), (halves, second, [slice(3), slice(3, None)])]:
            optimizer.zero_grad()
            for part in parts:
                (functional.cross_entropy(model(x[part]), y[part]) / len(parts)).backward()
            optimizer.step()
        for name, p in whole.named_parameters():
            torch.testing.assert_close(p, halves.get_parameter(name), rtol=1e-8, atol=1e-10)
    for name, moment in moments_of(first).items():
        torch.testing.assert_close(moment, moments_of(second)[name])


def test_closures() -> None:
    """`step(closure)` is `step()` after a backward pass, and returns the loss."""
    (plain, first), (closed, second) = fresh(), fresh()
    train(plain, first, range(END))
    for number in range(END):
        loss = second.step(closure_of(closed, second, batch(number)))
        assert float(loss.detach()) > 0
    assert_same(parameters_of(plain), parameters_of(closed))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_backward_pass_under_autocast(structure: str) -> None:
    """Torch advises against it, and people do it. The curvature is in float32 all the same; it was in bfloat16, or an error."""
    moments = []
    for inside in (False, True):
        model = network(dtype=torch.float32)
        optimizer = LLQR(sgd(model), model, structure=structure, every=1)
        for number in range(2):
            x, y = batch(number, dtype=torch.float32)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(x), y)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                loss.backward()
            optimizer.step()
        moments.append({f"{k} {n}": m for k, block in optimizer.blocks.items() for n, m in block.moments.items()})
    for name, moment in moments[0].items():
        assert moments[1][name].dtype == torch.float32
        torch.testing.assert_close(moments[1][name], moment, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_autocast_and_scaler(divergence: str | None) -> None:
    """float32 parameters, a forward pass in bfloat16, a GradScaler: close to float32 alone, no step lost."""
    reduced, exact = network(dtype=torch.float32), network(dtype=torch.float32)
    optimizer, plain = LLQR(sgd(reduced), reduced, divergence), LLQR(sgd(exact), exact, divergence)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(4):
        x, y = batch(number, dtype=torch.float32)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(reduced(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        train(exact, plain, [number])
    assert optimizer.stats.refits == 4
    for block in optimizer.blocks.values():
        assert all(tensor.dtype == torch.float32 for tensor in [*block.moments.values(), *block.inverse.values()])
    for name, p in exact.named_parameters():
        torch.testing.assert_close(reduced.get_parameter(name), p, rtol=0.1, atol=0.05)


def test_a_scaler_that_skips() -> None:
    """After an overflow the scaler doesn't step, and what was collected doesn't spoil the next one."""
    model = network(dtype=torch.float32)
    optimizer = LLQR(sgd(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number in range(3):
        x, y = batch(number, dtype=torch.float32)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x * (float("inf") if number == 0 else 1)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.stats.refits >= 1
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(m.isfinite().all() for m in moments_of(optimizer).values())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_bfloat16_parameters(structure: str, divergence: str | None) -> None:
    """The curvature and U in float32, of the structure that was asked for; parameters and momenta stay as they are."""
    model, single = network(dtype=torch.bfloat16), network(dtype=torch.float32)
    optimizer, other = (LLQR(sgd(each), each, divergence, structure) for each in (model, single))
    train(model, optimizer, range(3))
    train(single, other, range(3))
    assert optimizer.assignments() == other.assignments()
    assert optimizer.stats.refits == 3
    assert optimizer.stats.nonfinite == 0
    for block in optimizer.blocks.values():
        assert all(tensor.dtype == torch.float32 for tensor in [*block.moments.values(), *block.inverse.values()])
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("form", ["channels last", "transposed"])
@pytest.mark.parametrize("divergence", [None, "ngd"])
@pytest.mark.parametrize("fused", [False, True])
def test_parameters_in_another_memory_format(form: str, divergence: str | None, fused: bool) -> None:
    """The same steps as with contiguous ones, and the format stays."""

    def base(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, fused=fused)

    plain = convolutional() if form == "channels last" else network()
    model = copy.deepcopy(plain)
    if form == "channels last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        for p in model.parameters():
            p.data = p.data.t().contiguous().t()
    strides = {name: p.stride() for name, p in model.named_parameters()}
    first, second = (LLQR(base(each.parameters()), each, divergence) for each in (plain, model))
    for number in range(3):
        x, y = batch(number)
        x = torch.cat((x, x.sin()), 1).reshape(-1, 2, 2, 2) if form == "channels last" else x
        backward(plain, (x, y))
        backward(model, (x, y))
        first.step()
        second.step()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-9, atol=1e-11)
        assert model.get_parameter(name).stride() == strides[name]


def test_parts_of_a_weight_in_another_memory_format() -> None:
    torch.manual_seed(0)
    plain = Attention().double()
    model = copy.deepcopy(plain)
    model.attention.in_proj_weight.data = plain.attention.in_proj_weight.data.t().contiguous().t()
    for each in (plain, model):
        train(each, LLQR(sgd(each), each), range(3))
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_base_that_keeps_its_gradients(momentum: float) -> None:
    """What it was given is as it was, and so is its momentum: also around a structure that returns what it is given."""

    class Returning(Scalar):
        def apply(self, tensors: Any, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(nn.Linear(SIZE, CLASSES, bias=False)).double()
    for structure in (Returning(), "kfac", "scalar"):
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        kept: list[tuple[Tensor, Tensor]] = []

        def keep(base: Any, *_: Any, kept: list[tuple[Tensor, Tensor]] = kept) -> None:
            held = [p.grad for p in model.parameters()] + [state["momentum_buffer"] for state in base.state.values()]
            kept += [(tensor, tensor.clone()) for tensor in held if tensor is not None]

        base.register_step_post_hook(keep)
        optimizer = LLQR(base, model, structure=structure)
        for number in range(3):
            kept.clear()
            backward(model, batch(number))
            optimizer.step()
            assert kept
            assert all(torch.equal(held, then) for held, then in kept)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("size", [1.0, 1e9, 1e-9])
def test_float16_parameters(structure: str, size: float) -> None:
    """Steps are finite wherever the base's are, however large U is."""
    model = network(dtype=torch.float16)
    optimizer = LLQR(sgd(model), model, structure=structure, every=10)
    for number in range(4):
        backward(model, batch(number, dtype=torch.float16))
        optimizer.step()
        for block in optimizer.blocks.values() if number == 0 else ():
            list(block.inverse.values())[-1].mul_(size)
    assert all(p.dtype == torch.float16 and p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_ways_of_the_base(options: dict[str, bool]) -> None:
    """Fused or not, the same steps."""
    models = [network(), network()]
    for model, own in zip(models, [options, {}], strict=True):
        train(model, LLQR(torch.optim.AdamW(model.parameters(), lr=0.01, **own), model), range(4))
    for name, p in models[0].named_parameters():
        torch.testing.assert_close(models[1].get_parameter(name), p, rtol=1e-9, atol=1e-11)


# --- models ---


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Any


class Plain:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Telling(nn.Module):
    """Returns its loss with what it was computed from, in some container."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = network(), form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.inner(x)
        loss = functional.cross_entropy(logits, y)
        return {
            "tensor": loss,
            "tuple": (loss, logits),
            "dict": {"loss": loss, "logits": logits},
            "object": Output(loss, logits),
            "nested": {"all": [(loss,), {"logits": logits}], "count": 3},
            "object in a tuple": (Output, Output(loss, logits)),
            "object in a dict": {"inner": Output(loss, logits)},
            "object in an object": Outer(Outer([Output(loss, logits)])),
            "object in a plain one": Plain(Output(loss, logits)),
        }[self.form]


FORMS = ["tensor", "tuple", "dict", "object", "nested"]
FORMS += ["object in a tuple", "object in a dict", "object in an object", "object in a plain one"]


@pytest.mark.parametrize("form", FORMS)
def test_losses_inside_the_model(form: str) -> None:
    """The same steps as with the loss outside."""
    model, plain = Telling(form), network()
    optimizer, other = LLQR(sgd(model), model), LLQR(sgd(plain), plain)
    for number in range(3):
        x, y = batch(number)
        optimizer.zero_grad()
        output = model(x, y)
        loss = {
            "tensor": lambda out=output: out,
            "tuple": lambda out=output: out[0],
            "dict": lambda out=output: out["loss"],
            "object": lambda out=output: out.loss,
            "nested": lambda out=output: out["all"][0][0],
            "object in a tuple": lambda out=output: out[1].loss,
            "object in a dict": lambda out=output: out["inner"].loss,
            "object in an object": lambda out=output: out.inner.inner[0].loss,
            "object in a plain one": lambda out=output: out.inner.loss,
        }[form]()
        loss.backward()
        optimizer.step()
        train(plain, other, [number])
    assert_same(parameters_of(model.inner), parameters_of(plain))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(SIZE, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.left(hidden), self.right(hidden)


def test_several_losses() -> None:
    """Two outputs, a loss each: taken backward together, or one after the other, all maps are seen."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    other = copy.deepcopy(model)
    first, second = LLQR(sgd(model), model), LLQR(sgd(other), other)
    x, y = batch()
    left, right = model(x)
    (functional.cross_entropy(left, y) + right.square().mean()).backward()
    first.step()
    left, right = other(x)
    functional.cross_entropy(left, y).backward(retain_graph=True)
    right.square().mean().backward()
    second.step()
    assert set(first.blocks) == set(second.blocks) == {"body.weight", "left.weight", "right.weight"}
    for key in ("left.weight", "right.weight"):
        for name, moment in first.blocks[key].moments.items():
            torch.testing.assert_close(moment, second.blocks[key].moments[name])


def test_only_one_output_is_used() -> None:
    """A head whose output the loss doesn't use has no map and no gradient."""
    model = TwoHeads().double()
    optimizer = LLQR(sgd(model), model)
    x, y = batch()
    before = parameters_of(model)
    functional.cross_entropy(model(x)[0], y).backward()
    optimizer.step()
    assert set(optimizer.blocks) == {"body.weight", "left.weight"}
    assert torch.equal(before["right.weight"], model.right.weight)


def test_double_backward() -> None:
    """A gradient penalty: the graph is differentiated twice, and the step is finite and turned."""
    model, optimizer = fresh()
    for number in range(3):
        x, y = batch(number)
        x.requires_grad_()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        assert not any(m.requires_grad for sums in optimizer._collector.sums.values() for m in sums.tensors.values())
        optimizer.step()
    assert set(optimizer.blocks) == {"0.weight", "2.weight"}
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_model_called_twice() -> None:
    """Both calls of a step count, as two parts of one batch would."""
    (once, first), (twice, second) = fresh(), fresh()
    x, y = batch()
    functional.cross_entropy(once(x), y, reduction="sum").backward()
    parts = [functional.cross_entropy(twice(x[part]), y[part], reduction="sum") for part in (slice(2), slice(2, None))]
    (parts[0] + parts[1]).backward()
    first.step()
    second.step()
    for name, moment in moments_of(first).items():
        torch.testing.assert_close(moment, moments_of(second)[name])


@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_calls_between(divergence: str | None) -> None:
    """Evaluations without gradients, or in eval mode, between the backward pass and the step change nothing."""
    (plain, first), (looked_at, second) = fresh(divergence=divergence), fresh(divergence=divergence)
    for number in range(4):
        train(plain, first, [number])
        backward(looked_at, batch(number))
        with torch.no_grad():
            looked_at(batch(50)[0])
        with torch.inference_mode():
            looked_at(batch(51)[0])
        looked_at.eval()
        with torch.no_grad():
            looked_at(batch(52)[0])
        looked_at.train()
        second.step()
    assert_same(parameters_of(plain), parameters_of(looked_at))


def test_a_call_with_gradients_that_goes_nowhere() -> None:
    """A validation that forgot no_grad: it isn't taken backward, so it doesn't count."""
    (plain, first), (looked_at, second) = fresh(), fresh()
    for number in range(4):
        train(plain, first, [number])
        looked_at(batch(50)[0])
        backward(looked_at, batch(number))
        looked_at(batch(50)[0])
        second.step()
    assert_same(parameters_of(plain), parameters_of(looked_at))


@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_such_a_call_where_the_model_is_run_again(divergence: str | None) -> None:
    """Of a fused LSTM's calls, the one that a gradient came back to is run again."""
    torch.manual_seed(0)
    plain = Recurrent()
    looked_at = copy.deepcopy(plain)
    first, second = LLQR(sgd(plain), plain, divergence), LLQR(sgd(looked_at), looked_at, divergence)
    for number in range(3):
        train(plain, first, [number])
        backward(looked_at, batch(number, dtype=torch.float32))
        looked_at(batch(50, dtype=torch.float32)[0])
        second.step()
    assert second._collector.runs_again
    assert "lstm.weight_hh_l0" in second.blocks
    assert_same(parameters_of(plain), parameters_of(looked_at))


def test_a_model_that_only_passes_gradients_on() -> None:
    """As a discriminator in a generator's step: its parameters have no gradient, and that call doesn't count."""
    (plain, first), (passing, second) = fresh(), fresh()
    for number in range(4):
        train(plain, first, [number])
        passing.requires_grad_(False)
        passing(batch(50)[0].requires_grad_()).sum().backward()
        passing.requires_grad_(True)
        train(passing, second, [number])
    assert not second._collector.runs_again
    assert_same(parameters_of(plain), parameters_of(passing))


def test_an_input_that_is_written_over() -> None:
    """Where that leads nowhere, as in a validation that forgot no_grad, nothing is raised."""

    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.writes = network(), False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner[0](x).tanh()
            output = self.inner[2](hidden)
            if self.writes:
                hidden.detach().zero_()
            return output

    model, plain = Overwriting(), network()
    optimizer, other = LLQR(sgd(model), model), LLQR(sgd(plain), plain)
    for number in range(2):
        model.writes = True
        model(batch(50)[0])
        model.writes = False
        train(model, optimizer, [number])
        train(plain, other, [number])
    assert_same(parameters_of(model.inner), parameters_of(plain))


def test_backward_passes_of_a_step_before() -> None:
    """A graph that is taken backward after the step belongs to no curvature."""
    model = nn.Linear(SIZE, CLASSES).double()
    optimizer = LLQR(sgd(model), model)
    x, y = batch()
    late = functional.cross_entropy(model(x), y)
    backward(model, batch(1))
    optimizer.step()
    late.backward()
    assert optimizer._collector.sums == {}


def test_more_parameters() -> None:
    """`add_param_group`: the new layer is stepped from then on, with a map of its own at the next refit."""
    model = network()
    optimizer = LLQR(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    train(model, optimizer, [0])
    assert set(optimizer.blocks) == {"0.weight"}
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
    train(model, optimizer, [1])
    assert set(optimizer.blocks) == {"0.weight", "2.weight"}
    strange = nn.Parameter(torch.zeros(2))
    with pytest.raises(LLQRError, match="aren't in the model"):
        optimizer.add_param_group({"params": [strange]})
    assert len(optimizer.param_groups) == 2
    train(model, optimizer, [2])


def test_two_optimizers() -> None:
    """Each around its own parameters of one model; a bias that is the other's is no column of the weight."""
    model = network()
    own = [model[0].weight, model[2].weight, model[2].bias]
    first, second = LLQR(torch.optim.SGD(own, lr=0.1), model), LLQR(torch.optim.Adam([model[0].bias], lr=0.1), model)
    before = parameters_of(model)
    backward(model, batch())
    first.step()
    second.step()
    assert {key: block.map.bias for key, block in first.blocks.items()} == {"0.weight": None, "2.weight": "2.bias"}
    assert second.blocks == {}
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_frozen_from_the_start() -> None:
    """A layer that was frozen when LLQR was made, and is unfrozen later."""
    model = network()
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = LLQR(sgd(model), model)
    train(model, optimizer, [0])
    for p in model[0].parameters():
        p.requires_grad_()
    train(model, optimizer, [1])
    assert set(optimizer.blocks) == {"0.weight", "2.weight"}


def test_frozen_and_unfrozen() -> None:
    """A frozen layer isn't touched; unfrozen it has a map at the next refit."""
    model, optimizer = fresh()
    for p in model[0].parameters():
        p.requires_grad_(False)
    before = parameters_of(model)
    train(model, optimizer, [0])
    assert set(optimizer.blocks) == {"2.weight"}
    assert optimizer.assignments()["0.weight"] == "frozen"
    assert torch.equal(before["0.weight"], model[0].weight)
    for p in model[0].parameters():
        p.requires_grad_()
    train(model, optimizer, range(1, 4))
    assert set(optimizer.blocks) == {"0.weight", "2.weight"}
    for p in model[2].parameters():
        p.requires_grad_(False)
        p.grad = None
    held = model[2].weight.clone()
    train(model, optimizer, range(4, 7))
    assert torch.equal(held, model[2].weight)


@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_a_compiled_model(divergence: str | None) -> None:
    """The wrapper that torch.compile makes is given to LLQR: a second run sees the maps, and the steps are the plain ones."""
    plain, model = network(), network()
    compiled: Any = torch.compile(model, backend="aot_eager")
    first, second = LLQR(sgd(plain), plain, divergence), LLQR(sgd(model), compiled, divergence)
    for number in range(4):
        train(plain, first, [number])
        backward(compiled, batch(number))
        second.step()
    assert second.stats.refits == 4
    assert set(second.blocks) == {"0.weight", "2.weight"}
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-8, atol=1e-10)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[..., None])[0][:, -1])


@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_a_fused_lstm(divergence: str | None) -> None:
    """Its matrices are seen in a second run, whether the loop's own graph shows them or not (float32, float64)."""
    torch.manual_seed(0)
    exact = Recurrent().double()
    fused = copy.deepcopy(exact).float()
    blocks = []
    for model in (exact, fused):
        optimizer = LLQR(sgd(model, 0.0), model, divergence)
        train(model, optimizer, [0])
        assert optimizer.stats.refits == 1
        blocks.append(optimizer.blocks)
    assert set(blocks[0]) == set(blocks[1]) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "head.weight"}
    for key, block in blocks[0].items():
        for name, moment in block.moments.items():
            torch.testing.assert_close(blocks[1][key].moments[name].double(), moment, rtol=1e-3, atol=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant, self.runs = network(), reentrant, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.reentrant is None else checkpoint(self._run, x, use_reentrant=self.reentrant)

    def _run(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    """The same steps as without them; where a step doesn't refit, nothing is computed more than once more."""
    plain, model = Checkpointed(None), Checkpointed(reentrant)
    first, second = LLQR(sgd(plain), plain, every=3), LLQR(sgd(model), model, every=3)
    for number in range(4):
        x, y = batch(number)
        x.requires_grad_()
        before = model.runs
        for each, optimizer in [(plain, first), (model, second)]:
            optimizer.zero_grad()
            functional.cross_entropy(each(x), y).backward()
            optimizer.step()
        assert model.runs - before == (3 if number in (0, 3) else 2)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("divergence", [None, "ngd"])
def test_checkpoints_and_what_they_hold(reentrant: bool, divergence: str | None) -> None:
    """Dropout in a second run is that of the loop's own, so steps are as without checkpoints; and a refit runs no block again
    where its BatchNorm would see it."""
    plain, model = Checkpointed(None), Checkpointed(reentrant)
    for each in (plain, model):
        each.inner.insert(1, nn.Dropout(0.5))
    optimizers = [LLQR(sgd(each), each, divergence) for each in (plain, model)]
    for number in range(3):
        x, y = batch(number)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            torch.manual_seed(number)
            optimizer.zero_grad()
            functional.cross_entropy(each(x.requires_grad_()), y).backward()
            optimizer.step()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-8, atol=1e-10)
    models = []
    for wrapped in (True, False):
        each = Checkpointed(reentrant)
        each.inner.insert(1, nn.BatchNorm1d(5).double())
        base = sgd(each, 0.0)
        optimizer = LLQR(base, each, divergence) if wrapped else base
        for number in range(3):
            x, y = batch(number)
            functional.cross_entropy(each(x.requires_grad_()), y).backward()
            optimizer.step()
        models.append(each)
    for one, other in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_and_accumulation(reentrant: bool) -> None:
    """All micro-batches count, and none of those that were thrown away."""
    plain, model = Checkpointed(None), Checkpointed(reentrant)
    for each in (plain, model):
        optimizer = LLQR(sgd(each), each)
        for numbers in ((0, 1), (2, 3)):
            for thrown_away in (True, False):
                optimizer.zero_grad(set_to_none=numbers[0] == 0)
                for number in (4,) if thrown_away else numbers:
                    x, y = batch(number)
                    functional.cross_entropy(each(x.requires_grad_()), y).backward()
            optimizer.step()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-8, atol=1e-10)


# --- no trace ---


class Noisy(nn.Module):
    """Dropout, BatchNorm, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, CLASSES))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x)


@pytest.mark.parametrize("divergence", [None, "ngd", "gauss-newton"])
def test_nothing_else_is_changed(divergence: str | None) -> None:
    """A step with a refit leaves gradients, buffers, training flags, hooks and the random stream as they were."""
    torch.manual_seed(0)
    model = Noisy().double()
    model.layers[2].eval()
    model.layers[0].bias.requires_grad_(False)
    optimizer = LLQR(sgd(model), model, divergence)
    for number in range(3):
        calls = int(model.calls)
        if divergence == "gauss-newton":
            loss = optimizer.step(closure_of(model, optimizer, batch(number)))
            assert int(model.calls) == calls + 1
            assert loss.requires_grad
            assert float(model.layers[1].num_batches_tracked) == number + 1
            continue
        backward(model, batch(number))
        gradients = gradients_of(model)
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        flags = {name: module.training for name, module in model.named_modules()}
        hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
        stream = torch.get_rng_state()
        optimizer.step()
        assert_same(gradients_of(model), gradients)
        assert_same(dict(model.named_buffers()), buffers)
        assert {name: module.training for name, module in model.named_modules()} == flags
        assert {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()} == hooks
        assert torch.equal(torch.get_rng_state(), stream)
    assert optimizer.stats.refits == 3
    assert model.layers[0].bias.grad is None


class Watched(nn.Module):
    """Keeps a weak reference to an activation that a linear layer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, 5), nn.Linear(5, CLASSES)
        self.seen: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        self.seen.append(weakref.ref(hidden.untyped_storage()))
        return self.second(hidden)


def alive(model: Watched) -> int:
    gc.collect()
    return sum(reference() is not None for reference in model.seen)


@pytest.mark.parametrize("divergence", [None, "ngd"])
@pytest.mark.parametrize("keeps", ["nothing", "the loss"])
def test_activations_are_freed(divergence: str | None, keeps: str) -> None:
    """After the step no activation lives on, also where the loop still holds the loss (and with it the graph)."""
    model = Watched().double()
    optimizer = LLQR(sgd(model), model, divergence)
    kept = []
    for number in range(3):
        x, y = batch(number)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if keeps == "the loss":
            kept.append(loss)
        del loss
        assert alive(model) == 0


def test_activations_of_calls_that_lead_nowhere_are_freed() -> None:
    """No backward pass and no step ever comes: they go with the output."""
    model = Watched().double()
    optimizer = LLQR(sgd(model), model)
    for number in range(3):
        output = model(batch(number)[0])
        del output
    assert alive(model) == 0
    assert optimizer.stats.refits == 0


def test_the_hook_goes_with_the_optimizer() -> None:
    """Collected as garbage or closed, it leaves the model without a hook."""
    model = network()
    optimizer = LLQR(sgd(model), model)
    backward(model, batch())
    optimizer.step()
    assert len(model._forward_hooks) == 1
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert len(model._forward_hooks) == 0
    optimizer = LLQR(sgd(model), model)
    backward(model, batch())
    optimizer.step()
    optimizer.close()
    assert len(model._forward_hooks) == 0
    blocks = moments_of(optimizer)
    backward(model, batch(1))
    optimizer.step()
    assert_same(moments_of(optimizer), blocks)
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (1, 0)


def test_what_is_said() -> None:
    """`repr` tells what each parameter gets, before and after the first step."""
    model, optimizer = fresh()
    assert "not known before the first step" in repr(optimizer)
    train(model, optimizer, range(1))
    assert "0.weight: along U m, kfac" in repr(optimizer)
    assert "2.bias: along U m, with 2.weight" in repr(optimizer)
    usage = optimizer.memory_usage()
    assert usage["total"] == usage["preconditioner"] + usage["base"] > 0


def test_calls_that_go_on_from_each_other() -> None:
    """A recurrence by hand: A is the mean of a aᵀ over all calls and G the sum of b bᵀ, each call counted once."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).double()
    optimizer = LLQR(sgd(model), model)
    h, inputs, outputs = torch.randn(5, 4).double(), [], []
    for _ in range(4):
        inputs.append(h)
        outputs.append(model(h))
        outputs[-1].retain_grad()
        h = outputs[-1].tanh()
    h.square().mean().backward()
    optimizer.step()
    gradients = [output.grad for output in outputs if output.grad is not None]
    found = moments_of(optimizer)
    torch.testing.assert_close(found["weight rows"][0], sum(b.mT @ b for b in gradients))
    torch.testing.assert_close(found["weight columns"][0], sum(a.detach().mT @ a.detach() for a in inputs) / 20)


@pytest.mark.parametrize("kind", ["a batch thrown away", "a jacobian", "a gradient penalty"])
def test_gradients_that_no_step_takes(kind: str) -> None:
    """What isn't added to `.grad`, or was cleared from it by model.zero_grad(), is in no statistics."""
    torch.manual_seed(0)
    x = torch.randn(6, 4).double()
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    other = copy.deepcopy(model)
    first, second = LLQR(sgd(model), model), LLQR(sgd(other), other)
    if kind == "a batch thrown away":
        (100 * model(3 * x).square().mean()).backward()
        model.zero_grad()
    elif kind == "a jacobian":
        torch.autograd.functional.jacobian(lambda y: model(y).sum(), x)
    points = x.clone().requires_grad_()
    output = model(points)
    loss = output.square().mean()
    if kind == "a gradient penalty":
        torch.autograd.grad(1000 * output.sum(), points, retain_graph=True)
    loss.backward()
    other(x).square().mean().backward()
    first.step()
    second.step()
    for (name, found), expected in zip(moments_of(first).items(), moments_of(second).values(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def test_a_bias_that_is_added_elsewhere_for_once() -> None:
    """A linear layer on a transposed batch adds its bias by another node: the curvature that is known stays."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = LLQR(sgd(model), model)
    for turned in (False, False, True, False):
        x = torch.randn(5, 2, 4).double()
        optimizer.zero_grad()
        model(x.transpose(0, 1) if turned else x).square().mean().backward()
        optimizer.step()
    assert optimizer.blocks["weight"].refits == 4
    assert optimizer.blocks["weight"].map.bias == "bias"


def test_another_model_under_the_same_names() -> None:
    """Parameters that were replaced by larger ones are stepped by the base until the next refit."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    base = sgd(model)
    optimizer = LLQR(base, model, every=1000)
    model(torch.randn(5, 4).double()).square().mean().backward()
    optimizer.step()
    model[0] = nn.Linear(4, 7).double()
    base.param_groups[0]["params"] = list(model.parameters())
    model(torch.randn(5, 4).double()).square().mean().backward()
    before = parameters_of(model)
    optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in parameters_of(model).items())


def test_a_refit_listens_to_no_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closure that Gauss–Newton evaluates again for every product leaves no copies of the inputs behind."""
    copies = []
    monkeypatch.setattr("llqr.curvature.collector.copied", lambda value: copies.append(value) or value)
    model = nn.Linear(SIZE, CLASSES).double()
    optimizer = LLQR(sgd(model), model, divergence="gauss-newton")
    x, y = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.stats.refits == 1
    assert len(copies) == 2  # the arguments and the keywords of the one call of the step


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.RMSprop])
def test_another_dtype_in_mid_training(base: Any) -> None:
    """As with the base alone; U comes back at the next refit, with what was known."""
    model = network(dtype=torch.float32)
    optimizer = LLQR(base(model.parameters(), lr=0.01), model, every=2)
    train(model, optimizer, range(3))
    model.double()
    for k in (3, 4):
        optimizer.zero_grad()
        backward(model, batch(k))
        optimizer.step()
    assert all(block.refits == 3 for block in optimizer.blocks.values())
    assert {tensor.dtype for block in optimizer.blocks.values() for tensor in block.inverse.values()} == {torch.float64}
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_bias_that_is_frozen_in_mid_training() -> None:
    """The weight goes on along U m, from the next refit on without the bias."""
    model = network()
    optimizer = LLQR(sgd(model), model, every=2)
    train(model, optimizer, range(2))
    model[0].bias.requires_grad_(False)
    model[0].bias.grad = None
    train(model, optimizer, range(2, 4))
    assert optimizer.blocks["0.weight"].map.bias is None
    told = optimizer.assignments()
    assert told["0.bias"] == "frozen"
    assert told["0.weight"].startswith("along U m")


# --- loops that don't call the model as a whole ---


class Encoder(nn.Module):
    """Called by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:  # type: ignore[attr-defined]
            x = layer(x)
        return x


class Forwarding(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return x


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "forward": (network, lambda m, x: m.forward(x)),
    "a method": (Encoder, lambda m, x: m.encode(x)),
    "a method beside forward": (Forwarding, lambda m, x: m.encode(x)),
    "modules of a list": (lambda: nn.ModuleList([network()]), lambda m, x: m[0](x)),
    "modules of a dict": (lambda: nn.ModuleDict({"all": network()}), lambda m, x: m["all"](x)),
}


def train_by(call: Callable[[Any, Tensor], Tensor], model: nn.Module, optimizer: LLQR, steps: range) -> None:
    for number in steps:
        x, y = batch(number)
        optimizer.zero_grad()
        functional.cross_entropy(call(model, x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("case", CALLS)
def test_loops_that_call_what_is_inside(case: str) -> None:
    """The same steps as of a loop that calls the model, from the second on where that wasn't to be known; no hook stays."""
    make, call = CALLS[case]
    model, whole = make(), network()
    optimizer, truth = LLQR(sgd(model), model, every=2), LLQR(sgd(whole), whole, every=2)
    known = type(model).forward is nn.Module.forward
    if not known:
        with pytest.warns(LLQRWarning, match="modules inside count too"):
            train_by(call, model, optimizer, range(1))
        train(whole, truth.base, range(1))
        truth.load_state_dict({**truth.state_dict(), "llqr": {**truth.state_dict()["llqr"], "step": 1}})
    start = 0 if known else 1
    train_by(call, model, optimizer, range(start, END))
    train(whole, truth, range(start, END))
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (3 + known, 1 - known)
    assert_same(dict(enumerate(model.parameters())), dict(enumerate(whole.parameters())))  # type: ignore[arg-type]
    optimizer.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("saved", ["state", "copy"])
def test_loops_that_call_what_is_inside_go_on(saved: str) -> None:
    """Bit for bit, as if they hadn't been interrupted."""
    make, call = CALLS["a method beside forward"]
    model = make()
    optimizer = LLQR(sgd(model), model, every=2)
    with pytest.warns(LLQRWarning):
        train_by(call, model, optimizer, range(3))
    if saved == "copy":
        other, resumed = copy.deepcopy((model, optimizer))
    else:
        other = make()
        other.load_state_dict(model.state_dict())
        resumed = LLQR(sgd(other), other, every=2)
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train_by(call, model, optimizer, range(3, END))
    train_by(call, other, resumed, range(3, END))
    assert_same(parameters_of(other), parameters_of(model))
    assert resumed.stats.refits == optimizer.stats.refits == 3


class Reused(nn.Module):
    """Its first weight is in another thing too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh() * self.first.weight.exp().mean(0))  # type: ignore[no-any-return]


def test_parts_whose_weights_are_used_otherwise_too() -> None:
    """They are heard before what else uses them, and left to the base nevertheless."""
    torch.manual_seed(0)
    model = Reused().double()
    optimizer = LLQR(sgd(model), model, every=1)
    with pytest.warns(LLQRWarning, match="modules inside count too"):
        train_by(lambda m, x: m.forward(x), model, optimizer, range(1))
    train(model, optimizer, range(1, 3))
    assert set(optimizer.blocks) == {"second.weight"}
    assert optimizer.assignments()["first.weight"] == "by the base: used by Exp"


def test_parts_with_a_divergence_are_not_promised() -> None:
    model = nn.ModuleList([network()])
    optimizer = LLQR(sgd(model), model, "ngd")
    with pytest.warns(LLQRWarning, match="With a divergence, or a sharded model, it has to be"):
        train_by(lambda m, x: m[0](x), model, optimizer, range(2))
