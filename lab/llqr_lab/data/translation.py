"""Translation: pairs of sentences, cut into words (Moses) and pieces (byte pair encoding), as numbers in batches of tokens."""

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sacremoses import MosesDetokenizer, MosesTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llqr_lab.data.batches import Batch, mixed, shuffled
from llqr_lab.data.files import data_path, reading
from llqr_lab.errors import DataError, check_names

LANGUAGES = ("de", "en")


class Corpus(NamedTuple):
    """Where a corpus is to be had, and what has been done to it already."""

    folder: str
    """In the data folder, with {train,valid,val,test,test_2016_flickr}.LANGUAGE, plain or .gz."""
    tokenised: bool
    """Moses-tokenised (with its entities) and lowercased where it comes from: there is no raw text to score against."""
    source: str


CORPORA = {
    "multi30k": Corpus("multi30k_de_en", False, "https://github.com/multi30k/dataset/tree/master/data/task1/raw"),
    "iwslt14": Corpus(
        "iwslt14_de_en", True, "fairseq's examples/translation/prepare-iwslt14.sh, gzipped before its BPE"
    ),
}
PARTS = {"train": ("train",), "valid": ("valid", "val"), "test": ("test", "test_2016_flickr")}
Pairs = list[tuple[str, str]]


class ParallelText(NamedTuple):
    """The three parts of a corpus."""

    corpus: Corpus
    train: Pairs
    valid: Pairs
    test: Pairs


def parallel_text(name: str, folder: Path | None = None) -> ParallelText:
    """A corpus from its folder in the data folder (`folder`, or LLQR_DATA)."""
    corpus = CORPORA[name]
    place = data_path(folder, corpus.folder, corpus.source)
    return ParallelText(corpus, **{part: _pairs(place, corpus, part) for part in PARTS})


def _pairs(folder: Path, corpus: Corpus, part: str) -> Pairs:
    """A training pair with an empty side teaches nothing, and `cleaned` drops it. Elsewhere it is an error: without
    it the scores would be of another test set, and with it of a sentence that nobody translated.
    """
    # both sides are of the first name that either of them has: valid.de never goes with val.en
    names = [n for n in PARTS[part] if any(_file(folder, n, language) for language in LANGUAGES)]
    paths = []
    for language in LANGUAGES:
        path = _file(folder, names[0], language) if names else None
        if path is None:
            wanted = " or ".join(f"{n}.{language}{end}" for n, end in product(names[:1] or PARTS[part], ("", ".gz")))
            raise DataError(f"there is no {wanted} in '{folder}': put it there, from {corpus.source}")
        paths.append(path)
    source, target = (read_lines(path, corpus.source) for path in paths)
    if len(source) != len(target):
        counts = f"'{paths[0]}' has {len(source)} lines and '{paths[1]}' has {len(target)}"
        raise DataError(f"{counts}: they aren't translations of each other; get both again, from the same place")
    pairs = list(zip(source, target, strict=True))
    empty = [number for number, pair in enumerate(pairs, 1) if not all(pair)]
    if empty and part != "train":
        lines = f"line {empty[0]} of '{paths[0]}' or '{paths[1]}' is empty ({len(empty)} such lines)"
        raise DataError(f"{lines}: what is scored has to be whole; get both again, or take the line out of both")
    return pairs


