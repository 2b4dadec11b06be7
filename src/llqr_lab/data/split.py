"""What every data set for classification comes as."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Split:
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def standardised(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Split:
    """Centred and scaled, all pixels alike, by what the training pictures show."""
    mean, deviation = train[0].mean(), train[0].std()
    return Split((train[0] - mean) / deviation, train[1], (test[0] - mean) / deviation, test[1])
