"""A network as stages x_{i+1} = f_i(x_i, θ_i)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llqr.checks import (
    Inputs,
    call,
    check_finite,
    check_model,
    check_parameter,
    check_precision,
    frozen_rng,
    kinds_of,
    refuse_scripted,
    tensors_in,
)
from llqr.curvature.locations import Layout
from llqr.curvature.recorder import without_checkpoints
from llqr.curvature.replacements import constants, plain_rules
from llqr.errors import ChainError, LLQRError


class Row(nn.Sequential):
    """Stages in a row, of which the first takes what a model takes."""

    def __init__(self, stages: nn.Sequential | Sequence[nn.Module]) -> None:
        listed = isinstance(stages, (Sequence, nn.ModuleList))
        if isinstance(stages, nn.Module) and not listed and type(stages).forward is not nn.Sequential.forward:
            raise ChainError(
                f"a {type(stages).__name__} isn't an nn.Sequential, or has a forward of its own: give an nn.Sequential or a "
                "list of modules, or [model] to see all of it as one stage; for any other model there is cg_step"
            )
        if isinstance(stages, nn.Sequential):
            named = dict(stages._modules)
        elif listed:
            named = {str(position): module for position, module in enumerate(stages)}
        else:
            raise ChainError(f"stages are an nn.Sequential or a list of modules, not a {type(stages).__name__}")
        if not named:
            raise ChainError("there are no stages")
        for name, module in named.items():
            if not isinstance(module, nn.Module):
                raise ChainError(f"stage {name} is a {type(module).__name__}, not an nn.Module; wrap functions in one")
        super().__init__(OrderedDict(named))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *rest = self
        state = first(*args, **kwargs)
        for stage in rest:
            state = stage(state)
        return state


class Chain:
    """Stages in a row: the children of an `nn.Sequential`, or modules named as `nn.Sequential(*modules)` would name them.

    A stage maps one value to the next: a tensor, or a tuple (a list, a dict) of tensors, for what later stages take from
    earlier ones. The first may take what a model takes; the last returns one tensor. Frozen parameters are constants.
    """

    def __init__(self, stages: nn.Sequential | Sequence[nn.Module]) -> None:
        self.whole = Row(stages)
        """All of it as one module."""
        self.names, self.modules = list(self.whole._modules), list(self.whole)
        for module in self.modules:
            refuse_scripted(module)
        self._refuse_shared_parameters()
        self.parameters: list[dict[str, Tensor]] = [self._trainable(stage) for stage in range(len(self))]
        self._layouts: dict[int, Layout] = {}
        """How what each stage returns lies in x_{i+1}."""
        if not any(self.parameters):
            raise ChainError("no stage has a parameter that requires a gradient: there is nothing to step")

    def __len__(self) -> int:
        return len(self.modules)

    def label(self, stage: int) -> str:
        """How messages name a stage."""
        return f"stage {self.names[stage]!r} ({type(self.modules[stage]).__name__})"

    def packs(self, stage: int) -> bool:
        """Whether it returned several tensors."""
        return self._layouts[stage].several

    def qualified(self, stage: int, parameter: str) -> str:
        """A parameter's name in the whole network."""
        return f"{self.names[stage]}.{parameter}"

    def apply(self, stage: int, state: Inputs, parameters: dict[str, Tensor]) -> Tensor:
        """f_i(x_i, θ_i), without touching what the module holds: buffers and inputs are copies."""
        try:
            module = self.modules[stage]
            taken = (self._layouts[stage - 1].unpack(state),) if stage > 0 and isinstance(state, Tensor) else state
            with without_checkpoints(), plain_rules():
                output = call(module, {**constants(module), **parameters}, taken)
        except LLQRError:
            raise
        except Exception as error:
            raise ChainError(self._mismatch(stage, state, error)) from error
        if not isinstance(output, Tensor) and (stage == len(self) - 1 or not tensors_in(output)):
            raise ChainError(
                f"{self.label(stage)} returned a {type(output).__name__}; stages pass on tensors, and the last one returns one"
            )
        self._layouts[stage] = Layout(output)
        return self._layouts[stage].pack(output)

    def run(self, inputs: Inputs) -> list[Tensor]:
        """The states x_1 … x_N at θ_k, checked."""
        check_model(self.whole, inputs)
        states: list[Tensor] = []
        state: Inputs = inputs
        with torch.enable_grad(), frozen_rng():  # recorded, so that a loss can be seen to depend on what a stage keeps
            for stage, parameters in enumerate(self.parameters):
                before = torch.get_rng_state()
                leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
                output = self.apply(stage, state, leaves)
                if not torch.equal(before, torch.get_rng_state()):
                    raise ChainError(f"{self.label(stage)} draws random numbers (dropout?): call .eval() on it first")
                if not output.is_floating_point():
                    raise ChainError(f"{self.label(stage)} returned {output.dtype}, which has no derivatives")
                check_finite(output, f"the output of {self.label(stage)}")
                states.append(output.detach())
                state = output
        return states

    def sizes(self, inputs: Inputs) -> list[tuple[int, int]]:
        """Of each stage: how many numbers it returns, and how many parameters it has."""
        pairs = zip(self.run(inputs), self.parameters, strict=True)
        return [(state.numel(), sum(p.numel() for p in own.values())) for state, own in pairs]

    def _mismatch(self, stage: int, state: Inputs, error: Exception) -> str:
        if not isinstance(state, Tensor):
            return f"{self.label(stage)} can't take the inputs, {kinds_of(state)}: {error}"
        source = "the inputs" if stage == 0 else f"the output of {self.label(stage - 1)}"
        what = "several tensors" if stage and self.packs(stage - 1) else kinds_of(state)
        return f"{self.label(stage)} can't take {source}, {what}: {error}"

    def _trainable(self, stage: int) -> dict[str, Tensor]:
        parameters: dict[str, Tensor] = {}
        for name, parameter in self.modules[stage].named_parameters():
            if parameter.requires_grad:
                check_parameter(self.qualified(stage, name), parameter)
                check_precision(self.qualified(stage, name), parameter)
                parameters[name] = parameter.detach().clone()
        return parameters

    def _refuse_shared_parameters(self) -> None:
        owners: dict[int, tuple[int, str]] = {}
        for stage, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                first, other = owners.setdefault(id(parameter), (stage, name))
                if first != stage and parameter.requires_grad:
                    raise ChainError(
                        f"{self.qualified(stage, name)!r} is the same parameter as {self.qualified(first, other)!r}: put both "
                        "stages into one (nn.Sequential(…) as a single stage), or use cg_step"
                    )
