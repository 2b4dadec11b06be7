"""Data that is made up, so that every experiment can be tried with nothing at hand: easy, tiny, always the same."""

from __future__ import annotations

import random

import torch

from llqr_lab.data.parallel import Corpus, Pairs, ParallelText
from llqr_lab.data.pictures import Pictures, pictures_in_memory


def random_pictures(
    classes: int = 10, pixels: int = 16, train: int = 128, test: int = 64, channels: int = 3
) -> Pictures:
    """Each class is a pattern of its own, with noise over it."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(256, (classes, channels, pixels, pixels), generator=generator).float()

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(classes, (count,), generator=generator)
        noise = 64 * torch.randn(count, channels, pixels, pixels, generator=generator)
        return (patterns[labels] + noise).clamp(0, 255).byte(), labels

    return pictures_in_memory("generated pictures", part(train), part(test), classes)


NUMBERS = {"ein": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five"}
THINGS = {"Hunde": "dogs", "Katzen": "cats", "Bäume": "trees", "Häuser": "houses", "Kinder": "children"}
ACTIONS = {"laufen": "run", "spielen": "play", "warten": "wait", "schlafen": "sleep"}


def sentences(count: int, seed: int) -> Pairs:
    """Such as "drei Hunde und zwei Katzen warten." and "three dogs and two cats wait."."""
    draw = random.Random(seed)
    source, target = [], []
    for _ in range(count):
        groups = [(draw.choice(list(NUMBERS)), draw.choice(list(THINGS))) for _ in range(draw.randint(1, 3))]
        action = draw.choice(list(ACTIONS))
        source.append(" und ".join(f"{number} {thing}" for number, thing in groups) + f" {action}.")
        target.append(" and ".join(f"{NUMBERS[n]} {THINGS[t]}" for n, t in groups) + f" {ACTIONS[action]}.")
    return Pairs(source, target)


def tiny_translation() -> ParallelText:
    corpus = Corpus("tiny-translation", "", ("de", "en"), False, "generated sentences")
    return ParallelText(corpus, sentences(200, 0), sentences(20, 1), sentences(20, 2))


def tiny_text() -> str:
    return "\n".join(sentences(200, 3).target)
