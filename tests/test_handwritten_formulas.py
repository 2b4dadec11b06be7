"""Backward formulas written by hand that hide from the next derivative: Newton notices, and refuses nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from formulas import FORMULAS, Layer, written
from llqr import QuadraticModel
from llqr.curvature.graph import check_handwritten
from llqr.divergences import KL, Divergence, GaussNewton, Newton
from llqr.errors import LLQRWarning, NotTwiceDifferentiableError

LOSS = nn.CrossEntropyLoss()


class Cut(torch.autograd.Function):
    """A square whose whole backward is cut from the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return (2 * ctx.saved_tensors[0] * u).detach()


class Kept(torch.autograd.Function):
    """A square that keeps its slope, so that the slope's own derivative is lost. H stays symmetric."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = 2 * x
        return x.square()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return ctx.slope * u  # type: ignore[no-any-return]


class Tripled(torch.autograd.Function):
    """Linear, and right but for what it says about its own dependence on u."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return 3 * u.data


class Honest(torch.autograd.Function):
    """A square as it should be written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * u  # type: ignore[no-any-return]


class Ramp(torch.autograd.Function):
    """A ReLU that keeps its mask: nothing is lost, its slope is constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = x > 0
        return x * ctx.mask  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return u * ctx.mask  # type: ignore[no-any-return]


class Rounded(torch.autograd.Function):
    """Straight through: the gradient isn't one, by intent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return u


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return -u


class By(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)  # type: ignore[no-any-return]


def network(function: Any, dtype: torch.dtype, width: int = 6) -> nn.Sequential:
    """ReLUs and norms around a function written by hand; a layer that is frozen."""
    model = nn.Sequential(
        nn.Linear(3, width),
        nn.ReLU(),
        nn.BatchNorm1d(width),
        nn.Linear(width, width),
        By(function),
        nn.LayerNorm(width),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 2),
    ).to(dtype)
    model[3].requires_grad_(False)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", [Cut, Kept, Tripled])
def test_hidden_formulas_are_noticed(function: Any, dtype: torch.dtype) -> None:
    inputs, targets = torch.randn(9, 3).to(dtype), torch.randint(2, (9,))
    for divergence in (Newton(), KL() + 0.1 * Newton()):
        for size, training in ((None, None), (4, False)):
            with pytest.raises(
                NotTwiceDifferentiableError, match=rf"{function.__name__}.*save_for_backward.*GaussNewton"
            ):
                QuadraticModel.build(
                    network(function, dtype), inputs, targets, LOSS, divergence, 0.1, size, training=training
                )


@pytest.mark.parametrize("function", [Honest, Ramp, Rounded, Reversed])
@pytest.mark.parametrize("seed", range(4))
def test_other_formulas_are_not(function: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        inputs, targets = torch.randn(64, 3).to(dtype), torch.randint(2, (64,))
        model = network(function, dtype, width=64)
        state, random = {n: v.clone() for n, v in model.state_dict().items()}, torch.get_rng_state()
        q = QuadraticModel.build(model, inputs, targets, LOSS, Newton(), 0.1)
        q.curvature(q.gradient)
        assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), random)
    model[6].register_full_backward_hook(lambda module, of_input, of_output: None)
    QuadraticModel.build(model.float(), inputs.float(), targets, LOSS, Newton(), 0.1)


def test_dropout_and_models_that_stay_in_float32() -> None:
    """One mask in all of it; a model that can't be run in double precision isn't judged."""
    inputs, targets = torch.randn(9, 3), torch.randint(2, (9,))

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).float() @ torch.eye(6) + self.inner(x.float())  # type: ignore[no-any-return]

    for middle in (nn.Dropout(0.5), Single()):
        model = nn.Sequential(nn.Linear(3, 6), By(Honest), middle, nn.Linear(6, 2))
        q = QuadraticModel.build(model, inputs, targets, LOSS, Newton(), 0.1)
        q.curvature(q.gradient)


class SquaredError(torch.autograd.Function):
    """A loss that computes its gradient with its value, and keeps it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.slope = 2 * (x - y) / x.numel()
        return (x - y).square().mean()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None]:
        return ctx.slope * u, None


