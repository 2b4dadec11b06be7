"""Translation: a smoothed loss per token to learn by, and BLEU of a beam search to be judged by."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor, nn

from llqr_lab.data.files import WHOLE
from llqr_lab.data.translation import (
    PAD,
    START,
    STOP,
    TranslationBatches,
    all_batches,
    corpus,
    padded,
    real_tokens,
)
from llqr_lab.errors import DataError
from llqr_lab.tasks.base import Metrics, Task, scores

BEAM = 5


class Translating(Task):
    """fairseq spreads ε of its smoothing over the V - 1 other words: the same as ours with ε·V/(V - 1), or 0.10001 for 0.1 and
    V = 10,000."""

    ignored = PAD

    def __init__(
        self,
        model: dict[str, Any],
        batch: int,
        seed: int,
        folder: Path | None,
        name: str,
        bpe: int = 10_000,
        beam: int = BEAM,
        sentences: int = 0,
        label_smoothing: float = 0.0,
    ) -> None:
        """`beam`: of the translations at the end; 0 is none of them, and the validation loss is the score.
        `sentences`: how many of the validation and the test set are taken, from the first on; 0 is all."""
        if type(beam) is not int or beam < 0:
            raise DataError(f"data.beam is a number of translations kept at a time, or 0 for none, not {beam!r}")
        self.beam, self.score = beam, "bleu" if beam else "valid_loss"
        self.data = corpus(name, folder, bpe)
        self.model = {**model, "source_words": len(self.data.source), "target_words": len(self.data.target)}
        self.examples = len(self.data.train.source) + self.data.empty + self.data.cleaned
        self.whole = WHOLE.get(name)
        self.train = TranslationBatches(self.data.train, batch, seed)
        if type(sentences) is not int or sentences < 0:
            raise DataError(f"data.sentences is how many to validate and test on, or 0 for all, not {sentences!r}")
        self.test = self.data.test.first(sentences)
        self.tests = all_batches(self.data.valid.first(sentences), batch)
        self.label_smoothing = label_smoothing
        self.weights = real_tokens

    def evaluate(self, model: nn.Module, device: torch.device) -> Metrics:
        """The loss of a token on the validation set, </s> included, without smoothing."""
        return {"valid_loss": scores(model, self.tests, device, PAD)["test_loss"]}

    def finals(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """BLEU on the test set."""
        if not self.beam:
            return {}
        numbers = translate(cast(Translator, model), self.test.source, self.beam, device=device)
        score = bleu([self.data.text(each) for each in numbers], self.test.references)
        return {"bleu": score.score, "bleu_signature": score.signature}


# how good translations are


class Bleu(NamedTuple):
    score: float
    signature: str
    """sacrebleu's: how it was computed, to be reported with the score."""


def bleu(translations: Sequence[str], references: Sequence[str]) -> Bleu:
    """Corpus BLEU by sacrebleu of detokenised text against raw text; case is ignored, and the signature says so."""
    if len(translations) != len(references):
        raise ValueError(f"there are {len(translations)} translations of {len(references)} sentences")
    metric = BLEU(lowercase=True)  # a lowercased corpus can't be scored in any other way
    score = metric.corpus_score(list(translations), [list(references)])
    return Bleu(score.score, str(metric.get_signature()))


# beam search: the likeliest translations, found by keeping a few open ones at every length


class Translator(Protocol):
    """A model that can be searched. `decode` gives logits (sentences, tokens, words) for what follows each target token."""

    def encode(self, source: Tensor) -> Tensor: ...

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor: ...


class Hypothesis(NamedTuple):
    tokens: list[int]
    """Without <s> and </s>."""
    score: float
    """Σ log p / n^lenpen over its n tokens, </s> included."""


def length_limit(source: Tensor) -> Tensor:
    """⌊1.2 · |source| + 10⌋ tokens before </s>, where |source| counts BPE pieces and </s>.

    fairseq counts the padding of the batch too, so there a translation may depend on what it is batched with; for a sentence
    alone the two agree.
    """
    return ((source != PAD).sum(1) * 6 + 50) // 5


