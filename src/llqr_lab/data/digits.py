"""Scikit-learn's handwritten digits: they come with the package, so nothing is fetched."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import avg_pool2d

from llqr_lab.data.split import Split, standardised

INPUTS, CLASSES = 16, 10


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


def digits(train: int = 1400) -> Split:
    """The 1,797 digits as 1 × 8 × 8 pictures in float32, the first `train` of them, in an order that is always the same."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    inputs = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
    targets = torch.as_tensor(labels)[order].long()
    return standardised((inputs[:train], targets[:train]), (inputs[train:], targets[train:]))
