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
from collections.abc import Collection, Iterator, Mapping, Sequence
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

from llqr.errors import LLQRError
from llqr.wrapper import Wrapping

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


OWN, WORDS = "own", "words"
"""Where the tensors are that LLQR adds, by the keys that lead to them; and all of it that isn't a tensor, as JSON in bytes."""


def save(folder: str | Path, optimizer: Wrapping) -> None:
    """Write a checkpoint of an optimizer and its model; every rank has to take part."""
    folder = Path(folder)
    optimizer._meet()
    processes, group = optimizer.processes, optimizer.processes.group
    partial = folder.with_name(folder.name + ".partial")
    with processes.together():
        if folder.exists():
            raise LLQRError(f"{str(folder)!r} is there already: give each checkpoint a folder of its own")
        if processes.rank == 0 and partial.exists():
            shutil.rmtree(partial)  # of a run that was stopped while it wrote
    own = optimizer._own_state(gathered=False)
    tensors = {json.dumps(path): tensor for path, tensor in _take_tensors(own)}
    words = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8)
    state = {**_trained(optimizer), OWN: tensors, WORDS: words}
    state_dict_saver.save(state, checkpoint_id=partial, process_group=group, no_dist=group is None)
    with processes.together():
        if processes.rank == 0:
            partial.rename(folder)


def _take_tensors(state: dict[str, Any], *keys: str) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The tensors in a dictionary, however deep, out of it; by the keys that lead to them."""
    for key in list(state):
        if isinstance(state[key], Tensor):
            yield (*keys, key), state.pop(key)
        elif isinstance(state[key], dict):
            yield from _take_tensors(state[key], *keys, key)


def _put(state: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """The inverse, for one of them."""
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def load(folder: str | Path, optimizer: Wrapping) -> None:
    """Go on from a checkpoint, whatever the number of ranks that wrote it; every rank has to take part.

    Only tensors and builtins are read, so a folder from elsewhere can't run anything; one that holds more is refused. What LLQR
    has added comes first: where that doesn't fit, nothing is changed.
    """
    parameters, folder = optimizer._meet(loads=True), Path(folder)
    processes = optimizer.processes
    with processes.together():
        if not (folder / METADATA).is_file():
            raise LLQRError(f"there is no complete checkpoint in {str(folder)!r}")
        files = _Files(folder, read_metadata(folder), processes.group)
        if WORDS not in files.known:
            raise LLQRError(f"what is in {str(folder)!r} wasn't written by llqr.distributed.checkpoint.save")
    try:
        found = files.entries((WORDS, OWN), {})
        with processes.together():
            own = dict(json.loads(bytes(found.pop(()).tolist())))
            for (path,), tensor in found.items():
                _put(own, json.loads(path), tensor)
            resume = optimizer._resuming(own, parameters)
        _load_trained(files, optimizer)
        resume()
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

    def entries(self, places: Collection[str], parameters: Mapping[str, Tensor]) -> dict[tuple[Any, ...], Any]:
        """All that is there, by the keys that lead on to it. What has the shape of a parameter among them is divided like it,
        the rest is whole on each rank."""
        paths = {name: path for name, path in (self._stored.planner_data or {}).items() if path[0] in places}
        blank: dict[str, Any] = {}
        for name, path in paths.items():
            kind = self.known.get(name)
            like = next((parameters[key] for key in path if key in parameters), None)
            if kind is None:
                blank[name] = None  # not a tensor
            elif like is not None and like.shape == kind.size:
                blank[name] = torch.empty_like(like, dtype=kind.properties.dtype, requires_grad=False)
            else:
                blank[name] = torch.empty(kind.size, dtype=kind.properties.dtype)
        self.fill(blank)
        return {path[1:]: blank[name] for name, path in paths.items()}

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


def _trained(optimizer: Wrapping) -> dict[str, Any]:
    """The model's state and the base's, by the names of the parameters.

    Torch's own get_optimizer_state_dict lets a base that hasn't stepped yet take a step, which it would begin after.
    """
    held, order = optimizer.base.state_dict(), _order(optimizer)
    state = {order[number]: entry for number, entry in held["state"].items()}
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in held["param_groups"]]
    return {"model": get_model_state_dict(optimizer.model), "base": {"state": state, "param_groups": groups}}


def _load_trained(files: _Files, optimizer: Wrapping) -> None:
    order = _order(optimizer)
    found: dict[str, dict[Any, Any]] = {"state": {}, "param_groups": {}}
    for path, value in files.entries(("base",), dict(optimizer.model.named_parameters())).items():
        _put(found, path, value)
    groups = [group for _, group in sorted(found["param_groups"].items())]
    if [name for group in groups for name in group["params"]] != order:
        raise LLQRError(
            "the checkpoint's base has other parameters, or in another order: make it as it was made before"
        )
    numbers = {name: number for number, name in enumerate(order)}
    state = {numbers[name]: held for name, held in found["state"].items()}
    packed = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    model = get_model_state_dict(optimizer.model)
    files.fill({"model": model})
    set_model_state_dict(optimizer.model, model)
    optimizer.base.load_state_dict({"state": state, "param_groups": packed})


def _order(optimizer: Wrapping) -> list[str]:
    """The names of the parameters, as they come in the groups of the base."""
    names = {id(parameter): name for name, parameter in optimizer.model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.base.param_groups for parameter in group["params"]]
