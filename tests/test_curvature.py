"""QuadraticModel: g, H·v and m(δ) against dense derivatives, on the models that people train (float64).

The truth is torch.autograd.functional.hessian of the divergence written out here, on the model called as it is.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from llqr import cg_step, dense_step, exact_step
from llqr.checks import as_arguments
from llqr.curvature.quadratic import QuadraticModel
from llqr.divergences import KL, L2, Divergence, GaussNewton, Intermediate, Newton, Renyi, ReverseKL
from llqr.errors import LLQRError, NotTwiceDifferentiableError
from llqr.exact import Chain, build
from zoo import CLASSES, cases, pick

NAMES = list(cases())


def kl(p: Tensor, q: Tensor) -> Tensor:
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def renyi(p: Tensor, q: Tensor, a: float) -> Tensor:
    return (p.softmax(-1) ** a * q.softmax(-1) ** (1 - a)).sum(-1).log() / (a - 1)


Psi = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]
DIVERGENCES: dict[str, tuple[Divergence, Psi]] = {
    "newton": (Newton(), lambda x, k, loss: loss(x)),
    "gauss-newton": (GaussNewton(), lambda x, k, loss: kl(k, x).mean()),  # the same matrix for cross-entropy
    "kl": (KL(), lambda x, k, loss: kl(k, x).mean()),
    "kl sum": (KL(reduction="sum"), lambda x, k, loss: kl(k, x).sum()),
    "reverse": (ReverseKL(), lambda x, k, loss: kl(x, k).mean()),
    "renyi": (Renyi(2.0), lambda x, k, loss: renyi(k, x, 2.0).mean()),
    "bernoulli": (KL("bernoulli"), lambda x, k, loss: kl(two(k), two(x)).mean()),
    "gaussian": (KL("gaussian"), lambda x, k, loss: 0.5 * (x - k).square().mean()),
    "mixture": (
        0.5 * Newton() + 2 * KL() + L2(0.3),
        lambda x, k, loss: 0.5 * loss(x) + 2 * kl(k, x).mean(),
    ),
}


def two(x: Tensor) -> Tensor:
    return torch.stack((x, torch.zeros_like(x)), -1)


class Truth:
    """The dense H of one model, by differentiating twice without vmap."""

    def __init__(self, model: nn.Module, inputs: Any, loss: Callable[[Tensor], Tensor]) -> None:
        self.model, self.inputs, self.loss = model, inputs, loss
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.point = self.flat({name: p.detach() for name, p in model.named_parameters()})
        self.output = self.run(self.point)

    def flat(self, named: dict[str, Tensor]) -> Tensor:
        return torch.cat([named[name].reshape(-1) for name in self.shapes])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def run(self, flat: Tensor) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with sdpa_kernel(SDPBackend.MATH):
            return pick(functional_call(self.model, {**self.named(flat), **buffers}, *as_arguments(self.inputs)))

    def hessian(self, psi: Psi, base: Tensor) -> Tensor:
        return torch.autograd.functional.hessian(lambda flat: psi(self.run(flat), base, self.loss), self.point)

    def gradient(self) -> Tensor:
        point = self.point.clone().requires_grad_()
        return torch.autograd.grad(self.loss(self.run(point)), point)[0]


def truth_of(name: str) -> tuple[Truth, tuple[Any, ...]]:
    model, inputs, targets, loss_fn = cases()[name]
    return Truth(model, inputs, lambda x: loss_fn(x, targets)), (model, inputs, targets, loss_fn)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert (found - expected).norm() <= tolerance * expected.norm() + 1e-13


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("name", NAMES)
def test_products_equal_the_dense_matrix(name: str, kind: str) -> None:
    """g = ∇L, Hv = ∇²D v, m(δ) = g·δ + ½ δ·Hδ; with damping on the diagonal; whole and in chunks of one and three."""
    truth, arguments = truth_of(name)
    divergence, psi = DIVERGENCES[kind]
    matrix = truth.hessian(psi, truth.output) + 0.01 * torch.eye(len(truth.point)).double()
    if kind == "mixture":
        matrix = matrix + 0.3 * torch.eye(len(truth.point)).double()
    for chunk_size in (None, 3, 1) if name != "batch statistics" else (None,):
        q = QuadraticModel.build(*arguments, divergence, 0.01, chunk_size, output=pick)
        close(truth.flat(q.gradient), truth.gradient())
        for _ in range(2):
            v = torch.randn_like(truth.point)
            close(truth.flat(q.curvature(truth.named(v))), matrix @ v)
            value = truth.gradient() @ v + 0.5 * v @ matrix @ v
            assert abs(q.value(truth.named(v)) - value) <= 1e-9 * (abs(value) + v.abs() @ matrix.abs() @ v.abs())


@pytest.mark.parametrize("name", ["attention", "convolution", "residual"])
def test_intermediate_metrics(name: str) -> None:
    truth, arguments = truth_of(name)
    place = {"attention": "mix.1", "convolution": "3", "residual": "inner.1"}[name]
    module = truth.model.get_submodule(place)

    def at(flat: Tensor) -> Tensor:
        caught: list[Tensor] = []
        hook = module.register_forward_hook(lambda module, args, output: caught.append(output))
        truth.run(flat)
        hook.remove()
        return caught[0]

    base = at(truth.point)
    scale = torch.rand(base.shape[1:]).double()
    for metric, weight in ((0.7, 0.7), (scale, scale)):
        divergence = KL() + Intermediate({place: metric})
        inside = torch.autograd.functional.hessian(
            lambda flat, weight=weight: 0.5 * (weight * (at(flat) - base).square()).sum() / 4, truth.point
        )
        matrix = inside + truth.hessian(lambda x, k, loss: kl(k, x).mean(), truth.output)
        for chunk_size in (None, 3):
            q = QuadraticModel.build(*arguments, divergence, 0.0, chunk_size, output=pick)
            v = torch.randn_like(truth.point)
            close(truth.flat(q.curvature(truth.named(v))), matrix @ v)


def test_relaxed_objective_is_the_lqr_cost() -> None:
    """J(U) of eq. (relaxed-lqr-equivalence): m(-Ug) is the cost of the LQR blocks, stage by stage, on a chain."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    inputs, targets = torch.randn(5, 3).double(), torch.randint(3, (5,))
    loss = nn.CrossEntropyLoss()
    for divergence in (Newton(), KL(), KL(reduction="sum"), GaussNewton() + Intermediate({1: 0.5}), Newton() + L2(0.2)):
        q = QuadraticModel.build(model, inputs, targets, loss, divergence, 0.05)
        lqr = build(Chain(model), inputs, targets, loss, divergence, 0.05)
        for name, g in q.gradient.items():
            assert g.shape == dict(model.named_parameters())[name].shape
        step = {name: -torch.rand_like(g) * g for name, g in q.gradient.items()}
        assert abs(q.value(step) - lqr.value(step)) <= 1e-10 * (abs(q.value(step)) + 1)


