"""A drawn training that is saved on the way and goes on in new objects, held against one that wasn't stopped."""

from __future__ import annotations

import copy
import io
import pickle
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from fuzz_draws import Draw, Trained, bare_model, drawn, optimized
from fuzz_steps import advance, differences, not_finite, outcome

UNPICKLED = ("spectral norm", "weight norm")
"""Torch saves parametrised modules by their state alone."""


def save(seed: int) -> tuple[list[str], str, int]:
    """What differs, what was drawn, and how many refits there were."""
    draw = drawn("save", seed)
    choose = random.Random(draw.extra["random"])
    copies = draw.scheduler is None and choose.random() < 0.25
    ways = ["file"] if not copies else ["deepcopy"] if draw.model in UNPICKLED else ["deepcopy", "pickle", "torch"]
    stops = sorted({choose.randint(0, draw.steps - 1) for _ in range(choose.choice([1, 1, 1, 2, 3]))})
    path = [(stop, choose.choice(ways), 0 if draw.thaw else choose.choice([0, 0, 1, 2])) for stop in stops]
    straight = _made(draw)
    advance(draw, straight, range(draw.steps))
    stopped = _made(draw)
    begun = 0
    for stop, way, life in path:
        advance(draw, stopped, range(begun, stop))
        begun = stop
        stopped = _through_a_file(draw, stopped, life) if way == "file" else Trained(*_copied(stopped, way))
    advance(draw, stopped, range(begun, draw.steps))
    found = outcome(straight)
    wrong = differences(found, outcome(stopped)) + [f"{name} isn't finite" for name in not_finite(found)]
    return wrong, f"{draw}, stopped at {path}", straight.optimizer.stats.refits


def _made(draw: Draw, other: int = 0) -> Trained:
    model = bare_model(draw, other)
    trained = optimized(draw, model, model)
    torch.manual_seed(draw.seed)
    return trained


def _through_a_file(draw: Draw, trained: Trained, life: int) -> Trained:
    """In new objects, which have made some steps of their own."""
    parts: dict[str, Any] = {"model": trained.model, "optimizer": trained.optimizer, "scheduler": trained.scheduler}
    states = {name: part.state_dict() for name, part in parts.items() if part is not None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "saved.pt")
        torch.save({**states, "random": torch.get_rng_state()}, path)
        advance(draw, trained, range(200, 201))  # what was saved doesn't move on
        loaded = torch.load(path, weights_only=True)
    again = _made(draw, 1)
    advance(draw, again, range(100, 100 + life))
    for name in states:
        getattr(again, name).load_state_dict(loaded[name])
    torch.set_rng_state(loaded["random"])
    return again


def _copied(trained: Trained, way: str) -> tuple[Any, Any, Any]:
    pair = (trained.model, trained.optimizer)
    if way == "deepcopy":
        model, optimizer = copy.deepcopy(pair)
    elif way == "pickle":
        model, optimizer = pickle.loads(pickle.dumps(pair))
    else:
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        model, optimizer = torch.load(file, weights_only=False)
    return model, model, optimizer
