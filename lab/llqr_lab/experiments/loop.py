"""The training loop: from a configuration and a folder to a result; stopped anywhere, it goes on as if it hadn't been.

Everything that a step depends on is in the checkpoint (model, optimizer with U, schedule, random numbers) or a function of the
step's number (the batch), so that the metrics of a run that was killed are those of one that wasn't, bit for bit.
"""

import math
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from llqr.diagnostics import Monitor
from llqr_lab.bench.measure import peak_resident
from llqr_lab.data.batches import Batch, mixed, own_randomness, stream
from llqr_lab.errors import ConfigError
from llqr_lab.experiments.config import Config, Schedule
from llqr_lab.experiments.folder import RunFolder
from llqr_lab.experiments.optimizers import optimizer, rate
from llqr_lab.results import finite, provenance
from llqr_lab.tasks import Task, right_answers, task_of, to_device

SPENT = ("refit_step_seconds", "evaluation_seconds", "batch_seconds", "checkpoint_seconds")
"""Where time goes, by the run's clock: the steps that refit (within `seconds`), and three things beside the steps."""

NOTHING_YET: list[float] = [0.0, 0, 0, 0]
"""Since the last record: the sum of the losses, the steps, the right answers, and how many were asked for."""

Report = Callable[[int, int, Mapping[str, Any]], None]
"""Called at the beginning and after each step with the steps so far, how many there are, and what was measured last."""


class StoppedError(Exception):
    """A run was asked to stop, and has saved where it was."""

    def __init__(self, step: int, steps: int, number: int) -> None:
        super().__init__(f"stopped after step {step:,} of {steps:,}, which is saved")
        self.number = number
        """Of the signal."""


