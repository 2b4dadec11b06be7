"""What QuadraticModel refuses, before any work is lost, and what it says to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llqr import cg_step, dense_step, exact_step
from llqr.curvature.quadratic import QuadraticModel
from llqr.divergences import KL, Divergence, GaussNewton, Intermediate, Newton
from llqr.errors import LLQRError, NonFiniteError, NotTwiceDifferentiableError

LOSS = nn.CrossEntropyLoss()


def network(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *extra, nn.Linear(4, 2)).double()


def data(batch: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3).double(), torch.randint(2, (batch,))


def refuse(match: str, *arguments: Any, error: type[Exception] = LLQRError, **options: Any) -> None:
    with pytest.raises(error, match=match):
        QuadraticModel.build(*arguments, **options)


def test_losses_that_are_no_mean() -> None:
    model, (inputs, targets) = network(), data()
    refuse(r"shape \(5,\).*mean", model, inputs, targets, nn.CrossEntropyLoss(reduction="none"), KL())
    refuse("adds the examples up", model, inputs, targets, nn.CrossEntropyLoss(reduction="sum"), KL())
    refuse("returned float", model, inputs, targets, lambda output, targets: 1.0, KL())
    refuse("doesn't depend", model, inputs, targets, lambda output, targets: output.detach().sum(), KL())
    refuse("needs the loss", model, inputs, targets, None, Newton())
    refuse("needs the loss", model, inputs, targets, None, KL())


def test_outputs_that_do_not_fit() -> None:
    inputs, targets = data()
    single = nn.Sequential(nn.Linear(3, 1)).double()
    refuse("two classes.*bernoulli", single, inputs, torch.rand(5, 1).double(), nn.MSELoss(), KL())

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), x

    refuse(r"returned a tuple.*output=lambda", Several(), inputs, targets, LOSS, KL())
    QuadraticModel.build(Several(), inputs, targets, LOSS, KL(), output=lambda out: out[0])
    refuse(r"output is torch.int64", network(), inputs, targets, LOSS, KL(), output=lambda out: out.argmax(-1))
    refuse(r"weights have shape \(4,\)", network(), inputs, targets, LOSS, KL(), weights=torch.ones(4))
    refuse("not all zero", network(), inputs, targets, LOSS, KL(), weights=torch.zeros(5))


def test_values_that_are_not_finite() -> None:
    model, (inputs, targets) = network(), data()
    bad = inputs.clone()
    bad[1, 2] = float("nan")
    refuse(r"inputs.*\(1, 2\)", model, bad, targets, LOSS, KL(), error=NonFiniteError)
    with torch.no_grad():
        model[2].bias[1] = float("inf")
    refuse(r"'2.bias'.*\(1,\)", model, inputs, targets, LOSS, KL(), error=NonFiniteError)
    gradient = {"0.weight": torch.full((4, 3), float("nan")).double()}
    refuse("gradient of '0.weight'", network(), inputs, None, None, KL(), gradient=gradient, error=NonFiniteError)


def test_devices() -> None:
    model, (inputs, targets) = network(), data()
    refuse("inputs are on meta", model, inputs.to("meta"), targets, LOSS, KL())
    model[2] = model[2].to("meta")
    refuse("several devices.*move it to one", model, inputs, targets, LOSS, KL())


def test_names() -> None:
    model, (inputs, targets) = network(), data()
    refuse("unknown divergence 'ndg'.*'ngd'", model, inputs, targets, LOSS, "ndg")
    refuse("unknown module in Intermediate 'x'", model, inputs, targets, LOSS, Intermediate({"x": 1.0}))
    refuse("damping '7'", model, inputs, targets, LOSS, KL(), {"7": 0.1})
    refuse("unknown parameter in the gradient '0.wight'.*'0.weight'", model, inputs, None, None, KL(),
           gradient={"0.wight": torch.ones(4, 3)})  # fmt: skip
    q = QuadraticModel.build(model, inputs, targets, LOSS, KL())
    with pytest.raises(LLQRError, match=r"lacks '0.bias'"):
        q.curvature({"0.weight": torch.ones(4, 3).double()})
    with pytest.raises(LLQRError, match="unknown parameter in the direction 'x'"):
        q.curvature({**q.gradient, "x": torch.ones(1)})
    with pytest.raises(LLQRError, match=r"shape \(1,\), and the parameter \(4, 3\)"):
        q.curvature({**q.gradient, "0.weight": torch.ones(1).double()})
    refuse("damping.*zero or more", model, inputs, targets, LOSS, KL(), -0.1)


def test_chunks() -> None:
    inputs, targets = data()
    normed = network(nn.BatchNorm1d(4).double())
    refuse(
        r"'2' normalises with the statistics of the batch.*training=False", normed, inputs, targets, LOSS, KL(), 0.0, 2
    )
    QuadraticModel.build(normed, inputs, targets, LOSS, KL(), 0.0, 2, training=False)
    refuse("random numbers.*training=False", network(nn.Dropout(0.5)), inputs, targets, LOSS, KL(), 0.0, 2)
    stateless = network(nn.BatchNorm1d(4, track_running_stats=False).double()).eval()
    refuse("statistics of the batch", stateless, inputs, targets, LOSS, KL(), 0.0, 2)
    for size in (0, -1, 2.5, True):
        refuse("chunk_size is a positive", network(), inputs, targets, LOSS, KL(), 0.0, size)


def test_things_that_are_no_model() -> None:
    inputs, targets = data()
    refuse("not an nn.Module", torch.tanh, inputs, targets, LOSS, KL())
    refuse("nothing to step", nn.Tanh(), inputs, targets, LOSS, KL())
    refuse("empty", network(), inputs[:0], targets[:0], LOSS, KL())
    refuse("tensor", network(), "abc", targets, LOSS, KL())
    with torch.inference_mode():
        refuse("inference_mode", network(), inputs, targets, LOSS, KL())


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Once(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OnceOnly.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_operations_without_the_derivatives() -> None:
    inputs, targets = data()
    refuse("Newton asks", network(Once()), inputs, targets, LOSS, Newton(), error=NotTwiceDifferentiableError)
    refuse("LLQR.base, model", network(Once()), inputs, targets, LOSS, KL(), error=NotTwiceDifferentiableError)


def test_parameters_changed_behind_its_back() -> None:
    """A model that was stepped since isn't the one that was linearised: no wrong product comes out."""
    model, (inputs, targets) = network(), data()
    q = QuadraticModel.build(model, inputs, targets, LOSS, KL())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    with pytest.raises(LLQRError, match="changed since"):
        q.curvature(q.gradient)


