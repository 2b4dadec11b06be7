"""Promise: modular arithmetic is right, whole and split by the seed alone."""

from __future__ import annotations

import pytest
import torch

from llqr.errors import LLQRError
from llqr_lab.data.batches import TensorBatches, tensor_batches_in_order
from llqr_lab.data.sequences import OPERATIONS, equations, modular_arithmetic


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_pair_occurs_once_and_every_equation_holds(operation: str) -> None:
    p = 11
    inputs, targets = equations(operation, p)
    pairs = {(a, b) for a, _, b, _ in inputs.tolist()}
    assert len(pairs) == len(inputs) == (p * (p - 1) if operation in ("divide", "exponentiate") else p * p)
    assert inputs[:, 1].unique().tolist() == [p]
    assert inputs[:, 3].unique().tolist() == [p + 1]
    assert int(inputs.max()) == p + 1
    for (a, _, b, _), c in zip(inputs.tolist(), targets.tolist(), strict=True):
        power = 1
        for _ in range(b):
            power = power * a % p
        right = {
            "add": (a + b) % p == c,
            "subtract": (c + b) % p == a,
            "multiply": a * b % p == c,
            "divide": c * b % p == a and b != 0,
            "exponentiate": power == c and b != 0,
        }
        assert right[operation], (a, b, c)
        assert 0 <= c < p


def test_the_split_is_of_all_pairs_by_fraction_and_seed() -> None:
    data = modular_arithmetic("divide")
    assert (len(data.train_targets), len(data.test_targets)) == (5587, 97 * 96 - 5587)
    together = torch.cat([data.train_inputs, data.test_inputs])
    assert len(together.unique(dim=0)) == 97 * 96
    again, other = modular_arithmetic("divide"), modular_arithmetic("divide", seed=1)
    assert torch.equal(data.train_inputs, again.train_inputs)
    assert not torch.equal(data.train_inputs, other.train_inputs)


def test_batches_are_functions_of_the_step() -> None:
    data = modular_arithmetic("add", 7)
    batches = TensorBatches(data.train_inputs, data.train_targets, 8, seed=3)
    assert batches.steps_per_epoch == 29 // 8
    late = batches[7]
    again = TensorBatches(data.train_inputs, data.train_targets, 8, seed=3)[7]
    assert torch.equal(late.inputs[0], again.inputs[0])
    assert torch.equal(late.targets, again.targets)
    epoch = torch.cat([batches[step].inputs[0] for step in range(3)])
    assert len(epoch.unique(dim=0)) == 24  # nothing twice within an epoch
    assert not torch.equal(batches[0].inputs[0], batches[3].inputs[0])  # a new order in the next
    rest = tensor_batches_in_order(data.test_inputs, data.test_targets, 8)
    assert [len(batch.targets) for batch in rest] == [8, 8, 4]
    assert torch.equal(torch.cat([batch.targets for batch in rest]), data.test_targets)


def test_what_cannot_be_had_is_told() -> None:
    with pytest.raises(LLQRError, match="did you mean 'divide'"):
        modular_arithmetic("divde")
    for modulus in (-7, 0, 1, 2, 9, 91):
        with pytest.raises(LLQRError, match="prime"):
            modular_arithmetic("add", modulus)
    for fraction in (0.0, 1.0, -0.5, 2.0, 0.001):
        with pytest.raises(LLQRError, match="leaves nothing"):
            modular_arithmetic("add", 7, fraction)
    data = modular_arithmetic("add", 7)
    with pytest.raises(LLQRError, match="batch of 30"):
        TensorBatches(data.train_inputs, data.train_targets, 30, 0)
