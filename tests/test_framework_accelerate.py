"""Promise: accelerate takes LLQR as it takes any optimizer; examples/accelerate_bert.py runs, stops and goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks import example, quiet, run
from llqr import LLQR
from llqr.errors import LLQRError
from loops import assert_same, batch, blocks_of, network, never, parameters_of, sgd, spoil

pytest.importorskip("accelerate", reason="accelerate isn't installed: pip install llqr[frameworks]")
pytest.importorskip("transformers", reason="transformers isn't installed: pip install llqr[frameworks]")
pytest.importorskip("tensorboard", reason="tensorboard isn't installed: pip install -e '.[dev]'")
pytestmark = quiet()


@pytest.fixture(scope="module")
def page() -> Any:
    page = example("accelerate_bert")
    made = page.reviews(128, 0)
    page.reviews = lambda count, seed: made
    return page


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """accelerate keeps one state a process, of the first precision that was asked for."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def logged(folder: Path, name: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars(name)]


def test_stop_go_on_and_logs(page: Any, tmp_path: Path) -> None:
    """From the state after two epochs to the same bits as without a stop; order of the data, dropout and schedule included."""
    model, optimizer = page.train(str(tmp_path), epochs=3, every=3)
    assert optimizer.state_dict()["llqr"]["step"] == 6  # four batches an epoch, two a step
    (events,) = (tmp_path / "logs").glob("events*")
    assert logged(events, "llqr/refits") == [1.0, 2.0, 2.0]
    shutil.rmtree(tmp_path / "epoch_002")
    saved = torch.load(tmp_path / "epoch_001" / "optimizer.bin", weights_only=True)
    assert saved["llqr"]["step"] == 4
    again, other = page.train(str(tmp_path), epochs=3, every=3, resume=True)
    assert_same(blocks_of(optimizer), blocks_of(other))
    assert_same(parameters_of(model), parameters_of(again))


def test_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("accelerate_bert", "--folder", str(tmp_path), "--epochs", "1")
    assert "at step 16: 13 refits" in capsys.readouterr().out


@pytest.mark.parametrize("every", [never, 2], ids=["identity", "fitted"])
def test_a_scaler_of_accelerate(every: Any) -> None:
    """accelerate asks the optimizer whether a step was left out; an overflow is, as with the base, and the scale falls."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    found = []
    for wrap in (False, True):
        model = network(dtype=torch.float32)
        base: Any = LLQR.paper(sgd(model), model, structure="kfac", every=every, steps=3) if wrap else sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = AcceleratedOptimizer(base, scaler=scaler)
        skipped = []
        for k in range(4):
            x, y = batch(k, dtype=torch.float32)
            optimizer.zero_grad()
            scaler.scale(torch.nn.functional.cross_entropy(model(x), y)).backward()
            if k == 2:
                spoil(model, "0.weight")
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
        found.append((skipped, scaler.get_scale(), parameters_of(model)))
    assert found[0][:2] == found[1][:2] == ([False, False, True, False], 32.0)
    if every is never:
        assert_same(found[0][2], found[1][2])


def test_the_identity_is_the_base(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = page.train(str(tmp_path / "ours"), epochs=1, every=never)
    monkeypatch.setattr(page, "LLQR", lambda base, model, **options: _alone(base, model))
    alone, _ = page.train(str(tmp_path / "alone"), epochs=1)
    assert_same(parameters_of(ours), parameters_of(alone))


def _alone(base: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    base.stats = LLQR.paper(base, model).stats  # type: ignore[attr-defined]
    return base


def test_mixed_precision(page: Any, tmp_path: Path) -> None:
    """accelerate puts autocast into the model's own forward; U is fitted without, to what float32 gives at these gradients."""
    from accelerate import Accelerator

    inputs = page.collate(page.reviews(128, 0)[:8])
    found = []
    for precision in ("bf16", "no"):
        torch.manual_seed(0)
        config = page.BertConfig(
            vocab_size=len(page.WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
        model = page.BertForSequenceClassification(config).eval()
        optimizer = LLQR.paper(sgd(model), model, structure="kfac", steps=3, ema=0.0)
        if precision == "bf16":
            accelerator = Accelerator(mixed_precision=precision, cpu=True)
            prepared, stepping = accelerator.prepare(model, optimizer)
            accelerator.backward(prepared(**inputs).loss)
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            stepping.step()
        else:
            model(**inputs)
            for name, p in model.named_parameters():
                p.grad = gradients[name]
            optimizer.step()
        assert optimizer.stats.refits == 1
        found.append(blocks_of(optimizer))
    assert_same(*found)


def test_a_wrapped_base_is_refused() -> None:
    """It would step by halves: scaled gradients in, and its own idea of when an accumulated batch is whole."""
    from accelerate import Accelerator

    model = network()
    prepared = Accelerator(cpu=True).prepare(sgd(model))
    with pytest.raises(LLQRError, match=r"AcceleratedOptimizer.*accelerator.prepare\(LLQR"):
        LLQR.paper(prepared, model)