def _file(folder: Path, part: str, language: str) -> Path | None:
    candidates = (folder / f"{part}.{language}{end}" for end in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def read_lines(path: Path, source: str) -> list[str]:
    """The lines of a UTF-8 text file, gzipped if its name says so. A line ends at a line feed and nowhere else."""
    with reading(path, source, UnicodeDecodeError):
        content = path.read_bytes()
        # "-sig": a byte order mark isn't part of the first word
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    if not text.strip():
        raise DataError(f"'{path}' is empty: get it again from {source}")
    # not splitlines(): other characters it takes for line ends occur within sentences, and would move the two sides apart
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


NUMBERS = {"ein": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five"}
THINGS = {"Hunde": "dogs", "Katzen": "cats", "Bäume": "trees", "Häuser": "houses", "Kinder": "children"}
ACTIONS = {"laufen": "run", "spielen": "play", "warten": "wait", "schlafen": "sleep"}


def made_up(count: int, seed: int) -> Pairs:
    """Such as "drei Hunde und zwei Katzen warten." and "three dogs and two cats wait."."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        groups = [(draw.choice(list(NUMBERS)), draw.choice(list(THINGS))) for _ in range(draw.randint(1, 3))]
        action = draw.choice(list(ACTIONS))
        source = " und ".join(f"{number} {thing}" for number, thing in groups)
        target = " and ".join(f"{NUMBERS[number]} {THINGS[thing]}" for number, thing in groups)
        pairs.append((f"{source} {action}.", f"{target} {ACTIONS[action]}."))
    return pairs


END = " "
"""After the last letter of a word."""
UNKNOWN_PIECE = "  "
"""Stands for a letter that wasn't learned; no piece has two ends."""


class Subwords:
    """Byte pair encoding: letters (the last ones of words too, with their mark) and merges, in the order they are applied.

    A word is its letters, the last one marked by a space after it; then the commonest pair of neighbours becomes one piece,
    again and again. No word holds a space, so gluing pieces together undoes it exactly, whatever the text.
    """

    def __init__(self, letters: Sequence[str], merges: list[tuple[str, str]]) -> None:
        self.merges = merges
        # without repetition: two merges may give the same piece by different ways
        pieces = dict.fromkeys([UNKNOWN_PIECE, *letters, *map("".join, merges)])
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        self._model: Any = models.BPE(vocabulary, merges, unk_token=UNKNOWN_PIECE, end_of_word_suffix=END)
        self._known: dict[str, list[str]] = {}

    def split(self, words: str) -> list[str]:
        """Words with whitespace between them, as pieces; a letter that wasn't learned is UNKNOWN_PIECE."""
        found = words.split()
        for word in found:  # every word is taken apart once: a corpus has many times more words than different ones
            if word not in self._known:
                self._known[word] = [token.value for token in self._model.tokenize(word)]
        return [piece for word in found for piece in self._known[word]]


def join(pieces: Iterable[str]) -> str:
    return " ".join("".join(pieces).split())


def learn_pieces(text: Iterable[str], merges: int) -> Subwords:
    """So many merges (fewer if no pair is left that occurs twice) from words with whitespace between them."""
    counts = Counter(word for line in text for word in line.split())
    words = sorted(counts)
    letters = sorted({letter for word in words for letter in word}) + sorted({word[-1] + END for word in words})
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + merges,
        min_frequency=2,
        show_progress=False,
        end_of_word_suffix=END,
        # Pairs that occur equally often are merged in the order of the numbers of their pieces, and the trainer numbers last
        # letters in the order of a hash table, which is another in every process. Named beforehand, they keep ours.
        special_tokens=letters,
    )
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(((word + " ") * counts[word] for word in words), trainer)
    return Subwords(letters, [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])


SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
START, PAD, STOP, UNKNOWN = range(4)


class Words:
    """Sentences of a language as words with spaces between them, by the rules of Moses: punctuation apart, `'` as `&apos;`.

    `tokenised` says that the text comes like that, and isn't to be cut again. Lowercasing comes last, as in fairseq's recipe.
    """

    def __init__(self, language: str, tokenised: bool = False) -> None:
        self._tokenizer = None if tokenised else MosesTokenizer(language)
        self._detokenizer = MosesDetokenizer(language)

    def split(self, sentence: str) -> str:
        words: str = sentence if self._tokenizer is None else self._tokenizer.tokenize(sentence, return_str=True)
        return " ".join(words.split()).lower()

    def join(self, words: str) -> str:
        """The sentence as one would write it; what lowercasing took is gone."""
        return str(self._detokenizer.detokenize(words.split()))


class Dictionary:
    """Pieces by number: <s> 0, <pad> 1, </s> 2, <unk> 3, then the pieces of the training text from the commonest on, equally
    common ones by the alphabet.

    fairseq's order, without the made-up words by which it fills up to a multiple of eight. A text that holds "<pad>" can't be
    mistaken for padding: the four are never looked up.
    """

    def __init__(self, text: Iterable[Sequence[str]]) -> None:
        counts = Counter(piece for pieces in text for piece in pieces)
        self.pieces = sorted(counts, key=lambda piece: (-counts[piece], piece))
        self._numbers = {piece: number for number, piece in enumerate(self.pieces, len(SPECIAL))}
        self._written = ["", "", "", SPECIAL[UNKNOWN] + END, *self.pieces]

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.pieces)

    def encode(self, pieces: Iterable[str]) -> list[int]:
        return [*(self._numbers.get(piece, UNKNOWN) for piece in pieces), STOP]

    def decode(self, numbers: Iterable[int]) -> str:
        """The words up to the first </s>. What isn't known is the word <unk>; <s> and <pad> are nothing."""
        return join(self._written[number] for number in takewhile(lambda number: number != STOP, numbers))


