"""Reading what torch.distributed.checkpoint has written without running what may be in it.

torch unpickles a folder's `.metadata`, and whatever isn't a tensor, so a crafted folder could run commands. Here only the
classes that torch itself writes there are known, and builtins.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import _get_layout

from llqr.errors import LLQRError

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
