"""Translation: a corpus as numbers, and its batches of about as many tokens each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llqr_lab.data.batches import Batch, mixed, shuffled
from llqr_lab.data.parallel import Pairs, ParallelText, parallel_text
from llqr_lab.data.subwords import Subwords, learn
from llqr_lab.data.tokens import PAD, START, Dictionary, Words


class Part(NamedTuple):
    source: list[list[int]]
    """Sentences as numbers, each with </s> at its end; `target` too."""
    target: list[list[int]]
    references: list[str]
    """What translations are scored against: raw text, or detokenised where the corpus comes tokenised. None in training."""


@dataclass(frozen=True)
class Translation:
    """A corpus ready to learn from. Validation and test are whole: only training pairs are ever left out."""

    source: Dictionary
    target: Dictionary
    subwords: Subwords
    words: Words
    """Of the target language."""
    lowercase: bool
    train: Part
    valid: Part
    test: Part
    empty: int
    """Training pairs dropped because a side was empty."""
    cleaned: int
    """Training pairs dropped because a side was too long, or too long for the other."""

    def text(self, numbers: Iterable[int]) -> str:
        """A translation as one would write it, to be scored."""
        return self.words.join(self.target.decode(numbers))


def translation(
    name: str = "multi30k",
    folder: Path | None = None,
    *,
    merges: int = 10_000,
    lowercase: bool = True,
    longest: int | None = 175,
    ratio: float | None = 1.5,
) -> Translation:
    """A corpus of the data folder or the hub, `prepared`."""
    return prepared(parallel_text(name, folder), merges=merges, lowercase=lowercase, longest=longest, ratio=ratio)


def prepared(
    text: ParallelText,
    *,
    merges: int = 10_000,
    lowercase: bool = True,
    longest: int | None = 175,
    ratio: float | None = 1.5,
) -> Translation:
    """By the recipe of fairseq's prepare-iwslt14.sh.

    Moses tokenisation; training pairs cleaned (at most `longest` words a side, and neither side more than `ratio` times as
    many as the other; None: no such rule); lowercasing; one BPE code of so many merges from both languages; then for each
    language a dictionary of the pieces in its training text.
    """
    sides = [Words(language, lowercase, text.corpus.tokenised) for language in text.corpus.languages]
    train, valid, test = (
        Pairs(sides[0].split_all(pairs.source), sides[1].split_all(pairs.target))
        for pairs in (text.train, text.valid, text.test)
    )
    clean = cleaned(train, longest, ratio)
    subwords = learn([*clean.source, *clean.target], merges)
    source, target = (Dictionary.of(map(subwords.split, side)) for side in (clean.source, clean.target))

    def part(pairs: Pairs, references: list[str]) -> Part:
        return Part(
            [source.encode(subwords.split(line)) for line in pairs.source],
            [target.encode(subwords.split(line)) for line in pairs.target],
            [sides[1].join(line) for line in references] if text.corpus.tokenised else references,
        )

    return Translation(
        source,
        target,
        subwords,
        sides[1],
        lowercase or text.corpus.tokenised,
        part(clean, []),
        part(valid, text.valid.target),
        part(test, text.test.target),
        text.train.dropped,
        clean.dropped,
    )


def cleaned(pairs: Pairs, longest: int | None, ratio: float | None) -> Pairs:
    """Pairs of 1 to `longest` words a side, of which neither has more than `ratio` times as many as the other."""
    whole = []
    for source, target in zip(pairs.source, pairs.target, strict=True):
        short, long = sorted((len(source.split()), len(target.split())))
        if short and (longest is None or long <= longest) and (ratio is None or long <= ratio * short):
            whole.append((source, target))
    if not whole:
        raise ValueError(f"no training pair has at most {longest} words a side and a ratio of at most {ratio}")
    return Pairs([pair[0] for pair in whole], [pair[1] for pair in whole], len(pairs.source) - len(whole))


def batch(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Batch:
    """((source, target_in), target_out), padded on the right: w… </s>, <s> w… and w… </s>."""
    return Batch(
        (padded(sources), padded([[START, *target[:-1]] for target in targets])),
        padded(targets),
    )


def padded(sentences: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([torch.tensor(sentence) for sentence in sentences], batch_first=True, padding_value=PAD)


def real_tokens(inputs: tuple[Tensor, ...]) -> Tensor:
    """1 for a token of `target_in` and 0 for padding, from the inputs of a batch: the `weights` of LLQR."""
    return (inputs[1] != PAD).to(torch.get_default_dtype())


def groups(part: Part, tokens: int, seed: int) -> list[list[int]]:
    """Sentences of about the same length together: with n of them, n · (the longest side of any, with its </s>) ≤ `tokens`.

    Which of those with equal lengths go together is drawn from the seed.
    """
    sizes = [(len(source), len(target)) for source, target in zip(part.source, part.target, strict=True)]
    longest = max(max(size) for size in sizes)
    if longest > tokens:
        raise ValueError(
            f"a sentence of {longest} tokens doesn't fit into a batch of {tokens}: give `tokens` or `longest`"
        )
    drawn = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(mixed("groups", seed))).tolist()
    # By the longer side first: it is what a batch is filled up to. The sort is stable, so equal ones stay as drawn.
    order = sorted(drawn, key=lambda i: (max(sizes[i]), *sizes[i]))
    found: list[list[int]] = [[]]
    for i in order:
        if (len(found[-1]) + 1) * max(sizes[i]) > tokens:
            found.append([])
        found[-1].append(i)
    return found


class TranslationBatches:
    """Training batches of at most so many tokens, padding included, on each side.

    Which sentences are together is fixed by the seed, and so is the number of batches; their order is another in every epoch.
    """

    def __init__(self, part: Part, tokens: int, seed: int) -> None:
        self.part, self.seed = part, seed
        self.groups = groups(part, tokens, seed)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.groups)

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"steps are counted from 0, and this is {step}")
        epoch, place = divmod(step, self.steps_per_epoch)
        group = self.groups[int(shuffled(self.steps_per_epoch, self.seed, epoch)[place])]
        return batch([self.part.source[i] for i in group], [self.part.target[i] for i in group])


def all_batches(part: Part, tokens: int) -> list[Batch]:
    """Every sentence once, for the loss of a part."""
    return [
        batch([part.source[i] for i in group], [part.target[i] for i in group]) for group in groups(part, tokens, 0)
    ]