@pytest.mark.parametrize("name", ["attention", "tied"])
def test_padded_tokens_weigh_nothing(name: str) -> None:
    """Weights of zero take tokens out of KL's mean, as ignore_index takes them out of the loss; also in chunks."""
    model, inputs, targets, loss_fn = cases()[name]
    targets = targets.clone()
    targets[0, 1:] = targets[2, 2] = -100
    weights = (targets != -100).double()
    truth = Truth(model, inputs, lambda x: loss_fn(x, targets))
    matrix = truth.hessian(lambda x, k, loss: (kl(k, x) * weights).sum() / weights.sum(), truth.output)
    v = torch.randn_like(truth.point)
    for chunk_size in (None, 3, 1):
        q = QuadraticModel.build(model, inputs, targets, loss_fn, KL(), 0.0, chunk_size, weights=weights)
        close(truth.flat(q.gradient), truth.gradient())
        close(truth.flat(q.curvature(truth.named(v))), matrix @ v)


def test_a_known_gradient_spares_the_loss() -> None:
    model, inputs, targets, loss_fn = cases()["attention"]
    whole = QuadraticModel.build(model, inputs, targets, loss_fn, KL())
    known = QuadraticModel.build(model, inputs, None, None, KL(), gradient=whole.gradient)
    for name, value in known.curvature(whole.gradient).items():
        torch.testing.assert_close(value, whole.curvature(whole.gradient)[name])
    with pytest.raises(LLQRError, match="needs the loss"):
        QuadraticModel.build(model, inputs, None, None, Newton(), gradient=whole.gradient)


class Square(torch.autograd.Function):
    """Differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Silent(Square):
    """The same, and nothing says so."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (2 * ctx.saved_tensors[0] * gradient).detach()


