"""Promise: Lightning takes LLQR as it takes any optimizer; examples/lightning_vit.py runs, stops and goes on."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks import example, quiet, run
from llqr import LLQR
from llqr.errors import LLQRError
from loops import assert_same, blocks_of, never, parameters_of

pytest.importorskip("lightning", reason="lightning isn't installed: pip install llqr[frameworks]")
pytest.importorskip("transformers", reason="transformers isn't installed: pip install llqr[frameworks]")
pytest.importorskip("sklearn", reason="scikit-learn isn't installed")
pytestmark = quiet(
    "ignore:The 'train_dataloader' does not have many workers",
    "ignore:.*is deprecated",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:Experiment logs directory .* exists",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # dynamo's
)


@pytest.fixture(scope="module")
def page() -> Any:
    return example("lightning_vit")


def fitted(page: Any, folder: Path, epochs: int = 3, every: Any = 3, module: Any = None, **settings: Any) -> Any:
    """Four batches of 32 an epoch, two a step; a checkpoint for each epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    path = settings.pop("ckpt_path", None)
    trainer = page.build(
        str(folder),
        epochs,
        limit_train_batches=4,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        accelerator="cpu",
        **settings,
    )
    torch.manual_seed(0)
    trainer.fit(page.Digits(every) if module is None else module(), page.data(32), ckpt_path=path)
    return trainer


def test_stop_go_on_and_logs(page: Any, tmp_path: Path) -> None:
    """From the checkpoint after two epochs to the same bits as without a stop; schedule and order of the data included."""
    whole = fitted(page, tmp_path)
    with open(tmp_path / "version_0" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["llqr/refits"]]
    assert [float(row["llqr/refits"]) for row in rows] == [0, 1, 1, 1, 2, 2]  # as of before the step
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=False)["optimizer_states"][0]
    assert saved["llqr"]["step"] == 4
    again = fitted(page, tmp_path, ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert again.global_step == whole.global_step == 6
    assert_same(blocks_of(whole.optimizers[0]), blocks_of(again.optimizers[0]))
    assert_same(parameters_of(whole.lightning_module), parameters_of(again.lightning_module))


def test_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--resume"]):
        epochs = 1 + len(more)
        run("lightning_vit", "--folder", str(tmp_path), "--epochs", str(epochs), *more)
        assert f"at step {14 * epochs}: {(12, 18)[len(more)]} refits" in capsys.readouterr().out


def test_the_identity_is_the_base(page: Any, tmp_path: Path) -> None:
    """With U = I, Lightning's accumulation, clipping and schedule come to the base's own, bit for bit."""
    ours = fitted(page, tmp_path / "ours", every=never)

    class Alone(page.Digits):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            wrapper = made["optimizer"]
            wrapper.close()
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(wrapper.base, self.trainer.max_epochs)
            return {"optimizer": wrapper.base, "lr_scheduler": schedule}

        def on_before_zero_grad(self, optimizer: Any) -> None:
            pass

    alone = fitted(page, tmp_path / "alone", module=Alone)
    assert_same(parameters_of(ours.lightning_module), parameters_of(alone.lightning_module))


@pytest.mark.parametrize("way", ["bf16-mixed", "bf16-true", "compiled"])
def test_options(page: Any, tmp_path: Path, way: str) -> None:
    """No warning (they are errors) and no rejected fit: autocast, a model kept in bf16, a compiled one."""
    torch._dynamo.reset()

    class Compiled(page.Digits):  # type: ignore[misc, name-defined]
        def configure_model(self) -> None:
            self.net = torch.compile(self.net, backend="eager")

    options = {"module": lambda: Compiled(3)} if way == "compiled" else {"precision": way}
    trainer = fitted(page, tmp_path, 1, **options)
    (optimizer,) = trainer.optimizers
    assert (optimizer.stats.refits, optimizer.stats.rejected) == (1, 0)
    assert {tensor.dtype for tensor in blocks_of(optimizer).values()} == {torch.float32}
    assert not any("_orig_mod" in key for key in blocks_of(optimizer))


def test_a_loss_without_a_graph_is_told(page: Any, tmp_path: Path) -> None:
    """What Lightning's closures return is detached, so Newton has to be given a loss and a batch of its own."""

    class Newton(page.Digits):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            base = torch.optim.SGD(self.net.parameters(), lr=0.1)
            return LLQR.paper(base, self.net, "newton", "diagonal", steps=2)

    with pytest.raises(LLQRError, match=r"detached.*loss_fn and a refit_batch"):
        fitted(page, tmp_path, 1, module=Newton)
