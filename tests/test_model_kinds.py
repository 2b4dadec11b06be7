"""Modules that torch treats in a way of its own: right numbers where that can be, else a word on what to write instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llqr import LLQR, QuadraticModel, cg_step, exact_step
from llqr.divergences import KL, Divergence, GaussNewton, Intermediate, Newton
from llqr.errors import LLQRError, NotTwiceDifferentiableError

LOSS = nn.CrossEntropyLoss()
DIVERGENCES = [KL(), GaussNewton(), Newton()]


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(6, (5, 3)), torch.randint(2, (5,))


def same(one: QuadraticModel, other: QuadraticModel, prefix: str = "") -> None:
    """The same g, and the same product with a random direction."""
    v = {name: torch.randn_like(g) for name, g in one.gradient.items()}
    product = one.curvature({name: v[name] for name in one.gradient})
    expected = other.curvature({prefix + name: value for name, value in v.items()})
    for name in v:
        torch.testing.assert_close(other.gradient[prefix + name], one.gradient[name], rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(expected[prefix + name], product[name], rtol=1e-10, atol=1e-13)


def embedding(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(6, 4, **options), nn.Flatten(), nn.Linear(12, 2)).double()


class Tied(nn.Module):
    """An embedding that renormalises, and an output layer that reads what it left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, max_norm=0.7)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).sum(1).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_embeddings_that_renormalise(divergence: Divergence, size: int | None, frozen: bool) -> None:
    """Forward renormalises the rows it looks up, in place: the numbers are of such rows, and the model is untouched."""
    inputs, targets = tokens()
    for model in (embedding(max_norm=0.7), Tied().double()):
        if frozen:
            next(model.parameters()).requires_grad_(False)
        before = copy.deepcopy(model.state_dict())
        if size is not None and isinstance(model, Tied):  # the output layer reads rows that other chunks renormalise
            with pytest.raises(LLQRError, match="depends on the other examples"):
                QuadraticModel.build(model, inputs, targets, LOSS, divergence, 0.1, size)
            continue
        q = QuadraticModel.build(model, inputs, targets, LOSS, divergence, 0.1, size)
        q.curvature(q.gradient)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        after = copy.deepcopy(model)
        LOSS(after(inputs), targets).backward()
        for name, p in after.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(q.gradient[name], p.grad)
        for module in after.modules():
            if isinstance(module, nn.Embedding):
                module.max_norm = None
        same(q, QuadraticModel.build(after, inputs, targets, LOSS, divergence, 0.1, size))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_renormalise_and_are_not_stepped(kind: Any) -> None:
    """Held fixed by `only`, though they could be stepped: they stay as they are, and the numbers are of renormalised rows."""
    inputs, targets = tokens()
    model = nn.Sequential(kind(6, 4, max_norm=0.7), nn.Flatten(), nn.LazyLinear(2)).double()
    model(inputs)
    model[0].weight.data.mul_(3.0)
    before = model[0].weight.detach().clone()
    for divergence in DIVERGENCES:
        for size in (None, 2):
            q = QuadraticModel.build(model, inputs, targets, LOSS, divergence, 0.1, size, only=["2.weight", "2.bias"])
            q.curvature(q.gradient)
            assert torch.equal(model[0].weight, before)
            after = copy.deepcopy(model)
            after[0].weight.requires_grad_(False)
            same(q, QuadraticModel.build(after, inputs, targets, LOSS, divergence, 0.1))


def test_the_exact_step_leaves_embeddings_alone() -> None:
    inputs, targets = tokens()
    for frozen in (False, True):
        model = embedding(max_norm=0.7)
        model[0].weight.requires_grad_(not frozen)
        before = model[0].weight.detach().clone()
        for step in (exact_step, cg_step):
            step(model, inputs, targets, LOSS, KL(), 0.1)
            assert torch.equal(model[0].weight, before)


class Restless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(1.0)
        return self.inner(x)  # type: ignore[no-any-return]


