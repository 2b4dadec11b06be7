"""Blocks: which blocks U has for the parameters that a base steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from glob import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llqr.distributed.division import Division
from llqr.errors import unknown
from llqr.preconditioner import Preconditioner
from llqr.structures.base import Structure
from llqr.structures.stacks import Group, StructureSpec, assign, identity_groups

if TYPE_CHECKING:
    from llqr.distributed.team import Team


@dataclass(frozen=True)
class Blocks:
    """U's blocks, by a structure for all parameters or by patterns of their names."""

    structure: StructureSpec

    def structures(self, parameters: Mapping[str, Tensor], only: Collection[str]) -> dict[str, Structure]:
        """By name; a pattern for frozen parameters alone is no mistake, so the patterns are held against all of them."""
        assigned = assign(self.structure, parameters)
        return {escape(name): assigned[name] for name in only}

    def identity(self, parameters: Mapping[str, Tensor], only: Collection[str]) -> Preconditioner:
        """U = I for some of the parameters."""
        return Preconditioner.identity({name: parameters[name] for name in only}, self.structures(parameters, only))

    def layout(self, parameters: Mapping[str, Tensor], only: Collection[str]) -> list[Group]:
        """The blocks for some of the parameters, without numbers."""
        shapes = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in parameters.items()}
        return identity_groups({name: shapes[name] for name in only}, self.structures(parameters, only))

    def current(
        self, parameters: Mapping[str, Tensor], only: Collection[str], u: Preconditioner | None
    ) -> Preconditioner:
        """U for some of the parameters: the one that is there, the identity for what it doesn't know.

        It doesn't know a layer's block either that covers other parameters now, since some were added or frozen.
        """
        new = self.identity(parameters, only)
        if u is not None:
            known, wanted = _shapes(u), _shapes(new)
            new.take(u.restricted([key for key in wanted if known.get(key) == wanted[key]]))
        return new

    def blank(
        self, parameters: Mapping[str, Tensor], keys: Collection[str], team: Team | None
    ) -> tuple[Preconditioner, Division | None]:
        """U = I for the blocks of these names, to be filled: those that this rank is to hold."""
        covered = [name for name, p in parameters.items() if p.requires_grad or name in keys]
        layout = self.layout(parameters, covered)
        known = [key for group in layout for key in group.keys]
        for key in keys:
            if key not in known:
                raise unknown("block in the state", key, known)
        if team is None:
            return self.identity(parameters, covered).restricted(keys), None
        groups = [group.only(keys) for group in layout]
        division = Division.of(team.ranks, team.shard, [group for group in groups if group is not None])
        return self.identity(parameters, division.held()), division


def _shapes(u: Preconditioner) -> dict[str, Any]:
    return {key: (group.structure, group.shapes) for group in u.groups for key in group.keys}