class By(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [Square, Silent])
def test_operations_that_can_be_differentiated_once_are_refused(function: Any) -> None:
    """Jv is the derivative of Jᵀu by u, which they don't have; ⟨c, Jv⟩ isn't ⟨Jᵀc, v⟩ where nothing says so."""
    inputs, targets = torch.randn(5, 3).double(), torch.randint(2, (5,))
    model = nn.Sequential(nn.Linear(3, 4), By(function), nn.Linear(4, 2)).double()
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}

    def built() -> QuadraticModel:
        return QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), KL(), 0.1)

    for product in (QuadraticModel.curvature, QuadraticModel.curvature_along):
        with pytest.raises(NotTwiceDifferentiableError, match="replace the operation"):
            product(built(), direction)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, inputs, targets, loss_fn = cases()[name]
    loss_fn(pick(model(*as_arguments(inputs)[0], **as_arguments(inputs)[1])), targets).backward()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    for divergence in (KL(), Newton()):
        for training in (False, None):
            q = QuadraticModel.build(model, inputs, targets, loss_fn, divergence, 0.1, output=pick, training=training)
            q.curvature(q.gradient)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[key]) for key, p in model.named_parameters() if p.grad is not None)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_modules_and_weights_that_are_used_twice_stay_the_models_own() -> None:
    """Under every name they are the parameters and buffers of before, whose gradients a training goes on with."""
    norm, layer, other = nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = layer.weight
    model = nn.Sequential(nn.Sequential(layer, norm, nn.Tanh(), layer, norm, other), nn.Linear(3, CLASSES)).double()
    inputs, targets, loss_fn = torch.randn(5, 3).double(), torch.randint(CLASSES, (5,)), nn.CrossEntropyLoss()
    before = list(model.named_parameters(remove_duplicate=False)) + list(model.named_buffers(remove_duplicate=False))
    for divergence in (KL(), Newton()):
        q = QuadraticModel.build(model, inputs, targets, loss_fn, divergence, 0.1)
        q.curvature(q.gradient)
    QuadraticModel.build(model, (), None, None, Newton(), closure=lambda: loss_fn(model(inputs), targets))
    for way in (exact_step, dense_step, cg_step):
        way(model.eval(), inputs, targets, loss_fn, KL(), 0.1)
    after = list(model.named_parameters(remove_duplicate=False)) + list(model.named_buffers(remove_duplicate=False))
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))
    assert isinstance(layer.weight, nn.Parameter)


def test_dropout_keeps_one_mask_and_can_be_off() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    inputs, targets = torch.randn(5, 3).double(), torch.randint(2, (5,))
    loss = nn.CrossEntropyLoss()
    q = QuadraticModel.build(model, inputs, targets, loss, Newton() + KL(), 0.1)
    one, other = q.curvature(q.gradient), q.curvature(q.gradient)
    assert all(torch.equal(one[name], other[name]) for name in one)
    torch.testing.assert_close(dot(q.gradient, q.curvature(other)), dot(other, one))  # symmetric: one mask in all of it
    off = QuadraticModel.build(model, inputs, targets, loss, KL(), 0.1, training=False)
    plain = QuadraticModel.build(model.eval(), inputs, targets, loss, KL(), 0.1)
    assert all(torch.equal(off.gradient[name], g) for name, g in plain.gradient.items())


class Strided(nn.Module):
    """Dropout of what a batch norm makes of a tensor that lies otherwise in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(3),
            nn.Dropout(0.5),
            nn.Linear(12, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).transpose(0, 1).contiguous().transpose(0, 1)
        return self.last(self.drop(self.norm(x)).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("divergence", [KL(), Newton(), KL() + Newton()], ids=repr)
def test_masks_are_those_of_a_training_step(divergence: Divergence) -> None:
    """Also where the norm before them is by running statistics, whatever it is recorded by."""
    model, inputs, targets = Strided().double(), torch.randn(5, 3, 4).double(), torch.randint(2, (5,))
    model.norm.eval()
    stream = torch.get_rng_state()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    torch.set_rng_state(stream)
    q = QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), divergence)
    for name, p in model.named_parameters():
        torch.testing.assert_close(q.gradient[name], p.grad)
    torch.testing.assert_close(dot(q.gradient, q.curvature(ones(q))), dot(ones(q), q.curvature(q.gradient)))


def ones(q: QuadraticModel) -> dict[str, Tensor]:
    return {name: torch.ones_like(g) for name, g in q.gradient.items()}


def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def test_frozen_and_unused_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    model[0].bias.requires_grad_(False)
    model.idle = nn.Parameter(torch.ones(3).double())  # type: ignore[assignment]
    inputs, targets = torch.randn(5, 3).double(), torch.randint(2, (5,))

    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.idle = model[:2], nn.Parameter(torch.ones(3).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    q = QuadraticModel.build(Front(), inputs, targets, nn.CrossEntropyLoss(), KL() + Newton(), 0.5)
    assert set(q.gradient) == {"idle", "net.0.weight", "net.1.weight", "net.1.bias"}
    assert not q.gradient["idle"].any()
    v = {name: torch.ones_like(g) for name, g in q.gradient.items()}
    torch.testing.assert_close(q.curvature(v)["idle"], 0.5 * torch.ones(3).double())


def test_a_convolution_with_only_its_bias_free() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(6, 2)).double()
    model[0].weight.requires_grad_(False)
    inputs, targets = torch.randn(4, 2, 3).double(), torch.randint(2, (4,))
    q = QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), KL())
    lqr = build(Chain(model), inputs, targets, nn.CrossEntropyLoss(), KL())
    step = {name: torch.randn_like(g) for name, g in q.gradient.items()}
    torch.testing.assert_close(dot(step, q.curvature(step)), lqr.quadratic_form(step))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_stays_alive(name: str) -> None:
    """With q gone its graphs are gone, without waiting for the garbage collector: memory of a refit is memory of one refit."""
    _, arguments = truth_of(name)
    gc.collect()
    gc.disable()
    try:
        for divergence in (KL(), Newton()):
            q = QuadraticModel.build(*arguments, divergence, output=pick)
            recorded = q._chunks[0]()
            held = [weakref.ref(recorded), weakref.ref(recorded.run), *map(weakref.ref, recorded.run._outputs)]
            q.curvature(q.gradient)
            del q, recorded
            assert all(ref() is None for ref in held)
    finally:
        gc.enable()


def test_under_autocast() -> None:
    """Autocast chooses its own dtypes: the products are those of its forward pass, to bfloat16."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    inputs, targets = torch.randn(6, 8), torch.randint(4, (6,))
    q = QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), KL(), 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        low = QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), KL(), 0.1)
        product = low.curvature(q.gradient)
    for name, expected in q.curvature(q.gradient).items():
        assert (product[name] - expected).norm() < 0.1 * expected.norm()


