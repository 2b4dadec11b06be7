"""Checkpoints by torch.distributed.checkpoint: every rank writes what it holds, any number of them can go on.

    from llqr.distributed import checkpoint

    checkpoint.save("checkpoints/step-500", optimizer)   # on every rank
    checkpoint.load("checkpoints/step-500", optimizer)   # on every rank, with a model and an optimizer that are made as before

In the folder are the model's parameters and buffers, the base's state, and U (of the default `LLQR` the curvature, which gives
it). It appears under its name when it is complete. Nothing in a folder is run when it is loaded.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.serialization import _get_layout
from torch.utils._pytree import tree_map

from llqr.errors import LLQRError
from llqr.optimizer import LLQR
from llqr.paper import PaperLLQR
from llqr.saved_state import State, block_state
from llqr.wrapper import stepped_parameters

METADATA = ".metadata"

_KINDS = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata "
    "_MEM_FORMAT_ENCODING"
)
_KNOWN: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _KINDS.split()},
    (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): Path
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class _Unpickler(pickle._Unpickler):
    """Python's own in Python, because that in C can't be kept from changing the classes it knows."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it has {module}.{name}, which torch doesn't write there")
        return found

    def load_build(self) -> None:
        if callable(self.stack[-2]):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it would change a class or a function")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint; an error where there is anything else in it."""
    try:
        with (folder / METADATA).open("rb") as file:
            found = _Unpickler(file).load()
    except Exception as error:  # a pickle that isn't torch's can end in anything
        raise LLQRError(
            f"the {METADATA} in {str(folder)!r} isn't what torch.distributed.checkpoint writes, and was not loaded: {error}"
        ) from error
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise LLQRError(f"the {METADATA} in {str(folder)!r} isn't that of a checkpoint")
    return found


class Reader(FileSystemReader):
    """torch's, with metadata that were read as above."""

    def __init__(self, folder: Path, known: Metadata) -> None:
        super().__init__(folder)
        self._known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known


