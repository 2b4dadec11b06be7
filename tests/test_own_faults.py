"""Promise: `llqr.testing` tells what is wrong with a structure or a divergence of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llqr import fit
from llqr.divergences import KL, BasePoint, GaussNewton, Newton, OutputTerm, Renyi
from llqr.errors import LLQRError
from llqr.solvers import Solver
from llqr.structures import Dense, Diagonal, EigenKronecker, Kronecker, Linearization, Scalar, Structure
from llqr.testing import check_divergence, check_structure
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
        if self.fault == "place":
            return x.mul_(tensors["d"] * 1.5)
        if self.fault == "alone":
            return tensors["d"][:1] * x
        return (tensors["d"] * x).flatten() if self.fault == "shape" else tensors["d"] * x

    def linearize(self, tensors: Any, x: Tensor) -> Linearization:
        wrong: dict[str, Any] = {
            "value": lambda: -tensors["d"] * x,
            "derivative": lambda change: -change["d"] * x,
            "pullback": lambda cotangent: {"d": -cotangent * x},
        }
        faulty = {name: function for name, function in wrong.items() if name == self.fault}
        if self.fault == "names":
            faulty = {"pullback": lambda cotangent: cotangent * x}
        return super().linearize(tensors, x)._replace(**faulty)

    def degree(self, shape: Any) -> int:
        return 0 if self.fault == "degree" else 1

    def scaled(self, tensors: Any, factor: float) -> dict[str, Tensor]:
        return {name: tensor * (factor**2 if self.fault == "scaled" else factor) for name, tensor in tensors.items()}


FAULTS = {
    "count": "leading dimension",
    "like": "make it from `like`",
    "shape": "U x has the shape of x",
    "identity": "doesn't give x back",
    "value": "isn't apply",
    "derivative": "isn't how apply",
    "pullback": "isn't the gradient of",
    "names": "returns a dict with a gradient for each",
    "tensor": "returns a dict of tensors by name",
    "degree": "degree",
    "scaled": "scaled",
    "place": "in place",
    "alone": "as it does alone",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_own_structures_are_told(fault: str) -> None:
    with pytest.raises(LLQRError, match=FAULTS[fault]):
        check_structure(Faulty(fault))
    check_structure(Faulty("none"))


@pytest.mark.parametrize(
    "structure",
    [Scalar(), Diagonal(), Dense(), Kronecker(), Kronecker(3), EigenKronecker(), EigenKronecker(2)],
    ids=repr,
)
def test_the_librarys_own_structures_pass(structure: Structure) -> None:
    check_structure(structure)


def test_a_solver_that_returns_no_preconditioner_is_told() -> None:
    class Nothing(Solver):
        def solve(self, problem: Any, u: Any, steps: int) -> Any:
            return None

    with pytest.raises(LLQRError, match=r"solve\(\) of Nothing\(\) returned NoneType"):
        fit(random_model(), "diagonal", Nothing(), steps=2)


class Squares(OutputTerm):
    """Half the mean square, with a product or draws of its own."""

    needs_loss = False

    def __init__(self, product: Callable[[Tensor], Tensor], drawn: float = 1.0) -> None:
        self.product, self.drawn = product, drawn

    def psi(self, output: Tensor, base: BasePoint) -> Tensor:
        return 0.5 * (output - base.output).square().mean()

    def hessian_product(self, tangent: Tensor, base: BasePoint) -> Tensor:
        return self.product(tangent)

    def draw(self, base: BasePoint, generator: torch.Generator) -> Tensor:
        return (
            self.drawn
            * torch.randn(base.output.shape, generator=generator).to(base.output)
            / base.output.numel() ** 0.5
        )


def test_faults_of_own_divergences_are_told() -> None:
    """W v = v/n for a mean of n numbers, and draws of variance 1/n."""
    output = torch.randn(6, 3)

    def own(psi: Callable[[Tensor, BasePoint], object], flat: bool = True) -> OutputTerm:
        made = {"needs_loss": False, "flat": flat, "psi": lambda self, output, base: psi(output, base)}
        return type("Own", (OutputTerm,), made)()  # type: ignore[no-any-return]

    check_divergence(own(lambda output, base: (output - base.output).square().mean()), output)
    with pytest.raises(LLQRError, match=r"psi\(\) of Own\(\) has to return one number.*shape \(6, 3\)"):
        check_divergence(own(lambda output, base: (output - base.output).square()), output)
    with pytest.raises(LLQRError, match="doesn't depend on the output"):
        check_divergence(own(lambda output, base: (output - base.output).detach().square().mean()), output)
    with pytest.raises(LLQRError, match="set flat=False"):
        check_divergence(own(lambda output, base: output.square().mean()), output)
    check_divergence(own(lambda output, base: output.square().mean(), flat=False), output)
    check_divergence(Squares(lambda v: v / v.numel()), output)
    for wrong in (lambda v: 5 * v / v.numel(), lambda v: v.sum()):
        with pytest.raises(LLQRError, match="isn't the second derivative of its psi"):
            check_divergence(Squares(wrong), output)
    with pytest.raises(LLQRError, match=r"draw\(\) of.*second moment"):
        check_divergence(Squares(lambda v: v / v.numel(), drawn=2.0), output)


@pytest.mark.parametrize(
    "divergence", [KL(), KL("bernoulli"), KL("gaussian"), Renyi(0.5), GaussNewton(), Newton()], ids=repr
)
def test_the_librarys_own_divergences_pass(divergence: OutputTerm) -> None:
    check_divergence(divergence, torch.randn(2, 3), torch.tensor([0, 2]), nn.CrossEntropyLoss())
