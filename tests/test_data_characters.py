"""Promise: windows of text hold what the text says, and the tokens after them are those that come next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llqr_lab.data.sequences import Characters, characters, shakespeare
from llqr_lab.errors import DataError

TEXT = "".join(chr(ord("a") + number * number % 23) for number in range(990)) + "Ähre\r\n✓end"


@pytest.fixture
def text(tmp_path: Path) -> Characters:
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    return characters(tmp_path / "a.txt")


def letters(text: Characters, tokens: torch.Tensor) -> str:
    return "".join(text.vocabulary[token] for token in tokens.tolist())


def test_the_vocabulary_is_of_the_whole_text_and_the_parts_are_nine_to_one(text: Characters) -> None:
    assert text.vocabulary == tuple(sorted(set(TEXT)))
    assert "✓" in text.vocabulary  # of the test part alone
    assert "\r" in text.vocabulary
    assert letters(text, text.train) + letters(text, text.test) == TEXT
    assert (len(text.train), len(text.test)) == (900, 100)


def test_training_windows_are_pieces_of_the_training_part_with_what_comes_next(text: Characters) -> None:
    batches = text.training(size=4, context=9, seed=0)
    assert batches.steps_per_epoch == 900 // 36
    for step in (0, 1, 1000):
        (tokens,), following = batches[step]
        assert tokens.shape == following.shape == (4, 9)
        assert tokens.dtype == torch.int64
        for window, after in zip(tokens, following, strict=True):
            assert letters(text, window) + letters(text, after[-1:]) in TEXT[:900]
            assert torch.equal(window[1:], after[:-1])


def test_batches_are_functions_of_seed_and_step(text: Characters) -> None:
    batches = text.training(4, 9, 0)
    before = torch.random.get_rng_state()
    late = batches[17].inputs[0]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(late, text.training(4, 9, 0)[17].inputs[0])
    assert not torch.equal(late, batches[18].inputs[0])
    assert not torch.equal(late, text.training(4, 9, 1)[17].inputs[0])


def test_the_first_and_the_last_window_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrst")
    batches = characters(tmp_path / "a.txt").training(64, 16, 0)
    assert batches.steps_per_epoch == 1  # however short the text is
    assert batches[0].inputs[0][:, 0].unique().tolist() == [0, 1]
    assert int(batches[0].targets.max()) == 17


def test_test_windows_are_all_there_are_in_order(text: Characters) -> None:
    batches = text.testing(size=4, context=9)
    assert [len(batch.targets) for batch in batches] == [4, 4, 3]  # 11 windows of 9 and one token after the last
    tokens = torch.cat([batch.inputs[0] for batch in batches]).flatten()
    following = torch.cat([batch.targets for batch in batches]).flatten()
    assert torch.equal(tokens, text.test[:99])
    assert torch.equal(following, text.test[1:100])


def test_what_cannot_be_had_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="karpathy"):
        shakespeare(tmp_path)
    (tmp_path / "text").mkdir()
    place = tmp_path / "text" / "tinyshakespeare.txt"
    for content, message in ((b"", "is empty"), (b"caf\xe9", "UTF-8")):
        place.write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            shakespeare(tmp_path)
        assert str(place) in str(caught.value)
    place.write_bytes(b"to be or not to be")
    assert len(shakespeare(tmp_path).vocabulary) == 7
    with pytest.raises(DataError, match="training part"):
        shakespeare(tmp_path).training(1, 16, 0)
    with pytest.raises(DataError, match="test part"):
        shakespeare(tmp_path).testing(1, 2)
    with pytest.raises(DataError, match="context"):
        shakespeare(tmp_path).training(1, 0, 0)
