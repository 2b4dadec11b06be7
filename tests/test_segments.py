"""Promise: segments, example chunks and the whole batch give the same products, and what can't be a segment is told.

Equations: H = Jᵀ W J for KL and Gauss–Newton, H = ∇²L for Newton (a dense matrix, by torch.autograd.functional), on residual
blocks with BatchNorm and dropout, in training and in evaluation, in float64.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from llqr import LLQR, QuadraticModel
from llqr.divergences import KL, Divergence, GaussNewton, Intermediate, Newton, Renyi
from llqr.errors import LLQRError, NotTwiceDifferentiableError

LOSS = nn.CrossEntropyLoss()
EXACT = {"rtol": 1e-12, "atol": 1e-13}
DIVERGENCES: list[Divergence] = [KL(), KL(reduction="sum"), GaussNewton(), Newton(), Renyi(0.5), KL() + 0.5 * Newton()]


class Block(nn.Module):
    """With a BatchNorm, dropout, and a second input that is passed by name."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.drop = nn.BatchNorm2d(channels), nn.Dropout(0.4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.conv2(self.drop(functional.gelu(self.norm(self.conv1(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.scale = nn.Conv2d(2, 3, 3), nn.Parameter(torch.tensor(0.7))
        self.blocks, self.head = nn.ModuleList(Block(3) for _ in range(3)), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return self.head(x.relu().mean((2, 3)))  # type: ignore[no-any-return]


def network() -> Net:
    torch.manual_seed(0)
    model = Net().double()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 2, 6, 6).double())
    return model


def data(count: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 2, 6, 6).double(), torch.randint(4, (count,))


def same(one: QuadraticModel, other: QuadraticModel, products: int = 2) -> None:
    """The same g and H·v, v·Hv, again and again."""
    for number in range(products):
        generator = torch.Generator().manual_seed(number)
        v = {n: torch.randn(g.shape, generator=generator, dtype=g.dtype) for n, g in one.gradient.items()}
        expected, found = one.curvature(v), other.curvature(v)
        for name, g in one.gradient.items():
            torch.testing.assert_close(other.gradient[name], g, **EXACT)
            torch.testing.assert_close(found[name], expected[name], **EXACT)
        torch.testing.assert_close(other.curvature_along(v), one.curvature_along(v), **EXACT)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluated"])
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=repr)
def test_whole_is_examples_is_segments(divergence: Divergence, training: bool) -> None:
    model, (x, y) = network(), data()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def build(chunk_size: int | None = None, segments: Any = ()) -> QuadraticModel:
        torch.manual_seed(2)  # the dropout masks
        return QuadraticModel.build(
            model, x, y, LOSS, divergence, 0.1, chunk_size, training=training, segments=segments
        )

    whole = build()
    for segments in (["blocks.*"], ["blocks.0", "blocks.2"], ["blocks.*.conv?", "stem", "head"]):
        same(whole, build(segments=segments))
    for segments in ([], ["blocks.*"]) if not training else ():  # batch statistics and masks are of the whole batch
        same(whole, build(4, segments))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluated"])
