"""Promise: autocast, GradScaler and half-precision models train as with the base, and U is learned in float32 all the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llqr import LLQR, QuadraticModel, fit
from llqr.curvature.precision import AutocastOff
from llqr.divergences import KL, Newton
from llqr.errors import LLQRWarning
from llqr.paper import PaperLLQR
from llqr.solvers import ScaleFree
from loops import assert_same, batch, blocks_of, gradients_of, network, never, parameters_of, sgd, spoil

HALF = [torch.bfloat16, torch.float16]


def wrapped(model: nn.Module, **options: Any) -> PaperLLQR:
    return LLQR.paper(sgd(model), model, **{"structure": "kfac", "every": 2, "steps": 3, **options})


def scaled_training(
    optimizer: torch.optim.Optimizer, model: nn.Module, dtype: torch.dtype, spoilt: int, unscale: bool, micro: int
) -> tuple[list[bool], float]:
    """Eight steps under autocast with a scaler, an overflow in one of them: which moved the parameters, and the scale.

    A step adds up the gradients of so many micro-batches; the overflow is in the first.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    moved = []
    for k in range(8):
        before = parameters_of(model)
        optimizer.zero_grad()
        for part in range(micro):
            x, y = batch(10 * k + part, dtype=torch.float32)
            with torch.autocast("cpu", dtype):
                loss = functional.cross_entropy(model(x), y) / micro
            scaler.scale(loss).backward()
            if k == spoilt and part == 0:
                spoil(model, "0.weight")
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        moved.append(any(not torch.equal(p, before[name]) for name, p in model.named_parameters()))
    return moved, scaler.get_scale()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(
    "base", [sgd, lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)], ids=["sgd", "fused"]
)
def test_an_overflow_is_as_with_the_base(
    dtype: torch.dtype, unscale: bool, micro: int, base: Callable[..., Any]
) -> None:
    """U = I: parameters, scale and the step left out bit for bit; fitted: the same steps are left out, and the same scale."""
    found = {}
    for way in ("alone", "identity", "fitted"):
        model = network(dtype=torch.float32)
        optimizer = base(model)
        if way != "alone":
            optimizer = LLQR.paper(optimizer, model, structure="kfac", every=never if way == "identity" else 2, steps=3)
        found[way] = (*scaled_training(optimizer, model, dtype, 4, unscale, micro), parameters_of(model), optimizer)
    moved, scale, parameters, _ = found["alone"]
    assert moved == [k != 4 for k in range(8)]
    for way in ("identity", "fitted"):
        assert found[way][:2] == (moved, scale)
        assert found[way][3].state_dict()["llqr"]["step"] == 7
    assert_same(parameters, found["identity"][2])
    assert found["fitted"][3].stats.refits == 4
    assert (found["fitted"][3].stats.nonfinite, found["fitted"][3].stats.rejected) == (0, 0)


@pytest.mark.parametrize("divergence", [KL(), Newton()], ids=repr)
def test_the_scale_reaches_nothing(divergence: Any) -> None:
    """J is of the unscaled gradient: in float32 without autocast, a power of two for the scale changes no bit of U."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(dtype=torch.float32)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.inner(x)
            return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}

    found = []
    for scale in (None, 2.0**16):
        model = WithLoss()
        optimizer = wrapped(model, divergence=divergence)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for k in range(3):
            x, y = batch(k, dtype=torch.float32)
            optimizer.zero_grad()
            scaler.scale(model(x, y)["loss"]).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.stats.refits == 2
        found.append({**blocks_of(optimizer), **parameters_of(model)})
    assert_same(*found)


def refitted(model: nn.Module, forward: Callable[[], Any], **options: Any) -> PaperLLQR:
    """An optimizer that has refitted once at a forward pass, without warnings."""
    optimizer = wrapped(model, ema=0.0, **options)
    functional.cross_entropy(forward(), batch()[1]).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert optimizer.stats.refits == 1
    return optimizer


def fitted(model: nn.Module, gradients: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """U of the same model in float32, at a gradient that is given."""
    optimizer = wrapped(model, ema=0.0, **options)
    model(batch(dtype=torch.float32)[0]).log_softmax(1)[:, 0].sum().backward()
    for name, p in model.named_parameters():
        p.grad = gradients[name].float()
    optimizer.step()
    return blocks_of(optimizer)


@pytest.mark.parametrize("dtype", HALF)
def test_a_refit_knows_nothing_of_autocast(dtype: torch.dtype) -> None:
    """U after a step under autocast is that of the float32 model, at the gradient that autocast gave, to the last bit."""
    model, x = network(dtype=torch.float32), batch(dtype=torch.float32)[0]
    with torch.autocast("cpu", dtype):
        optimizer = refitted(model, lambda: model(x))
    assert_same(blocks_of(optimizer), fitted(network(dtype=torch.float32), gradients_of(model)))


@pytest.mark.parametrize("dtype", HALF)
def test_inputs_in_half_precision(dtype: torch.dtype) -> None:
    """What autocast's layers hand on to the model that is trained is bf16 or fp16, which its float32 layers take there only."""
    model, x = network(dtype=torch.float32), batch(dtype=torch.float32)[0]
    with torch.autocast("cpu", dtype):
        optimizer = refitted(model, lambda: model(x.to(dtype)))
    twin = network(dtype=torch.float32)
    q = QuadraticModel.build(twin, x.to(dtype).float(), None, None, KL(), gradient=gradients_of(model))
    exact = wrapped(twin, ema=0.0)
    for name, p in twin.named_parameters():
        p.grad = q.gradient[name]
    exact.refit(x.to(dtype).float())
    assert_same(blocks_of(optimizer), blocks_of(exact))


