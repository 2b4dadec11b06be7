"""Steps as mappings from parameter names to tensors: their algebra, in float64, and what is looked at before it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from llqr.checks import check_finite
from llqr.errors import LLQRError, unknown
from llqr.structures.assign import owner

Step = Mapping[str, Tensor]


def dot(left: Step, right: Step) -> float:
    return sum(float((part.double() * right[name].double()).sum()) for name, part in left.items())


def norm(step: Step) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(v.double()) for v in step.values()])))


def flat(step: Step) -> Tensor:
    return torch.cat([part.reshape(-1) for part in step.values()])


def named(vector: Tensor, like: Step) -> dict[str, Tensor]:
    """The inverse of `flat`."""
    parts = torch.split(vector, [part.numel() for part in like.values()])
    return {name: part.reshape(like[name].shape) for name, part in zip(like, parts, strict=True)}


def only(step: Step, names: Collection[str]) -> dict[str, Tensor]:
    """The step of these parameters, the others at rest."""
    return {name: part if name in names else torch.zeros_like(part) for name, part in step.items()}


def layers(names: Collection[str]) -> dict[str, list[str]]:
    """The parameters by the module that owns them; one that the model owns itself is a layer of its own."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(owner(name) or name, []).append(name)
    return found


def checked(step: Step, like: Step) -> dict[str, Tensor]:
    """The step in the dtype and order of `like`; an error where it isn't one of all these parameters."""
    if not isinstance(step, Mapping):
        raise LLQRError(f"a step is a mapping from parameter names to tensors, not a {type(step).__name__}")
    for name, part in step.items():
        if name not in like:
            raise unknown("parameter in the step", name, like)
        if not isinstance(part, Tensor) or not part.is_floating_point():
            got = f"of {part.dtype}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise LLQRError(f"the step of {name!r} is a tensor of real numbers; this one is {got}")
        if part.shape != like[name].shape:
            raise LLQRError(
                f"the step of {name!r} has shape {tuple(part.shape)}, and the parameter {tuple(like[name].shape)}"
            )
        check_finite(part, f"the step of {name!r}")
    missing = [name for name in like if name not in step]
    if missing:
        raise LLQRError(
            f"the step lacks {', '.join(map(repr, missing[:5]))}: give a tensor for every parameter, zeros for those at rest"
        )
    return {name: step[name].detach().to(own.device, own.dtype) for name, own in like.items()}