@contextmanager
def listening() -> Iterator[Callable[[], int]]:
    """For Ctrl-C and SIGTERM: gives the number of the signal that came, 0 without one. A second Ctrl-C ends at once."""
    came = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(
    config: Config,
    folder: RunFolder,
    data: Path | None,
    device: torch.device,
    workers: int = 0,
    checkpoint_seconds: float = 60.0,
    report: Report = lambda step, steps, metrics: None,
    warn: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Train to the end and write the result; begin at the checkpoint, if there is one. When the process is asked to end, one is
    written after the step, and `StoppedError` raised."""
    task = task_of(config, data)
    run = Run(config, task, device)
    with folder.locked(), listening() as asked_to_stop:  # only now: what can't be trained leaves nothing behind
        folder.begin(config)
        folder.load(run.load_state_dict)
        if run.threads_changed:
            warn("the run began with another number of threads: its numbers may differ in their last digits")
        report(run.step, run.steps, run.shown())
        saved = time.monotonic()
        monitor = run.monitor(folder.note)
        steps = range(run.step, run.step if run.over else run.steps)
        batches = stream(task.train, steps, workers)
        for _ in steps:
            with run.timed("batch_seconds"):
                batch = to_device(next(batches), device)
            if monitor is not None:
                run.model.train()
                monitor(run.step, *batch)
            run.advance(batch)
            evaluated = run.step % run.evaluate_every == 0 or run.step == run.steps or run.diverged
            if evaluated or (config.record_every and run.step % config.record_every == 0):
                metrics, times = run.measure(evaluated)
                folder.append(metrics, times)
            report(run.step, run.steps, run.shown())
            if run.over:
                break
            asked = asked_to_stop()
            if asked or time.monotonic() - saved >= checkpoint_seconds:
                with run.timed("checkpoint_seconds"):
                    folder.save(run.state_dict())
                saved = time.monotonic()
            if asked:
                raise StoppedError(run.step, run.steps, asked)
        result = _result(config, run, folder, device)
        folder.finish(run.state_dict(), result)
    return result


class Run:
    """A training between two steps."""

    def __init__(self, config: Config, task: Task, device: torch.device) -> None:
        self.config, self.task, self.device = config, task, device
        with own_randomness("weights", config.seed):
            self.model: nn.Module = _built(task).to(device)
        epoch = task.train.steps_per_epoch
        self.steps = config.steps or math.ceil(config.epochs * epoch)
        self.evaluate_every = config.evaluate_every or epoch
        self.step = 0
        falling = Schedule("cosine")
        self.optimizer: Optimizer = optimizer(
            config, self.model, task, lambda: rate(falling, self.step, self.steps), self._fresh
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: rate(config.schedule, step, self.steps))
        torch.manual_seed(mixed("training", config.seed))
        self.lr = config.base.lr
        """Of the last step."""
        self.seconds = 0.0
        """In training steps, refits included, evaluations not."""
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        # of one thread, the processor's time is what the run would take with nothing else on the machine
        self.clock: Callable[[], float] = time.process_time if alone else time.perf_counter
        self.clock_name = "processor" if alone else "wall"
        self.spent = dict.fromkeys(SPENT, 0.0)
        self.threads_changed = False
        self.over = self.diverged = self.learned = False
        self.latest: dict[str, Any] = {}
        self._interval = NOTHING_YET

    def _fresh(self) -> Batch:
        """A batch that no step is trained on."""
        return to_device(self.task.train[self.steps + self.step], self.device)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = self.clock()
        yield
        self.spent[what] += self.clock() - start

    def advance(self, batch: Batch) -> None:
        """One step."""
        start, before = self.clock(), self.fits
        self.model.train()
        outputs: list[Tensor] = []

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            output = self.model(*batch.inputs)
            loss = self.task.loss(output, batch.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self._clip(self.model)
            outputs.append(output.detach())
            return loss

        # the first evaluation is the step's own; LLQR may ask for more in a refit
        loss = float(cast(Tensor, self.optimizer.step(closure)).detach())  # type: ignore[arg-type]
        self.lr = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self.step += 1
        self.diverged = not math.isfinite(loss)
        new = (loss, 1, *right_answers(outputs[0], batch.targets, self.task.ignored))
        self._interval = [before + more for before, more in zip(self._interval, new, strict=True)]
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        seconds = self.clock() - start
        self.seconds += seconds
        if self.fits > before:
            self.spent["refit_step_seconds"] += seconds

    @property
    def stats(self) -> dict[str, Any]:
        """LLQR's own counts; none of another optimizer."""
        return vars(self.optimizer.stats) if hasattr(self.optimizer, "stats") else {}

    @property
    def fits(self) -> int:
        """Refits so far, taken or not."""
        return int(self.stats.get("refits", 0) + self.stats.get("rejected", 0))

    def monitor(self, record: Callable[[dict[str, Any]], None]) -> Monitor | None:
        """What looks at the coming steps; None where nobody asked."""
        wanted = self.config.diagnostics
        if not wanted.every:
            return None
        return Monitor(
            self.model,
            self.optimizer,
            self.task.loss,
            every=wanted.every,
            record=record,
            divergence="ngd",  # the same for every method, so that runs can be compared
            damping=wanted.damping,
            products=wanted.products,
            weights=self.task.weights,
            prepare=self._clip,
        )

    def _clip(self, model: nn.Module) -> None:
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), self.config.clip_norm)

    def measure(self, evaluated: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        """Metrics of the steps since the last time, of the model now if it is `evaluated`, and the seconds so far."""
        losses, steps, right, seen = self._interval
        metrics: dict[str, Any] = {
            "step": self.step,
            "epoch": self.step / self.task.train.steps_per_epoch,
            "lr": self.lr,
            "train_loss": finite(losses / steps),
            "train_accuracy": right / max(1, seen),
        }
        if evaluated:
            self.model.eval()
            with torch.no_grad(), self.timed("evaluation_seconds"):
                found = self.task.evaluate(self.model, self.device)
            metrics |= {name: finite(value) for name, value in found.items()}
        known = self.stats
        metrics |= {name: known[name] for name in ("refits", "rejected") if name in known}
        if "objective_after" in known:
            metrics["objective"] = known["objective_after"] and finite(known["objective_after"])
        times = {"seconds": self.seconds, "refit_wall_seconds": known.get("seconds", 0.0), **self.spent}
        self.learned = self.learned or self.task.learned(metrics)
        self.over = self.diverged or self.task.over(metrics, self.learned)
        self.latest, self._interval = metrics, NOTHING_YET
        return metrics, times

    def shown(self) -> dict[str, Any]:
        """For the progress bar."""
        losses, steps, *_ = self._interval
        loss = losses / steps if steps else self.latest.get("train_loss")
        return {**self.latest, "train_loss": loss, "refits": self.stats.get("refits")}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "seconds": self.seconds,
            "spent": self.spent,
            "clock": self.clock_name,
            "threads": torch.get_num_threads(),
            "lr": self.lr,
            "interval": self._interval,
            "latest": self.latest,
            "over": [self.over, self.diverged],
            "learned": self.learned,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.seconds, self.latest = state["step"], state["seconds"], state["latest"]
        self.spent, self.learned, self.lr = state["spent"], state["learned"], state["lr"]
        self.over, self.diverged = state["over"]
        self.threads_changed = state["threads"] != torch.get_num_threads()
        if state["clock"] != self.clock_name:
            self.clock_name = "mixed"
        self._interval = state["interval"]
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and state["random_cuda"]:
            torch.cuda.set_rng_state_all(state["random_cuda"])


def _built(task: Task) -> nn.Module:
    try:
        return task.network()
    except (RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"the model can't be built ({error}): change its settings") from error


def _result(config: Config, run: Run, folder: RunFolder, device: torch.device) -> dict[str, Any]:
    run.model.eval()
    with torch.no_grad(), run.timed("evaluation_seconds"):
        finals = {} if run.diverged else run.task.finals(run.model, device)
    lines = folder.read_metrics()
    where = f"llqr train {config.preset} --scale {config.scale} --method {config.method} --seed {config.seed}"
    command = " ".join([where, *(f"--set {shlex.quote(change)}" for change in config.changes)])
    with own_randomness("weights", config.seed):
        start = dict(_built(run.task).named_parameters())
    # an optimizer that skips some parameters would be compared for nothing
    trained = [(name, p.detach().cpu()) for name, p in run.model.named_parameters() if p.requires_grad]
    return {
        "preset": config.preset,
        "scale": config.scale,
        "method": config.label,
        "score": run.task.score,
        "model": config.model["name"],
        "data": config.data["name"],
        "batch": config.batch,
        "examples": run.task.examples,
        "whole": run.task.whole,
        **provenance(command, config.seed),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "clock": run.clock_name,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "steps": run.step,
        "seconds": run.seconds,
        "refit_wall_seconds": run.stats.get("seconds", 0.0),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident(),
        "unmoved": [name for name, parameter in trained if torch.equal(parameter, start[name])],
        **run.spent,
        "preconditioner_bytes": run.stats.get("memory", 0),
        "diverged": run.diverged,
        **run.task.summary(lines),
        "last": {**lines[-1], **finals},
    }
