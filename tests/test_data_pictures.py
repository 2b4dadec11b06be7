"""Promise: batches of pictures are what (seed, step) make them, and every augmentation does what its name says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llqr.errors import LLQRError
from llqr_lab.data.batches import own_randomness, stream
from llqr_lab.data.picture_sets import IMAGENET_NORMALISATION, random_pictures
from llqr_lab.data.pictures import (
    NOTHING,
    Augmentation,
    MemoryPictures,
    Normalisation,
    Pictures,
    PicturesInOrder,
    centre_crop,
    crop_and_flip,
    cut_out,
    imbalanced,
    pictures_in_memory,
    reduced,
)
from llqr_lab.errors import DataError

CUTOUT = Augmentation(padding=4, reflect=True, flip=True, cutout=16, cutout_share=0.5)


def noise(count: int, *sides: int) -> Tensor:
    return torch.randint(256, (count, *sides), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def small(side: int = 32, channels: int = 3) -> Pictures:
    """Seventeen and five pictures; labels 0 … 9 over and over."""
    train, test = noise(17, channels, side, side), noise(5, channels, side, side)
    return pictures_in_memory("a test", (train, torch.arange(17) % 10), (test, torch.arange(5)), 10)


def test_normalised_training_pictures_have_mean_zero_and_deviation_one_in_each_channel() -> None:
    data = small()
    everything = torch.cat([batch.inputs[0] for batch in PicturesInOrder(data.train, data.normalisation, 4)])
    assert everything.dtype == torch.float32
    torch.testing.assert_close(everything.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(everything.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_a_channel_without_contrast_becomes_zero() -> None:
    black = torch.zeros(3, 1, 4, 4, dtype=torch.uint8)
    assert not Normalisation.of(black + 7)(torch.full((3, 1, 4, 4), 7 / 255)).abs().gt(1e-6).any()


def test_the_test_pictures_come_once_each_in_order_and_as_they_are() -> None:
    data = small()
    assert isinstance(data.test, MemoryPictures)
    batches = list(data.testing(2))
    assert [len(batch.targets) for batch in batches] == [2, 2, 1]
    assert len(batches) == 3
    pictures, labels = (torch.cat(parts) for parts in zip(*((b.inputs[0], b.targets) for b in batches), strict=True))
    assert labels.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(pictures, data.normalisation(data.test.images.float() / 255))


@pytest.mark.parametrize("augmentation", [NOTHING, CUTOUT, Augmentation(size=16, flip=True)])
def test_a_batch_is_a_function_of_seed_and_step(augmentation: Augmentation) -> None:
    data = small()
    batches = data.training(4, 1, augmentation)
    assert batches.steps_per_epoch == 4
    before = torch.random.get_rng_state()
    first, second = batches[5], batches[6]
    assert torch.equal(torch.random.get_rng_state(), before)  # the stream outside goes on as if nothing had been drawn
    torch.rand(7)
    again = data.training(4, 1, augmentation)[5]
    assert torch.equal(first.inputs[0], again.inputs[0])
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs[0], second.inputs[0])
    assert not torch.equal(first.inputs[0], data.training(4, 2, augmentation)[5].inputs[0])
    assert first.targets.dtype == torch.int64


def test_the_same_picture_is_changed_differently_at_each_step() -> None:
    one = noise(1, 3, 32, 32)
    data = pictures_in_memory("a test", (one, torch.zeros(1).long()), (one, torch.zeros(1).long()), 1)
    batches = data.training(1, 0, CUTOUT)
    assert len({batches[step].inputs[0].numpy().tobytes() for step in range(10)}) == 10


def test_workers_make_the_same_batches() -> None:
    batches = small(8).training(4, 0, Augmentation(padding=1, flip=True))
    alone, helped = list(stream(batches, range(2, 6))), list(stream(batches, range(2, 6), workers=2))
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one.inputs[0], other.inputs[0])
        assert torch.equal(one.targets, other.targets)


def test_an_epoch_holds_no_picture_twice() -> None:
    images = torch.arange(10, dtype=torch.uint8).reshape(10, 1, 1, 1)
    labels = torch.arange(10)
    batches = pictures_in_memory("a test", (images, labels), (images, labels), 10).training(3, 0)
    for epoch in range(2):
        seen = torch.cat([batches[3 * epoch + place].targets for place in range(3)])
        assert len(seen.unique()) == 9
    assert batches[0].targets.tolist() != batches[3].targets.tolist()


def test_a_flip_is_a_flip_of_half_of_the_pictures() -> None:
    pictures = noise(200, 3, 4, 6).float() / 255
    with own_randomness("a test"):
        out = crop_and_flip(pictures, Augmentation(flip=True))
    flipped = [torch.equal(new, old.flip(-1)) for new, old in zip(out, pictures, strict=True)]
    kept = [torch.equal(new, old) for new, old in zip(out, pictures, strict=True)]
    assert all(a != b for a, b in zip(flipped, kept, strict=True))
    assert 60 < sum(flipped) < 140


@pytest.mark.parametrize("reflect", [False, True])
def test_a_padded_crop_is_a_shift_with_zeros_or_with_the_mirrored_picture(reflect: bool) -> None:
    pictures = noise(300, 2, 9, 9).float() / 255 + 0.01
    with own_randomness("a test"):
        out = crop_and_flip(pictures, Augmentation(padding=4, reflect=reflect))
    padded = torch.nn.functional.pad(pictures, (4, 4, 4, 4), mode="reflect" if reflect else "constant")
    shifts = [
        next((y, x) for y in range(9) for x in range(9) if torch.equal(new, wide[:, y : y + 9, x : x + 9]))
        for new, wide in zip(out, padded, strict=True)
    ]
    assert {y for y, _ in shifts} == {x for _, x in shifts} == set(range(9))  # 4 either way, and every one occurs


@pytest.mark.parametrize("side", [8, 16])
def test_cutout_zeroes_one_square_that_may_lie_partly_outside(side: int) -> None:
    pictures = torch.ones(2000, 2, 32, 32)
    with own_randomness("a test"):
        out = cut_out(pictures, side)
    assert out.shape == pictures.shape
    assert torch.equal(out[:, 0], out[:, 1])
    assert set(out.unique().tolist()) == {0.0, 1.0}
    gone = out[:, 0] == 0
    centres = set()
    for picture in gone:
        rows, columns = picture.any(1).nonzero().flatten(), picture.any(0).nonzero().flatten()
        spans = []
        for places in (rows, columns):
            low, high = int(places[0]), int(places[-1])
            assert len(places) == high - low + 1
            centre = low + side // 2 if low else high + 1 - side // 2
            assert (low, high) == (max(0, centre - side // 2), min(31, centre + side // 2 - 1))
            spans.append(centre)
        assert int(picture.sum()) == len(rows) * len(columns)  # the whole of the square
        centres.add(tuple(spans))
    assert {y for y, _ in centres} == {x for _, x in centres} == set(range(32))  # every pixel can be the centre


def test_a_share_of_the_pictures_is_cut() -> None:
    with own_randomness("a test"):
        out = cut_out(torch.ones(2000, 1, 32, 32), 16, 0.5)
    assert int((out == 0).any((1, 2, 3)).sum()) == pytest.approx(1000, abs=5 * 500**0.5)


def test_classes_can_be_made_rare() -> None:
    """Class c keeps n · ratio^(-c/(C-1)) of its n, and every picture its label."""
    labels = torch.arange(300) % 3
    data = pictures_in_memory("a test", (noise(300, 1, 4, 4), labels), (noise(300, 1, 4, 4), labels), 3)
    rare = imbalanced(data.train, 3, 25.0)
    assert torch.bincount(rare.labels).tolist() == [100, 20, 4]
    rows = torch.arange(len(rare.labels))
    everything = {
        bytes(picture.flatten().tolist()): label for picture, label in zip(noise(300, 1, 4, 4), labels, strict=True)
    }
    for picture, label in zip(rare.take(rows), rare.labels, strict=True):
        assert everything[bytes(picture.flatten().tolist())] == label
    with pytest.raises(DataError, match="how many times rarer"):
        imbalanced(data.train, 3, 0.5)


def test_black_comes_in_at_the_sides_and_the_mean_into_the_square() -> None:
    """What a crop's padding brings is black before normalisation; what is cut out is zero after it."""
    white = torch.full((8, 1, 32, 32), 255, dtype=torch.uint8)
    white[:, :, ::2] = 155  # so that there is a deviation
    data = pictures_in_memory("a test", (white, torch.zeros(8).long()), (white, torch.zeros(8).long()), 1)
    black = float(data.normalisation(torch.zeros(1, 1, 1)))
    shifted = data.training(8, 0, Augmentation(padding=4))[0].inputs[0]
    assert float(shifted.min()) == pytest.approx(black)
    cut = data.training(8, 0, Augmentation(cutout=16))[0].inputs[0]
    assert (cut == 0).any(dim=(1, 2, 3)).all()
    assert float(cut.min()) == pytest.approx(-1, abs=1e-4)


