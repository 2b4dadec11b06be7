"""Small quadratic models with all their numbers written out, to fit preconditioners to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

SHAPES = {
    "a.weight": (4, 3),
    "a.bias": (4,),
    "b.weight": (4, 3),
    "b.bias": (4,),
    "conv.weight": (2, 3, 2, 2),
    "gain": (),
}


class DenseModel:
    """g·δ + ½ δ·Hδ with H a matrix, counting the products."""

    def __init__(self, gradient: Mapping[str, Tensor], matrix: Tensor) -> None:
        self.gradient, self.matrix, self.products = dict(gradient), matrix, 0

    def curvature(self, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert list(direction) == list(self.gradient)
        assert all(direction[name].shape == g.shape for name, g in self.gradient.items())
        self.products += 1
        return self.unflat(self.matrix.to(self.flat(direction)) @ self.flat(direction))

    def value(self, step: Mapping[str, Tensor]) -> Tensor:
        flat = self.flat(step)
        return self.flat(self.gradient) @ flat + 0.5 * flat @ self.matrix @ flat

    def scaled(self, gradient: float, curvature: float) -> DenseModel:
        return DenseModel({name: g * gradient for name, g in self.gradient.items()}, self.matrix * curvature)

    def flat(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[name].reshape(-1) for name in self.gradient])

    def unflat(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([g.numel() for g in self.gradient.values()])
        return {name: part.reshape(g.shape) for (name, g), part in zip(self.gradient.items(), parts, strict=True)}


def random_model(seed: int = 0, indefinite: bool = False, damping: float = 0.0) -> DenseModel:
    """Random g, and H with eigenvalues between 0.001 and 1 (half of them negative if indefinite)."""
    generator = torch.Generator().manual_seed(seed)
    gradient = {n: 0.2 * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    size = sum(g.numel() for g in gradient.values())
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    spectrum = torch.logspace(-3, 0, size, dtype=torch.float64)
    if indefinite:
        spectrum[::2] *= -1
    return DenseModel(gradient, basis @ torch.diag(spectrum) @ basis.T + damping * torch.eye(size, dtype=torch.float64))


def network_model(kind: str, divergence: str, trained: int = 30, damping: float = 0.0) -> DenseModel:
    """The model of a small network's mean cross-entropy: H its Hessian ("newton"), or the Fisher matrix ("mean", "sum")."""
    torch.manual_seed(3)
    x, y = torch.randn(24, 1, 4, 4, dtype=torch.float64), torch.randint(0, 3, (24,))
    network = {
        "mlp": lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
        ),
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
        ),
        "deep": lambda: nn.Sequential(
            nn.Flatten(),
            *(m for i in range(5) for m in (nn.Linear(16 if i == 0 else 5, 5), nn.Tanh())),
            nn.Linear(5, 3),
        ),
    }[kind]().double()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(trained):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    shaped = DenseModel(parameters, torch.empty(0))
    point = shaped.flat(parameters)

    def outputs(flat: Tensor) -> Tensor:
        return functional_call(network, shaped.unflat(flat), (x,))

    def loss(flat: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs(flat), y)

    gradient = torch.func.grad(loss)(point)
    if divergence == "newton":
        matrix = torch.func.hessian(loss)(point)
    else:
        jacobian = torch.func.jacrev(outputs)(point)
        p = outputs(point).softmax(-1)
        fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        matrix = torch.einsum("bip,bij,bjq->pq", jacobian, fisher, jacobian) / (len(x) if divergence == "mean" else 1)
    return DenseModel(shaped.unflat(gradient.detach()), matrix.detach() + damping * torch.eye(len(point)))
