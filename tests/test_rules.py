"""Promise: operations that are recorded by rules of our own give the products that torch's own derivatives give."""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call

from llqr.curvature.quadratic import QuadraticModel
from llqr.divergences import KL, Divergence, GaussNewton, Newton

CHECKPOINTED = [
    [nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)],
    [nn.Linear(4, 4), nn.Tanh()],  # all that is saved is of one shape, so that nobody would notice a mix-up
    [nn.LayerNorm(4), nn.Sigmoid(), nn.Linear(4, 4)],
]


def test_checkpointed_blocks() -> None:
    """What a block saves when it runs again has to be what it saved at first, by the same operations."""

    class Block(nn.Module):
        def __init__(self, inner: nn.Sequential) -> None:
            super().__init__()
            self.inner, self.again = inner, False

        def forward(self, x: Tensor) -> Tensor:
            if not self.again:
                return self.inner(x)  # type: ignore[no-any-return]
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    inputs, targets = torch.randn(5, 3).double(), torch.randint(2, (5,))
    for divergence, layers in itertools.product((KL(), Newton()), CHECKPOINTED):
        model = nn.Sequential(nn.Linear(3, 4), Block(nn.Sequential(*layers)), nn.Linear(4, 2)).double()
        products = []
        for again in (False, True):
            model[1].again = again
            q = QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), divergence, 0.1)
            products.append(q.curvature(q.gradient))
        for name, expected in products[0].items():
            torch.testing.assert_close(products[1][name], expected, rtol=1e-10, atol=1e-13)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean": {
        "attn_mask": torch.tensor([[True, False, True], [False, False, False], [True, True, True], [False, True, True]])
    },
    "added": {"attn_mask": torch.randn(2, 1, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))},
    "scaled": {"scale": 0.3},
}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_by_its_own_rule(mask: str) -> None:
    """Jᵀ W J v as torch.func has it, for every way to mask, whichever of q, k and v depend on a parameter."""

    class Attending(nn.Module):
        def __init__(self, learned: str) -> None:
            super().__init__()
            self.maps = nn.ModuleDict({name: nn.Linear(5, 6) for name in learned})

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            parts = {
                name: (self.maps[name](given) if name in self.maps else given.repeat(1, 1, 2)[..., :6])
                .unflatten(-1, (2, 3))
                .transpose(1, 2)
                for name, given in (("q", x), ("k", y), ("v", y))
            }
            return nn.functional.scaled_dot_product_attention(*parts.values(), **MASKS[mask]).transpose(1, 2).flatten(2)

    inputs = (torch.randn(2, 4, 5).double(), torch.randn(2, 3, 5).double())
    for learned in ("qkv", "q", "kv", "v"):
        model = Attending(learned).double()
        q = QuadraticModel.build(model, inputs, torch.zeros(2, 4, 6), nn.functional.mse_loss, GaussNewton())
        v = {name: torch.randn_like(g) for name, g in q.gradient.items()}
        points = {name: p.detach() for name, p in model.named_parameters()}

        def run(p: dict[str, Tensor], model: nn.Module = model) -> Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return torch.func.functional_call(model, p, inputs)  # type: ignore[no-any-return]

        pushed = torch.func.jvp(run, (points,), (v,))[1]
        (expected,) = torch.func.vjp(run, points)[1](pushed * 2 / pushed.numel())
        for name, product in q.curvature(v).items():
            torch.testing.assert_close(product, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False)], ids=["affine", "plain"])
