"""How good translations are: loss a token, perplexity, BLEU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor, nn
from torch.nn import functional

from llqr_lab.data.batches import Batch
from llqr_lab.data.tokens import PAD


def token_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.1) -> Tensor:
    """Mean over real tokens of the cross-entropy to the target, smoothed: (1 - ε) of it and ε spread over all V words.

    fairseq spreads ε over the V - 1 others, 1 - ε staying with the target: the same as ours with ε·V/(V - 1), or 0.10001 for
    0.1 and V = 10,000.
    """
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=smoothing
    )


class Likelihood(NamedTuple):
    loss: float
    """Mean -log p a token (</s> included), without smoothing."""
    perplexity: float
    tokens: int


@torch.no_grad()
def likelihood(model: nn.Module, batches: Iterable[Batch], device: torch.device | str = "cpu") -> Likelihood:
    """Of all tokens of these batches, each counting once; in evaluation mode, and the model is left in the mode it was in."""
    training = model.training
    model.eval()
    total, tokens = 0.0, 0
    try:
        for inputs, targets in batches:
            logits = model(*(each.to(device) for each in inputs))
            count = int((targets != PAD).sum())
            total += float(token_loss(logits, targets.to(device), smoothing=0.0)) * count
            tokens += count
    finally:
        model.train(training)
    loss = total / tokens
    return Likelihood(loss, float(torch.tensor(loss, dtype=torch.float64).exp()), tokens)


class Bleu(NamedTuple):
    score: float
    signature: str
    """sacrebleu's: how it was computed, to be reported with the score."""


def bleu(translations: Sequence[str], references: Sequence[str], lowercase: bool) -> Bleu:
    """Corpus BLEU by sacrebleu of detokenised text against raw text; `lowercase` ignores case, and the signature says so."""
    if len(translations) != len(references):
        raise ValueError(f"there are {len(translations)} translations of {len(references)} sentences")
    # A lowercased corpus can't be scored in any other way: "case:lc" in the signature.
    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(translations), [list(references)])
    return Bleu(score.score, str(metric.get_signature()))