def test_imagenet_crops_are_pieces_of_the_picture() -> None:
    pictures = noise(4, 3, 256, 256).float() / 255
    with own_randomness("a test"):
        crops = crop_and_flip(pictures, Augmentation(size=224))
        flipped = crop_and_flip(pictures, Augmentation(size=224, flip=True))
    assert crops.shape == flipped.shape == (4, 3, 224, 224)
    for crop, picture in zip(crops, pictures, strict=True):
        found = (picture[0] == crop[0, 0, 0]).nonzero()
        assert any(torch.equal(picture[:, y : y + 224, x : x + 224], crop) for y, x in found.tolist())
    assert torch.equal(centre_crop(pictures, 224), pictures[..., 16:240, 16:240])


def test_imagenet_is_normalised_by_its_own_constants() -> None:
    grey = IMAGENET_NORMALISATION(torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1))
    assert torch.equal(grey, torch.zeros(3, 1, 1))


BAD: dict[str, tuple[tuple[Tensor, Tensor], str]] = {
    "floats": ((torch.rand(4, 3, 8, 8), torch.arange(4)), "bytes with four sides, not torch.float32"),
    "three sides": ((noise(4, 8, 8), torch.arange(4)), "four sides"),
    "no pictures": ((noise(4, 3, 8, 8)[:0], torch.arange(0)), "bytes with four sides, not torch.uint8 of"),
    "fewer labels": ((noise(4, 3, 8, 8), torch.arange(3)), "4 training pictures must have a whole number each"),
    "label too high": ((noise(4, 3, 8, 8), torch.arange(4) + 7), "from 7 to 10; of 10 classes"),
    "label negative": ((noise(4, 3, 8, 8), torch.arange(4) - 1), "from -1 to 2"),
    "float labels": ((noise(4, 3, 8, 8), torch.rand(4)), "a whole number each, not torch.float32"),
    "truth as labels": ((noise(4, 3, 8, 8), torch.ones(4, dtype=torch.bool)), "a whole number each, not torch.bool"),
    "labels in a column": ((noise(4, 3, 8, 8), torch.arange(4)[:, None]), "a whole number each"),
    "another size": ((noise(4, 3, 9, 9), torch.arange(4)), "must be alike"),
}


