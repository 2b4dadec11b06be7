"""Translation: a smoothed loss a token to learn by, BLEU with a beam of five to be judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from llqr_lab.data.folder import DataError
from llqr_lab.data.named import WHOLE, corpus
from llqr_lab.data.tokens import PAD
from llqr_lab.data.translation import TranslationBatches, all_batches, real_tokens
from llqr_lab.decoding import Translator, translate
from llqr_lab.models.zoo import build
from llqr_lab.scoring import bleu, likelihood, token_loss
from llqr_lab.tasks.base import Metrics, Task

BEAM = 5


class Translating(Task):
    score = "bleu"

    def __init__(
        self,
        model: dict[str, Any],
        batch: int,
        seed: int,
        folder: Path | None,
        name: str,
        bpe: int = 10_000,
        beam: int = BEAM,
        label_smoothing: float = 0.0,
    ) -> None:
        """`beam`: of the translations at the end; 0 is none of them, and the validation loss is the score."""
        if type(beam) is not int or beam < 0:
            raise DataError(f"data.beam is a number of translations kept at a time, or 0 for none, not {beam!r}")
        self.beam, self.score = beam, "bleu" if beam else "valid_loss"
        self.data = corpus(name, folder, bpe)
        self.model = {**model, "source_words": len(self.data.source), "target_words": len(self.data.target)}
        self.examples = len(self.data.train.source) + self.data.empty + self.data.cleaned
        self.whole = WHOLE.get(name)
        self.train = TranslationBatches(self.data.train, batch, seed)
        self.valid = all_batches(self.data.valid, batch)
        self.label_smoothing = label_smoothing
        self.weights = real_tokens

    def network(self) -> nn.Module:
        return build(**self.model)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return token_loss(output, targets, self.label_smoothing)

    def counts(self, output: Tensor, targets: Tensor) -> tuple[int, int]:
        real = targets != PAD
        return int(((output.argmax(-1) == targets) & real).sum()), int(real.sum())

    def evaluate(self, model: nn.Module, device: torch.device) -> Metrics:
        """On the validation set, without smoothing."""
        found = likelihood(model, self.valid, device)
        return {"valid_loss": found.loss}

    def finals(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """BLEU on the test set."""
        if not self.beam:
            return {}
        numbers = translate(cast(Translator, model), self.data.test.source, self.beam, device=device)
        score = bleu([self.data.text(each) for each in numbers], self.data.test.references, self.data.lowercase)
        return {"bleu": score.score, "bleu_signature": score.signature}
