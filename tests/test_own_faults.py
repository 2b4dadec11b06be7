"""Promise: a structure, a divergence or a solver of one's own that is wrong is told so, before a training is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llqr import LLQR, QuadraticModel, fit
from llqr.divergences import BasePoint, OutputTerm
from llqr.errors import LLQRError
from llqr.solvers import Solver
from llqr.structures import Structure
from loops import batch, network, sgd
from standins import random_model


class Faulty(Structure):
    """d ∘ x, with one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def identity(self, shape: Any, like: Tensor, count: int = 1) -> dict[str, Tensor]:
        if self.fault == "count":
            return {"d": like.new_ones(shape)}
        if self.fault == "tensor":
            return like.new_ones(count, *shape)  # type: ignore[return-value]
        if self.fault == "like":
            return {"d": torch.ones(count, *shape)}
        return {"d": like.new_ones(count, *shape) * (2 if self.fault == "identity" else 1)}

    def apply(self, tensors: Any, x: Tensor) -> Tensor:
        return (tensors["d"] * x).flatten() if self.fault == "shape" else tensors["d"] * x

    def linearize(self, tensors: Any, x: Tensor) -> Any:
        if self.fault not in ("pullback", "sign"):
            return super().linearize(tensors, x)
        wrong = {"pullback": lambda _, cotangent: cotangent * x, "sign": lambda _, cotangent: {"d": -cotangent * x}}
        return type("Wrong", (), {"value": lambda _: x, "pullback": wrong[self.fault]})()

    def degree(self, shape: Any) -> int:
        return 1

    def scaled(self, tensors: Any, factor: float) -> dict[str, Tensor]:
        return {name: tensor * factor for name, tensor in tensors.items()}


FAULTS = {
    "count": "leading dimension",
    "like": "make it from `like`",
    "shape": "U x has the shape of x",
    "identity": "doesn't give x back",
    "pullback": "returns a dict with a gradient for each",
    "sign": "isn't the gradient of",
    "tensor": "returns a dict of tensors by name",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_own_structures_are_told(fault: str) -> None:
    with pytest.raises(LLQRError, match=rf"of Faulty\(fault='{fault}'\).*{FAULTS[fault]}"):
        fit(random_model(), Faulty(fault), steps=2)
    model = network()
    if fault not in ("identity", "sign"):  # what a shape tells is told before the first step
        with pytest.raises(LLQRError, match=FAULTS[fault]):
            LLQR.paper(sgd(model), model, structure=Faulty(fault))
    fit(random_model(), Faulty("none"), steps=2)


def test_faults_of_own_divergences_and_solvers_are_told() -> None:
    def build(psi: Callable[[Tensor, BasePoint], object]) -> None:
        kind = type("Own", (OutputTerm,), {"needs_loss": False, "psi": lambda self, output, base: psi(output, base)})()
        QuadraticModel.build(model, *data, nn.CrossEntropyLoss(), kind)

    model, data = network(), batch()
    with pytest.raises(LLQRError, match=r"psi\(\) of Own\(\) has to return one number.*shape \(6, 3\)"):
        build(lambda output, base: (output - base.output).square())
    with pytest.raises(LLQRError, match="doesn't depend on the output"):
        build(lambda output, base: (output - base.output).detach().square().mean())
    build(lambda output, base: (output - base.output).square().mean())

    class Nothing(Solver):
        def solve(self, problem: Any, u: Any, steps: int) -> Any:
            return None

    with pytest.raises(LLQRError, match=r"solve\(\) of Nothing\(\) returned NoneType"):
        fit(random_model(), "diagonal", Nothing(), steps=2)


class Squares(OutputTerm):
    """Half the mean square, with a product of its own."""

    needs_loss = False

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        self.product = product

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        return 0.5 * (output - base.output).square().mean()

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        return self.product(tangent)


def test_a_product_that_isnt_psis_is_told() -> None:
    """W v = v/n for a mean of n numbers."""
    model, (inputs, targets) = network(), batch(0)
    loss = nn.CrossEntropyLoss()
    QuadraticModel.build(model, inputs, targets, loss, Squares(lambda v: v / v.numel()))
    for wrong in (lambda v: 5 * v / v.numel(), lambda v: v.sum()):
        with pytest.raises(LLQRError, match="isn't the second derivative of its psi"):
            QuadraticModel.build(model, inputs, targets, loss, Squares(wrong))
