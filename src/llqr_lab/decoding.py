"""Beam search: the likeliest translations that a model gives, found by keeping a few open ones at every length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from llqr_lab.data.tokens import PAD, START, STOP
from llqr_lab.data.translation import padded


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
    model: Translator,
    source: Tensor,
    beam: int = 5,
    *,
    lenpen: float = 1.0,
    limit: Tensor | None = None,
    stop: Literal["beaten", "counted"] = "beaten",
) -> list[Hypothesis]:
    """The best translation found of every sentence of `source` (sentences, tokens), padded on the right.

    At every length the 2·beam likeliest continuations are looked at: those among the first `beam` that end are finished, and
    the likeliest `beam` that don't end stay open. <s> and <pad> are never written. At its limit (`length_limit`, or one for
    each sentence) a translation has to end. A sentence is done when

    - "beaten": its best finished translation scores at least what any open one could get, Σ log p / (limit + 1)^lenpen, so
      that going on couldn't change the answer;
    - "counted": `beam` translations are finished, which is fairseq's rule: quicker, but a longer and better one may be missed.
    """
    if beam < 1 or lenpen < 0:
        raise ValueError(f"beam is at least 1 and lenpen at least 0; they are {beam} and {lenpen}")
    limit = length_limit(source) if limit is None else limit
    best = [Hypothesis([], -math.inf) for _ in source]
    finished = [0] * len(source)
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
            finished[sentence] += 1
            score = float(ranked[place, rank]) / length**lenpen
            if score > best[sentence].score:
                best[sentence] = Hypothesis(tokens[place, rows[place, rank], 1:].tolist(), score)
        # The open ones first, in the order of their scores.
        scores, chosen = ranked.masked_fill(words == STOP, -math.inf).topk(min(beam, ranked.shape[1]), dim=1)
        rows, words = rows.gather(1, chosen), words.gather(1, chosen)
        tokens = torch.cat([tokens.gather(1, rows.unsqueeze(2).expand(-1, -1, length)), words.unsqueeze(2)], dim=2)
        bounds = (scores[:, 0] / (limit[active] + 1) ** lenpen).tolist()
        done = torch.tensor(
            [
                best[s].score >= bound if stop == "beaten" else finished[s] >= beam
                for s, bound in zip(active.tolist(), bounds, strict=True)
            ],
            device=source.device,
        )
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
    beam: int = 5,
    *,
    tokens: int = 1024,
    device: torch.device | str = "cpu",
    stop: Literal["beaten", "counted"] = "beaten",
) -> list[list[int]]:
    """Translations of sentences given as numbers with </s>, in their order; searched in batches of at most so many tokens.

    `decode` gives logits for all of a target's tokens, so that `beam` · 1.2 · tokens · (words) numbers are held at once.
    A module is searched in evaluation mode, and left in the mode it was in.
    """
    training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    found: dict[int, list[int]] = {}
    try:
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]), reverse=True)
        while order:
            # The longest first: it says how many fit.
            fitting = max(1, tokens // len(sources[order[0]]))
            group, order = order[:fitting], order[fitting:]
            hypotheses = beam_search(model, padded([sources[i] for i in group]).to(device), beam, stop=stop)
            found.update((i, hypothesis.tokens) for i, hypothesis in zip(group, hypotheses, strict=True))
    finally:
        if isinstance(model, nn.Module):
            model.train(training)
    return [found[i] for i in range(len(sources))]
