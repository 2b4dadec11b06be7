"""A small network, a stream of batches, and training loops to hold one optimizer against another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR
from llqr.paper import PaperLLQR

SIZE, CLASSES = 4, 3
Batch = tuple[Tensor, Tensor]
STRUCTURES = ["scalar", "diagonal", "kfac", "ekfac", "dense"]


def never(step: int) -> bool:
    return False


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(SIZE, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(dtype)


def batch(number: int = 0, size: int = 6, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(size, SIZE, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(CLASSES, (size,), generator=generator)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def backward(model: nn.Module, data: Batch) -> Tensor:
    """Gradients of one batch, in place of those that were there."""
    model.zero_grad()
    loss = functional.cross_entropy(model(data[0]), data[1])
    loss.backward()
    return loss.detach()


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data[0]), data[1])
        loss.backward()
        return loss

    return closure


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], closures: bool = False) -> None:
    """One step for each number, on the batch of that number."""
    dtype = next(model.parameters()).dtype
    for number in steps:
        data = batch(number, dtype=dtype)
        if closures:
            optimizer.step(closure_of(model, optimizer, data))
        else:
            backward(model, data)
            optimizer.step()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def blocks_of(optimizer: LLQR | PaperLLQR) -> dict[str, Tensor]:
    """Copies of U's tensors, by block and name."""
    if isinstance(optimizer, LLQR):
        blocks = {key: block.inverse for key, block in optimizer.blocks.items()}
    else:
        assert optimizer.preconditioner is not None
        blocks = optimizer.preconditioner.blocks
    assert blocks
    return {f"{key} {name}": tensor.clone() for key, block in blocks.items() for name, tensor in block.items()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients that are there."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def spoil(model: nn.Module, name: str, value: float = float("inf")) -> None:
    """Put a number into a gradient."""
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    gradient.view(-1)[0] = value