@pytest.mark.parametrize("frozen", [(), ("1.bias",), ("1.weight",), ("0.weight", "0.bias")], ids=str)
def test_batch_norm_by_running_statistics(layer: nn.BatchNorm1d, frozen: tuple[str, ...]) -> None:
    """Jᵀ W J v as torch.func has it, whichever of input, weight and bias depend on a parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), copy.deepcopy(layer), nn.Linear(5, 3)).double()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2.0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.eval()
    x = torch.randn(6, 4).double()
    q = QuadraticModel.build(model, x, torch.zeros(6, 3).double(), nn.functional.mse_loss, GaussNewton())
    v = {name: torch.randn_like(g) for name, g in q.gradient.items()}
    points = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def run(p: dict[str, Tensor]) -> Tensor:
        return functional_call(model, p, (x,))  # type: ignore[no-any-return]

    pushed = torch.func.jvp(run, (points,), (v,))[1]
    (expected,) = torch.func.vjp(run, points)[1](pushed * 2 / pushed.numel())
    for name, product in q.curvature(v).items():
        torch.testing.assert_close(product, expected[name], rtol=1e-9, atol=1e-12)


WAYS = ["plain", "changed", "read", "in place"]


class Together(nn.Module):
    """Layers that are recorded together with what follows them, unless something else comes between or reads them too."""

    def __init__(self, way: str, bias: bool = True) -> None:
        super().__init__()
        self.way = way
        self.conv, self.norm = nn.Conv2d(2, 4, 3, 2, 1, groups=2, bias=bias), nn.BatchNorm2d(4, affine=bias)
        self.linear, self.out = nn.Linear(16, 5, bias=bias), nn.Linear(5, 3)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.way == "changed":
            y.sin_()
        if self.way == "watched" and y.requires_grad:
            y.register_hook(lambda g: 2 * g)
        if self.way == "written":
            with torch.no_grad():
                y.mul_(2)
        normal = self.norm(y)
        if self.way == "watched later" and y.requires_grad:
            y.register_hook(lambda g: 2 * g)
        if self.way == "read":
            normal = normal + 0.3 * y
        if self.way == "in place":
            normal = nn.functional.relu_(normal)
        z = self.linear(normal.flatten(1))
        if self.way == "changed":
            z.cos_()
        if self.way == "watched at the node" and z.grad_fn is not None:
            z.grad_fn.register_prehook(lambda of_output: (2 * of_output[0],))
        active = nn.functional.gelu(z)
        if self.way == "watched later" and z.requires_grad:
            z.register_hook(lambda g: 3 * g)
        return self.out(active + 0.2 * z if self.way == "read" else active)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "frozen", [(), ("conv.weight",), ("norm.weight", "linear.weight"), ("linear.bias", "conv.bias")]
)
@pytest.mark.parametrize("bias", [True, False], ids=["affine", "without"])
def test_layers_that_are_recorded_together(way: str, frozen: tuple[str, ...], bias: bool) -> None:
    """g and Jᵀ W J v as torch.func has them: a convolution with its batch norm, an affine map with its activation."""
    torch.manual_seed(0)
    model = Together(way, bias).double().eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = torch.randn(6, 2, 4, 4).double()
    q = QuadraticModel.build(model, x, torch.zeros(6, 3).double(), nn.functional.mse_loss, GaussNewton())
    v = {name: torch.randn_like(g) for name, g in q.gradient.items()}
    points = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def run(p: dict[str, Tensor]) -> Tensor:
        return functional_call(model, p, (x,))  # type: ignore[no-any-return]

    output, pushed = torch.func.jvp(run, (points,), (v,))
    pull = torch.func.vjp(run, points)[1]
    (gradient,), (expected,) = pull(output * 2 / output.numel()), pull(pushed * 2 / pushed.numel())
    for name, product in q.curvature(v).items():
        torch.testing.assert_close(q.gradient[name], gradient[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(product, expected[name], rtol=1e-9, atol=1e-12)


def hessian_product(model: nn.Module, x: Tensor, v: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hv of the mean square of the output by torch's own derivatives, with no rule of ours in force."""
    free = {name: p for name, p in model.named_parameters() if name in v}
    slopes = torch.autograd.grad(model(x).square().mean(), list(free.values()), create_graph=True)
    products = torch.autograd.grad(slopes, list(free.values()), [v[name] for name in free], materialize_grads=True)
    return dict(zip(free, products, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "frozen", [(), ("conv.weight",), ("norm.weight", "linear.weight"), ("linear.bias", "conv.bias")]
)
@pytest.mark.parametrize("bias", [True, False], ids=["affine", "without"])
def test_second_derivatives_of_layers_that_are_recorded_together(way: str, frozen: tuple[str, ...], bias: bool) -> None:
    """H v as torch has it: a convolution whose batch norm becomes a part of it, an activation with f' and f'' kept."""
    torch.manual_seed(0)
    model = Together(way, bias).double().eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = torch.randn(6, 2, 4, 4).double()
    q = QuadraticModel.build(model, x, torch.zeros(6, 3).double(), nn.functional.mse_loss, Newton())
    for _ in range(2):  # what the first product keeps is for the second
        v = {name: torch.randn_like(g) for name, g in q.gradient.items()}
        expected = hessian_product(model, x, v)
        for name, product in q.curvature(v).items():
            torch.testing.assert_close(product, expected[name], rtol=1e-9, atol=1e-12)


ACTIVATIONS: list[nn.Module] = [
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.SiLU(inplace=True),
    nn.Mish(),
    nn.Softplus(),
    nn.Softplus(beta=2.0, threshold=1.0),
    nn.ReLU(),
    nn.ReLU(inplace=True),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("divergence", [Newton(), GaussNewton()], ids=repr)
def test_activations(activation: nn.Module, divergence: Newton | GaussNewton) -> None:
    """Products as torch has them, where the activation's input is read again, and where it is a parameter itself."""

    class Active(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out, self.start = nn.Linear(4, 5), nn.Linear(5, 3), nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            y = self.into(x)
            hidden = y.sin() + activation(y * 1 if getattr(activation, "inplace", False) else y)
            return self.out(hidden * activation(self.start * 2) + activation(2 * activation(hidden * 1)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Active().double(), torch.randn(6, 4).double()
    q = QuadraticModel.build(model, x, torch.zeros(6, 3).double(), nn.functional.mse_loss, divergence)
    v = {name: torch.randn_like(g) for name, g in q.gradient.items()}
    if isinstance(divergence, Newton):
        expected = hessian_product(model, x, v)
    else:
        points = {name: p.detach() for name, p in model.named_parameters()}
        pushed = torch.func.jvp(lambda p: functional_call(model, p, (x,)), (points,), (v,))[1]
        (expected,) = torch.func.vjp(lambda p: functional_call(model, p, (x,)), points)[1](pushed * 2 / pushed.numel())
    for name, product in q.curvature(v).items():
        torch.testing.assert_close(product, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("divergence", [Newton(), GaussNewton(), KL()], ids=repr)
def test_hard_sigmoid(divergence: Divergence, inplace: bool) -> None:
    """Which torch's own kernel can't differentiate twice: as it is with a ReLU6. MobileNetV3 has one."""

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu6(x + 3) / 6

    layers = [nn.Linear(4, 5), nn.Linear(5, 3)]
    inputs, targets = 4 * torch.randn(6, 4).double(), torch.randint(3, (6,))
    one, other = (
        QuadraticModel.build(
            nn.Sequential(layers[0], middle, layers[1]).double(), inputs, targets, nn.CrossEntropyLoss(), divergence
        )
        for middle in (nn.Hardsigmoid(inplace), Plain())
    )
    v = {name: torch.randn_like(g) for name, g in one.gradient.items()}
    expected = other.curvature(v)
    for name, product in one.curvature(v).items():
        torch.testing.assert_close(product, expected[name], rtol=1e-9, atol=1e-12)


def test_our_own_rules_arent_taken_for_formulas_written_by_hand() -> None:
    """Newton looks for backward formulas that hide from the next derivative; ours don't, and the look takes several runs."""
    runs = []
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    model.register_forward_hook(lambda *_: runs.append(1))
    q = QuadraticModel.build(model, torch.randn(5, 3).double(), torch.zeros(5, 2), nn.functional.mse_loss, Newton())
    q.curvature(q.gradient)
    assert len(runs) == 1


class Penalised(nn.Module):
    """Returns its output beside the gradient of it by the input, as gradient penalties and physics-informed networks do."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.layers(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.cat([y.flatten(1), slope.flatten(1)], 1)


class Batched(nn.Module):
    """A convolution and an activation inside of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: nn.functional.silu(nn.functional.conv2d(row[None], self.kernel)[0]))(x).flatten(1)


class Backbone(nn.Module):
    """Two layers that are never stepped, in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2), nn.Linear(2, 3)
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            features = nn.functional.gelu(self.second(self.first(x))).flatten(1)
        return self.out(features.clone())  # type: ignore[no-any-return]


class Complex(nn.Module):
    """A convolution with complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x + 1j, self.kernel + 0.5j).flatten(1).abs()


class Overwritten(nn.Module):
    """What a frozen layer has read is changed in place, before an activation: no derivative needs it."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation
        self.first, self.frozen = nn.Conv2d(2, 4, 1), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).sin()
        seen = self.frozen(hidden)
        hidden.mul_(2)
        return (self.activation(seen) + hidden).sin().flatten(1)  # type: ignore[no-any-return]


UNUSUAL: dict[str, Any] = {
    "read and overwritten": lambda: Overwritten(torch.sin),
    "read and overwritten, gelu": lambda: Overwritten(nn.functional.gelu),
    "read and overwritten, silu": lambda: Overwritten(nn.functional.silu),
    "read and overwritten, mish": lambda: Overwritten(nn.functional.mish),
    "read and overwritten, softplus": lambda: Overwritten(nn.functional.softplus),
    "inner gradient, linear": lambda: Penalised(nn.Flatten(), nn.Linear(32, 5), nn.SiLU(), nn.Linear(5, 2)),
    "inner gradient, convolution": lambda: Penalised(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.Flatten(), nn.Linear(12, 1)
    ),
    "inside of torch.func": Batched,
    "inference mode": Backbone,
    "complex": Complex,
    "watched": lambda: Together("watched"),
    "watched later": lambda: Together("watched later"),
    "watched at the node": lambda: Together("watched at the node"),
    "written to, unrecorded": lambda: Together("written"),
}


def compare(model: nn.Module, x: Tensor, divergence: Newton | GaussNewton) -> None:
    """Products by plain double backward passes: J from the transpose of u ↦ Jᵀu, H from the gradient."""
    free = {name: p for name, p in model.named_parameters() if p.requires_grad}
    v = {name: torch.randn_like(p) for name, p in free.items()}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        output = model(x)
        if isinstance(divergence, Newton):
            expected = hessian_product(model, x, v)
        else:
            u = torch.zeros_like(output).requires_grad_()
            rows = torch.autograd.grad(output, list(free.values()), u, create_graph=True)
            (pushed,) = torch.autograd.grad(rows, u, list(v.values()))
            pulled = torch.autograd.grad(model(x), list(free.values()), pushed * 2 / pushed.numel())
            expected = dict(zip(free, pulled, strict=True))
    q = QuadraticModel.build(model, x, torch.zeros_like(output), nn.functional.mse_loss, divergence)
    for name, product in q.curvature(v).items():
        torch.testing.assert_close(product, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("divergence", [Newton(), GaussNewton()], ids=repr)
@pytest.mark.parametrize("kind", UNUSUAL)
def test_models_that_rules_must_leave_to_torch(kind: str, divergence: Newton | GaussNewton) -> None:
    torch.manual_seed(0)
    compare(UNUSUAL[kind]().double().eval(), torch.randn(3, 2, 4, 4).double(), divergence)


class Changing(nn.Module):
    """What a layer returns is changed in place: an activation, a residual, a mask, some of its places."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(4, 4), nn.Linear(4, 2)
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.way == "activation":
            y = nn.functional.relu_(y)
        elif self.way == "before an activation":
            y = nn.functional.gelu(y.sin_())
        elif self.way == "residual":
            y += x
        elif self.way == "mask":
            y = y.masked_fill_(torch.ones(y.shape[-2:]).triu(1).bool(), -3.0).softmax(-1)
        elif self.way == "places":
            y[..., 0] = 0.0
            y[..., 1].mul_(2)
        elif self.way == "attention":
            y = nn.functional.scaled_dot_product_attention(y, y, y)
            y += x
        elif self.way == "what attention read":
            y = nn.functional.scaled_dot_product_attention(y, x, x) + y.mul_(2)
        elif self.way == "what was copied":  # torch has to, where a layer's input isn't contiguous
            z = y.sin().transpose(-1, -2).contiguous().transpose(-1, -2)
            y = self.first(z) + z.mul_(2)
        elif self.way == "heads":
            y, _ = self.heads(*[y.reshape(-1, *y.shape[-2:])] * 3)
            y += x.reshape(y.shape)
        return self.last(y)  # type: ignore[no-any-return]


CHANGES = ["activation", "before an activation", "residual", "mask", "places"]
CHANGES += ["attention", "what attention read", "what was copied", "heads"]


@pytest.mark.parametrize("divergence", [Newton(), GaussNewton()], ids=repr)
@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize("way", CHANGES)
def test_layers_whose_output_is_changed_in_place(way: str, dimensions: int, divergence: Newton | GaussNewton) -> None:
    """With more dimensions than two linear layers return views, and autograd forbids to change those of a rule."""
    torch.manual_seed(0)
    model = Changing(way).double()
    if way != "heads":
        del model.heads
    compare(model, torch.randn(3, 2, 5, 4)[(0,) * (4 - dimensions)].double(), divergence)


@pytest.mark.parametrize("divergence", [Newton(), GaussNewton()], ids=repr)
def test_single_examples_and_bags_that_are_changed_in_place(divergence: Newton | GaussNewton) -> None:
    torch.manual_seed(0)
    compare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).double(), torch.randn(4).double(), divergence)
    bags = nn.Sequential(nn.EmbeddingBag(5, 4, mode="max"), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    words = torch.randint(5, (3, 4))
    q = QuadraticModel.build(bags, words, torch.zeros(3, 2).double(), nn.functional.mse_loss, divergence)
    plain = nn.Sequential(bags[0], nn.ReLU(), bags[2])
    truth = QuadraticModel.build(plain, words, torch.zeros(3, 2).double(), nn.functional.mse_loss, divergence)
    for name, product in truth.curvature(q.gradient).items():
        torch.testing.assert_close(q.curvature(q.gradient)[name], product, rtol=1e-9, atol=1e-12)


class Normed(nn.Module):
    """w = g v/‖v‖, with the norms over all dimensions but one, written out."""

    def __init__(self, layer: nn.Conv1d, dim: int | None) -> None:
        super().__init__()
        self.dims = [d for d in range(3) if d != dim]
        self.v, self.bias = nn.Parameter(layer.weight.detach()), layer.bias
        self.g = nn.Parameter(self._norm().detach())

    def _norm(self) -> Tensor:
        return self.v.square().sum(self.dims, keepdim=True).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.v * (self.g / self._norm()), self.bias)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("divergence", [Newton(), GaussNewton()], ids=repr)
@pytest.mark.parametrize("dim", [0, 1, 2, None])
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_weight_norm(old: bool, dim: int | None, divergence: Newton | GaussNewton) -> None:
    """Torch's second derivative of its own kernel isn't the derivative of its gradient."""
    torch.manual_seed(0)
    layer, x, target = nn.Conv1d(3, 4, 2).double(), torch.randn(5, 3, 4).double(), torch.randn(5, 4, 3).double()
    plain = nn.Sequential(Normed(layer, dim), nn.Tanh())
    normed = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
    model = nn.Sequential(normed(layer, dim=dim), nn.Tanh())
    ends = {"0.bias": "bias", "0.g": "_g" if old else "original0", "0.v": "_v" if old else "original1"}
    names = {ours: next(n for n, _ in model.named_parameters() if n.endswith(end)) for ours, end in ends.items()}
    q = QuadraticModel.build(model, x, target, nn.functional.mse_loss, divergence)
    truth = QuadraticModel.build(plain, x, target, nn.functional.mse_loss, divergence)
    v = {name: torch.randn_like(g) for name, g in truth.gradient.items()}
    found = q.curvature({theirs: v[ours].reshape(q.gradient[theirs].shape) for ours, theirs in names.items()})
    for name, product in truth.curvature(v).items():
        torch.testing.assert_close(found[names[name]].reshape(product.shape), product, rtol=1e-9, atol=1e-12)


def test_weight_norm_in_a_checkpointed_block() -> None:
    """Which is run plainly, so that it is replaced there too."""

    class Block(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
            self.checkpointed = checkpointed

        def forward(self, x: Tensor) -> Tensor:
            if not self.checkpointed:
                return self.inner(x)  # type: ignore[no-any-return]
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    batch = torch.randn(5, 3).double(), torch.zeros(5, 2).double(), nn.functional.mse_loss
    plain, q = (QuadraticModel.build(Block(which).double(), *batch, Newton()) for which in (False, True))
    truth = plain.curvature(plain.gradient)
    for name, product in q.curvature(q.gradient).items():
        torch.testing.assert_close(product, truth[name], rtol=1e-9, atol=1e-12)


def test_products_in_two_threads() -> None:
    """What a rule works with in one thread isn't written to by another."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(200, 200), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(300, 200)
    q = QuadraticModel.build(model, x, torch.zeros(300, 200), nn.functional.mse_loss, GaussNewton())
    directions = [{name: torch.randn_like(g) for name, g in q.gradient.items()} for _ in range(2)]
    expected = [q.curvature(v) for v in directions]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: q.curvature(directions[i % 2]), range(24)))
    for i, product in enumerate(found):
        torch.testing.assert_close(product, expected[i % 2])


class Force(nn.Module):
    """Its output is a gradient of its own, as in physics-informed networks; taken in another thread, as a GPU's are."""

    def __init__(self, elsewhere: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
        self.elsewhere = elsewhere

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.inner(x)

        def slope() -> Tensor:
            with torch.enable_grad():
                return torch.autograd.grad(energy.square().sum(), x, create_graph=True)[0]

        if not self.elsewhere:
            return energy + slope()[:, :2]
        with ThreadPoolExecutor() as pool:
            return energy + pool.submit(slope).result()[:, :2]


@pytest.mark.parametrize("divergence", [KL(), Newton()], ids=repr)
def test_a_gradient_in_the_forward_pass(divergence: Divergence) -> None:
    """Noticed in whatever thread it is taken."""
    torch.manual_seed(0)
    here, elsewhere = Force(False), Force(True)
    elsewhere.load_state_dict(here.state_dict())
    inputs, targets = torch.randn(5, 3).double(), torch.randint(2, (5,))
    v = {name: torch.randn_like(p) for name, p in here.named_parameters()}
    expected, found = (
        QuadraticModel.build(model, inputs, targets, nn.CrossEntropyLoss(), divergence).curvature(v)
        for model in (here, elsewhere)
    )
    for name, part in expected.items():
        torch.testing.assert_close(found[name], part, rtol=1e-9, atol=1e-11)
