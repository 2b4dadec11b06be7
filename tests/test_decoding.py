"""Promise: beam search finds what it says, for each sentence as if it were alone; losses and perplexities are per token."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.data.translation import PAD, START, STOP, Part, all_batches, padded
from llqr_lab.errors import DataError
from llqr_lab.tasks import Hypothesis, Translating, beam_search, length_limit, scores, translate

WORDS = 7
SOURCES = [[4, 5, 6, STOP], [6, STOP], [5, 5, 4, 4, 6, 5, STOP], [4, 6, STOP]]


class Tiny(nn.Module):
    """Logits from the mean of the source, the last two words and the place; nothing of it sees padding."""

    def __init__(self, seed: int = 0, sharp: float = 3.0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.source, self.last, self.before = (
            nn.Parameter(sharp * torch.randn(WORDS, WORDS, generator=draw, dtype=torch.float64)) for _ in range(3)
        )

    def encode(self, source: Tensor) -> Tensor:
        real = (source != PAD).unsqueeze(2)
        return (self.source[source] * real).sum(1) / real.sum(1)

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        assert len(target) == len(memory) == len(source)
        before = torch.cat([target[:, :1], target[:, :-1]], dim=1)
        return memory.unsqueeze(1) + self.last[target] + self.before[before]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, self.encode(source), source)


@torch.no_grad()
def score(model: Tiny, source: list[int], words: list[int], lenpen: float = 1.0) -> float:
    """Σ log p / n^lenpen by one forward pass."""
    logits = model(torch.tensor([source]), torch.tensor([[START, *words]]))[0].log_softmax(-1)
    return float(logits.gather(1, torch.tensor([*words, STOP]).unsqueeze(1)).sum() / (len(words) + 1) ** lenpen)


@pytest.mark.parametrize("lenpen", [0.0, 1.0, 2.0])
def test_a_beam_wide_enough_is_exhaustive_search(lenpen: float) -> None:
    longest = 3
    real = [word for word in range(WORDS) if word not in (START, PAD, STOP)]
    every = [list(words) for n in range(longest + 1) for words in product(real, repeat=n)]
    for seed in range(4):
        model = Tiny(seed)
        best = [max(every, key=lambda words, s=source: score(model, s, words, lenpen)) for source in SOURCES]  # type: ignore[misc]
        found = beam_search(model, padded(SOURCES), WORDS**longest, lenpen, torch.full((4,), longest))
        for source, words, hypothesis in zip(SOURCES, best, found, strict=True):
            assert hypothesis.tokens == words
            assert hypothesis.score == pytest.approx(score(model, source, words, lenpen))


def test_a_beam_of_one_is_greedy() -> None:
    """The likeliest word at every place, until it is </s>; without a prize for length nothing later is better."""
    for seed in range(5):
        model = Tiny(seed)
        for source, found in zip(SOURCES, beam_search(model, padded(SOURCES), 1, lenpen=0.0), strict=True):
            words: list[int] = []
            while len(words) < int(length_limit(torch.tensor([source]))):
                logits = model(torch.tensor([source]), torch.tensor([[START, *words]]))[0, -1].clone()
                logits[[START, PAD]] = -math.inf
                if int(logits.argmax()) == STOP:
                    break
                words.append(int(logits.argmax()))
            assert found.tokens == words


def test_a_sentence_is_translated_as_if_it_were_alone() -> None:
    for seed in range(5):
        model = Tiny(seed, sharp=1.0)
        together = beam_search(model, padded(SOURCES), 3)
        wider = beam_search(model, functional.pad(padded(SOURCES), (0, 5), value=PAD), 3)
        alone = [beam_search(model, torch.tensor([source]), 3)[0] for source in SOURCES]
        for one, other, third in zip(together, wider, alone, strict=True):
            assert one.tokens == other.tokens == third.tokens
            assert one.score == pytest.approx(third.score)
        assert translate(model, SOURCES, 3, tokens=9) == [each.tokens for each in alone]


def test_stopping_when_beaten_changes_nothing() -> None:
    """Against a search that always goes to the limit."""
    shorter = 0
    for seed in range(10):
        model = Tiny(seed, sharp=1.5)
        patient = [limited(model, source) for source in SOURCES]
        found = beam_search(model, padded(SOURCES), 4)
        for one, other in zip(found, patient, strict=True):
            assert one.tokens == other.tokens
            shorter += len(one.tokens) < 10
    assert shorter


def limited(model: Tiny, source: list[int], beam: int = 4) -> Hypothesis:
    """The same search written with lists, to the very end."""
    opened, best = [([], 0.0)], Hypothesis([], -math.inf)
    limit = math.floor(1.2 * len(source) + 10)
    for length in range(limit + 1):
        candidates = []
        for words, total in opened:
            logp = model(torch.tensor([source]), torch.tensor([[START, *words]]))[0, -1].log_softmax(-1).tolist()
            allowed = [STOP] if length == limit else [w for w in range(WORDS) if w not in (START, PAD)]
            candidates += [([*words, w], total + logp[w]) for w in allowed]
        candidates = sorted(candidates, key=lambda each: -each[1])[: 2 * beam]
        for words, total in candidates[:beam]:
            if words[-1] == STOP and total / len(words) > best.score:
                best = Hypothesis(words[:-1], total / len(words))
        opened = [each for each in candidates if each[0][-1] != STOP][:beam]
    return best


def test_the_limit_and_the_words_that_are_never_written() -> None:
    assert length_limit(padded(SOURCES)).tolist() == [math.floor(1.2 * len(source) + 10) for source in SOURCES]
    assert [int(length_limit(torch.zeros(1, n))) for n in range(1, 200)] == [
        (12 * n + 100) // 10 for n in range(1, 200)
    ]
    model = Tiny()
    with torch.no_grad():
        model.last[:, STOP] -= 100  # it would never end
        model.last[:, [START, PAD]] += 50
    for source, found in zip(SOURCES, beam_search(model, padded(SOURCES)), strict=True):
        assert len(found.tokens) == math.floor(1.2 * len(source) + 10)
        assert not {START, PAD, STOP} & set(found.tokens)
        assert found.score == pytest.approx(score(model, source, found.tokens))


def test_a_model_that_diverged_translates_into_nothing() -> None:
    model = Tiny()
    with torch.no_grad():
        model.last.fill_(math.nan)
    assert translate(model, SOURCES) == [[], [], [], []]


def test_nothing_to_translate() -> None:
    assert translate(Tiny(), []) == []


def token_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.1) -> Tensor:
    task = object.__new__(Translating)
    task.label_smoothing = smoothing
    return task.loss(logits, targets)


def test_label_smoothing_is_fairseqs_up_to_its_convention() -> None:
    logits, epsilon = torch.randn(3, 4, WORDS, dtype=torch.float64), 0.1
    targets = torch.tensor([[4, 5, STOP, PAD], [6, STOP, PAD, PAD], [3, 3, 4, STOP]])
    logp = logits.log_softmax(-1)
    real = targets != PAD
    nll = -logp.gather(2, targets.unsqueeze(2)).squeeze(2)[real]
    every = -logp.sum(-1)[real]
    torch.testing.assert_close(token_loss(logits, targets, 0.0), nll.mean())
    torch.testing.assert_close(token_loss(logits, targets), (0.9 * nll + 0.1 / WORDS * every).mean())
    others = epsilon / (WORDS - 1)
    fairseq = ((1 - epsilon - others) * nll + others * every).mean()
    torch.testing.assert_close(token_loss(logits, targets, epsilon * WORDS / (WORDS - 1)), fairseq)


def test_the_loss_is_a_mean_over_tokens() -> None:
    """However the tokens are batched."""
    model = Tiny().float()
    part = Part(SOURCES, [[4, STOP], [5, 6, 4, STOP], [STOP], [6, 6, STOP]], [])
    whole, pieces = (
        scores(model, all_batches(part, tokens), torch.device("cpu"), PAD)["test_loss"] for tokens in (100, 7)
    )
    each = [-score(model, *pair, lenpen=0.0) for pair in zip(part.source, [t[:-1] for t in part.target], strict=True)]
    assert whole == pytest.approx(pieces) == pytest.approx(sum(each) / 10)


def test_some_sentences_can_be_validated_and_tested_on() -> None:
    model = {"name": "translation-transformer", "width": 8, "ffn": 8, "heads": 2, "layers": 1}
    whole, some = (Translating(model, 64, 0, None, "tiny-translation", bpe=60, sentences=count) for count in (0, 3))
    assert len(some.test.source) == len(some.test.references) == 3 < len(whole.test.source)
    assert some.test.source == whole.test.source[:3]
    assert sum(len(batch.targets) for batch in some.tests) == 3
    with pytest.raises(DataError, match=r"data\.sentences"):
        Translating(model, 64, 0, None, "tiny-translation", bpe=60, sentences=-1)
