"""Checkpoints of `LLQR.paper` by torch.distributed.checkpoint: every rank writes what it holds, any number of them can go on.

    from llqr.distributed import checkpoint

    checkpoint.save("checkpoints/step-500", optimizer)   # on every rank
    checkpoint.load("checkpoints/step-500", optimizer)   # on every rank, with a model and an optimizer that are made as before

In the folder are the model's parameters and buffers, the base's state and U. It appears under its name when it is complete.
Nothing in a folder is run when it is loaded. The default `LLQR` is saved by its `state_dict()`, which has the whole U on every
rank and loads on any number of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from llqr.distributed.reading import METADATA, Planner, Reader, read_metadata
from llqr.errors import LLQRError
from llqr.loop.gradients import stepped_parameters
from llqr.loop.state import State
from llqr.paper import PaperLLQR

BLOCK, WORDS = "u", "words"
"""Where a block's tensors are, and all that isn't a tensor, as JSON in bytes."""


def save(folder: str | Path, optimizer: PaperLLQR) -> None:
    """Write a checkpoint of an `LLQR.paper` and its model; every rank has to take part."""
    _check(optimizer)
    folder = Path(folder)
    optimizer._meet(stepped_parameters(optimizer.base, optimizer.model))
    group = _group(optimizer)
    partial = folder.with_name(folder.name + ".partial")
    with optimizer._together():
        if folder.exists():
            raise LLQRError(f"{str(folder)!r} is there already: give each checkpoint a folder of its own")
        if _leads(group) and partial.exists():
            shutil.rmtree(partial)  # of a run that was stopped while it wrote
    state_dict_saver.save(_state(optimizer), checkpoint_id=partial, process_group=group, no_dist=group is None)
    with optimizer._together():
        if _leads(group):
            partial.rename(folder)


def load(folder: str | Path, optimizer: PaperLLQR) -> None:
    """Go on from a checkpoint, whatever the number of ranks that wrote it; every rank has to take part.

    Only tensors and builtins are read, so a folder from elsewhere can't run anything; one that holds more is refused.
    """
    _check(optimizer)
    parameters = stepped_parameters(optimizer.base, optimizer.model)
    optimizer._meet(parameters, loads=True)
    folder, group = Path(folder), _group(optimizer)
    with optimizer._together():
        if not (folder / METADATA).is_file():
            raise LLQRError(f"there is no complete checkpoint in {str(folder)!r}")
        stored = read_metadata(folder)
        kinds = stored.state_dict_metadata
        tensors = {name: kind.size for name, kind in kinds.items() if isinstance(kind, TensorStorageMetadata)}
        sizes = {name.partition(".")[2]: size for name, size in tensors.items() if name.startswith(f"{BLOCK}.")}
        if WORDS not in tensors:
            raise LLQRError(f"what is in {str(folder)!r} wasn't written by llqr.distributed.checkpoint.save")
        keys = {_split(name)[0] for name in sizes}
        u, division = optimizer._refit.blocks.blank(parameters, keys, optimizer._team) if keys else (None, None)
        state = _state(optimizer, {} if u is None else u.blocks, torch.empty(tensors[WORDS], dtype=torch.uint8))
        for name, tensor in state[BLOCK].items():
            if tuple(tensor.shape) != tuple(sizes.get(name, ())) or name not in sizes:
                block, part = _split(name)
                raise LLQRError(
                    f"the checkpoint's block for {block!r} has no tensor {part!r} of shape {tuple(tensor.shape)}: was it "
                    "written with another structure?"
                )
    try:
        state_dict_loader.load(
            state, storage_reader=Reader(folder, stored), planner=Planner(), process_group=group, no_dist=group is None
        )
    except CheckpointException as error:
        raise LLQRError(f"the checkpoint in {str(folder)!r} can't be loaded: {error}") from error
    told = json.loads(bytes(state[WORDS].tolist()))
    set_model_state_dict(optimizer.model, state["model"])
    set_optimizer_state_dict(optimizer.model, optimizer.base, state["base"])
    own = State.from_dict({**told, "preconditioner": None})
    if u is not None:
        u.history = told["history"]
    optimizer._resume(own, u, division)


def _state(
    optimizer: PaperLLQR, blocks: dict[str, dict[str, Tensor]] | None = None, words: Tensor | None = None
) -> dict[str, Any]:
    """What is saved, or what is to be filled by loading."""
    u = optimizer.preconditioner
    if blocks is None:
        blocks = {} if u is None else u.blocks
    if words is None:
        own = State.of(optimizer._schedule.step, None, optimizer.stats).as_dict()
        told = json.dumps({**own, "history": [] if u is None else u.history})
        words = torch.tensor(list(told.encode()), dtype=torch.uint8)
    return {
        "model": get_model_state_dict(optimizer.model),
        "base": get_optimizer_state_dict(optimizer.model, optimizer.base),
        BLOCK: {f"{key}/{name}": tensor for key, block in blocks.items() for name, tensor in block.items()},
        WORDS: words,
    }


def _check(optimizer: object) -> None:
    if not isinstance(optimizer, PaperLLQR):
        raise LLQRError("llqr.distributed.checkpoint is for LLQR.paper: save and load the state_dict() of an LLQR")


def _split(name: str) -> tuple[str, str]:
    block, _, tensor = name.rpartition("/")
    return block, tensor


def _group(optimizer: PaperLLQR) -> dist.ProcessGroup | None:
    return None if optimizer._team is None else optimizer._team.ranks.group


def _leads(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0
