"""Promise: a compiled model trains as it does uncompiled; LLQR breaks no graph and has none compiled anew."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR
from llqr.paper import PaperLLQR
from loops import assert_same, batch, blocks_of, closure_of, network, parameters_of, sgd, train


@pytest.fixture(autouse=True)
def _strictly() -> Iterator[None]:
    """Nothing compiled is left from before, and to compile anew is an error."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


class Masked(nn.Module):
    """A module of one's own, with an argument that may be given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(dtype=torch.float32)

    def forward(self, x: Tensor, mask: Tensor | None = None, doubled: bool = False) -> Tensor:
        x = x if mask is None else x * mask
        return self.inner(x + x if doubled else x)  # type: ignore[no-any-return]


class Around(nn.Module):
    """Holds the model that is trained, and is compiled as a whole."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(2 * x) + 1  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module, **options: Any) -> PaperLLQR:
    return LLQR.paper(sgd(model), model, **{"structure": "kfac", "every": 3, "steps": 3, **options})


WAYS = ["wrapper", "inside", "in place", "in place, later", "in another"]


@pytest.mark.parametrize("own", [False, True], ids=["torch's module", "module of one's own"])
@pytest.mark.parametrize("way", WAYS)
def test_one_graph_and_the_same_training(way: str, own: bool) -> None:
    """fullgraph: a graph that breaks is an error, and so is one that is compiled a second time."""
    trained = []
    for compiles in (False, True):
        model: Any = Masked() if own else network(dtype=torch.float32)
        loop: Any = Around(model) if way == "in another" else model
        given, options = model, {"backend": "eager", "fullgraph": True}
        if compiles and way in ("wrapper", "inside", "in another"):
            loop = torch.compile(loop, **options)
            given = loop if way == "wrapper" else model
        elif compiles and way == "in place":
            model.compile(**options)
        optimizer = optimizer_of(given)
        if compiles and way == "in place, later":
            model.compile(**options)
        train(loop, optimizer, range(8))
        assert optimizer.stats.refits == 3
        trained.append({**blocks_of(optimizer), **parameters_of(model)})
        if compiles:
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_same(*trained)


@pytest.mark.parametrize("way", WAYS[:4])
def test_arguments_by_position_and_by_name(way: str) -> None:
    trained = []
    for compiles in (False, True):
        model: Any = Masked()
        options = {"backend": "eager", "fullgraph": True}
        if way == "in place" and compiles:
            model.compile(**options)
        loop = torch.compile(model, **options) if compiles and way in ("wrapper", "inside") else model
        optimizer = optimizer_of(loop if way == "wrapper" else model)
        if way == "in place, later" and compiles:
            model.compile(**options)
        mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        for k in range(4):
            x, y = batch(k, dtype=torch.float32)
            optimizer.zero_grad()
            functional.cross_entropy(loop(x, mask=mask, doubled=True), y).backward()
            if k == 0:
                mask.copy_(mask.roll(1))  # what is held is a copy
            optimizer.step()
        assert optimizer.stats.refits == 2
        trained.append({**blocks_of(optimizer), **parameters_of(model)})
    assert_same(*trained)


@pytest.mark.parametrize("divergence", ["newton", "gauss-newton"])
def test_closures_that_call_a_compiled_model(divergence: str) -> None:
    trained = []
    for compiles in (False, True):
        model = network()
        loop: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        optimizer = optimizer_of(loop, divergence=divergence, every=2)
        for k in range(4):
            optimizer.step(closure_of(loop, optimizer, batch(k)))
        assert optimizer.stats.refits == 2
        trained.append(parameters_of(model))
    for name, p in trained[0].items():
        torch.testing.assert_close(trained[1][name], p, rtol=1e-9, atol=1e-12)


def test_names_are_those_without_the_wrapper() -> None:
    """Patterns, dampings and states serve the model compiled or not."""
    options: dict[str, Any] = {"structure": {"0": "diagonal", "*": "kfac"}, "damping": {"2": 0.1}, "every": 2}
    models = [network() for _ in range(3)]
    loops: list[Any] = [models[0], torch.compile(models[1], backend="eager"), torch.compile(models[2], backend="eager")]
    optimizers = [optimizer_of(loop, **options) for loop in loops]
    train(loops[0], optimizers[0], range(6))
    train(loops[1], optimizers[1], range(3))
    assert optimizers[1].preconditioner is not None
    assert set(optimizers[1].preconditioner.blocks) == {name for name, _ in models[0].named_parameters()}
    plain = network()  # from compiled to plain, and on to compiled
    other = optimizer_of(plain, **options)
    plain.load_state_dict(models[1].state_dict())
    other.load_state_dict(optimizers[1].state_dict())
    train(plain, other, range(3, 4))
    models[2].load_state_dict(plain.state_dict())
    optimizers[2].load_state_dict(other.state_dict())
    train(loops[2], optimizers[2], range(4, 6))
    assert_same(parameters_of(models[0]), parameters_of(models[2]))
    assert_same(blocks_of(optimizers[0]), blocks_of(optimizers[2]))


@pytest.mark.skipif(" " in torch.__file__, reason="torch's compiler doesn't quote the path of its own libraries")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++, and there is none")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own, of torch.jit
def test_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compiler itself: the same losses to float32's rounding, and nothing compiled a second time."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    losses: list[list[float]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = network(dtype=torch.float32)
        loop: Any = torch.compile(model, fullgraph=True) if compiles else model
        optimizer = optimizer_of(loop, structure="ekfac")
        losses.append([])
        for k in range(7):
            x, y = batch(k, dtype=torch.float32)
            optimizer.zero_grad()
            loss = functional.cross_entropy(loop(x), y)
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
        assert (optimizer.stats.refits, optimizer.stats.rejected) == (3, 0)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=1e-5)
