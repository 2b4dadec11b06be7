"""The graph that autograd recorded: its nodes, and what torch leaves unsaid about second derivatives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


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
