"""The networks of the benchmarks by name, each with a random batch of the shape that it takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llqr_lab.models.gpt import GrokkingTransformer
from llqr_lab.models.resnet import ResNet18
from llqr_lab.models.small import convnet, mlp

Example = tuple[nn.Module, Tensor, Tensor]
"""A network, inputs and targets."""


def transformer(batch: int, words: int = 99, width: int = 128, layers: int = 2) -> Example:
    model = GrokkingTransformer(words, width=width, layers=layers)
    tokens = torch.randint(words, (batch, 5))
    return model, tokens[:, :4], tokens[:, 4]


def _of_pictures(network: Callable[[], nn.Module], *shape: int) -> Callable[[int], Example]:
    return lambda batch: (network(), torch.randn(batch, *shape), torch.randint(10, (batch,)))


NETWORKS: dict[str, Callable[[int], Example]] = {
    "mlp": _of_pictures(mlp, 784),
    "convnet": _of_pictures(convnet, 3, 32, 32),
    "resnet18": _of_pictures(ResNet18, 3, 32, 32),
    "transformer": transformer,
}


def example(name: str, batch: int, seed: int) -> Example:
    """The network of this name and so many examples for it, from this seed."""
    torch.manual_seed(seed)
    return NETWORKS[name](batch)