class Planner(DefaultLoadPlanner):
    """torch's, for tensors and builtins alone."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises where there is anything else
        value.seek(0)
        super().load_bytes(read_item, value)


BLOCK, PLACES, AVERAGES, WORDS = "u", "places", "averages", "words"
"""Where a block's tensors are, of the default also the places of its maps and its own momenta; and all that isn't a tensor, as
JSON in bytes."""

Tensors = dict[str, dict[str, Tensor]]


def save(folder: str | Path, optimizer: LLQR | PaperLLQR) -> None:
    """Write a checkpoint of an optimizer and its model; every rank has to take part."""
    folder = Path(folder)
    optimizer._meet(stepped_parameters(optimizer.base, optimizer.model))
    group = _group(optimizer)
    partial = folder.with_name(folder.name + ".partial")
    with optimizer._together():
        if folder.exists():
            raise LLQRError(f"{str(folder)!r} is there already: give each checkpoint a folder of its own")
        if _leads(group) and partial.exists():
            shutil.rmtree(partial)  # of a run that was stopped while it wrote
    tensors, told = _of_paper(optimizer) if isinstance(optimizer, PaperLLQR) else _of_default(optimizer)
    words = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
    state = {**_trained(optimizer), **tensors, WORDS: words}
    state_dict_saver.save(state, checkpoint_id=partial, process_group=group, no_dist=group is None)
    with optimizer._together():
        if _leads(group):
            partial.rename(folder)


def load(folder: str | Path, optimizer: LLQR | PaperLLQR) -> None:
    """Go on from a checkpoint, whatever the number of ranks that wrote it; every rank has to take part.

    Only tensors and builtins are read, so a folder from elsewhere can't run anything; one that holds more is refused.
    """
    optimizer._meet(stepped_parameters(optimizer.base, optimizer.model), loads=True)
    folder, group = Path(folder), _group(optimizer)
    with optimizer._together():
        if not (folder / METADATA).is_file():
            raise LLQRError(f"there is no complete checkpoint in {str(folder)!r}")
        files = _Files(folder, read_metadata(folder), group)
        if WORDS not in files.known:
            raise LLQRError(f"what is in {str(folder)!r} wasn't written by llqr.distributed.checkpoint.save")
    try:
        told = dict(json.loads(bytes(files.whole(WORDS)[WORDS].tolist())))
        of_default = "blocks" in told
        if of_default != isinstance(optimizer, LLQR):
            kind = "LLQR" if of_default else "LLQR.paper"
            raise LLQRError(
                f"the checkpoint in {str(folder)!r} is of {kind}: load it into an optimizer of the same kind"
            )
        if isinstance(optimizer, PaperLLQR):
            _load_paper(files, optimizer, told)
        else:
            _load_default(files, optimizer, told)
    except LLQRError:
        raise
    except (AttributeError, IndexError, KeyError, MemoryError, TypeError, ValueError) as error:
        raise LLQRError(f"what is in {str(folder)!r} isn't as it was written: {error!r}") from error


class _Files:
    """A checkpoint to be read."""

    def __init__(self, folder: Path, stored: Metadata, group: dist.ProcessGroup | None) -> None:
        self._folder, self._stored, self._group = folder, stored, group
        kinds = stored.state_dict_metadata.items()
        self.known = {name: kind for name, kind in kinds if isinstance(kind, TensorStorageMetadata)}

    def under(self, place: str) -> dict[str, TensorStorageMetadata]:
        """The tensors in a dictionary of the state, by their names in it."""
        return {n.partition(".")[2]: kind for n, kind in self.known.items() if n.startswith(f"{place}.")}

    def whole(self, *places: str) -> dict[str, Any]:
        """All tensors there, whole on each rank."""
        kinds: dict[str, Any] = {place: self.known.get(place, self.under(place)) for place in places}
        state = tree_map(lambda kind: torch.empty(kind.size, dtype=kind.properties.dtype), kinds)
        self.fill({place: held for place, held in state.items() if not isinstance(held, dict) or held})
        return dict(state)

    def entries(self, place: str, parameters: Mapping[str, Tensor]) -> dict[tuple[Any, ...], Any]:
        """All that is there, by the keys that lead to it. What has the shape of a parameter among them is divided like it."""
        paths = self._stored.planner_data or {}
        found = {name: path[1:] for name, path in paths.items() if path[0] == place}
        blank: dict[str, Any] = {}
        for name, path in found.items():
            kind = self.known.get(name)
            like = next((parameters[key] for key in path if key in parameters), None)
            if kind is None:
                blank[name] = None  # not a tensor
            elif like is not None and like.shape == kind.size:
                blank[name] = torch.empty_like(like, dtype=kind.properties.dtype, requires_grad=False)
            else:
                blank[name] = torch.empty(kind.size, dtype=kind.properties.dtype)
        self.fill(blank)
        return {path: blank[name] for name, path in found.items()}

    def fill(self, state: dict[str, Any]) -> None:
        """Read into the tensors that are there."""
        reader = Reader(self._folder, self._stored)
        alone = self._group is None
        try:
            state_dict_loader.load(
                state, storage_reader=reader, planner=Planner(), process_group=self._group, no_dist=alone
            )
        except CheckpointException as error:
            why = "; ".join(sorted({str(failed) for failed, _ in error.failures.values()}))
            raise LLQRError(f"the checkpoint in {str(self._folder)!r} can't be loaded: {why}") from error


def _trained(optimizer: LLQR | PaperLLQR) -> dict[str, Any]:
    """The model's state and the base's, by the names of the parameters.

    Torch's own get_optimizer_state_dict lets a base that hasn't stepped yet take a step, which it would begin after.
    """
    held, order = optimizer.base.state_dict(), _order(optimizer)
    state = {order[number]: entry for number, entry in held["state"].items()}
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in held["param_groups"]]
    return {"model": get_model_state_dict(optimizer.model), "base": {"state": state, "param_groups": groups}}


def _load_trained(files: _Files, optimizer: LLQR | PaperLLQR, more: Mapping[str, Any]) -> None:
    """With more tensors to be filled."""
    order = _order(optimizer)
    entries = files.entries("base", dict(optimizer.model.named_parameters()))
    state: dict[Any, Any] = {}
    groups: dict[int, dict[str, Any]] = {}
    for path, value in entries.items():
        place: dict[Any, Any] = state if path[0] == "state" else groups
        for key in path[1:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    named = [name for _, group in sorted(groups.items()) for name in group["params"]]
    if named != order:
        raise LLQRError(
            "the checkpoint's base has other parameters, or in another order: make it as it was made before"
        )
    numbers = {name: number for number, name in enumerate(order)}
    packed = [{**group, "params": [numbers[n] for n in group["params"]]} for _, group in sorted(groups.items())]
    model = get_model_state_dict(optimizer.model)
    files.fill({"model": model, **more})
    set_model_state_dict(optimizer.model, model)
    optimizer.base.load_state_dict({"state": {numbers[n]: held for n, held in state.items()}, "param_groups": packed})


def _order(optimizer: LLQR | PaperLLQR) -> list[str]:
    """The names of the parameters, as they come in the groups of the base."""
    names = {id(parameter): name for name, parameter in optimizer.model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.base.param_groups for parameter in group["params"]]


# --- the paper's ---


def _of_paper(optimizer: PaperLLQR) -> tuple[Tensors, dict[str, Any]]:
    u = optimizer.preconditioner
    own = State.of(optimizer._schedule.step, None, optimizer.stats).as_dict()
    return {BLOCK: _named({} if u is None else u.blocks)}, {**own, "history": [] if u is None else u.history}


def _load_paper(files: _Files, optimizer: PaperLLQR, told: dict[str, Any]) -> None:
    parameters, kinds = stepped_parameters(optimizer.base, optimizer.model), files.under(BLOCK)
    with optimizer._together():
        keys = {name.rpartition("/")[0] for name in kinds}
        u, owners = optimizer._refit.blocks.blank(parameters, keys, optimizer.ranks) if keys else (None, None)
        blocks = _named({} if u is None else u.blocks)
        for name, tensor in blocks.items():
            if name not in kinds or tuple(tensor.shape) != tuple(kinds[name].size):
                block, _, part = name.rpartition("/")
                raise LLQRError(
                    f"the checkpoint's block for {block!r} has no tensor {part!r} of shape {tuple(tensor.shape)}: was it "
                    "written with another structure?"
                )
    _load_trained(files, optimizer, {BLOCK: blocks})
    own = State.from_dict({**told, "preconditioner": None})
    if u is not None:
        u.history = told["history"]
    optimizer._resume(own, u, owners)


# --- the default ---


def _of_default(optimizer: LLQR) -> tuple[Tensors, dict[str, Any]]:
    """Moments of the blocks that are held here; what isn't a tensor is known to all ranks."""
    blocks = {key: block_state(block) for key, block in optimizer.blocks.items()}
    places = {key: block["map"].pop("places") for key, block in blocks.items()}
    tensors: Tensors = {
        BLOCK: _named({key: block.pop("moments") for key, block in blocks.items()}),
        PLACES: {key: tensor for key, tensor in places.items() if tensor is not None},
        AVERAGES: dict(optimizer._base_step.momentum.averages),
    }
    told = {"step": optimizer._schedule.step, "stats": asdict(optimizer.stats), "by_parts": optimizer._by_parts}
    return tensors, {**told, "blocks": blocks}


def _load_default(files: _Files, optimizer: LLQR, told: dict[str, Any]) -> None:
    """First what LLQR adds: where that doesn't fit, nothing is changed."""
    found = files.whole(BLOCK, PLACES, AVERAGES)
    with optimizer._together():
        blocks = told["blocks"]
        for key, block in blocks.items():
            block["map"]["places"] = found[PLACES].get(key)
            block["moments"] = {}
        for name, moment in found[BLOCK].items():
            key, _, part = name.rpartition("/")
            blocks[key]["moments"][part] = moment
        own = {**told, AVERAGES: found[AVERAGES]}
        checked = optimizer._checked_state(own, stepped_parameters(optimizer.base, optimizer.model))
    _load_trained(files, optimizer, {})
    optimizer._resume(*checked)


# --- both ---


def _named(blocks: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{key}/{name}": tensor for key, block in blocks.items() for name, tensor in block.items()}


def _group(optimizer: LLQR | PaperLLQR) -> dist.ProcessGroup | None:
    if isinstance(optimizer, LLQR):
        return optimizer._processes.group
    return optimizer.ranks.group


def _leads(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0
