"""Drawn trainings on ranks, in one process group after another draw by draw, held against one process on the joined batches."""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fuzz_draws import Draw, Trained, bare_model, drawn, optimized
from fuzz_steps import Outcome, advance, differences, not_finite, outcome, quiet, whole
from llqr.distributed import checkpoint
from llqr.divergences import BasePoint, OutputTerm
from ranks import PRELOADED

SIZES = (2, 2, 2, 3)
TOLERANCE = 1e-9
LONGEST = 90.0
"""Seconds for one draw."""
FULL = StateDictOptions(full_state_dict=True)
WRAPPERS: dict[str, list[dict[str, Any]]] = {
    "ddp": [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    "fsdp": [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}],
}
NOT_SHARDED = ("transposed", "channels last")
"""fully_shard takes contiguous parameters alone."""

PLAIN = Draw(
    seed=0,
    model="linear",
    loss="classes",
    base="sgdm",
    base_options={},
    paper=False,
    llqr={},
    closures=False,
    micro=1,
    steps=4,
    groups=False,
    frozen=False,
    clip=False,
    rows=[6, 6],
    extra={"late": False, "save": None, "parts": True},
)
"""Of two ranks; what a test changes is what it is about."""


def drawn_for(kind: str, seed: int) -> Draw:
    draw = drawn(kind, seed, SIZES)
    choose = random.Random(draw.extra["random"])
    extra = {
        "no_sync": choose.random() < 0.5,
        "late": not draw.paper and choose.random() < 0.15,
        "save": choose.choice([None, None, "state", "checkpoint"]),
        "at": choose.randint(0, draw.steps - 1),
        "again": choose.random() < 0.5,
        "wrapper": choose.choice(WRAPPERS[kind]),
        "parts": choose.random() < 0.5,
    }
    changes: dict[str, Any] = {"extra": extra}
    if kind == "fsdp" and draw.model in NOT_SHARDED:
        changes["model"] = "linear"
    if kind == "fsdp" and not draw.base.startswith("adam"):  # torch shards no other fused steps
        changes["base_options"] = {name: value for name, value in draw.base_options.items() if name != "fused"}
    return replace(draw, **changes)


# --- what a rank does ---


def built(draw: Draw, kind: str, other: int = 0) -> Trained:
    """On this rank; on one process if torch.distributed isn't there."""
    model = bare_model(draw, other)
    if not dist.is_initialized():
        return optimized(draw, model, model)
    if kind == "ddp":
        called = DistributedDataParallel(model, **draw.extra.get("wrapper", {}))
        return replace(optimized(draw, model, model if draw.extra["late"] else called), called=called)
    if draw.extra["parts"] and draw.model != "tied":
        for part in [child for child in model.children() if list(child.parameters())][1:]:
            fully_shard(part, **draw.extra.get("wrapper", {}))
    fully_shard(model, **draw.extra.get("wrapper", {}))
    return optimized(draw, model, model)


def trained(draw: Draw, kind: str, rank: int, folder: str | None) -> Outcome:
    """What the training comes to; saved and loaded on the way, if there is a folder for that."""
    found = built(draw, kind)
    begun = 0
    if folder is not None and draw.extra["save"]:
        stops = [draw.extra["at"]]
        stops += [min(stops[0] + 1, draw.steps)] if draw.extra["again"] else []
        for stop in stops:
            advance(draw, found, range(begun, stop), rank)
            begun = stop
            with quiet():
                found = _through_files(draw, kind, found, rank, f"{folder}/{draw.seed}-{stop}")
    advance(draw, found, range(begun, draw.steps), rank)
    return outcome(found)


def _through_files(draw: Draw, kind: str, saved: Trained, rank: int, path: str) -> Trained:
    """In new objects, on as many ranks."""
    loaded = built(draw, kind, 1)
    if saved.scheduler is not None:
        loaded.scheduler.load_state_dict(saved.scheduler.state_dict())
    if draw.extra["save"] == "checkpoint":
        checkpoint.save(path, saved.optimizer)
        checkpoint.load(path, loaded.optimizer)
        return loaded
    state: dict[str, Any] = {"optimizer": saved.optimizer.state_dict()}
    state["model"] = {name: whole(tensor) for name, tensor in saved.model.state_dict().items()}
    if kind == "fsdp":
        state["groups"] = [{**group, "params": []} for group in saved.optimizer.param_groups]
        if saved.optimizer.base.state:  # or else torch would make one
            state["base"] = get_optimizer_state_dict(saved.model, saved.optimizer.base, options=FULL)
        state["optimizer"] = {"llqr": state["optimizer"]["llqr"]}
    if rank == 0:
        torch.save(state, path)
    dist.barrier()
    state = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, tensor in loaded.model.state_dict().items():
            there = state["model"][name]
            sharded = isinstance(tensor, DTensor)
            tensor.copy_(distribute_tensor(there, tensor.device_mesh, tensor.placements) if sharded else there)
    if kind == "fsdp":
        if "base" in state:
            set_optimizer_state_dict(loaded.model, loaded.optimizer.base, state["base"], options=FULL)
        for group, held in zip(loaded.optimizer.param_groups, state["groups"], strict=True):
            group.update({**held, "params": group["params"]})
        state["optimizer"] |= loaded.optimizer.base.state_dict()
    loaded.optimizer.load_state_dict(state["optimizer"])
    return loaded