@pytest.mark.parametrize("divergence", [GaussNewton(), Newton()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_that_keep_their_gradient(divergence: Divergence, dtype: torch.dtype) -> None:
    """Their second derivative would be zero."""
    model = nn.Linear(3, 2).to(dtype)
    inputs, targets = torch.randn(5, 3).to(dtype), torch.randn(5, 2).to(dtype)
    for size in (None, 2):
        with pytest.raises(NotTwiceDifferentiableError, match=r"loss.*SquaredError.*KL"):
            QuadraticModel.build(model, inputs, targets, SquaredError.apply, divergence, 0.1, size)
        QuadraticModel.build(model, inputs, targets, SquaredError.apply, KL("gaussian"), 0.1, size)
    QuadraticModel.build(model, inputs, targets, functional.mse_loss, divergence, 0.1)


class Shy(torch.autograd.Function):
    """A sine whose backward hides what it does with u."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return u.detach() * ctx.saved_tensors[0].cos() + 0 * u


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_every_product_says_what_the_first_has_noticed(chunk_size: int | None) -> None:
    model = nn.Sequential(nn.Linear(3, 5), By(Shy), nn.Linear(5, 4)).double()
    inputs, targets = torch.randn(8, 3).double(), torch.randint(4, (8,))
    q = QuadraticModel.build(model, inputs, targets, LOSS, KL(), chunk_size=chunk_size)
    for product in (q.curvature, q.curvature_along, q.curvature):
        with pytest.raises(NotTwiceDifferentiableError, match="replace the operation"):
            product(q.gradient)


FIRST: dict[str, dict[str, float]] = {
    "nothing": {"0": 0.0, "2": 0.0},
    "later layers": {"0": 0.0, "2": 1.0},
    "hardly earlier layers": {"0": 1e-9, "2": 1.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first", FIRST)
def test_it_doesnt_matter_what_the_first_product_is_of(first: str, dtype: torch.dtype) -> None:
    """A first direction that doesn't come by the formula shows nothing, and everything afterwards would be trusted."""
    inputs, targets = torch.randn(8, 3).to(dtype), torch.randint(4, (8,))
    for function in (Shy, Cut, Tripled):
        model = nn.Sequential(nn.Linear(3, 5), By(function), nn.Linear(5, 4)).to(dtype)
        for product in (QuadraticModel.curvature, QuadraticModel.curvature_along):
            q = QuadraticModel.build(model, inputs, targets, LOSS, KL())
            away = {name: FIRST[first][name[0]] * torch.randn_like(g) for name, g in q.gradient.items()}
            with pytest.raises(NotTwiceDifferentiableError, match="replace the operation"):
                product(q, away)


def test_a_model_that_is_nothing_but_a_hidden_formula() -> None:
    q = QuadraticModel.build(
        nn.Sequential(nn.Linear(3, 4), By(Cut)), torch.randn(8, 3), torch.randint(4, (8,)), LOSS, KL()
    )
    with pytest.raises(NotTwiceDifferentiableError, match="replace the operation"):
        q.curvature(q.gradient)


def test_parameters_whose_gradient_is_rounding_alone_are_no_sign() -> None:
    """A bias before batch statistics, a key's bias: 1e-17 in place of 0, and it isn't linear in anything."""
    for dtype in (torch.float32, torch.float64):
        model = nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)
        q = QuadraticModel.build(model, torch.randn(256, 3).to(dtype), torch.randint(4, (256,)), LOSS, KL())
        q.curvature(q.gradient)  # a warning is an error


@pytest.mark.parametrize("only", [None, ["first.weight"]])
def test_hidden_formulas_are_noticed_where_some_parameters_stay(only: list[str] | None) -> None:
    """The look is in double precision, with parameters in it that aren't stepped and could be."""
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("first", nn.Linear(3, 5))
    net.add_module("by", By(Kept))
    net.add_module("last", nn.Linear(5, 4))
    inputs, targets = torch.randn(8, 3), torch.randint(4, (8,))
    with pytest.raises(NotTwiceDifferentiableError):
        QuadraticModel.build(net, inputs, targets, LOSS, Newton(), only=only)


class Padded(nn.Module):
    """Words, of which one is a padding that isn't trained; hooks on the gradients, if they are asked for."""

    def __init__(self, wave: Any, hook: Any = None) -> None:
        super().__init__()
        self.embed, self.wave, self.last = nn.Embedding(5, 4, padding_idx=1), wave, nn.Linear(4, 3)
        self.embed.weight.data.normal_()
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        y = self.wave(self.embed(x))
        if self.hook is not None and y.requires_grad:
            y.register_hook(self.hook)
        return self.last(y.sum(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("hook", [lambda u: None, lambda u: 2 * u], ids=["looks", "changes"])
def test_hooks_are_no_formulas_that_hide(hook: Any) -> None:
    """What a hook does to a gradient is in the graph: push is the transpose of pull."""
    words, targets = torch.randint(5, (8, 3)), torch.randint(3, (8,))
    q = QuadraticModel.build(Padded(torch.sin, hook).double(), words, targets, LOSS, KL())
    q.curvature(q.gradient)


class Faint(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1e-4 * x


def beside(name: str, function: Any) -> tuple[nn.Module, Tensor]:
    """A network with a function written by hand, beside which there is something that hides the hiding."""
    first: nn.Module = nn.Linear(3, 4)
    middle: nn.Module = nn.Identity()
    inputs = torch.randn(9, 3).double()
    if name == "a small part":
        middle = Faint()
    elif name == "a straight-through estimator":
        middle = By(Rounded)
    elif name == "a hook":
        first.register_forward_hook(
            lambda module, args, y: y.register_hook(lambda u: 2 * u) and None if y.requires_grad else None
        )
    elif name == "a norm that is kept":
        first, inputs = nn.EmbeddingBag(5, 4, max_norm=0.8), torch.randint(5, (9, 3))
    last = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    if name == "a small part":
        model: nn.Module = nn.Sequential(first, By(function), middle, nn.Linear(4, 3), last)
    else:
        model = nn.Sequential(first, middle, By(function), nn.Linear(4, 3), last)
    return model.double(), inputs


@pytest.mark.parametrize("function", [Cut, Kept, Tripled])
@pytest.mark.parametrize(
    "name", ["a small part", "a straight-through estimator", "a hook", "a norm that is kept", "nothing"]
)
def test_formulas_are_looked_at_one_by_one(name: str, function: Any) -> None:
    """What is hidden is noticed however small a part of H it is, and whatever else isn't a derivative in the model."""
    targets = torch.randint(3, (9,))
    model, inputs = beside(name, function)
    with pytest.raises(NotTwiceDifferentiableError, match=f"written by hand.*{function.__name__}"):
        QuadraticModel.build(model, inputs, targets, LOSS, Newton(), 0.1)
    for honest in (Honest, Ramp):
        model, inputs = beside(name, honest)
        QuadraticModel.build(model, inputs, targets, LOSS, Newton(), 0.1)


@pytest.mark.parametrize("seed", range(6))
def test_paddings_are_no_sign(seed: int) -> None:
    """A padding that isn't zero has no gradient though the output depends on it: that isn't the fault of a formula."""
    torch.manual_seed(seed)
    words, targets = torch.randint(5, (8, 3)), torch.randint(3, (8,))
    for function in (Honest, Ramp):
        model = Padded(function.apply).double()
        model.last.register_full_backward_hook(lambda module, of_input, of_output: None)
        for scale in (1.0, 1e-2):
            model.embed.weight.data[1].mul_(scale)
            QuadraticModel.build(model, words, targets, LOSS, Newton(), 0.1)


class Masking(torch.autograd.Function):
    """A dropout by hand, from torch's stream, of a square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = torch.rand(x.shape) > 0.5
        ctx.save_for_backward(x)
        return x.square() * ctx.mask  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * u * ctx.mask  # type: ignore[no-any-return]


def test_functions_that_draw() -> None:
    """They are looked at with one mask, and the stream stays where it is; hidden or not."""

    class Lost(Masking):
        @staticmethod
        def backward(ctx: Any, u: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0].detach() * u * ctx.mask  # type: ignore[no-any-return]

    before = torch.get_rng_state()
    q = QuadraticModel.build(beside("a hook", Masking)[0], *sample(), LOSS, Newton(), 0.1)
    q.curvature(q.gradient)
    with pytest.raises(NotTwiceDifferentiableError, match="Lost"):
        QuadraticModel.build(beside("a hook", Lost)[0], *sample(), LOSS, Newton(), 0.1)
    with torch.random.fork_rng():
        torch.set_rng_state(before)
        for function in (Masking, Lost):
            beside("a hook", function)
            sample()
        after = torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), after)


def sample() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 3).double(), torch.randint(3, (9,))


def test_functions_are_themselves_again() -> None:
    """After the look, and after a model that raised in it."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.autograd.Function.apply.__module__ == "torch.autograd.function"
            return Honest.apply(x).float().double()  # type: ignore[no-any-return, no-untyped-call]

    before = vars(torch.autograd.function._SingleLevelFunction).keys()
    model = nn.Sequential(nn.Linear(3, 4), Failing(), nn.Linear(4, 2)).double()
    QuadraticModel.build(model, torch.randn(9, 3).double(), torch.randint(2, (9,)), LOSS, Newton(), 0.1)
    assert vars(torch.autograd.function._SingleLevelFunction).keys() == before


def stack(name: str, width: int, apply: Any, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layer = Layer(FORMULAS[name], width, apply)
    return nn.Sequential(nn.Linear(5, width), layer, nn.Tanh(), nn.Linear(width, 3)).to(dtype)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [8, 2000])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_as_people_write_them(name: str, width: int, dtype: torch.dtype, single: bool) -> None:
    """Right ones are taken, and Hv is that of torch's own operations in float64; those that keep a number are refused."""
    formula = FORMULAS[name]
    x, y = torch.randn(24, 5).to(dtype), torch.randint(3, (24,))
    model = stack(name, width, written(formula, (), single).apply, dtype)
    q = QuadraticModel.build(model, x, y, LOSS, Newton())
    v = {name: torch.randn_like(g) for name, g in q.gradient.items()}
    found = q.curvature(v)
    plain = stack(name, width, None, dtype).double()
    expected = QuadraticModel.build(plain, x.double(), y, LOSS, Newton()).curvature(
        {name: part.double() for name, part in v.items()}
    )
    gap = sum(float((found[name] - part).square().sum()) for name, part in expected.items()) ** 0.5
    size = sum(float(part.square().sum()) for part in expected.values()) ** 0.5
    assert gap < (1e-10 if dtype == torch.float64 and not single else 1e-3) * size
    for keeps in formula.hidden:
        model = stack(name, width, written(formula, keeps, single).apply, dtype)
        with pytest.raises(NotTwiceDifferentiableError, match=r"hides a part of itself.*Written"):
            QuadraticModel.build(model, x, y, LOSS, Newton())
    if not formula.hidden:  # what it keeps is constant
        QuadraticModel.build(stack(name, width, written(formula, (0,), single).apply, dtype), x, y, LOSS, Newton())


class InFloat32(torch.autograd.Function):
    """Runs in float32 alone, as kernels may."""

    cuts = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        ctx.save_for_backward(x)
        return x**3

    @classmethod
    def backward(cls, ctx: Any, u: Tensor) -> Tensor:
        x = ctx.saved_tensors[0]
        return 3 * u * (x.detach() if cls.cuts else x).square()


class CutInFloat32(InFloat32):
    cuts = True


def test_a_formula_is_judged_in_its_own_precision() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 3), torch.randint(2, (16,))
    for function in (InFloat32, CutInFloat32):
        model = nn.Sequential(nn.Linear(3, 6), By(function), nn.Linear(6, 2))
        if function is InFloat32:
            QuadraticModel.build(model, x, y, LOSS, Newton())
            continue
        with pytest.raises(NotTwiceDifferentiableError, match=r"hides a part of itself.*CutInFloat32"):
            QuadraticModel.build(model, x, y, LOSS, Newton())


class OnlyOnce(torch.autograd.Function):
    """Can't be called again by itself: it takes what another object holds."""

    held: tuple[Tensor, ...] = ()

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        (scale,), cls.held = cls.held, ()
        ctx.save_for_backward(x, scale)
        return x.square() * scale.float()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        x, scale = ctx.saved_tensors
        return 2 * u * x * scale.float()


def test_what_cant_be_judged_is_said() -> None:
    """Neither the function by itself, nor the model in double precision."""

    class Holding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            OnlyOnce.held = (torch.full((6,), 2.0),)
            return OnlyOnce.apply(x) @ torch.eye(6)  # type: ignore[no-any-return, no-untyped-call]

    model = nn.Sequential(nn.Linear(3, 6), Holding(), nn.Linear(6, 2))
    with pytest.warns(LLQRWarning, match=r"OnlyOnce is written by hand.*gradgradcheck"):
        QuadraticModel.build(model, torch.randn(9, 3), torch.randint(2, (9,)), LOSS, Newton())


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("size", [1e-3, 0.1])
def test_many_kinks_are_no_curvature(size: float, single: bool) -> None:
    """A sparsemax of wide rows comes to kinks at every long step, and their sum looks like a smooth function."""
    call = written(FORMULAS["sparsemax"], (0,), single).apply
    for seed in range(8):
        x = size * torch.randn(1 if size < 0.1 else 24, 2000, generator=torch.Generator().manual_seed(seed))
        check_handwritten(["Written"], lambda x=x: call(x.double().requires_grad_()), "this", "")


class ZeroedProduct(torch.autograd.Function):
    """x A B, with x A kept from the forward pass, or computed again."""

    again = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.kept = x @ a
        return ctx.kept @ b

    @classmethod
    def backward(cls, ctx: Any, u: Tensor) -> Any:  # type: ignore[override]
        x, a, b = ctx.saved_tensors
        return u @ b.T @ a.T, x.T @ (u @ b.T), (x @ a if cls.again else ctx.kept).T @ u


class CutZeroedProduct(ZeroedProduct):
    again = False


class Zeroed(nn.Module):
    """An adapter as it begins: B is zero."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.zeros(3, 3))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.a, self.b)  # type: ignore[no-any-return]


def test_a_formula_is_looked_at_where_it_is_not_zero() -> None:
    """By x A and B = 0 the slope of A is zero, and nothing of ∂²/∂A∂B would be seen."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    QuadraticModel.build(Zeroed(ZeroedProduct).double(), x, y, functional.cross_entropy, "newton")
    with pytest.raises(NotTwiceDifferentiableError, match="CutZeroedProduct"):
        QuadraticModel.build(Zeroed(CutZeroedProduct).double(), x, y, functional.cross_entropy, "newton")


class SharpLog(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        ctx.save_for_backward(p)
        return (p + 1e-8).log()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:  # type: ignore[override]
        return u / (ctx.saved_tensors[0] + 1e-8)


@pytest.mark.parametrize("sharpness", [1.0, 10.0, 40.0])
def test_a_formula_that_bends_within_the_step_is_no_sign(sharpness: float) -> None:
    """log(p + 1e-8) of probabilities that are almost zero: differences are off by their third derivative."""
    torch.manual_seed(0)

    class Sharp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            logs: Tensor = SharpLog.apply((sharpness * self.one(x)).softmax(-1))  # type: ignore[no-untyped-call]
            return self.two(logs)  # type: ignore[no-any-return]

    x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    QuadraticModel.build(Sharp().double(), x, y, functional.cross_entropy, "newton")
