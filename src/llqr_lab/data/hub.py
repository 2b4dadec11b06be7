"""Pictures by Hugging Face's `datasets`: from a folder of parquet files, or from the hub where the network allows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llqr_lab.data.folder import DataError, MissingDataError

SECONDS = 10.0
"""How long the hub may take to answer."""


def hub_parts(
    name: str | Path, image: str, label: str, sought: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test pictures (uint8 NCHW, RGB) and labels of a data set on the hub, or of a folder that holds one.

    `sought` says what was looked for in vain before, and ends the message of an error.
    """
    # Seconds of import that nobody pays who has the files.
    import datasets

    local = isinstance(name, Path)
    try:
        if not local:
            _reachable(str(name))
        data = datasets.load_dataset(str(name))
        parts = [data[part].cast_column(image, datasets.Image(mode="RGB")) for part in ("train", "test")]
        train, test = ((_stacked(part[image]), torch.tensor(list(part[label]))) for part in parts)
    except Exception as error:  # datasets, its readers and the network raise too many kinds to name
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if local:
            raise DataError(f"'{name}' holds no data set that can be read ({told}). {sought}") from error
        raise MissingDataError(
            f"{name} couldn't be had from the Hugging Face hub ({told}). {sought} "
            "(A copy that was downloaded before is used with HF_HUB_OFFLINE=1.)"
        ) from error
    return train, test


def _reachable(name: str) -> None:
    """One question to the hub: `load_dataset` asks five times, for half a minute, where there is no network."""
    import huggingface_hub
    from huggingface_hub import constants

    # Offline, load_dataset looks into its cache without asking anybody.
    if not constants.HF_HUB_OFFLINE:
        huggingface_hub.HfApi().dataset_info(name, timeout=SECONDS)


def _stacked(images: object) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)  # type: ignore[attr-defined]
