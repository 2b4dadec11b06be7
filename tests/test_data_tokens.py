"""Promise: text becomes numbers and the same text again, by the same code in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llqr_lab.data.translation import (
    END,
    PAD,
    START,
    STOP,
    UNKNOWN,
    UNKNOWN_PIECE,
    Dictionary,
    Subwords,
    Words,
    join,
    learn_pieces,
)

TEXT = ["low low low low lower", "newest newest newest widest widest", "der hund und der hund"] * 3


def by_hand(text: list[str], merges: int) -> list[str]:
    """Byte pair encoding as it is defined, slowly: the pieces, in the order they are made."""
    words = [[*word[:-1], word[-1] + END] for line in text for word in line.split()]
    made = []
    for _ in range(merges):
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts or max(counts.values()) < 2:
            break
        best = [pair for pair, count in counts.items() if count == max(counts.values())]
        assert len(best) == 1, "the text of this test has to leave no choice"
        made.append("".join(best[0]))
        for word in words:
            for i in range(len(word) - 2, -1, -1):
                if i + 1 < len(word) and (word[i], word[i + 1]) == best[0]:
                    word[i : i + 2] = [made[-1]]
    return made


def test_the_commonest_pairs_are_merged() -> None:
    text = ["ab " * 10, "abc " * 7, "bc " * 4, "xabc " * 2]
    assert by_hand(text, 4) == ["bc ", "ab ", "abc ", "xabc "]
    assert [first + second for first, second in learn_pieces(text, 4).merges] == by_hand(text, 4)
    assert learn_pieces(text, 4).split("abc xabc bab") == ["abc ", "xabc ", "b", "ab "]


def test_no_more_merges_than_pairs_that_occur_twice() -> None:
    assert [first + second for first, second in learn_pieces(["aa b aa c"], 100).merges] == ["aa "]


def test_every_process_learns_the_same_code() -> None:
    """Almost all pairs here occur equally often, so that the order of a hash table would show."""
    program = (
        "from llqr_lab.data.translation import learn_pieces; import string;"
        "text = [f'{a}{b}{c}' for a in string.ascii_letters for b in 'xyz' for c in string.ascii_letters] * 2;"
        "print(learn_pieces(text, 300).merges)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "RAYON_NUM_THREADS": str(1 + i % 2)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for i in range(3)
    }
    assert len(said) == 1


CODE = Subwords(
    sorted(set("lowernstdiu<>/@▁")) + [letter + END for letter in "wrtd@>"],
    [("l", "o"), ("lo", "w "), ("e", "s"), ("es", "t "), ("@", "@ ")],
)


@given(st.lists(st.text(st.sampled_from("lowernstdiu<>/@▁"), min_size=1)))
def test_what_is_split_is_joined_exactly(words: list[str]) -> None:
    """Also words that look like marks of other codes; a last letter that isn't known as such is one unknown piece."""
    pieces = CODE.split(" ".join(words))
    known = all(word[-1] in "wrtd@>" for word in words)
    assert (UNKNOWN_PIECE in pieces) == (not known)
    if known:
        assert join(pieces) == " ".join(words)


def test_a_letter_that_was_not_learned() -> None:
    assert CODE.split("lo§w") == ["lo", UNKNOWN_PIECE, "w "]


def test_words_by_moses() -> None:
    english = Words("en")
    assert english.split("He's here,  (isn't he)?") == "he &apos;s here , ( isn &apos;t he ) ?"
    assert english.join("he &apos;s here , ( isn &apos;t he ) ?") == "he's here, (isn't he)?"
    assert Words("de").split("Ein Bär, z.B. ÄÖ.") == "ein bär , z.B. äö .".lower()
    # What comes tokenised isn't escaped or cut again.
    assert Words("en", tokenised=True).split("he &apos;s here , z.b.") == "he &apos;s here , z.b."


def test_dictionary() -> None:
    dictionary = Dictionary([["a", "b "], ["b ", "c "], ["<pad>", "c "]])
    assert len(dictionary) == 8
    assert dictionary.pieces == ["b ", "c ", "<pad>", "a"]  # the commonest first, then by the alphabet
    assert dictionary.encode(["a", "b ", "?", "<pad>"]) == [7, 4, UNKNOWN, 6, STOP]
    assert (START, PAD, STOP, UNKNOWN) == (0, 1, 2, 3)
    assert dictionary.decode([START, 7, 4, 3, 5, PAD, STOP, 5]) == "ab <unk> c"
    assert dictionary.decode([]) == ""
    assert dictionary.decode([4, 7]) == "b a"