def test_newton_in_segments_is_the_dense_hessian(training: bool) -> None:
    """H·v of segments against torch's Hessian of the loss, with the same masks and batch statistics."""
    model, (x, y) = network().train(training), data(4)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        named = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        torch.manual_seed(2)
        held = {name: b.clone() for name, b in buffers.items()}
        return LOSS(torch.as_tensor(functional_call(model, {**named, **held}, (x,))), y)

    point = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    hessian = torch.as_tensor(torch.autograd.functional.hessian(loss, point))
    torch.manual_seed(2)
    q = QuadraticModel.build(model, x, y, LOSS, Newton(), segments=["blocks.*"])
    v = {name: torch.randn(shape).double() for name, shape in shapes.items()}
    found = torch.cat([part.reshape(-1) for part in q.curvature(v).values()])
    expected = hessian @ torch.cat([part.reshape(-1) for part in v.values()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_nothing_of_a_segment_is_kept() -> None:
    """What a block computes inside, here the input of its second convolution, is gone after the recording and each product."""
    model, (x, y) = network().eval(), data()
    inside: list[StorageWeakRef] = []
    for block in model.blocks:
        assert isinstance(block, Block)
        block.drop.register_forward_hook(lambda m, args, out: inside.append(StorageWeakRef(out.untyped_storage())))
    for divergence in (KL(), Newton()):
        for segments, alive in (((), 3), (["blocks.*"], 0)):
            q = QuadraticModel.build(model, x, y, LOSS, divergence, segments=segments)
            for _ in range(2):
                gc.collect()
                assert sum(not storage.expired() for storage in inside) == alive, (divergence, segments)
                q.curvature(q.gradient)
            del q
            gc.collect()
            inside.clear()


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
def test_refits_in_segments(divergence: str) -> None:
    """Whole, in segments, in example chunks and in both: the same training, by closures under dropout and BatchNorm."""
    trained = []
    for options in ({}, {"segments": ["blocks.*"]}, {"chunk_size": 4}, {"chunk_size": 4, "segments": ["blocks.*"]}):
        model = network()
        optimizer = LLQR.paper(
            torch.optim.SGD(model.parameters(), lr=0.1), model, divergence, "kfac", 2, steps=3, **options
        )
        for number in range(4):
            torch.manual_seed(10 + number)
            x, y = torch.randn(6, 2, 6, 6).double(), torch.randint(4, (6,))

            def closure(x: Tensor = x, y: Tensor = y, model: nn.Module = model) -> Tensor:
                model.zero_grad()
                loss = LOSS(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        assert optimizer.stats.refits == 2
        trained.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], **EXACT)
    assert "segments=['blocks.*']" in repr(optimizer)


@pytest.mark.parametrize("divergence", ["newton", "gauss-newton", Newton() + 0.5 * KL()], ids=repr)
@pytest.mark.parametrize("kind", ["classes", "ignored", "tokens"])
def test_a_closures_loss_in_chunks(divergence: Any, kind: str) -> None:
    """J and U of a refit in chunks are those of the whole batch, whatever the loss counts; five examples, two at a time."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 3, 4).double(), torch.randint(3, (5, 3))
    if kind == "ignored":
        y[1:3] = -100
    fitted = []
    for chunk_size in (None, 2):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        optimizer = LLQR.paper(
            torch.optim.SGD(model.parameters(), lr=0.1), model, divergence, "diagonal", steps=4, chunk_size=chunk_size
        )

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            output = model(x) if kind != "tokens" else model(x.flatten(0, 1)).reshape(5, 3, 3)
            loss = functional.cross_entropy(output.flatten(0, 1), y.flatten())
            loss.backward()
            return loss

        optimizer.step(closure)
        assert optimizer.stats.refits == 1
        fitted.append(optimizer)
    for key, block in fitted[0].preconditioner.blocks.items():
        torch.testing.assert_close(fitted[1].preconditioner.blocks[key]["d"], block["d"], **EXACT)
    assert fitted[1].stats.objective_after == pytest.approx(fitted[0].stats.objective_after, rel=1e-12)
    assert not torch.equal(fitted[0].preconditioner.blocks["0.weight"]["d"], torch.ones(6, 4))


def test_closures_that_cannot_be_cut() -> None:
    """A loss that compares examples, and one that calls the model twice."""
    model, x = nn.Linear(4, 3).double(), torch.randn(6, 4).double()
    optimizer = LLQR.paper(torch.optim.SGD(model.parameters(), lr=0.1), model, "newton", chunk_size=2)

    def backward(loss: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss.backward()
        return loss

    with pytest.raises(LLQRError, match="compares examples"):
        optimizer.step(lambda: backward(model(x).square().mean(0).exp().sum()))
    with pytest.raises(LLQRError, match="calls the model 2 times"):
        optimizer.step(lambda: backward((model(x) * model(x).sin()).mean()))


# --- what a segment may be ---


class Around(nn.Module):
    """One module inside a model; `use` says what else the model does with it."""

    def __init__(
        self, inner: nn.Module, use: Callable[[Any, Tensor], Tensor] = lambda model, x: model.inner(x)
    ) -> None:
        super().__init__()
        self.first, self.inner, self.head, self.use = nn.Linear(3, 4), inner, nn.Linear(4, 2), use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, self.first(x)))  # type: ignore[no-any-return]


class Holding(nn.Module):
    """Keeps what it computes in an attribute, or reads a tensor from one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor, read: bool = False) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        if not read:
            self.kept = y.exp()
        return y * self.kept if read else y


