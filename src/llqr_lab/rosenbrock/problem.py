"""The Rosenbrock function R(x, y) = (a - x)² + b (y - x²)² with a = 1, b = 100: closed forms, and as a network.

A point is a tensor (x, y) of float64. The network has no data: its input is ignored, and its loss is the mean output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

A, B = 1.0, 100.0

INPUTS = torch.zeros(1, 1, dtype=torch.float64)
"""What the networks are called with: one example, which they ignore."""

Build = Callable[[Tensor], nn.Module]
"""From a point to a network that holds it as its parameters."""


def value(point: Tensor) -> float:
    """R(x, y)."""
    x, y = point.tolist()
    return float((A - x) ** 2 + B * (y - x**2) ** 2)


def gradient(point: Tensor) -> Tensor:
    """∇R = (-2(a - x) - 4b x (y - x²), 2b (y - x²))."""
    x, y = point.tolist()
    return torch.tensor([-2 * (A - x) - 4 * B * x * (y - x**2), 2 * B * (y - x**2)], dtype=torch.float64)


def hessian(point: Tensor) -> Tensor:
    """∇²R = [[2 - 4b (y - 3x²), -4b x], [-4b x, 2b]].

    Its determinant is 4b - 8b² (y - x²), so it is indefinite above y = x² + 1/(2b), a little above the valley's floor.
    """
    x, y = point.tolist()
    across = -4 * B * x
    return torch.tensor([[2 - 4 * B * (y - 3 * x**2), across], [across, 2 * B]], dtype=torch.float64)


def newton(point: Tensor) -> Tensor:
    """-H⁻¹ g: the stationary point of the quadratic model, wherever H isn't singular."""
    step: Tensor = torch.linalg.solve(hessian(point), -gradient(point))
    return step


def mean(outputs: Tensor, targets: object) -> Tensor:
    """The loss: the mean output; there are no targets."""
    return outputs.mean()


class First(nn.Module):
    """The first of two layers, which holds x: (u₁, u₂, u₃) = (a² - 2a x, x², b)."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        states = torch.cat((A**2 - 2 * A * self.x, self.x**2, torch.full_like(self.x, B)))
        return states.expand(len(inputs), 3)


class Second(nn.Module):
    """The second of two layers, which holds y: (u₁ + u₂) + u₃ (y - u₂)²."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y = nn.Parameter(y.clone())

    def forward(self, states: Tensor) -> Tensor:
        u1, u2, u3 = states.unbind(1)
        return (u1 + u2) + u3 * (self.y - u2) ** 2


class Single(nn.Module):
    """One layer that holds the whole point."""

    def __init__(self, point: Tensor) -> None:
        super().__init__()
        self.point = nn.Parameter(point.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        x, y = self.point.unbind()
        return ((A - x) ** 2 + B * (y - x**2) ** 2).expand(len(inputs))


def two_layers(point: Tensor) -> nn.Sequential:
    """The paper's two-layer form; its parameters are "0.x" and "1.y"."""
    return nn.Sequential(First(point[:1]), Second(point[1:]))


def one_layer(point: Tensor) -> nn.Module:
    """The single-layer form; its parameter is "point"."""
    return Single(point)


def named(network: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """The parts of a vector of the plane, by parameter of a network."""
    parameters = dict(network.named_parameters())
    parts = torch.split(vector, [parameter.numel() for parameter in parameters.values()])
    return dict(zip(parameters, parts, strict=True))


def joined(parts: dict[str, Tensor]) -> Tensor:
    """The inverse of `named`."""
    return torch.cat(list(parts.values()))