def test_metrics_before_in_place_functions() -> None:
    """A metric sits on what its module returned, not on what the next one made of it."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    inplace = nn.Sequential(plain[0], nn.ReLU(inplace=True), plain[2])
    inputs, targets = torch.randn(5, 3).double(), torch.randint(2, (5,))
    q, same = (
        QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), KL() + Intermediate({"0": 1.0}))
        for model in (inplace, plain)
    )
    for name, expected in same.curvature(q.gradient).items():
        torch.testing.assert_close(q.curvature(q.gradient)[name], expected)


class Sums(nn.Module):
    """Autograd hands the gradient of a sum on to its terms as it is, and to what was broadcast as an expanded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(3, 4).double()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b + self.c.sum()


@pytest.mark.parametrize("divergence", [Newton(), GaussNewton()], ids=repr)
@pytest.mark.parametrize("damping", [0.0, {"a": 0.1}], ids=str)
def test_products_are_the_callers_own(divergence: Divergence, damping: float | dict[str, float]) -> None:
    """Written to in place, a product changes neither another one, nor the direction, nor the next product."""
    model, x = Sums(), torch.randn(3, 4).double()
    q = QuadraticModel.build(model, x, torch.zeros(3, 4).double(), nn.functional.mse_loss, divergence, damping)
    v = {name: torch.randn_like(g) for name, g in q.gradient.items()}
    before = {name: part.clone() for name, part in v.items()}
    expected = {name: part.clone() for name, part in q.curvature(v).items()}
    for name in v:
        product = q.curvature(v)
        product[name].add_(torch.arange(12).reshape(3, 4))
        for other in v.keys() - {name}:
            torch.testing.assert_close(product[other], expected[other])
        torch.testing.assert_close(v, before, rtol=0, atol=0)
    torch.testing.assert_close(q.curvature(v), expected)


@pytest.mark.parametrize("damping", [0.0, {"a": 0.1}], ids=str)
def test_products_come_as_the_direction_does(damping: float | dict[str, float]) -> None:
    """In its order, at least in its precision, and for many directions at once."""
    model, x = Sums().float(), torch.randn(3, 4)
    q = QuadraticModel.build(model, x, torch.zeros(3, 4), nn.functional.mse_loss, Newton(), damping)
    v = {name: torch.randn_like(q.gradient[name]).double() for name in ("c", "a", "b")}
    product = q.curvature(v)
    assert list(product) == ["c", "a", "b"]
    assert {part.dtype for part in product.values()} == {torch.float64}
    many = {name: torch.stack([part, 2 * part]).float() for name, part in v.items()}
    for name, parts in torch.func.vmap(q.curvature)(many).items():
        torch.testing.assert_close(parts, torch.stack([product[name], 2 * product[name]]).float())


def test_later_changes_of_the_model_do_not_reach_it() -> None:
    """Chunks run the model again at every product, in the modes and with the buffers of the time when it was built."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    inputs, targets = torch.randn(5, 3).double(), torch.randint(2, (5,))
    q = QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), KL(), 0.0, 2)
    expected = q.curvature(q.gradient)
    model.train()
    model[1].running_mean.add_(1.0)
    for name, product in q.curvature(q.gradient).items():
        torch.testing.assert_close(product, expected[name])
