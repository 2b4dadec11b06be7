"""A network as stages x_{i+1} = f_i(x_i, θ_i)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from llqr.errors import ChainError, NonFiniteError

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]


class Chain:
    """Stages in a row: the children of an `nn.Sequential`, or a sequence of modules named as `nn.Sequential(*modules)` would.

    Each stage maps one tensor to one tensor (the first may take what a model takes: a tensor, a tuple, a dict). A residual
    block is one stage; a stage may have no parameters. Parameters that don't require a gradient are constants.
    """

    def __init__(self, stages: nn.Sequential | Sequence[nn.Module]) -> None:
        if isinstance(stages, nn.Module) and not isinstance(stages, nn.Sequential):
            raise ChainError(
                f"a {type(stages).__name__} has no visible stages: give an nn.Sequential or a list of modules, or "
                "[model] to see all of it as one stage; for any other model there is cg_step"
            )
        modules = list(stages)
        for position, module in enumerate(modules):
            if not isinstance(module, nn.Module):
                raise ChainError(
                    f"stage {position} is a {type(module).__name__}, not an nn.Module; wrap functions in one"
                )
        if not modules:
            raise ChainError("there are no stages")
        names = stages._modules if isinstance(stages, nn.Sequential) else map(str, range(len(modules)))
        self.names: list[str] = list(names)
        self.modules: list[nn.Module] = modules
        self.parameters: list[dict[str, Tensor]] = [_trainable(module) for module in modules]
        self._refuse_shared_parameters()
        if not any(self.parameters):
            raise ChainError("no stage has a parameter that requires a gradient: there is nothing to step")

    def __len__(self) -> int:
        return len(self.modules)

    def label(self, stage: int) -> str:
        """How messages name a stage."""
        return f"stage {self.names[stage]!r} ({type(self.modules[stage]).__name__})"

    def qualified(self, stage: int, parameter: str) -> str:
        """A parameter's name in the whole network."""
        return f"{self.names[stage]}.{parameter}"

    def apply(self, stage: int, state: Inputs, parameters: dict[str, Tensor]) -> Tensor:
        """f_i(x_i, θ_i), without touching what the module holds: buffers are copies, and so is the input (in-place stages)."""
        buffers = {name: buffer.clone() for name, buffer in self.modules[stage].named_buffers()}
        args, kwargs = as_arguments(state)
        args = tuple(value.clone() if isinstance(value, Tensor) else value for value in args)
        try:
            output = functional_call(self.modules[stage], {**parameters, **buffers}, args, kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise ChainError(self._mismatch(stage, state, error)) from error
        if not isinstance(output, Tensor):
            raise ChainError(
                f"{self.label(stage)} returned a {type(output).__name__}; a stage maps one tensor to one tensor, so wrap it "
                "in a module that picks what the next stage takes"
            )
        return output

    def run(self, inputs: Inputs) -> list[Tensor]:
        """The states x_1 … x_N at θ_k, checked."""
        check_inputs(inputs, self.modules[0])
        for stage, parameters in enumerate(self.parameters):
            for name, parameter in parameters.items():
                check_finite(parameter, f"parameter {self.qualified(stage, name)!r}")
        states: list[Tensor] = []
        state: Inputs = inputs
        with torch.no_grad(), frozen_rng():
            for stage, parameters in enumerate(self.parameters):
                output = self.apply(stage, state, parameters)
                if not output.is_floating_point():
                    raise ChainError(f"{self.label(stage)} returned {output.dtype}, which has no derivatives")
                check_finite(output, f"the output of {self.label(stage)}")
                if not torch.equal(output, self.apply(stage, state, parameters)):
                    raise ChainError(
                        f"{self.label(stage)} gives another output each time (dropout?): call .eval() on it first"
                    )
                states.append(output)
                state = output
        return states

    def _mismatch(self, stage: int, state: Inputs, error: Exception) -> str:
        if not isinstance(state, Tensor):
            return f"{self.label(stage)} can't take the inputs: {error}"
        source = "the inputs" if stage == 0 else f"the output of {self.label(stage - 1)}"
        return f"{self.label(stage)} can't take {source}, {tuple(state.shape)} {state.dtype}: {error}"

    def _refuse_shared_parameters(self) -> None:
        owners: dict[int, tuple[int, str]] = {}
        for stage, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                first, other = owners.setdefault(id(parameter), (stage, name))
                if first != stage and parameter.requires_grad:
                    raise ChainError(
                        f"{self.qualified(stage, name)!r} is the same parameter as {self.qualified(first, other)!r}: a "
                        "layerwise LQR gives each stage its own; put both stages into one (nn.Sequential(…) as a single "
                        "stage) or use cg_step"
                    )


def as_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with: a tensor alone, a tuple spread out, a dict as keywords."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def check_inputs(inputs: Inputs, first: nn.Module) -> None:
    """Raise for inputs that are empty, not finite, or integers where no embedding takes them."""
    args, kwargs = as_arguments(inputs)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not tensors:
        raise ChainError(f"inputs are a tensor, or a tuple or dict with tensors in it; got {type(inputs).__name__}")
    embeds = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in first.modules())
    for tensor in tensors:
        if tensor.numel() == 0:
            raise ChainError(f"the inputs are empty, shape {tuple(tensor.shape)}: give at least one example")
        if not (tensor.is_floating_point() or tensor.dtype == torch.bool or embeds):
            raise ChainError(
                f"the inputs are {tensor.dtype}, and the first stage ({type(first).__name__}) has no embedding for them: "
                "convert them, as in inputs.double(), or start the chain with an nn.Embedding"
            )
        check_finite(tensor, "the inputs")


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise if there is a NaN or an infinity, and say where."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    bad = ~tensor.isfinite()
    if bad.any():
        place = tuple(int(i) for i in bad.nonzero()[0])
        value = float(tensor[place].real)
        more = int(bad.sum()) - 1
        also = f", and in {more} more places" if more else ""
        raise NonFiniteError(f"{what} has a value that is not finite: {value} at index {place}{also}")


@contextmanager
def frozen_rng() -> Iterator[None]:
    """Leave the random streams as they were."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
        yield


def _trainable(module: nn.Module) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ChainError(f"parameter {name!r} of {type(module).__name__} is complex; only real ones can be stepped")
    return parameters
