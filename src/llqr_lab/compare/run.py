"""A short training with a base, looked at on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from llqr_lab.compare.look import STRUCTURES, Applied, ExactInverse, Look, Settings, elsewhere
from llqr_lab.compare.shadows import Shadow, base_of, carried, shadows
from llqr_lab.compare.subjects import Batch, Subject

FAR = 10_000_000
"""Batches from this number on are never trained on: another draw from the same data."""


def compare(
    subject: Subject, base: str, rate: float, at: Sequence[int], settings: Settings
) -> Iterator[dict[str, Any]]:
    """Train to the last of the steps in `at`, and look before each of them; what was seen, as it is seen."""
    model = copy.deepcopy(subject.model).train()
    optimizer = base_of(base, model, rate)
    followers = {name: Shadow(model, make) for name, make in shadows(base, rate).items()}
    with_u = {name: Shadow(model, make) for name, make in carried(STRUCTURES, base, rate).items()}
    kept: list[tuple[int, dict[str, Applied]]] = []
    for step in range(max(at) + 1):
        batch = subject.draw(step)
        if step in at:
            look = Look(model, subject, batch, settings)
            look.fill(followers, with_u, model, batch)
            yield _told(look, step, kept, subject.draw(FAR + step))
            kept.append((step, look.inverses))
        inputs, targets = batch
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        for shadow in (*followers.values(), *with_u.values()):
            shadow.follow(model, step, inputs)
        optimizer.step()


def _told(look: Look, step: int, kept: list[tuple[int, dict[str, Applied]]], other: Batch) -> dict[str, Any]:
    found = look.reference
    there = look.referred(other)
    told: dict[str, Any] = {
        "step": step,
        "loss": found.loss,
        "attainable": found.attainable,
        "exact": {"method": found.method, "residual": found.residual, "converged": found.converged},
        "exact_actual": found.change(found.step),
        "rows": look.rows,
        "another_batch": {
            "residual": there.residual,
            "cosine_of_gradients": _cosine(found.gradient, there.gradient),
            "fraction_along": elsewhere({**look.inverses, "exact": ExactInverse(found, look.settings.products)}, there),
            "step_along": there.judge(found.step, by_layer=False).fraction_along,
        },
        "older": [{"fitted": when, "fraction_along": elsewhere(inverses, found)} for when, inverses in kept],
        "by_layer": look.by_layer(),
    }
    if look.cut is not None:
        told["coupling"] = {"lost": look.cut.lost, "energy": look.cut.energy, "residual": look.cut.residual}
    return told


def _cosine(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    one, other = (torch.cat([part.reshape(-1) for part in each.values()]) for each in (left, right))
    return float(one @ other / one.norm() / other.norm())
