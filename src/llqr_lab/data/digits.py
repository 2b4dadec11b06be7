"""Scikit-learn's handwritten digits, made small: they come with the package, so nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import avg_pool2d

INPUTS, CLASSES = 16, 10


@dataclass(frozen=True)
class Split:
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def small_digits(train: int, seed: int) -> Split:
    """`train` random digits to learn from and the rest to test on, 8 × 8 pixels averaged to 4 × 4, in float64.

    Centred and scaled by what the training digits show.
    """
    images, labels = load_digits(return_X_y=True)
    inputs = avg_pool2d(torch.as_tensor(images).reshape(-1, 1, 8, 8), 2).flatten(1)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    inputs, targets = inputs[order], torch.as_tensor(labels)[order].long()
    known = inputs[:train]
    inputs = (inputs - known.mean(0)) / known.std()
    return Split(inputs[:train], targets[:train], inputs[train:], targets[train:])
