"""Data sets by the names that configurations have for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llqr_lab.data import generated
from llqr_lab.data.augment import CIFAR, NOTHING, Augmentation
from llqr_lab.data.characters import Characters, characters_of, shakespeare
from llqr_lab.data.cifar import cifar, tiny_imagenet32
from llqr_lab.data.fashion import fashion_pictures
from llqr_lab.data.folder import DataError
from llqr_lab.data.imagefolder import imagenet, imagenette
from llqr_lab.data.pictures import Pictures
from llqr_lab.data.translation import Translation, prepared, translation
from llqr_lab.suggest import suggestion

SMALL: dict[str, Callable[[Path | None], Pictures]] = {
    "cifar10": partial(cifar, "cifar10"),
    "cifar100": partial(cifar, "cifar100"),
    "tiny-imagenet32": tiny_imagenet32,
}
"""Of 32 × 32 pixels, cropped with padding and flipped in training."""
LARGE: dict[str, Callable[..., Pictures]] = {"imagenet": imagenet, "imagenette": imagenette}
"""Of any size: brought to 8/7 of the wanted side, then cropped and flipped in training."""


WHOLE = {"cifar10": 50_000, "cifar100": 50_000, "imagenet": 1_281_167, "iwslt14": 160_239, "multi30k": 29_000}
"""How much there is to learn from in these, of which the files at hand may be a part."""


def pictures(
    name: str, folder: Path | None, pixels: int = 0, **options: Any
) -> tuple[Pictures, Augmentation, int | None]:
    """The pictures, what training does to them, and the side of the crop that is tested on."""
    if name in SMALL or name == "fashion":
        if pixels or options:
            raise DataError(
                f"{name} has a size of its own: leave out {', '.join(['pixels'] * bool(pixels) + list(options))}"
            )
        return (SMALL[name](folder), CIFAR, None) if name in SMALL else (fashion_pictures(folder), NOTHING, None)
    if name in LARGE:
        side = pixels or 224
        return LARGE[name](folder, side=side * 8 // 7, **options), Augmentation(size=side, flip=True), side
    if name == "random-pictures":
        return generated.random_pictures(pixels=pixels or 16, **options), Augmentation(padding=2, flip=True), None
    raise DataError(f"there are no pictures '{name}'{suggestion(name, [*SMALL, 'fashion', *LARGE, 'random-pictures'])}")


def characters(name: str, folder: Path | None) -> Characters:
    if name == "shakespeare":
        return shakespeare(folder)
    if name == "tiny-text":
        return characters_of(generated.tiny_text(), "generated text")
    raise DataError(f"there is no text '{name}'{suggestion(name, ['shakespeare', 'tiny-text'])}")


def corpus(name: str, folder: Path | None, bpe: int) -> Translation:
    if name == "tiny-translation":
        return prepared(generated.tiny_translation(), merges=bpe)
    if name in ("multi30k", "iwslt14"):
        return translation(name, folder, merges=bpe)
    raise DataError(f"there is no corpus '{name}'{suggestion(name, ['multi30k', 'iwslt14', 'tiny-translation'])}")
