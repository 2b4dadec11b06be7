"""Promise: the pages of examples/ run on two processes as Trainer, Lightning and accelerate start them, and go on after a stop.

Each rank has batches of its own, so that ranks that hold the same U have fitted it together.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from frameworks import example
from llqr import LLQR
from llqr.errors import LLQRWarning
from loops import assert_same, blocks_of, parameters_of
from ranks import on_ranks

for module in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(module, reason=f"{module} isn't installed: pip install llqr[frameworks]")
pytest.importorskip("sklearn", reason="scikit-learn isn't installed")


def found(model: torch.nn.Module, optimizer: LLQR) -> dict[str, Any]:
    stats = optimizer.stats
    return {
        "tensors": {**parameters_of(model), **blocks_of(optimizer)},
        "counts": [optimizer.state_dict()["llqr"]["step"], stats.refits, stats.rejected],
    }


def by_trainer(folder: Path) -> Any:
    """Four steps, and the last two once more from the checkpoint between them; what is logged."""
    page = example("trainer_gpt2")
    options = {"per_device_train_batch_size": 2, "save_steps": 2, "logging_steps": 1, "disable_tqdm": True}
    whole = page.build(str(folder), 4, 3, **options)
    whole.train()
    again = page.build(str(folder), 4, 3, **options)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    logged = [entry["llqr/refits"] for entry in whole.state.log_history if "loss" in entry]
    return [found(whole.model, whole.llqr), found(again.model, again.llqr), logged]


def by_accelerate(folder: Path) -> Any:
    """Two epochs, and the second once more from the state after the first."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    page = example("accelerate_bert")
    rows = page.reviews(256, seed=0)
    page.reviews = lambda count, seed: rows
    results = []
    for resume in (False, True):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        dist.barrier()  # all have saved
        if resume and dist.get_rank() == 0:
            (folder / "epoch_001").rename(folder / "later")
        dist.barrier()
        results.append(found(*page.train(str(folder), epochs=2, every=3, resume=resume, cpu=True, log_with=None)))
    return results


def by_lightning(folder: Path) -> Any:
    """Two epochs, and the second once more from the checkpoint after the first; what is logged."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    page = example("lightning_vit")
    results = []
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    for path in (None, folder / "epoch=0.ckpt"):
        lightning.seed_everything(0, verbose=False)
        saved = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        spread = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "limit_train_batches": 4}
        trainer = page.build(str(folder), 2, callbacks=[saved], **spread, **quiet)
        trainer.fit(page.Digits(3, 16), ckpt_path=path)
        results.append(found(trainer.lightning_module.net, trainer.optimizers[0]))
    return [*results, float(trainer.logged_metrics["llqr/refits"])]


def all_three(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # the frameworks' own
    warnings.simplefilter("error", LLQRWarning)
    place = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"HF_HUB_OFFLINE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"})  # they have met already
    ways = {"trainer": by_trainer, "accelerate": by_accelerate, "lightning": by_lightning}
    with mock.patch.object(dist, "destroy_process_group"):  # accelerate's end of a training
        return {name: way(Path(folder) / name) for name, way in ways.items()}


def test_on_two_processes(tmp_path: Path) -> None:
    """U and parameters are the same on both to the last bit, also after a stop."""
    first, second = on_ranks(2, tmp_path / "ranks", all_three, str(tmp_path))
    for name, (whole, again, *_) in first.items():
        assert whole["counts"] == again["counts"] == [4, 2, 0], name
        assert_same(whole["tensors"], again["tensors"])
        for here, there in zip((whole, again), second[name], strict=False):
            assert_same(here["tensors"], there["tensors"])
    assert first["trainer"][2] == [1.0, 1.0, 1.0, 2.0]
    assert first["lightning"][2] == 1.0  # as of before the last step, which refits