@pytest.mark.parametrize("kind", BAD)
def test_pictures_that_cannot_be_trained_on_are_refused(kind: str) -> None:
    train, message = BAD[kind]
    with pytest.raises(DataError, match=message) as caught:
        pictures_in_memory("'some file'", train, (noise(4, 3, 8, 8), torch.arange(4)), 10)
    assert "'some file'" in str(caught.value)


def test_settings_that_cannot_be_had_are_refused() -> None:
    data = small(8)
    with pytest.raises(LLQRError, match="batch of 18"):
        data.training(18, 0)
    with pytest.raises(LLQRError, match="even"):
        Augmentation(cutout=5)
    with pytest.raises(LLQRError, match="nothing to mirror"):
        Augmentation(reflect=True)


def test_pictures_can_be_averaged_to_fewer_pixels() -> None:
    """Each pixel is the mean of a square, rounded; channels are normalised anew."""
    data = random_pictures(pixels=16, train=20, test=10)
    small = reduced(data, 8)
    rows = torch.arange(20)
    squares = data.train.take(rows).double().reshape(20, 3, 8, 2, 8, 2).mean((3, 5))
    assert (small.train.take(rows).double() - squares).abs().max() <= 0.5
    assert small.test.take(torch.arange(10)).shape[-2:] == (8, 8)
    assert small.normalisation == Normalisation.of(small.train.take(rows))
    assert reduced(data, 16) is data
    with pytest.raises(DataError, match="divisor"):
        reduced(data, 5)