class Casting(nn.Module):
    """Enters autocast in its own forward, as accelerate makes a model do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = network(dtype=torch.float32), dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.inner(x).float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", HALF)
def test_a_model_that_enters_autocast_itself(dtype: torch.dtype) -> None:
    model = Casting(dtype)
    optimizer = refitted(model, lambda: model(batch(dtype=torch.float32)[0]))
    gradients = {name.removeprefix("inner."): g for name, g in gradients_of(model).items()}
    found = {key.removeprefix("inner."): block for key, block in blocks_of(optimizer).items()}
    assert_same(found, fitted(network(dtype=torch.float32), gradients))


@pytest.mark.parametrize("structure", ["scalar", "diagonal", "kfac", "ekfac"])
@pytest.mark.parametrize("dtype", HALF)
def test_models_kept_in_half_precision(dtype: torch.dtype, structure: str) -> None:
    """U is that of the float32 model of the same numbers, to the last bit; what the base gets is of the parameters' dtype."""
    model, x = network(dtype=dtype), batch(dtype=dtype)[0]
    seen = []
    twin = network(dtype=dtype).float()
    optimizer = wrapped(model, structure=structure, ema=0.0)
    optimizer.base.register_step_pre_hook(lambda base, *_: seen.extend(p.grad for p in base.param_groups[0]["params"]))
    functional.cross_entropy(model(x), batch()[1]).backward()
    held = gradients_of(model)
    optimizer.step()
    assert {g.dtype for g in seen if g is not None} == {dtype}
    assert any(not torch.equal(g, h) for g, h in zip(seen, held.values(), strict=True) if g is not None)
    assert_same(held, gradients_of(model))
    other = wrapped(twin, structure=structure, ema=0.0)
    for name, p in twin.named_parameters():
        p.grad = held[name].float()
    other.refit(x.float())
    assert {t.dtype for t in blocks_of(optimizer).values()} == {torch.float32}
    assert_same(blocks_of(optimizer), blocks_of(other))


def test_a_quadratic_model_in_half_precision() -> None:
    """g, Hv and m(δ) are float32, of the model with the same numbers; directions may come in the parameters' dtype."""
    model, (x, y) = network(dtype=torch.bfloat16), batch(dtype=torch.bfloat16)
    single = network(dtype=torch.bfloat16).float()
    for divergence in (KL(), Newton()):
        q, other = (
            QuadraticModel.build(m, inputs, y, functional.cross_entropy, divergence)
            for m, inputs in ((model, x), (single, x.float()))
        )
        assert_same(q.gradient, other.gradient)
        v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        assert_same(q.curvature(v), other.curvature(v))
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(q.curvature(v), other.curvature(v))
            assert float(q.value(v)) == float(other.value(v))


class Stubborn(nn.Module):
    """Writes its dtype out, and so runs in no other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).to(torch.bfloat16))  # type: ignore[no-any-return]


def test_models_that_run_in_no_other_precision() -> None:
    """They are linearised as they are, and told of; U is float32 and near that of float32."""
    torch.manual_seed(0)
    model = Stubborn().bfloat16()
    plain = copy.deepcopy(nn.Sequential(model.first, nn.Tanh(), model.second)).float()
    x, y = batch(dtype=torch.bfloat16)
    optimizer = wrapped(model, structure="diagonal", ema=0.0)
    functional.cross_entropy(model(x), y).backward()
    with pytest.warns(LLQRWarning, match="in its own precision"):
        optimizer.step()
    assert optimizer.stats.refits == 1
    gradients = {
        new: gradients_of(model)[old]
        for new, old in zip(dict(plain.named_parameters()), dict(model.named_parameters()), strict=True)
    }
    expected = list(fitted(plain, gradients, structure="diagonal").values())
    for block, other in zip(blocks_of(optimizer).values(), expected, strict=True):
        assert block.dtype == torch.float32
        assert float((block - other).norm()) < 0.1 * float(other.norm())


def test_a_mistake_is_no_matter_of_precision() -> None:
    """What fails in every precision fails with its own error, in float32 without a word about precision."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        QuadraticModel.build(
            network(dtype=torch.float32), torch.randn(3, 7), torch.zeros(3).long(), functional.cross_entropy, KL()
        )


