"""Wrapping: what an optimizer around another one has of it, and torch's own hooks, which it has for itself."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from llqr.errors import LLQRWarning, callers_level

HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


class Wrapping(Optimizer):
    """An optimizer whose `param_groups`, `state` and `defaults` are those of the `base` inside."""

    base: Optimizer
    stats: Any

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self._begin()

    def _begin(self) -> None:
        """What isn't saved: torch's own hooks, and what was warned of."""
        for hooks in HOOKS:
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())
        self._patch_step_function()
        self._warned: set[str] = set()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return self.base.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def _warn(self, kind: str, message: str) -> None:
        """Once; what comes after is only counted, if it is."""
        if kind not in self._warned:
            self._warned.add(kind)
            counted = f"counted in optimizer.stats.{kind}; " if hasattr(self.stats, kind) else ""
            warnings.warn(f"{message} ({counted}said once)", LLQRWarning, stacklevel=callers_level())
