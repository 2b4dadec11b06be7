"""The lab's networks in sizes that a test can afford, each with a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.models.zoo import build

CLASSES, WORDS, PAD = 3, 7, 1
OPTIONS: dict[str, dict[str, Any]] = {
    "mlp": {"classes": CLASSES, "inputs": 6, "width": 5},
    "resnet18": {"classes": CLASSES, "width": 1, "blocks": (1, 1, 1, 1)},
    "resnet20": {"classes": CLASSES, "width": 2, "blocks": (1, 1, 1)},
    "resnet50": {"classes": CLASSES, "width": 2, "blocks": (1, 1)},
    "vgg16-bn": {"classes": CLASSES, "width": 1},
    "wrn28-10": {"classes": CLASSES, "width": 2, "depth": 10, "factor": 1},
    "pyramidnet110": {"classes": CLASSES, "width": 3, "depth": 8, "alpha": 4},
    "grokking-transformer": {"words": WORDS, "width": 8, "heads": 2},
    "translation-transformer": {
        "source_words": 9,
        "target_words": WORDS,
        "width": 8,
        "ffn": 12,
        "heads": 2,
        "layers": 1,
        "dropout": 0.1,
        "pad": PAD,
    },
    "gpt": {"words": WORDS, "length": 6, "width": 8, "heads": 2, "layers": 2, "dropout": 0.1},
    "vit": {"classes": CLASSES, "picture": 8, "width": 8, "heads": 2, "layers": 2},
}
SIDES = {"vgg16-bn": 32, "resnet50": 16}
"""Of the pictures; 8 for the others."""


def small(name: str, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return build(name, **{**OPTIONS[name], **options})


def batch(name: str, size: int = 3) -> tuple[tuple[Tensor, ...], Tensor]:
    """Inputs and targets; of sentences to translate, most are shorter than the longest."""
    if name == "mlp":
        return (torch.randn(size, 6),), torch.randint(CLASSES, (size,))
    if name == "grokking-transformer":
        tokens = torch.randint(WORDS, (size, 5))
        return (tokens[:, :4],), tokens[:, 4]
    if name == "gpt":
        tokens = torch.randint(WORDS, (size, 6))
        return (tokens[:, :-1],), tokens[:, 1:]
    if name == "translation-transformer":
        source, target = sentences(9, 5, size), sentences(WORDS, 5, size)
        return (source, target[:, :-1]), target[:, 1:]
    side = SIDES.get(name, 8)
    return (torch.randn(size, 3, side, side),), torch.randint(CLASSES, (size,))


def sentences(words: int, longest: int, size: int) -> Tensor:
    """Words above `PAD`, each sentence shorter by one than the one before, and filled up behind."""
    tokens = torch.randint(PAD + 1, words, (size, longest))
    for row in range(size):
        tokens[row, longest - row :] = PAD
    return tokens


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, over all words but padding where the targets are words."""
    if targets.dim() == 1:
        return functional.cross_entropy(output, targets)
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=PAD)
