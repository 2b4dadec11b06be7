"""Small random networks and the dense truth about them, written out without the library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

CLASSES = 3


class Residual(nn.Module):
    """x + W₂ tanh(W₁ x): two layers in one stage, so that R and M of the stage are full."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2), nn.Tanh(), nn.Linear(2, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Shift(nn.Module):
    """A stage without parameters that isn't elementwise: each number sees its neighbour."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * x.roll(1, dims=-1).square()


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Sequential, Tensor]:
    """A chain of 2 to 6 stages with float64 weights, and a batch of 1 to 8 inputs for it."""
    batch = draw(st.integers(1, 8))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    stages: list[nn.Module] = []
    width = draw(st.integers(2, 4))
    if draw(st.booleans()):
        inputs = torch.randn(batch, 1, 3, 3)
        channels = draw(st.integers(1, 2))
        stages += [nn.Conv2d(1, channels, 2), nn.Flatten()]
        width = channels * 4
    else:
        inputs = torch.randn(batch, width)
    for kind in draw(st.lists(st.sampled_from(STAGES), min_size=1, max_size=5 - len(stages))):
        if kind == "linear":
            wider = draw(st.integers(2, 4))
            stages.append(nn.Linear(width, wider))
            width = wider
        else:
            stages.append(PLAIN[kind](width))
    stages.append(nn.Linear(width, CLASSES))
    return nn.Sequential(*stages).double(), inputs.double()


PLAIN: dict[str, Callable[[int], nn.Module]] = {
    "tanh": lambda width: nn.Tanh(),
    "gelu": lambda width: nn.GELU(),
    "softplus": lambda width: nn.Softplus(),
    "layernorm": lambda width: nn.LayerNorm(width),
    "residual": Residual,
    "shift": lambda width: Shift(),
}
STAGES = ["linear", *PLAIN]


class Dense:
    """g and H of a network by torch.func.hessian, for a divergence that is given as a plain function."""

    def __init__(self, model: nn.Module, inputs: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
        self.model, self.inputs, self.loss = model, inputs, loss
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.point = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        self.output = self.run(self.point)
        self.gradient = torch.func.grad(lambda flat: loss(self.run(flat)))(self.point)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def flat(self, named: dict[str, Tensor]) -> Tensor:
        assert list(named) == list(self.shapes)
        return torch.cat([part.reshape(-1) for part in named.values()])

    def run(self, flat: Tensor) -> Tensor:
        return functional_call(self.model, self.named(flat), (self.inputs,))

    def step(self, matrix: Tensor, damping: float = 0.0) -> Tensor:
        """-(H + λI)⁻¹ g."""
        return -torch.linalg.solve(matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype), self.gradient)

    def hessian(self, divergence: Callable[[Tensor], Tensor]) -> Tensor:
        """∇² of a function of the flat parameters.

        Not by vmap where there is a LayerNorm: torch 2.13's batching rule for its second derivatives is wrong (finite
        differences, and the loop below, agree with each other and not with torch.func.hessian).
        """
        if any(isinstance(module, nn.LayerNorm) for module in self.model.modules()):
            return torch.autograd.functional.hessian(divergence, self.point)
        return torch.func.hessian(divergence)(self.point)


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())
