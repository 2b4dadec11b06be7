"""Small networks that are fitted to high accuracy: three equations, a noisy regression, an autoencoder.

Each has a network, the residuals that the loss is the mean square of, and an error that says how good the fit is: for an
equation the relative error of the solution on a grid, else the relative error of predictions on fresh data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine


@dataclass
class Problem:
    """What is fitted, and how good the fit is."""

    name: str
    model: nn.Module
    residuals: Callable[[], tuple[Tensor, ...]]
    """Of the network as it is; the loss is the sum of their mean squares."""
    error: Callable[[], float]
    truth: Callable[[Tensor], Tensor]
    """What the network should return at points of the unit square; of the autoencoder, the surface."""

    def loss(self) -> Tensor:
        return torch.stack([residual.square().mean() for residual in self.residuals()]).sum()


def network(inputs: int, width: int, depth: int, seed: int, outputs: int = 1) -> nn.Sequential:
    """tanh layers, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pairs = pairwise([inputs, *[width] * depth])
        layers = [part for before, after in pairs for part in (nn.Linear(before, after), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(width, outputs)).double()


def points(count: int, dimensions: int = 2) -> Tensor:
    """Points that fill the unit cube evenly, but on no grid."""
    drawn: Tensor = SobolEngine(dimensions, scramble=True, seed=0).draw(count, dtype=torch.float64)  # type: ignore[no-untyped-call]
    return drawn


def grid(count: int = 100) -> Tensor:
    line = torch.linspace(0, 1, count, dtype=torch.float64)
    return torch.cartesian_prod(line, line)


def derivatives(u: Tensor, x: Tensor) -> list[Tensor]:
    """∂u/∂x_i at every point, for u that depends on its own point alone."""
    (slopes,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return list(slopes.unbind(1))


def _relative(model: nn.Module, solution: Callable[[Tensor], Tensor]) -> Callable[[], float]:
    at = grid()
    truth = solution(at)

    def error() -> float:
        with torch.no_grad():
            return float((model(at)[:, 0] - truth).norm() / truth.norm())

    return error


def _sides(count: int) -> tuple[Tensor, ...]:
    """Points on the four sides of the unit square: below, above, on the left, on the right."""
    line = points(count // 16, 1)[:, 0]
    zero, one = torch.zeros_like(line), torch.ones_like(line)
    return tuple(torch.stack(side, 1) for side in ((line, zero), (line, one), (zero, line), (one, line)))


def poisson(seed: int = 0, width: int = 24, depth: int = 2, count: int = 600) -> Problem:
    """-Δu = 2π² sin πx sin πy on the unit square, u = 0 on its boundary; u = sin πx sin πy."""
    model = network(2, width, depth, seed)
    inside, boundary = points(count), torch.cat(_sides(count))

    def solution(x: Tensor) -> Tensor:
        return (math.pi * x).sin().prod(1)

    source = 2 * math.pi**2 * solution(inside)

    def residuals() -> tuple[Tensor, ...]:
        x = inside.clone().requires_grad_()
        u_x, u_y = derivatives(model(x)[:, 0], x)
        laplacian = derivatives(u_x, x)[0] + derivatives(u_y, x)[1]
        return laplacian + source, WALL * model(boundary)[:, 0]

    return Problem("poisson", model, residuals, _relative(model, solution), solution)


WALL = 10.0
"""How much more boundaries and beginnings count than the equation inside."""


def heat(seed: int = 0, width: int = 24, depth: int = 2, count: int = 600) -> Problem:
    """u_t = κ u_xx on the unit interval, κ = 0.1, u = 0 at its ends, u = sin πx at the start; u = exp(-κπ²t) sin πx."""
    model = network(2, width, depth, seed)
    inside, (start, _, *walls) = points(count), _sides(count)
    ends = torch.cat(walls)

    def solution(x: Tensor) -> Tensor:
        return (-0.1 * math.pi**2 * x[:, 1]).exp() * (math.pi * x[:, 0]).sin()

    def residuals() -> tuple[Tensor, ...]:
        x = inside.clone().requires_grad_()
        u_x, u_t = derivatives(model(x)[:, 0], x)
        return (
            u_t - 0.1 * derivatives(u_x, x)[0],
            WALL * (model(start)[:, 0] - solution(start)),
            WALL * model(ends)[:, 0],
        )

    return Problem("heat", model, residuals, _relative(model, solution), solution)


def burgers(seed: int = 0, width: int = 24, depth: int = 2, count: int = 1000) -> Problem:
    """u_t + u u_x = ν u_xx, ν = 0.1/π, on -1 ≤ x ≤ 1 and 0 ≤ t ≤ 1, with u = -sin πx at the start and u = 0 at the ends.

    The network sees (x + 1)/2. The solution is Cole and Hopf's integral, by Gauss-Hermite quadrature.
    """
    model = network(2, width, depth, seed)
    viscosity = 0.1 / math.pi
    inside, (start, _, *walls) = points(count), _sides(count)
    ends = torch.cat(walls)

    def residuals() -> tuple[Tensor, ...]:
        x = inside.clone().requires_grad_()
        u = model(x)[:, 0]
        u_x, u_t = derivatives(u, x)
        u_xx = derivatives(u_x, x)[0] / 4
        return (
            u_t + u * u_x / 2 - viscosity * u_xx,
            WALL * (model(start)[:, 0] - (2 * math.pi * start[:, 0]).sin()),
            WALL * model(ends)[:, 0],
        )

    solution = partial(cole_hopf, viscosity=viscosity)
    return Problem("burgers", model, residuals, _relative(model, solution), solution)


def cole_hopf(x: Tensor, viscosity: float) -> Tensor:
    """u(x, t) from u(x, 0) = -sin πx: a ratio of two Gaussian integrals."""
    from numpy.polynomial.hermite import hermgauss

    nodes, weights = (torch.tensor(each) for each in hermgauss(100))
    place, time = 2 * x[:, :1] - 1, x[:, 1:].clamp_min(1e-12)
    y = place - (4 * viscosity * time).sqrt() * nodes
    density = weights * (-(math.pi * y).cos() / (2 * math.pi * viscosity)).exp()
    return -((math.pi * y).sin() * density).sum(1) / density.sum(1)


def regression(seed: int = 0, width: int = 6, depth: int = 1, count: int = 400) -> Problem:
    """y = x₁ sin 6x₀ + noise of 0.1; the error is that against the truth without noise, on a grid."""
    model = network(2, width, depth, seed)
    inputs = points(count)

    def truth(x: Tensor) -> Tensor:
        return x[:, 1] * (6 * x[:, 0]).sin()

    noise = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = truth(inputs) + 0.1 * noise
    return Problem("regression", model, lambda: (model(inputs)[:, 0] - targets,), _relative(model, truth), truth)


def autoencoder(seed: int = 0, width: int = 16, count: int = 300) -> Problem:
    """Points on a curved surface in ten dimensions, through two numbers and back; the error is that of fresh points."""
    encoder, decoder = network(10, width, 1, seed, 2), network(2, width, 1, seed + 1, 10)
    model = nn.Sequential(encoder, decoder)
    lift = torch.randn(5, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def surface(x: Tensor) -> Tensor:
        a, b = 2 * x.T - 1
        return torch.stack((a, b, a * b, a**2, b**2), 1) @ lift

    seen, fresh = surface(points(count)), surface(grid(20))

    def error() -> float:
        with torch.no_grad():
            return float((model(fresh) - fresh).norm() / (fresh - seen.mean(0)).norm())

    return Problem("autoencoder", model, lambda: (model(seen) - seen,), error, surface)


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "poisson": poisson,
    "heat": heat,
    "burgers": burgers,
    "regression": regression,
    "autoencoder": autoencoder,
}
EQUATIONS = ("poisson", "heat", "burgers")
