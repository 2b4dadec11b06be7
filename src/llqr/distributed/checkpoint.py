"""Checkpoints of several ranks: every rank writes what it alone holds, any number of them can go on.

    from llqr.distributed import checkpoint

    checkpoint.save("checkpoints/step-500", optimizer)   # on every rank
    checkpoint.load("checkpoints/step-500", optimizer)   # on every rank, with a model and an optimizer that are made as before

The first rank writes the model's parameters and buffers, the base's state, and U (of the default `LLQR` the curvature, which
gives it). Where `fully_shard` has sharded the model, each rank has a file with its shards and its blocks. The folder appears
under its name when it is complete. Files are of tensors and builtins, so nothing in a folder is run when it is loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from llqr.errors import LLQRError
from llqr.wrapper import KEY, Wrapping


def save(folder: str | Path, optimizer: Wrapping) -> None:
    """Write a checkpoint of an optimizer and its model; every rank has to take part."""
    optimizer._meet()
    folder, processes = Path(folder), optimizer.processes
    unfinished, first = folder.with_name(folder.name + ".partial"), processes.rank == 0
    with processes.together():
        if folder.exists():
            raise LLQRError(f"{str(folder)!r} is there already: give each checkpoint a folder of its own")
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was stopped while it wrote
            unfinished.mkdir(parents=True)
    own = optimizer._own_state(gathered=False)
    blocks = own.pop("blocks", {})
    state = {"model": optimizer.model.state_dict(), "base": optimizer.base.state_dict(), KEY: own}
    leaves, tree = tree_flatten({**state, "names": _names(optimizer)})
    dims = [leaf.placements[0].dim if isinstance(leaf, DTensor) else None for leaf in leaves]  # type: ignore[attr-defined]
    held = [leaf.to_local() if isinstance(leaf, DTensor) else leaf if first else None for leaf in leaves]
    with processes.together():
        if first or processes.sharded:
            files = processes.size if processes.sharded else 1
            content = {"files": files, "dims": dims, "state": tree_unflatten(held, tree), "blocks": blocks}
            torch.save(content, unfinished / f"{processes.rank}.pt")
            _read_file(unfinished / f"{processes.rank}.pt")
    with processes.together():
        if first:
            unfinished.rename(folder)


def load(folder: str | Path, optimizer: Wrapping) -> None:
    """Go on from a checkpoint, whatever the number of ranks that wrote it; every rank has to take part.

    Only tensors and builtins are read, so a folder from elsewhere can't run anything; one that holds more is refused. What LLQR
    has added comes first: where that doesn't fit, nothing is changed.
    """
    parameters, folder = optimizer._meet(loads=True), Path(folder)
    with optimizer.processes.together():
        if not folder.is_dir():
            raise LLQRError(f"there is no complete checkpoint in {str(folder)!r}")
        try:
            take_over = _checked(_read(folder), optimizer, parameters)
        except LLQRError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise LLQRError(f"what is in {str(folder)!r} isn't as it was written: {error!r}") from error
    with optimizer.processes.together():  # all ranks have read theirs
        take_over()


def _read(folder: Path) -> list[dict[str, Any]]:
    """What each rank has written."""
    first = _read_file(folder / "0.pt")
    return [first, *(_read_file(folder / f"{rank}.pt") for rank in range(1, first["files"]))]


def _read_file(path: Path) -> dict[str, Any]:
    """What one rank has written; tensors stay on the disk until they are used."""
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a file that isn't torch's can end in anything
        raise LLQRError(
            f"{str(path)!r} can't be loaded (a checkpoint has tensors and builtins alone, no numbers of numpy's): {error}"
        ) from error
    return found


def _checked(files: Sequence[dict[str, Any]], optimizer: Wrapping, parameters: dict[str, Tensor]) -> Callable[[], None]:
    """What goes on from these files; an error where they don't fit."""
    state = _joined([file["state"] for file in files], files[0]["dims"])
    blocks = files[0]["blocks"]
    for file in files:  # the owner of a block has its moments
        blocks |= {key: block for key, block in file["blocks"].items() if block["moments"]}
    resume = optimizer._resuming({**_made(state[KEY]), "blocks": blocks}, parameters)
    if _made(state["names"]) != _names(optimizer):
        raise LLQRError(
            "the checkpoint's base has other parameters, or in another order: make it as it was made before"
        )

    def placed(like: Any, make: Callable[[], Any]) -> Any:
        """Divided as it is here, if it has the shape of what is divided."""
        value = make()
        if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
            return optimizer.processes.part(value.to(like.device), like)
        return value

    here = optimizer.model.state_dict()
    model = {name: tree_map(partial(placed, here.get(name)), held) for name, held in state["model"].items()}
    stepped = [parameter for group in optimizer.base.param_groups for parameter in group["params"]]
    likes = dict(enumerate(stepped))  # a base may keep more than what belongs to parameters
    base = {n: tree_map(partial(placed, likes.get(n)), held) for n, held in state["base"].pop("state").items()}
    others = _made(state["base"])

    def take_over() -> None:
        optimizer.model.load_state_dict(model)
        optimizer.base.load_state_dict({**others, "state": base})
        resume()

    return take_over


def _joined(states: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """The state with a function in the place of each leaf, which makes it whole."""
    (first, tree), *others = map(tree_flatten, states)
    pieces = zip(first, *(leaves for leaves, _ in others), strict=True)
    return tree_unflatten([partial(_whole, parts, dim) for parts, dim in zip(pieces, dims, strict=True)], tree)


def _whole(parts: Sequence[Any], dim: int | None) -> Any:
    if dim is not None:
        return torch.cat(list(parts), dim)
    return parts[0].clone() if isinstance(parts[0], Tensor) else parts[0]


def _made(state: Any) -> Any:
    return tree_map(lambda make: make(), state)


def _names(optimizer: Wrapping) -> list[str]:
    """Of the parameters, as they come in the groups of the base."""
    names = {id(parameter): name for name, parameter in optimizer.model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.base.param_groups for parameter in group["params"]]