@contextmanager
def draws_fixed() -> Iterator[None]:
    """Gradients that a refit draws from a divergence are functions of the output alone, the same on any rank."""

    def draw(self: OutputTerm, base: BasePoint, generator: torch.Generator) -> Tensor:
        along = base.output.sin() + 0.1
        product = self.hessian_product(along, base).detach()
        sizes = (along * product).flatten(1).sum(1)
        return product / sizes.sqrt().reshape(-1, *[1] * (product.dim() - 1))

    with ExitStack() as patches:
        family = "llqr.divergences.families.Categorical.draw"
        patches.enter_context(mock.patch(family, lambda self, output, generator: output.detach().sin()))
        patches.enter_context(mock.patch.object(OutputTerm, "draw", draw))
        yield


def try_draw(draw: Draw, kind: str, rank: int, folder: str) -> dict[str, Any] | None:
    """On every rank; the first returns what became of it. One of the ranks trains alone, too."""
    with draws_fixed():
        own: dict[str, Outcome] = {"rank": trained(draw, kind, rank, folder)}
        if rank == draw.seed % len(draw.rows):
            alone = replace(draw, rows=[sum(draw.rows)])
            with mock.patch.object(dist, "is_initialized", return_value=False):
                own["alone"] = trained(alone, kind, 0, None)
    told: list[Any] = [None] * len(draw.rows)
    dist.all_gather_object(told, own)
    if rank:
        return None
    expected = next(each["alone"] for each in told if "alone" in each)
    wrong = compared(kind, draw, expected, [each["rank"] for each in told])
    count = int(expected["counts"][1])
    result = "different" if wrong else "equal"
    return {"seed": draw.seed, "result": result, "wrong": wrong, "drawn": str(draw), "count": count}


def compared(kind: str, draw: Draw, expected: Outcome, ranks: list[Outcome]) -> list[str]:
    """To the tolerance of one process, and to the last bit among ranks."""
    wrong = [f"{name} isn't finite" for name in not_finite(expected)]
    held = [{name: each.pop(name) for name in list(each) if name.startswith("held")} for each in (expected, *ranks)]
    wrong += differences(_without_bases(expected), _without_bases(ranks[0]), TOLERANCE)
    for rank, other in enumerate(ranks[1:], 1):
        wrong += [f"rank {rank}: {told}" for told in differences(ranks[0], other)]
    if kind == "fsdp":
        names = [name for own in held[1:] for name in own]
        wrong += [] if sorted(names) == sorted(held[0]) else ["U isn't divided among the ranks"]
    else:
        for own in held[1:]:
            wrong += [f"U: {told}" for told in differences(held[1], own)]
    return wrong


def _without_bases(found: Outcome) -> Outcome:
    """Of the base's state, what has the size of a number may be in another dtype."""
    return {name: tensor for name, tensor in found.items() if not (name.startswith("base") and tensor.dim() == 0)}


def _work(rank: int, size: int, folder: str, kind: str, draws: list[Draw], lines: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    for draw in draws:
        try:
            line = try_draw(draw, kind, rank, folder)
        except Exception:
            told = [f"on rank {rank}: {traceback.format_exc()}"]
            line = {"seed": draw.seed, "result": "error", "wrong": told, "drawn": str(draw), "count": 0}
        if line is not None:
            lines.put(line)
        if line is not None and line["result"] == "error":
            lines.close()
            lines.join_thread()
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


# --- all ranks ---


def on_ranks(kind: str, draws: list[Draw]) -> Iterator[dict[str, Any]]:
    """What became of each draw. One process group for all of a size; a new one after an error."""
    by_size: dict[int, list[Draw]] = {}
    for draw in draws:
        by_size.setdefault(len(draw.rows), []).append(draw)
    for size, left in by_size.items():
        while left:
            for line in _group(kind, left, size):
                left = left[1:]
                yield line


def _group(kind: str, draws: list[Draw], size: int) -> Iterator[dict[str, Any]]:
    """Draws until one ends in an error, or all are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    lines = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        work = [
            context.Process(target=_work, args=(rank, size, folder, kind, draws, lines), daemon=True)
            for rank in range(size)
        ]
        for process in work:
            process.start()
        try:
            for draw in draws:
                try:
                    line = lines.get(timeout=LONGEST)
                except queue.Empty:
                    line = {
                        "seed": draw.seed,
                        "result": "error",
                        "wrong": ["no answer"],
                        "drawn": str(draw),
                        "count": 0,
                    }
                yield line
                if line["result"] == "error":
                    return
            for process in work:
                process.join(LONGEST)
        finally:
            for process in work:
                process.kill()
                process.join()
            Path(folder, "meeting").unlink(missing_ok=True)
