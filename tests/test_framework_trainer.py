"""Promise: transformers.Trainer takes LLQR as it takes any optimizer; examples/trainer_gpt2.py runs, stops and goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks import EXAMPLES, example, quiet, run
from llqr import LLQR
from loops import assert_same, blocks_of, never, parameters_of

pytest.importorskip("transformers", reason="transformers isn't installed: pip install llqr[frameworks]")
pytest.importorskip("accelerate", reason="accelerate isn't installed: pip install llqr[frameworks]")
pytestmark = quiet("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's


@pytest.fixture(scope="module")
def page() -> Any:
    return example("trainer_gpt2")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """accelerate keeps one state a process, of the first precision that was asked for."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def trained(page: Any, folder: Path, steps: int = 4, every: Any = 2, **options: Any) -> Any:
    settings: dict[str, Any] = {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    trainer = page.build(str(folder), steps, every, **{**settings, "per_device_train_batch_size": 4, **options})
    trainer.train()
    return trainer


def test_stop_and_go_on(page: Any, tmp_path: Path) -> None:
    """From the checkpoint of step 3, between two refits, to the same bits as without a stop; dropout and schedule included."""
    options = {"save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 4, "disable_tqdm": True}
    whole = trained(page, tmp_path, 6, **options)
    saved = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert saved["llqr"]["step"] == 3
    again = page.build(str(tmp_path), 6, 2, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.llqr.stats.refits == whole.llqr.stats.refits == 3
    assert_same(blocks_of(whole.llqr), blocks_of(again.llqr))
    assert_same(parameters_of(whole.model), parameters_of(again.model))


def test_logs_and_learning(page: Any, tmp_path: Path) -> None:
    trainer = trained(page, tmp_path, 12, 4, warmup_steps=2)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["llqr/refits"] for entry in history] == [1.0] * 4 + [2.0] * 4 + [3.0] * 4
    assert history[-1]["loss"] < history[0]["loss"] - 0.3
    assert history[-1]["learning_rate"] < history[2]["learning_rate"]
    assert trainer.llqr.stats.rejected == 0


def test_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, more in (("2", []), ("4", ["--resume"])):
        run("trainer_gpt2", "--folder", str(tmp_path), "--steps", steps, *more)
        assert f"at step {steps}: {steps} refits" in capsys.readouterr().out


def test_the_identity_is_the_base(page: Any, tmp_path: Path) -> None:
    """With U = I, Trainer's accumulation, clipping and schedule come to the base's own, bit for bit."""
    ours = trained(page, tmp_path / "ours", every=never)
    settings = {"save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 4}
    alone = page.build(str(tmp_path / "alone"), 4, never, **settings)
    alone.optimizer = alone.llqr.base
    alone.llqr.close()
    alone.train()
    assert_same(parameters_of(ours.model), parameters_of(alone.model))


@pytest.fixture(scope="module")
def plain(page: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(page, tmp_path_factory.mktemp("plain"), 3)


@pytest.mark.parametrize(
    "options",
    [{"bf16": True}, {"label_smoothing_factor": 0.1}, {"torch_compile": True, "torch_compile_backend": "eager"}],
    ids=["bf16", "label smoothing", "compiled"],
)
def test_options(page: Any, plain: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """No warning (they are errors), no rejected fit, and the parameters move where they move without the option."""
    torch._dynamo.reset()
    start = parameters_of(page.build(str(tmp_path / "start"), 3).model)
    trainer = trained(page, tmp_path / "other", 3, **options)
    assert (trainer.llqr.stats.refits, trainer.llqr.stats.rejected) == (2, 0)
    here, there = (
        torch.cat([(p - start[n]).flatten() for n, p in parameters_of(t.model).items()]) for t in (plain, trainer)
    )
    assert float(here @ there) > 0.8 * float(here.norm() * there.norm())


def test_an_optimizer_that_trainer_makes(page: Any, tmp_path: Path) -> None:
    """With model_init the optimizer is made inside, around groups with and without weight decay, by docs/frameworks.md."""
    text = (EXAMPLES.parent / "docs" / "frameworks.md").read_text(encoding="utf-8")
    (making,) = [
        code for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "MyTrainer" in code
    ]
    defined: dict[str, Any] = {"__name__": "page"}
    exec(making, defined)
    like = page.build(str(tmp_path), 2, save_strategy="no", disable_tqdm=True, per_device_train_batch_size=4)
    trainer = defined["MyTrainer"](args=like.args, model_init=lambda: like.model, train_dataset=like.train_dataset)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert optimizer.stats.refits == 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [like.args.weight_decay, 0.0]


def test_newton_is_of_the_mean_over_what_the_model_saw(page: Any, tmp_path: Path) -> None:
    """Trainer has a model divide its loss by all the tokens of an accumulated batch; H is that of the mean all the same."""
    found = []
    rows = page.Sums(4, seed=1).rows
    for share in (1.0, 0.5):
        model = page.build(str(tmp_path), 1).model.eval()
        optimizer = LLQR.paper(
            torch.optim.SGD(model.parameters(), lr=0.1), model, "newton", "diagonal", steps=3, ema=0.0
        )
        count = torch.tensor(rows[:, 1:].numel() / share)
        (model(input_ids=rows, labels=rows, num_items_in_batch=count).loss / share).backward()
        optimizer.step()
        assert optimizer.stats.refits == 1
        found.append(blocks_of(optimizer))
    for key, block in found[0].items():
        torch.testing.assert_close(found[1][key], block, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(page: Any, tmp_path: Path, reentrant: bool) -> None:
    """The same steps with it as without, dropout included."""
    kept = trained(page, tmp_path / "kept")
    again = trained(
        page,
        tmp_path / "again",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    for name, p in parameters_of(kept.model).items():
        torch.testing.assert_close(parameters_of(again.model)[name], p, rtol=1e-4, atol=1e-6)
