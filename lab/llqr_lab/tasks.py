"""What is learned: a model, batches by number, a loss, and a score; and the task that a configuration asks for."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor, nn
from torch.nn import functional

from llqr.errors import LLQRError
from llqr_lab.data.batches import Batch, Batches, TensorBatches, tensor_batches_in_order
from llqr_lab.data.files import WHOLE
from llqr_lab.data.picture_sets import pictures
from llqr_lab.data.pictures import imbalanced
from llqr_lab.data.sequences import characters_of, modular_arithmetic, shakespeare
from llqr_lab.data.translation import (
    PAD,
    START,
    STOP,
    TranslationBatches,
    all_batches,
    corpus,
    made_up,
    padded,
    real_tokens,
)
from llqr_lab.errors import ConfigError, DataError, check_names, suggestion
from llqr_lab.experiments.config import Config
from llqr_lab.models.zoo import build

Metrics = dict[str, float]


class Task:
    """`train` is what it learns from; everything random comes from its seed."""

    model: dict[str, Any]
    train: Batches
    tests: Iterable[Batch]
    score: str
    """The metric that results are compared by."""
    examples: int
    """To learn from, and"""
    whole: int | None = None
    """how many there would be in the data set as it is published, where the one at hand may be a part of it."""
    label_smoothing = 0.0
    ignored = -100
    """The target of places that don't count."""
    weights: Callable[[Any], Tensor] | None = None
    """From the inputs of a refit to one weight a variable, for models with padding."""

    def network(self) -> nn.Module:
        return build(**self.model)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over all places, classes along the last dimension; smoothed, ε is spread over all classes."""
        how: dict[str, Any] = {"ignore_index": self.ignored, "label_smoothing": self.label_smoothing}
        return functional.cross_entropy(output.flatten(0, -2), targets.flatten(), **how)

    def evaluate(self, model: nn.Module, device: torch.device) -> Metrics:
        """Scores on what wasn't trained on; the model is in eval mode."""
        return scores(model, self.tests, device, self.ignored)

    def learned(self, metrics: Mapping[str, Any]) -> bool:
        return False

    def over(self, metrics: Mapping[str, Any], learned: bool) -> bool:
        """Whether to end before the last step; `learned`: the training set is known by heart, or has been before."""
        return False

    def finals(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """What is measured once, at the end."""
        return {}

    def summary(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """What a result says of a whole run, from the lines of its metrics."""
        return {}


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(tuple(each.to(device, non_blocking=True) for each in batch.inputs), batch.targets.to(device))


def right_answers(output: Tensor, targets: Tensor, ignored: int) -> tuple[int, int]:
    asked = targets != ignored
    return int(((output.argmax(-1) == targets) & asked).sum()), int(asked.sum())


@torch.no_grad()
def scores(model: nn.Module, batches: Iterable[Batch], device: torch.device, ignored: int = -100) -> Metrics:
    """The mean cross-entropy and the share of right answers, of all that is asked for in these batches."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    right = seen = 0
    for batch in batches:
        inputs, targets = to_device(batch, device)
        output, flat = model(*inputs).flatten(0, -2), targets.flatten()
        total += functional.cross_entropy(output, flat, reduction="sum", ignore_index=ignored).double()
        counts = right_answers(output, flat, ignored)
        right, seen = right + counts[0], seen + counts[1]
    return {"test_loss": float(total) / seen, "test_accuracy": right / seen}


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
    ) -> None:
        """`beam`: of the translations at the end; 0 is none of them, and the validation loss is the score.
        `sentences`: how many of the validation and the test set are taken, from the first on; 0 is all."""
        for asked, what in ((beam, "beam"), (sentences, "sentences")):
            if type(asked) is not int or asked < 0:
                raise DataError(f"data.{what} is a number from 0 on, not {asked!r}")
        self.beam, self.score = beam, "bleu" if beam else "valid_loss"
        self.data = corpus(name, folder, bpe)
        self.model = {**model, "source_words": len(self.data.source), "target_words": len(self.data.target)}
        self.examples, self.whole = self.data.examples, WHOLE.get(name)
        self.train = TranslationBatches(self.data.train, batch, seed)
        self.test = self.data.test.first(sentences)
        self.tests = all_batches(self.data.valid.first(sentences), batch)
        self.weights = real_tokens

    def evaluate(self, model: nn.Module, device: torch.device) -> Metrics:
        """The loss of a token on the validation set, </s> included, without smoothing."""
        return {"valid_loss": scores(model, self.tests, device, PAD)["test_loss"]}

    def finals(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        if not self.beam:
            return {}
        numbers = translate(model, self.test.source, self.beam, device=device)
        score, signature = bleu([self.data.text(each) for each in numbers], self.test.references)
        return {"bleu": score, "bleu_signature": signature}


def bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU by sacrebleu of detokenised text against raw text, and its signature: how it was computed."""
    metric = BLEU(lowercase=True)  # a lowercased corpus can't be scored in any other way
    return metric.corpus_score(list(translations), [list(references)]).score, str(metric.get_signature())


# beam search: the likeliest translations, found by keeping a few open ones at every length


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
    model: Any, source: Tensor, beam: int = BEAM, lenpen: float = 1.0, limit: Tensor | None = None
) -> list[Hypothesis]:
    """The best translation found of every sentence of `source` (sentences, tokens), padded on the right.

    The model has `encode(source)`, and `decode(target, memory, source)`: logits (sentences, tokens, words) for what follows
    each target token.

    At every length the 2·beam likeliest continuations are looked at: those among the first `beam` that end are finished, and
    the likeliest `beam` that don't end stay open. <s> and <pad> are never written. At its limit (`length_limit`, or one for
    each sentence) a translation has to end. A sentence is done when its best finished translation scores at least what any
    open one could get, Σ log p / (limit + 1)^lenpen, so that going on couldn't change the answer. (fairseq stops at `beam`
    finished ones.)
    """
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
        total = scores.unsqueeze(2) + logp
        ranked, places = total.flatten(1).topk(min(2 * beam, total[0].numel()), dim=1)
        rows, words = places // total.shape[2], places % total.shape[2]
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


def _next(model: Any, tokens: Tensor, memory: Tensor, source: Tensor) -> Tensor:
    """log p of the next word, (sentences, open, words), in float32 at least."""
    sentences, width, length = tokens.shape
    memory, source = (each.repeat_interleave(width, 0) for each in (memory, source))
    last: Tensor = model.decode(tokens.reshape(-1, length), memory, source)[:, -1]
    logp = last.to(torch.promote_types(last.dtype, torch.float32)).log_softmax(-1).reshape(sentences, width, -1)
    # What isn't a number is never chosen: a model that diverged translates into nothing, instead of into an error.
    logp = logp.masked_fill(logp.isnan(), -math.inf)
    logp[..., [START, PAD]] = -math.inf
    return logp


def translate(
    model: Any, sources: Sequence[Sequence[int]], beam: int = BEAM, tokens: int = 1024, device: Any = "cpu"
) -> list[list[int]]:
    """Translations of sentences given as numbers with </s>, in their order; searched in batches of at most so many tokens."""
    found: dict[int, list[int]] = {}
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]), reverse=True)
    while order:
        fitting = max(1, tokens // len(sources[order[0]]))  # the longest says how many fit
        group, order = order[:fitting], order[fitting:]
        hypotheses = beam_search(model, padded([sources[i] for i in group]).to(device), beam)
        found.update((i, hypothesis.tokens) for i, hypothesis in zip(group, hypotheses, strict=True))
    return [found[i] for i in range(len(sources))]


class Classification(Task):
    """Of pictures, by top-1 accuracy on the test set."""

    score = "test_accuracy"

    def __init__(
        self,
        model: dict[str, Any],
        batch: int,
        seed: int,
        folder: Path | None,
        name: str,
        cutout: int = 0,
        cutout_share: float = 1.0,
        reflect: bool = False,
        pixels: int = 0,
        imbalance: float = 1.0,
        **options: Any,
    ) -> None:
        """`imbalance`: how many times rarer the last class is than the first, in training; the test set stays as it is."""
        if cutout_share != 1 and not cutout:
            raise ValueError("'data.cutout_share' has no effect where 'data.cutout' is 0: leave it out")
        data, augmentation, crop = pictures(name, folder, pixels, **options)
        self.model = {"classes": data.classes, **model}
        if self.model["classes"] != data.classes:
            raise ValueError(f"the model has {self.model['classes']} classes, and {name} has {data.classes}")
        augmentation = replace(augmentation, cutout=cutout, cutout_share=cutout_share, reflect=reflect)
        if imbalance != 1:
            data = replace(data, train=imbalanced(data.train, data.classes, imbalance))
        self.examples, self.whole = len(data.train.labels), WHOLE.get(name)
        self.train = data.training(batch, seed, augmentation)
        self.tests = data.testing(500, crop)


class Language(Task):
    """A language model of characters: the loss of the next one, on the last tenth of a text."""

    score = "test_loss"

    def __init__(self, model: dict[str, Any], batch: int, seed: int, folder: Path | None, name: str) -> None:
        check_names([name], ["shakespeare", "tiny-text"], "text")
        made = "\n".join(target for _, target in made_up(200, 3))
        text = shakespeare(folder) if name == "shakespeare" else characters_of(made, "generated text")
        self.model, self.examples = {"words": len(text.vocabulary), **model}, len(text.train)
        context = int(model.get("length", 256))
        self.train = text.training(batch, context, seed)
        self.tests = text.testing(64, context)


TARGET = 0.95
"""The test accuracy at which grokking has happened, as in the paper."""
LEARNED = 0.99
"""The training accuracy, over the steps since the last evaluation, from which on everything is known by heart."""


class Grokking(Task):
    """Arithmetic modulo a prime, learned by heart long before it is understood."""

    score = "steps_to_target"

    def __init__(
        self,
        model: dict[str, Any],
        batch: int,
        seed: int,
        folder: Path | None,
        name: str,
        p: int = 97,
        train: float = 0.6,
        by_heart: bool = True,
    ) -> None:
        """`by_heart`: what is understood before the training set is known by heart doesn't count, as in the paper."""
        self.model = {"words": p + 2, **model}
        self.by_heart = by_heart
        data = modular_arithmetic(name, p, train, seed)
        self.examples = len(data.train_targets)
        self.train = TensorBatches(data.train_inputs, data.train_targets, batch, seed)
        self.tests = tensor_batches_in_order(data.test_inputs, data.test_targets, 2048)

    def learned(self, metrics: Mapping[str, Any]) -> bool:
        return bool(metrics["train_accuracy"] >= LEARNED)

    def over(self, metrics: Mapping[str, Any], learned: bool) -> bool:
        return (learned or not self.by_heart) and (metrics.get("test_accuracy") or 0.0) >= TARGET

    def summary(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """When everything was learned by heart, and when it was understood."""
        first = next((number for number, line in enumerate(lines) if self.learned(line)), len(lines))
        reached = next((line for number, line in enumerate(lines) if self.over(line, number >= first)), None)
        return {
            "steps_to_overfit": lines[first]["step"] if first < len(lines) else None,
            "steps_to_target": reached["step"] if reached else None,
            "seconds_to_target": reached["seconds"] if reached else None,
        }


TASKS: dict[str, Callable[..., Task]] = {
    "grokking": Grokking,
    "classification": Classification,
    "language": Language,
    "translation": Translating,
}


def task_of(config: Config, folder: Path | None) -> Task:
    """With its data read and checked; the settings of `data` are the arguments of the task."""
    check_names([config.task], TASKS, "task")
    kind = TASKS[config.task]
    own: dict[str, Any] = {
        "model": config.model,
        "batch": config.batch,
        "seed": config.seed,
        "folder": folder,
        **config.data,
    }
    known = inspect.signature(kind).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        for name in own:
            if name not in known:
                raise ConfigError(f"there is no setting 'data.{name}' of {config.task}{suggestion(name, known)}")
    try:
        task = kind(**own)
    except (LLQRError, TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    task.label_smoothing = config.label_smoothing
    return task
