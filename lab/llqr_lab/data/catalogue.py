"""Data sets by the names that configurations have for them. docs/experiments.md lists them, with sources and licences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llqr_lab.data import picture_sets, sequences, translation
from llqr_lab.data.pictures import Augmentation, Pictures, reduced
from llqr_lab.errors import DataError, check_names

WHOLE = {"cifar10": 50_000, "cifar100": 50_000, "imagenet": 1_281_167, "iwslt14": 160_239, "multi30k": 29_000}
"""How much there is to learn from in these, of which the files at hand may be a part."""
CROPPED: dict[str, Callable[[Path | None], Pictures]] = {
    "cifar10": partial(picture_sets.cifar, "cifar10"),
    "cifar100": partial(picture_sets.cifar, "cifar100"),
    "tiny-imagenet32": picture_sets.tiny_imagenet32,
}
"""Of 32 × 32 pixels or averaged to fewer, cropped with padding and flipped in training."""
SCALED: dict[str, Callable[..., Pictures]] = {"imagenet": picture_sets.imagenet, "imagenette": picture_sets.imagenette}
"""Of any size: brought to 8/7 of the wanted side, then cropped and flipped in training."""


def pictures(
    name: str, folder: Path | None, pixels: int = 0, **options: Any
) -> tuple[Pictures, Augmentation, int | None]:
    """The pictures, what training does to them, and the side of the crop that is tested on."""
    if name in SCALED:
        side = pixels or 224
        return SCALED[name](folder, side=side * 8 // 7, **options), Augmentation(size=side, flip=True), side
    if name == "random-pictures":
        made = picture_sets.random_pictures(pixels=pixels or 16, **options)
        return made, Augmentation(padding=2, flip=True), None
    if name not in (*CROPPED, "fashion"):
        check_names([name], [*CROPPED, "fashion", *SCALED, "random-pictures"], "data set of pictures")
    if options or (pixels and name == "fashion"):
        given = ", ".join(["pixels"] * bool(pixels) + list(options))
        raise DataError(f"{name} has a size of its own: leave out {given}")
    if name == "fashion":
        return picture_sets.fashion(folder), Augmentation(), None
    side = pixels or picture_sets.SIDE
    return reduced(CROPPED[name](folder), side), Augmentation(padding=side // 8, flip=True), None


def characters(name: str, folder: Path | None) -> sequences.Characters:
    check_names([name], ["shakespeare", "tiny-text"], "text")
    if name == "shakespeare":
        return sequences.shakespeare(folder)
    return sequences.characters_of("\n".join(translation.made_up(200, 3).target), "generated text")


def corpus(name: str, folder: Path | None, merges: int) -> translation.Translation:
    check_names([name], [*translation.CORPORA, "tiny-translation"], "corpus")
    text = translation.tiny_text() if name == "tiny-translation" else translation.parallel_text(name, folder)
    return translation.prepared(text, merges)