def test_models_that_change_their_parameters() -> None:
    inputs, targets = torch.randn(5, 3), torch.randint(2, (5,))
    with pytest.raises(LLQRError, match=r"changes its parameter 'inner.weight'"):
        QuadraticModel.build(Restless(), inputs, targets, LOSS, KL())


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_sparse_gradients(divergence: Divergence) -> None:
    """`sparse=True` is about how a gradient is stored: the numbers are those of a dense one."""
    inputs, targets = tokens()
    dense, sparse = embedding(padding_idx=1), embedding(padding_idx=1, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    for size in (None, 2):
        builds = [QuadraticModel.build(m, inputs, targets, LOSS, divergence, 0.1, size) for m in (dense, sparse)]
        same(*builds)


class Bag(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, 4, **options), nn.Linear(4, 2)

    def forward(self, x: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.head(self.bag(x, offsets, weights).tanh())  # type: ignore[no-any-return]


class Spread(nn.Module):
    """A bag by what it means."""

    def __init__(self, bag: Bag) -> None:
        super().__init__()
        self.bag, self.head = bag.bag, bag.head

    def forward(self, x: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        if x.dim() == 1:
            ends = [*([] if offsets is None else offsets.tolist()), len(x)]
            bags = [x[a:b] for a, b in pairwise(ends)]
            scales = [None if weights is None else weights[a:b] for a, b in pairwise(ends)]
        else:
            bags, scales = list(x), [None] * len(x) if weights is None else list(weights)
        return self.head(torch.stack([self.one(b, w) for b, w in zip(bags, scales, strict=True)]).tanh())  # type: ignore[no-any-return]

    def one(self, bag: Tensor, weights: Tensor | None) -> Tensor:
        keep = torch.ones_like(bag, dtype=torch.bool) if self.bag.padding_idx is None else bag != self.bag.padding_idx
        rows = self.bag.weight[bag[keep]]
        if weights is not None:
            rows = rows * weights[keep][:, None]
        if len(rows) == 0:
            return self.bag.weight.new_zeros(4)
        return {"sum": rows.sum(0), "mean": rows.mean(0), "max": rows.max(0).values}[self.bag.mode]


@pytest.mark.parametrize("divergence", [KL(), Newton()])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_embedding_bags(divergence: Divergence, mode: str) -> None:
    targets = torch.randint(2, (5,))
    rows = torch.tensor([[0, 1, 2], [3, 3, 1], [5, 0, 4], [2, 2, 2], [1, 1, 4]])
    flat, offsets = torch.randint(6, (9,)), torch.tensor([0, 2, 2, 5, 8])
    inputs: list[dict[str, Tensor]] = [{"x": rows}, {"x": flat, "offsets": offsets}]
    if mode == "sum":
        inputs += [{"x": rows, "weights": torch.randn(5, 3).double()}]
        inputs += [{"x": flat, "offsets": offsets, "weights": torch.randn(9).double()}]
    for padding in (None, 1):
        for sparse in (False, True) if mode != "max" else (False,):
            model = Bag(mode=mode, padding_idx=padding, sparse=sparse).double()
            for given in inputs:
                builds = [
                    QuadraticModel.build(m, given, targets, LOSS, divergence, 0.1) for m in (model, Spread(model))
                ]
                same(*builds)


@pytest.mark.parametrize("divergence", [KL(), Newton()])
def test_the_exact_step_of_embeddings(divergence: Divergence) -> None:
    """Bags and sparse gradients, by the recursion and by conjugate gradients."""
    inputs, targets = tokens()
    bag = nn.Sequential(nn.EmbeddingBag(6, 4, sparse=True), nn.Tanh(), nn.Linear(4, 2)).double()
    for model in (embedding(sparse=True), bag):
        one, other = (step(model, inputs, targets, LOSS, divergence, 2.0) for step in (exact_step, cg_step))
        for name, value in one.items():
            torch.testing.assert_close(other[name], value)


def test_operations_of_torch_without_derivatives() -> None:
    """A backward formula of torch's that can't be differentiated."""
    inputs, targets = tokens()
    model = Bag(mode="sum", scale_grad_by_freq=True).double()
    for divergence, match in ((Newton(), "Newton asks"), (KL(), "products with its Jacobian")):
        q = QuadraticModel.build(model, inputs, targets, LOSS, divergence)
        with pytest.raises(NotTwiceDifferentiableError, match=match):
            q.curvature(q.gradient)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_models() -> None:
    inputs, targets = torch.randn(5, 3).double(), torch.randint(2, (5,))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for scripted in (torch.jit.script(model), torch.jit.trace(model, inputs)):
        with pytest.raises(LLQRError, match=r"TorchScript.*before it was scripted"):
            QuadraticModel.build(scripted, inputs, targets, LOSS, KL())
        with pytest.raises(LLQRError, match="TorchScript"):
            exact_step([scripted], inputs, targets, LOSS, KL())
        with pytest.raises(LLQRError, match="TorchScript"):
            LLQR(torch.optim.SGD(scripted.parameters(), lr=0.1), scripted)
    inside = nn.Sequential(torch.jit.script(model[:2]), model[2])
    q, plain = (QuadraticModel.build(m, inputs, targets, LOSS, KL(), 0.1) for m in (inside, model))
    for expected, product in zip(
        plain.curvature(plain.gradient).values(), q.curvature(q.gradient).values(), strict=True
    ):
        torch.testing.assert_close(product, expected)


def test_parallel_models() -> None:
    inputs, targets = torch.randn(5, 3), torch.randint(2, (5,))
    model = nn.DataParallel(nn.Linear(3, 2))
    for wrapped in (model, nn.Sequential(model, nn.Linear(2, 2))):
        with pytest.raises(LLQRError, match=r"DataParallel.*\.module"):
            QuadraticModel.build(wrapped, inputs, targets, LOSS, KL())
        with pytest.raises(LLQRError, match="DataParallel"):
            cg_step(wrapped, inputs, targets, LOSS, KL())


class Again(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Sine(torch.autograd.Function):
    """Written by hand, and right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class Waves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Sine.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def _last(output: Tensor) -> Tensor:
    return output[:, -1]


CHECKPOINTED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "a block": (lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4)), (5, 3)),
    "a transformer's layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (5, 3, 4)),
    "with dropout": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True), (5, 3, 4)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()), (5, 3)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), (5, 3)),
    "a limited embedding": (lambda: nn.Embedding(5, 4, max_norm=0.5), None),
    "a formula written by hand": (lambda: Waves(3, 4), (5, 3)),
    "an LSTM": (lambda: Recurrent(3, 4, batch_first=True), (5, 3, 3)),
}


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("training", [None, False])
@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_checkpoints(divergence: Divergence, reentrant: bool, training: bool | None, kind: str) -> None:
    """As without them, and nothing that the model holds is changed."""
    torch.manual_seed(0)
    inner, shape = CHECKPOINTED[kind]
    plain = nn.Sequential(inner(), nn.Linear(4, 2)).double()
    model = nn.Sequential(Again(copy.deepcopy(plain[0]), reentrant), copy.deepcopy(plain[1]))
    inputs = torch.randint(5, (5, 3)) if shape is None else torch.randn(shape).double().requires_grad_()
    targets = torch.randint(2, (5,) if shape is None or len(shape) == 2 else shape[:1])
    before = copy.deepcopy(model.state_dict())
    output = _last if shape is None or len(shape) == 3 else None
    expected, found = (
        QuadraticModel.build(m, inputs, targets, LOSS, divergence, output=output, training=training)
        for m in (plain, model)
    )
    v = {name: torch.randn_like(g) for name, g in expected.gradient.items()}
    named = {name.replace("0.", "0.inner.", 1) if name.startswith("0.") else name: name for name in v}
    product, truth = found.curvature({other: v[name] for other, name in named.items()}), expected.curvature(v)
    for other, name in named.items():
        torch.testing.assert_close(found.gradient[other], expected.gradient[name], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(product[other], truth[name], rtol=1e-9, atol=1e-11)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "counting", "in place"])
def test_compiled_models(backend: str) -> None:
    """They run uncompiled (no backend is called), with the names that their `named_parameters` gives."""
    called: list[int] = []

    def counting(graph: torch.fx.GraphModule, examples: Any) -> Any:
        called.append(1)
        return graph.forward

    inputs, targets = torch.randn(6, 3).double(), torch.randint(2, (6,))
    plain = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    compiled: Any = copy.deepcopy(plain)
    if backend == "in place":
        compiled.compile(backend=counting)
    else:
        compiled = torch.compile(compiled, backend=counting if backend == "counting" else backend)
    prefix = "" if backend == "in place" else "_orig_mod."
    for warm in (False, True):
        if warm:
            compiled(inputs)
            called.clear()
        for divergence in (KL(), Newton(), GaussNewton() + Intermediate({1: 0.5})):
            for size in (None, 4):
                q, other = (
                    QuadraticModel.build(m, inputs, targets, LOSS, divergence, {0: 0.1}, size)
                    for m in (plain, compiled)
                )
                assert list(other.gradient) == [name for name, _ in compiled.named_parameters()]
                same(q, other, prefix)
        assert not called
    named = QuadraticModel.build(compiled, inputs, targets, LOSS, KL(), {prefix + "0": 0.1})
    same(QuadraticModel.build(plain, inputs, targets, LOSS, KL(), {"0": 0.1}), named, prefix)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_unfused(kind: Any) -> None:
    """cuDNN gives no derivative of them in eval mode, nor a second one; nor has the one node of oneDNN in float32."""
    seen = []

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.backends.cudnn.enabled, torch._C._get_mkldnn_enabled()))
            return self.layer(x)[0][:, -1]  # type: ignore[no-any-return]

    model, inputs, targets = Network(), torch.randn(5, 3, 3), torch.randint(4, (5,))
    before = torch.backends.cudnn.enabled, torch._C._get_mkldnn_enabled()
    for divergence in DIVERGENCES:
        q = QuadraticModel.build(model, inputs, targets, LOSS, divergence, training=False)
        exact = QuadraticModel.build(
            copy.deepcopy(model).double(), inputs.double(), targets, LOSS, divergence, training=False
        )
        v = {name: torch.randn_like(g) for name, g in exact.gradient.items()}
        product = q.curvature({name: direction.float() for name, direction in v.items()})
        for name, expected in exact.curvature(v).items():
            torch.testing.assert_close(product[name].double(), expected, rtol=1e-3, atol=1e-5)
    assert seen
    assert set(seen) == {(False, False)}
    assert (torch.backends.cudnn.enabled, torch._C._get_mkldnn_enabled()) == before
