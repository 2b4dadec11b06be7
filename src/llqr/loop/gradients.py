"""The parameters that a base optimizer steps, under their names in the model, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.checks import check_parameter
from llqr.errors import LLQRError, NonFiniteError


def stepped_parameters(base: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The base's parameters by name, in the model's order; each has to be one of the model's."""
    stepped = {id(p): (number, p) for number, group in enumerate(base.param_groups) for p in group["params"]}
    named: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if id(p) in stepped}
    strangers = stepped.keys() - {id(p) for p in named.values()}
    if strangers:
        number, parameter = stepped[min(strangers, key=list(stepped).index)]
        raise LLQRError(
            f"{len(strangers)} of the optimizer's {len(stepped)} parameters aren't in the model, the first of shape "
            f"{tuple(parameter.shape)} in group {number}: make the optimizer from model.parameters() of the same model (after "
            "the model was moved, wrapped or given new layers)"
        )
    return named


def check_parameters(parameters: Mapping[str, Tensor]) -> None:
    """Raise for parameters that can't have a U: complex ones, integers, those without a shape yet."""
    for name, parameter in parameters.items():
        try:
            check_parameter(name, parameter)
        except NonFiniteError:
            continue  # the base would step it; a refit will say so


def gradients_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that are there, dense ones."""
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for name, gradient in found.items():
        if gradient.layout is not torch.strided:
            raise LLQRError(
                f"the gradient of {name!r} is sparse, and U acts on dense ones: make the layer with sparse=False, or step it "
                "by an optimizer of its own"
            )
    return found


@contextmanager
def replaced(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Iterator[None]:
    """Other gradients for a while."""
    kept = [(parameters[name], parameters[name].grad) for name in gradients]
    for name, gradient in gradients.items():
        parameters[name].grad = gradient
    try:
        yield
    finally:
        for parameter, before in kept:
            parameter.grad = before