@torch.no_grad()
def beam_search(
    model: Translator, source: Tensor, beam: int = BEAM, lenpen: float = 1.0, limit: Tensor | None = None
) -> list[Hypothesis]:
    """The best translation found of every sentence of `source` (sentences, tokens), padded on the right.

    At every length the 2·beam likeliest continuations are looked at: those among the first `beam` that end are finished, and
    the likeliest `beam` that don't end stay open. <s> and <pad> are never written. At its limit (`length_limit`, or one for
    each sentence) a translation has to end. A sentence is done when its best finished translation scores at least what any
    open one could get, Σ log p / (limit + 1)^lenpen, so that going on couldn't change the answer. (fairseq stops at `beam`
    finished ones.)
    """
    if beam < 1 or lenpen < 0:
        raise ValueError(f"beam is at least 1 and lenpen at least 0; they are {beam} and {lenpen}")
    limit = length_limit(source) if limit is None else limit
    best = [Hypothesis([], -math.inf) for _ in source]
    memory = model.encode(source)
    active = torch.arange(len(source), device=source.device)
    tokens = torch.full((len(source), 1, 1), START, device=source.device)  # (sentences, open, length)
    scores = torch.zeros(len(source), 1, device=source.device)
    while len(active):
        length = tokens.shape[2]  # with </s>, if it ends now
        logp = _next(model, tokens, memory, source)
        # Whoever is at its limit may only end.
        logp[length > limit[active], :, :STOP] = -math.inf
        logp[length > limit[active], :, STOP + 1 :] = -math.inf
        ranked, rows, words = _likeliest(scores.unsqueeze(2) + logp, 2 * beam)
        ends = (words == STOP) & ranked.isfinite()
        for place, rank in ends[:, :beam].nonzero().tolist():
            sentence = int(active[place])
            score = float(ranked[place, rank]) / length**lenpen
            if score > best[sentence].score:
                best[sentence] = Hypothesis(tokens[place, rows[place, rank], 1:].tolist(), score)
        # The open ones first, in the order of their scores.
        scores, chosen = ranked.masked_fill(words == STOP, -math.inf).topk(min(beam, ranked.shape[1]), dim=1)
        rows, words = rows.gather(1, chosen), words.gather(1, chosen)
        tokens = torch.cat([tokens.gather(1, rows.unsqueeze(2).expand(-1, -1, length)), words.unsqueeze(2)], dim=2)
        bounds = (scores[:, 0] / (limit[active] + 1) ** lenpen).tolist()
        beaten = [best[s].score >= bound for s, bound in zip(active.tolist(), bounds, strict=True)]
        done = torch.tensor(beaten, device=source.device)
        going = ~(done | scores[:, 0].isneginf())
        active, tokens, scores, memory, source = (each[going] for each in (active, tokens, scores, memory, source))
    return best


def _next(model: Translator, tokens: Tensor, memory: Tensor, source: Tensor) -> Tensor:
    """log p of the next word, (sentences, open, words), in float32 at least."""
    sentences, width, length = tokens.shape
    logits = model.decode(
        tokens.reshape(-1, length), memory.repeat_interleave(width, 0), source.repeat_interleave(width, 0)
    )
    last = logits[:, -1].to(torch.promote_types(logits.dtype, torch.float32))
    logp = last.log_softmax(-1).reshape(sentences, width, -1)
    # What isn't a number is never chosen: a model that diverged translates into nothing, instead of into an error.
    logp = logp.masked_fill(logp.isnan(), -math.inf)
    logp[..., [START, PAD]] = -math.inf
    return logp


def _likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations of each sentence, as (score, which open one, word), each (sentences, at most `count`)."""
    ranked, places = scores.flatten(1).topk(min(count, scores[0].numel()), dim=1)
    return ranked, places // scores.shape[2], places % scores.shape[2]


def translate(
    model: Translator,
    sources: Sequence[Sequence[int]],
    beam: int = BEAM,
    tokens: int = 1024,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """Translations of sentences given as numbers with </s>, in their order; searched in batches of at most so many tokens.

    `decode` gives logits for all of a target's tokens, so that `beam` · 1.2 · tokens · (words) numbers are held at once.
    """
    found: dict[int, list[int]] = {}
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]), reverse=True)
    while order:
        fitting = max(1, tokens // len(sources[order[0]]))  # the longest says how many fit
        group, order = order[:fitting], order[fitting:]
        hypotheses = beam_search(model, padded([sources[i] for i in group]).to(device), beam)
        found.update((i, hypothesis.tokens) for i, hypothesis in zip(group, hypotheses, strict=True))
    return [found[i] for i in range(len(sources))]