@pytest.mark.parametrize("divergence", [KL(), GaussNewton(), Newton(), KL() + Newton(), Intermediate({"0": 1.0})])
@pytest.mark.parametrize("size", [None, 2])
def test_weights(divergence: Divergence, size: int | None) -> None:
    model, (inputs, targets) = network(), data()
    for weights in ("x", 1.0, [1.0] * 5, torch.ones(5).to(torch.complex64)):
        refuse("weights are a tensor", model, inputs, targets, LOSS, divergence, 0.0, size, weights=weights)
    refuse(
        "weights are on meta", model, inputs, targets, LOSS, divergence, 0.0, size, weights=torch.ones(5, device="meta")
    )
    for weights in (-torch.ones(5), torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])):
        refuse("zero or more", model, inputs, targets, LOSS, divergence, 0.0, size, weights=weights)
    refuse("not all zero", model, inputs, targets, LOSS, divergence, 0.0, size, weights=torch.zeros(5))
    refuse("not finite", model, inputs, targets, LOSS, divergence, 0.0, size, weights=torch.full((5,), float("nan")))
    for shape in ((4,), (), (2, 5), (5, 3)):
        refuse("weights have shape", model, inputs, targets, LOSS, divergence, 0.0, size, weights=torch.ones(shape))
    for fitting in (torch.ones(5), torch.ones(5, dtype=torch.bool), torch.ones(5, dtype=torch.int64)):
        QuadraticModel.build(model, inputs, targets, LOSS, divergence, 0.0, size, weights=fitting)


def test_targets_that_are_missing() -> None:
    model, (inputs, _) = network(), data()
    for divergence in (KL(), Newton(), GaussNewton()):
        for size in (None, 2):
            refuse("targets are None.*give the targets", model, inputs, None, LOSS, divergence, 0.0, size)
    with pytest.raises(LLQRError, match="targets are None"):
        cg_step(model, inputs, None, LOSS, KL(), 0.1)


def ctc(output: Tensor, targets: Tensor) -> Tensor:
    sizes = (torch.tensor([len(output)]), torch.tensor([1]))
    return nn.functional.ctc_loss(output.log_softmax(-1)[:, None], torch.ones(1, 1).long(), *sizes)


def distance(output: Tensor, targets: Tensor) -> Tensor:
    return torch.cdist(output, torch.ones(3, 2).double()).mean()


@pytest.mark.parametrize("loss", [ctc, distance, nn.MultiMarginLoss(), nn.functional.multi_margin_loss])
@pytest.mark.parametrize("way", [QuadraticModel.build, exact_step, dense_step, cg_step], ids=lambda way: way.__name__)
def test_losses_that_have_no_second_derivative(way: Any, loss: Any) -> None:
    """Said where the problem is built. KL doesn't need it."""
    model, (inputs, targets) = network(), data()
    for divergence in (GaussNewton(), Newton(), 0.5 * KL() + GaussNewton()):
        with pytest.raises(NotTwiceDifferentiableError, match=r"the loss can't be differentiated twice.*KL"):
            way(model, inputs, targets, loss, divergence, 1.0)
    way(model, inputs, targets, loss, KL(), 1.0)


class Of(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cdist(x, torch.ones(4, 4).double()),
        lambda x: torch.segment_reduce(x, "mean", lengths=torch.ones(len(x)).long()),
    ],
    ids=["cdist", "segment_reduce"],
)
def test_operations_that_have_no_second_derivative(function: Any) -> None:
    """Torch raises different exceptions for them."""
    inputs, targets = data()
    for divergence in (KL(), GaussNewton(), Newton()):
        q = QuadraticModel.build(network(Of(function)), inputs, targets, LOSS, divergence)
        with pytest.raises(NotTwiceDifferentiableError, match="replace the operation"):
            q.curvature(q.gradient)


class Overwriting(nn.Module):
    """Changes in place what a derivative needs; torch notices, but not in a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        y = self.inner(x)
        return y.sin() + x.mul_(2)


@pytest.mark.parametrize("divergence", [KL(), GaussNewton(), Newton()], ids=repr)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_models_that_torch_cannot_differentiate_once(divergence: Divergence, checkpointed: bool) -> None:
    inner, (inputs, targets) = Overwriting(), data()
    block = Of(lambda x: checkpoint(inner, x, use_reentrant=False)) if checkpointed else Of(inner)
    model = network(block)
    model.add_module("held", inner.double())
    model.forward = lambda x: model[3](block(model[1](model[0](x))))  # type: ignore[method-assign, assignment]
    refuse("can't be differentiated.*modified by an inplace", model, inputs, targets, LOSS, divergence)