class Square(torch.autograd.Function):
    """A backward formula that hides its dependence on x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        return x * x

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return 2 * ctx.x * u


class Hiding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def leak(model: Any, x: Tensor) -> Tensor:
    model.inner(x)
    return model.inner.kept  # type: ignore[no-any-return]


def read(model: Any, x: Tensor) -> Tensor:
    model.inner.kept = x.exp()
    return model.inner(x, read=True)  # type: ignore[no-any-return]


def changed_later(model: Any, x: Tensor) -> Tensor:
    x = x * 2
    return model.inner(x) + x.mul_(3)  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "a tuple": (Around(Lambda(lambda x: (x, x)), lambda m, x: m.inner(x)[0]), "returns a tuple"),
    "in place": (Around(Lambda(lambda x: x.mul_(2))), "changes what it is called with"),
    "another's tensor": (Around(Holding(), read), "reads a tensor that is neither"),
    "a tensor left behind": (Around(Holding(), leak), "from inside of segment 'inner'"),
    "an input changed later": (Around(nn.Tanh(), changed_later), "is changed in place later"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("divergence", [KL(), Newton()], ids=repr)
def test_what_cannot_be_a_segment(case: str, divergence: Divergence) -> None:
    model, message = REFUSED[case]
    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    QuadraticModel.build(model, x, y, LOSS, divergence)
    with pytest.raises(LLQRError, match=message):
        QuadraticModel.build(model, x, y, LOSS, divergence, segments=["inner"])


@pytest.mark.parametrize("divergence", [KL(), Newton()], ids=repr)
def test_segments_of_all_kinds(divergence: Divergence) -> None:
    """Used twice, with a tied weight, frozen, checkpointed inside, an LSTM, attention, gradients in the forward pass."""
    tied = nn.Linear(4, 4)
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)

    def sequence(model: Any, x: Tensor) -> Tensor:
        out = model.inner(torch.stack([x, x.sin()], 1))
        return (out[0] if isinstance(out, tuple) else out).mean(1)  # type: ignore[no-any-return]

    def penalised(x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner.sin().sum(), inner)
        return x * slope

    class Recurrent(nn.LSTM):
        def forward(self, *args: Any) -> Any:  # one tensor
            return super().forward(*args)[0]

    cases: dict[str, nn.Module] = {
        "twice": Around(nn.Sequential(nn.Linear(4, 4), nn.Softplus()), lambda m, x: m.inner(m.inner(x))),
        "tied": Around(nn.Sequential(tied, nn.Tanh(), tied), lambda m, x: m.inner(x) @ m.inner[0].weight),
        "frozen": Around(nn.Sequential(frozen, nn.Tanh())),
        "inplace inside": Around(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))),
        "lstm": Around(Recurrent(4, 4, batch_first=True), sequence),
        "transformer": Around(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), sequence),
        "a gradient inside": Around(Lambda(penalised)),
        "weight norm": Around(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
    }
    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    for model in cases.values():
        whole, segments = (
            QuadraticModel.build(model, x, y, LOSS, divergence, 0.1, segments=s) for s in ((), ["inner"])
        )
        same(whole, segments)


def test_formulas_that_hide_inside_of_a_segment() -> None:
    """Newton's products would be wrong and are refused; products with J are right."""
    model, x, y = Around(Hiding(4, 4)), torch.randn(5, 3).double(), torch.randint(2, (5,))
    with pytest.raises(NotTwiceDifferentiableError, match="Square"):
        QuadraticModel.build(model, x, y, LOSS, Newton(), segments=["inner"])
    plain = Around(nn.Sequential(nn.Linear(4, 4), Lambda(torch.square)))
    plain.load_state_dict({k.replace("inner.", "inner.0."): t for k, t in model.state_dict().items()})
    expected = QuadraticModel.build(plain, x, y, LOSS, KL())
    found = QuadraticModel.build(model, x, y, LOSS, KL(), segments=["inner"])
    v = {name: torch.randn_like(g) for name, g in found.gradient.items()}
    product = found.curvature(v)
    right = expected.curvature({k.replace("inner.", "inner.0."): t for k, t in v.items()})
    for name, value in product.items():
        torch.testing.assert_close(value, right[name.replace("inner.", "inner.0.")], **EXACT)


def test_names_of_segments() -> None:
    model, (x, y) = network(), data()
    for segments, message in ((["block.*"], "unknown module in segments"), ("blocks.*", "is a list"), (3, "is a list")):
        with pytest.raises(LLQRError, match=message):
            QuadraticModel.build(model, x, y, LOSS, KL(), segments=segments)  # type: ignore[arg-type]
        with pytest.raises(LLQRError, match=message):
            LLQR.paper(torch.optim.SGD(model.parameters(), lr=0.1), model, segments=segments)  # type: ignore[arg-type]
    with pytest.raises(LLQRError, match=r"metric at 'blocks.0.norm' is inside of segment 'blocks.0'"):
        QuadraticModel.build(model, x, y, LOSS, KL() + Intermediate({"blocks.0.norm": 1.0}), segments=["blocks.*"])
    divergence = KL() + Intermediate({"blocks.0": 0.5})
    whole, cut = (
        QuadraticModel.build(model, x, y, LOSS, divergence, training=False, segments=s) for s in ((), ["blocks.*"])
    )
    same(whole, cut)