def test_frozen_weights_stay_as_they_are() -> None:
    """Adapters on a frozen bf16 model: it isn't copied to float32, which may be more than there is room for."""
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.dtype)
            return super().forward(x.to(self.weight.dtype))

    model = nn.Sequential(Watched(4, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()
    model[0].requires_grad_(False)
    optimizer = LLQR.paper(torch.optim.SGD(model[2].parameters(), lr=0.1), model, structure="kfac", steps=3)
    x, y = batch(dtype=torch.bfloat16)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert set(seen) == {torch.bfloat16}
    assert len(seen) > 1
    assert {t.dtype for t in blocks_of(optimizer).values()} == {torch.float32}


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize("keep", ["bf16", "autocast"])
def test_checkpointed_blocks(keep: str, divergence: str) -> None:
    """They are run as all others are, in float32."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(dtype=torch.bfloat16 if keep == "bf16" else torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=keep == "autocast"):
                return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Checkpointed()
    x, y = batch(dtype=torch.bfloat16 if keep == "bf16" else torch.float32)
    q = QuadraticModel.build(network(dtype=x.dtype).float(), x.float(), y, functional.cross_entropy, divergence)
    v = {name: torch.randn_like(g) for name, g in q.gradient.items()}
    other = QuadraticModel.build(model, x, y, functional.cross_entropy, divergence)
    product = other.curvature({f"inner.{name}": direction for name, direction in v.items()})
    for name, expected in q.curvature(v).items():
        assert product[f"inner.{name}"].dtype == torch.float32
        torch.testing.assert_close(product[f"inner.{name}"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("divergence", ["newton", "gauss-newton"])
def test_closures_with_autocast_in_them(divergence: str) -> None:
    """The closure's own autocast is off while U is fitted: J is that of float32, at the gradient that autocast gave."""
    model, (x, y) = network(dtype=torch.float32), batch(dtype=torch.float32)
    optimizer = wrapped(model, divergence=divergence, solver=ScaleFree(), ema=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.stats.refits == 1
    q = QuadraticModel.build(
        network(dtype=torch.float32), x, y, functional.cross_entropy, divergence, gradient=gradients_of(model)
    )
    for key, block in fit(q, "kfac", ScaleFree(), 3).blocks.items():
        for name, tensor in block.items():
            torch.testing.assert_close(blocks_of(optimizer)[f"{key} {name}"], tensor, rtol=1e-4, atol=1e-6)


def test_autocast_off_is_over_when_it_is_over() -> None:
    a = torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with AutocastOff("cpu") as mode:
            assert (a @ a).dtype == torch.float32
        assert mode.met
        assert (a @ a).dtype == torch.bfloat16


def digits() -> tuple[Tensor, Tensor]:
    pictures, labels = load_digits(return_X_y=True)
    return torch.tensor(pictures / 16, dtype=torch.float32), torch.tensor(labels)


def curve(precision: str, seed: int) -> list[float]:
    """The mean loss of each epoch on digits, in float32, under autocast, or of a model kept in bf16."""
    torch.manual_seed(seed)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    keep = torch.bfloat16 if precision == "kept" else torch.float32
    model.to(keep)
    optimizer = LLQR.paper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, every=10, steps=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=precision == "float16")
    dtype = torch.float16 if precision == "float16" else torch.bfloat16
    losses = []
    for _ in range(3):
        total = 0.0
        order = torch.randperm(len(x))
        for rows in order[:1792].split(128):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=precision in ("float16", "bfloat16")):
                loss = functional.cross_entropy(model(x[rows].to(keep)).float(), y[rows])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += float(loss.detach()) / 14
        losses.append(total)
    assert optimizer.stats.refits == 5
    return losses


def test_loss_curves_are_within_noise_of_float32() -> None:
    """At every epoch, the mean over seeds differs from float32's by a fifth of what seeds differ by, at most."""
    seeds = range(3)
    single = torch.tensor([curve("float32", seed) for seed in seeds])
    assert single[:, -1].max() < 0.5 * single[:, 0].min()  # they learn
    for precision in ("bfloat16", "float16", "kept"):
        half = torch.tensor([curve(precision, seed) for seed in seeds])
        assert ((half - single).mean(0).abs() < 0.2 * single.std(0)).all(), precision


def test_frozen_half_precision_layers_beside_float32_ones_under_autocast() -> None:
    """Only autocast makes their dtypes fit, and a refit has none: it copies the frozen ones to float32, and says so."""
    torch.manual_seed(0)
    frozen = nn.Linear(3, 5).bfloat16().requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))
    inputs, targets = torch.randn(8, 3), torch.randint(4, (8,))
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = LLQR.paper(torch.optim.SGD(learned, lr=0.1), model, structure="kfac", every=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs).float(), targets)
    loss.backward()
    with pytest.warns(LLQRWarning, match="copied to float32"):
        optimizer.step()
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (1, 0)
    assert frozen.weight.dtype == torch.bfloat16
