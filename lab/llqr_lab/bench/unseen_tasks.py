"""Tasks that nothing of LLQR was chosen by (`llqr bench unseen`): an autoencoder, a ViT, an LSTM, a regression, a U-Net, a GNN.

Batches are a function of the seed and the step's number, so that every optimizer sees the same ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.data.batches import mixed, own_randomness
from llqr_lab.data.picture_sets import cifar, fashion
from llqr_lab.data.sequences import shakespeare
from llqr_lab.models.transformers import ViT

Batch = tuple[tuple[Tensor, ...], Tensor]
"""What the model is called with, and the targets."""
Draw = Callable[[int], Batch]
"""The batch of a step."""


@dataclass(frozen=True)
class Unseen:
    network: Callable[[], nn.Module]
    load: Callable[[Path | None, int], Draw]
    """From the data folder and a seed to the batches."""
    loss: Callable[[Tensor, Tensor], Tensor]
    sgdm: tuple[float, ...] = (0.03, 0.1, 0.3)
    adamw: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Learning rates to begin with."""

    def start(self, seed: int) -> nn.Module:
        with own_randomness("weights", seed):
            return self.network()


def _rows(inputs: Tensor, targets: Tensor, size: int, seed: int) -> Draw:
    """Random rows of what is at hand."""

    def draw(step: int) -> Batch:
        generator = torch.Generator().manual_seed(mixed("rows", seed, step))
        rows = torch.randint(len(inputs), (size,), generator=generator)
        return (inputs[rows],), targets[rows]

    return draw


def _made(batch: Callable[[], Batch], seed: int) -> Draw:
    """Made up anew for every step."""

    def draw(step: int) -> Batch:
        with own_randomness("batch", seed, step):
            return batch()

    return draw


def every_place(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with the classes along the last dimension, over all places before it."""
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


# a deep autoencoder


def autoencoder() -> nn.Module:
    sides = (784, 256, 64, 16, 64, 256, 784)
    layers = [part for before, after in pairwise(sides) for part in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@cache
def _fashion(folder: Path | None) -> Tensor:
    images = fashion(folder).train
    return images.take(torch.arange(len(images.labels))).flatten(1).float() / 255


# a vision transformer


@cache
def _cifar(folder: Path | None) -> tuple[Tensor, Tensor]:
    pictures = cifar("cifar10", folder)
    labels = pictures.train.labels
    return pictures.normalisation(pictures.train.take(torch.arange(len(labels))).float() / 255), labels


# an LSTM


class CharacterLSTM(nn.Module):
    def __init__(self, words: int = 65, width: int = 128) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(words, width // 2), nn.LSTM(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(hidden)  # type: ignore[no-any-return]


# a regression: four smooth functions of eight numbers, with noise


def _functions(seed: int) -> Draw:
    with own_randomness("functions", 0):
        inputs, first, second = torch.randn(4096, 8), torch.randn(8, 16), torch.randn(16, 4) / 4
        targets = torch.sin(inputs @ first / 2) @ second
        return _rows(inputs, targets + 0.05 * torch.randn_like(targets), 128, seed)


# a U-Net that tells discs and squares from a noisy background


class UNet(nn.Module):
    def __init__(self, classes: int = 3, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(1, width), self._block(width, 2 * width)])
        self.middle = self._block(2 * width, 4 * width)
        self.rise = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([self._block(4 * width, 2 * width), self._block(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            kept.append(block(x))
            x = functional.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat((rise(x), kept.pop()), 1))
        return self.head(x)  # type: ignore[no-any-return]


def shapes(size: int = 16, side: int = 32) -> Batch:
    """A disc and a square in each picture, and which of them every pixel shows."""
    places = torch.arange(side, dtype=torch.float32)
    centres, reach = 4 + (side - 8) * torch.rand(size, 2, 2), 2 + 4 * torch.rand(size, 2)
    down, across = ((places - centres[:, :, axis, None]).abs() for axis in (0, 1))
    disc = down[:, 0, :, None] ** 2 + across[:, 0, None] ** 2 < reach[:, 0, None, None] ** 2
    square = torch.maximum(down[:, 1, :, None], across[:, 1, None].expand(-1, side, -1)) < reach[:, 1, None, None]
    classes = torch.where(square, 2, disc.long())
    pictures = (classes > 0).float() + 0.5 * torch.randn(size, side, side)
    return (pictures[:, None],), classes


# a GNN that tells how far each node is from a marked one


class GraphNet(nn.Module):
    """Messages along a dense adjacency matrix: h ← h + relu(W h + V (A h))."""

    def __init__(self, width: int = 64, layers: int = 3, classes: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, width), nn.Linear(width, classes)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.others = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.embed(features)
        for own, others in zip(self.own, self.others, strict=True):
            hidden = hidden + functional.relu(own(hidden) + others(adjacency @ hidden))
        return self.head(hidden)  # type: ignore[no-any-return]


def graphs(size: int = 32, nodes: int = 24, farthest: int = 5) -> Batch:
    """Random graphs with one marked node; the classes are the steps to it: 0 … 4, and more. Three layers don't see that far."""
    drawn = torch.triu((torch.rand(size, nodes, nodes) < 2 / nodes).float(), 1)
    adjacency = drawn + drawn.mT
    marked = functional.one_hot(torch.randint(nodes, (size,)), nodes).float()
    seen, steps = marked > 0, torch.full((size, nodes), farthest)
    steps[seen] = 0
    for number in range(1, farthest):
        reached = (torch.einsum("bij,bj->bi", adjacency, seen.float()) > 0) & ~seen
        steps[reached], seen = number, seen | reached
    normed = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
    return (torch.stack((marked, adjacency.sum(-1) / 4), -1), normed), steps


UNSEEN: dict[str, Unseen] = {
    "autoencoder": Unseen(
        autoencoder,
        lambda folder, seed: _rows(_fashion(folder), _fashion(folder), 256, seed),
        functional.binary_cross_entropy_with_logits,
        sgdm=(0.3, 1.0, 3.0),
    ),
    "vit": Unseen(
        partial(ViT, width=64, heads=4, layers=3),
        lambda folder, seed: _rows(*_cifar(folder), 64, seed),
        functional.cross_entropy,
    ),
    "lstm": Unseen(
        CharacterLSTM,
        lambda folder, seed: shakespeare(folder).training(32, 64, seed).__getitem__,
        every_place,
        sgdm=(0.3, 1.0, 3.0),
    ),
    "regression": Unseen(
        lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)),
        lambda folder, seed: _functions(seed),
        functional.mse_loss,
    ),
    "unet": Unseen(UNet, lambda folder, seed: _made(shapes, seed), functional.cross_entropy),
    "gnn": Unseen(GraphNet, lambda folder, seed: _made(graphs, seed), every_place),
}