class Part(NamedTuple):
    source: list[list[int]]
    """Sentences as numbers, each with </s> at its end; `target` too."""
    target: list[list[int]]
    references: list[str]
    """What translations are scored against: raw text, or detokenised where the corpus comes tokenised. None in training."""

    def first(self, sentences: int) -> "Part":
        some = slice(sentences or None)
        return Part(self.source[some], self.target[some], self.references[some])

    def batch(self, group: Iterable[int]) -> Batch:
        """((source, target_in), target_out), padded on the right: w… </s>, <s> w… and w… </s>."""
        sources, targets = zip(*((self.source[i], self.target[i]) for i in group), strict=True)
        return Batch((padded(sources), padded([[START, *target[:-1]] for target in targets])), padded(targets))


@dataclass(frozen=True)
class Translation:
    """A corpus ready to learn from. Validation and test are whole: only training pairs are ever left out."""

    source: Dictionary
    target: Dictionary
    words: Words
    train: Part
    valid: Part
    test: Part
    examples: int
    """Training pairs, with those that were left out."""

    def text(self, numbers: Iterable[int]) -> str:
        return self.words.join(self.target.decode(numbers))


def prepared(text: ParallelText, merges: int = 10_000) -> Translation:
    """By the recipe of fairseq's prepare-iwslt14.sh: Moses tokenisation, lowercasing; training pairs cleaned; one BPE code of
    so many merges from both languages; for each language a dictionary of the pieces in its training text."""
    source_words, target_words = (Words(language, text.corpus.tokenised) for language in LANGUAGES)
    train, valid, test = (
        [(source_words.split(source), target_words.split(target)) for source, target in pairs] for pairs in text[1:]
    )
    clean = cleaned(train)
    subwords = learn_pieces([line for side in zip(*clean, strict=True) for line in side], merges)
    source, target = (Dictionary(map(subwords.split, side)) for side in zip(*clean, strict=True))

    def part(pairs: Pairs, raw: Pairs) -> Part:
        references = [line for _, line in raw]
        return Part(
            [source.encode(subwords.split(line)) for line, _ in pairs],
            [target.encode(subwords.split(line)) for _, line in pairs],
            [target_words.join(line) for line in references] if text.corpus.tokenised else references,
        )

    valid_part, test_part = part(valid, text.valid), part(test, text.test)
    return Translation(source, target, target_words, part(clean, []), valid_part, test_part, len(text.train))


def corpus(name: str, folder: Path | None, merges: int) -> Translation:
    """By its name; tiny-translation is made up, so that translation can be tried with nothing at hand."""
    check_names([name], [*CORPORA, "tiny-translation"], "corpus")
    if name == "tiny-translation":
        made = ParallelText(Corpus("", False, ""), made_up(200, 0), made_up(20, 1), made_up(20, 2))
        return prepared(made, merges)
    return prepared(parallel_text(name, folder), merges)


LONGEST, RATIO = 175, 1.5


def cleaned(pairs: Pairs) -> Pairs:
    """Pairs of 1 to LONGEST words a side, of which neither has more than RATIO times as many as the other."""
    whole = []
    for pair in pairs:
        short, long = sorted(len(side.split()) for side in pair)
        if short and long <= min(LONGEST, RATIO * short):
            whole.append(pair)
    if not whole:
        raise ValueError(f"no training pair has at most {LONGEST} words a side and a ratio of at most {RATIO}")
    return whole


def padded(sentences: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([torch.tensor(sentence) for sentence in sentences], batch_first=True, padding_value=PAD)


def real_tokens(inputs: tuple[Tensor, ...]) -> Tensor:
    """1 for a token of `target_in` and 0 for padding, from the inputs of a batch: the `weights` of LLQR."""
    return (inputs[1] != PAD).to(torch.get_default_dtype())


def groups(part: Part, tokens: int, seed: int) -> list[list[int]]:
    """Sentences of about the same length together: with n of them, n · (the longest side of any, with its </s>) ≤ `tokens`.
    Which of those with equal lengths go together is drawn from the seed."""
    sizes = [(len(source), len(target)) for source, target in zip(part.source, part.target, strict=True)]
    longest = max(max(size) for size in sizes)
    if longest > tokens:
        raise ValueError(f"a sentence of {longest} tokens doesn't fit into a batch of {tokens}: take a larger batch")
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
        self.steps_per_epoch = len(self.groups)

    def __getitem__(self, step: int) -> Batch:
        epoch, place = divmod(step, self.steps_per_epoch)
        return self.part.batch(self.groups[int(shuffled(self.steps_per_epoch, self.seed, epoch)[place])])


def all_batches(part: Part, tokens: int) -> list[Batch]:
    """Every sentence once, for the loss of a part."""
    return [part.batch(group) for group in groups(part, tokens, 0)]
