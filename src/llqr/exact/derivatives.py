"""Jacobians by many pull-backs at once, and what torch leaves unsaid about second derivatives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]
"""A linear map from tensors of one shape to tensors of another."""

_PORTION = 2**24
"""How many numbers one batched application may hold at a time."""


def apply_to_each(operator: Operator, vectors: Tensor, at_once: int | None = None) -> Tensor:
    """The operator on each of a stack of vectors: all at once by vmap, in portions that bound the memory,
    or of `at_once` vectors if those are fewer.

    One by one where an operation has no batching rule, or a wrong one: the operator on a combination of the vectors is held
    against the combination of the results. (Torch has had wrong rules: torch.func.hessian of layer_norm in 2.13.)
    """
    if at_once == 1:
        return _fill(lambda part: operator(part[0]), operator(vectors[0]), vectors, 1)
    weights = torch.linspace(1, 2, len(vectors), dtype=vectors.dtype, device=vectors.device)
    together = operator(torch.tensordot(weights, vectors, dims=1))
    portion = max(1, min(_PORTION // (vectors[0].numel() + together.numel()), at_once or len(vectors)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "performance drop": where there is no rule, vmap loops by itself
            results = _fill(torch.func.vmap(operator), together, vectors, portion)
    except RuntimeError:
        return torch.stack([operator(vector) for vector in vectors])
    difference = (torch.tensordot(weights, results, dims=1) - together).abs()
    size = torch.tensordot(weights, results.abs(), dims=1) + together.abs()
    if bool((difference <= torch.finfo(vectors.dtype).eps ** 0.5 * size).all()):
        return results
    return torch.stack([operator(vector) for vector in vectors])


def _fill(operator: Operator, like: Tensor, vectors: Tensor, portion: int) -> Tensor:
    """Results in one place: small ones between large ones would keep freed memory from being used again."""
    results = like.new_empty(len(vectors), *like.shape)
    for place, part in zip(torch.split(results, portion), torch.split(vectors, portion), strict=True):
        place.copy_(operator(part))
    return results


def refuse_once_differentiable(gradients: Sequence[Tensor]) -> None:
    """Raise where a gradient came from a function marked `once_differentiable`.

    Torch leaves an error node in the graph in its place, but connected to nothing, so asking for the next derivative finds no
    dependence and would take it for zero.
    """
    if any(node.name() == "torch::autograd::Error" for node in graph_nodes(gradients)):
        raise RuntimeError("a function in it is marked as once differentiable")


def refuse_wrong_formulas(outputs: Sequence[Tensor]) -> None:
    """Raise for torch's kernel of weight_norm: its second derivative is wrong. Rules replace it, but not in blocks that are
    checkpointed."""
    if any(node.name() == "WeightNormInterfaceBackward0" for node in graph_nodes(outputs)):
        raise RuntimeError(
            "torch's second derivative of weight_norm is wrong, and inside of a checkpoint nothing replaces it"
        )


def graph_nodes(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """The nodes of the graph that autograd recorded behind some tensors, each once."""
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)


def graph_numbers(tensors: Sequence[Tensor]) -> int:
    """How many numbers a backward pass goes through."""
    shapes = (each.shape for node in graph_nodes(tensors) for each in node._input_metadata)
    return sum(math.prod(shape) for shape in shapes)


def puller(output: Tensor, inputs: list[Tensor]) -> Operator | None:
    """v ↦ vᵀ ∂output/∂inputs as one vector; None if the output doesn't depend on any of the inputs."""
    if not output.requires_grad:
        return None
    needed = torch.autograd.grad(output, inputs, torch.zeros_like(output), retain_graph=True, allow_unused=True)
    if all(gradient is None for gradient in needed):
        return None

    def pull(cotangent: Tensor) -> Tensor:
        gradients = torch.autograd.grad(
            output, inputs, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    return pull


def jacobian(output: Tensor, inputs: list[Tensor]) -> Tensor | None:
    """∂output/∂inputs, a row for each number of the output; None if it doesn't depend on any of the inputs."""
    pull = puller(output, inputs)
    units = torch.eye(output.numel(), dtype=output.dtype, device=output.device).reshape(-1, *output.shape)
    return None if pull is None else apply_to_each(pull, units)
