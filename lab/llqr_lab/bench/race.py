"""`llqr bench race`: optimizers side by side on the same tasks, from the same weights and batches; two tables.

Everybody tuned alike: each optimizer tries a grid of learning rates with the first seed, wider where the best is at its edge;
the rate with the lowest training loss at the end is its own, and is run with the other seeds too (where two are close, both,
and the seeds decide). Nothing of LLQR tuned: it runs at the best rate of its base, with all seeds. Every run is a folder as
`llqr train` makes them: what has been run isn't repeated.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any

import torch
from rich.console import Console

from llqr_lab.bench.measure import one_thread, step_seconds, widened
from llqr_lab.bench.race_page import COMMAND, THE_END, Row, body, draw
from llqr_lab.errors import RunError
from llqr_lab.experiments.collect import Result, curve, last_loss, reached_at, value
from llqr_lab.experiments.command import folder_of
from llqr_lab.experiments.config import Config
from llqr_lab.experiments.loop import Run
from llqr_lab.experiments.presets import resolve
from llqr_lab.experiments.sweep import sweep
from llqr_lab.results import bar, check_page, finite, provenance, say, write_json, write_page
from llqr_lab.tasks import Task, task_of

# who races, on what, and at which learning rates

STEPS_OF_SGD = (0.03, 0.1, 0.3)
STEPS_OF_ADAM = (1e-3, 3e-3, 1e-2)


@dataclass(frozen=True)
class Entry:
    """An optimizer in the race."""

    name: str
    base: str
    rates: tuple[float, ...]
    method: str = "base"

    def changes(self, rate: float) -> dict[str, Any]:
        averaging = {"base.beta2": 0.99} if self.base in ("adamw", "muon", "singd") else {}
        return {"base.name": self.base, "base.lr": rate, **averaging}


ENTRIES = (
    Entry("SGDM", "sgdm", STEPS_OF_SGD),
    Entry("AdamW", "adamw", STEPS_OF_ADAM),
    Entry("Muon", "muon", STEPS_OF_ADAM),
    Entry("SOAP", "soap", STEPS_OF_ADAM),
    Entry("Shampoo", "shampoo", STEPS_OF_SGD),
    Entry("SINGD", "singd", STEPS_OF_ADAM),
    Entry("LLQR on SGDM", "sgdm", STEPS_OF_SGD, "default"),
    Entry("LLQR on AdamW", "adamw", STEPS_OF_ADAM, "default"),
    Entry("LLQR on Muon", "muon", STEPS_OF_ADAM, "default"),
)


def course_of(steps: int, parts: int = 50) -> dict[str, Any]:
    """So many steps, evaluated at the end; the training loss is recorded after each of so many parts."""
    return {"epochs": 0, "steps": steps, "evaluate_every": steps, "record_every": max(1, steps // parts)}


@dataclass(frozen=True)
class Course:
    """A task of the race: a preset, and what is changed of it for everybody."""

    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    cpu: Mapping[str, Any] = field(default_factory=dict)
    """What is changed at the scale `cpu` only, so that a race takes some hours."""
    without: tuple[str, ...] = ()
    """Bases that can't run here: torch's Muon is for matrices, and a ResNet has none inside."""
    reached: str = "train_loss"
    """What is to be reached: the training loss of the plain bases, or the test accuracy at which a task says it is over."""
    target: float | None = None
    """A training loss at which the task is over: who is there in the fewest steps is best."""

    def of_length(self, steps: int | None) -> "Course":
        """The same over so many steps; one that says itself when it is over may take as many."""
        if steps is None:
            return self
        longer = course_of(steps) if self.reached == "train_loss" else {"steps": steps}
        return replace(self, cpu={**self.cpu, **longer})

    @property
    def runners(self) -> list[Entry]:
        return [entry for entry in ENTRIES if entry.base not in self.without]


PLAIN = {"base.weight_decay": 0.0}
COURSES = {
    "fashion-mlp": Course("fashion-mlp", cpu=course_of(600)),
    "fashion-convnet": Course("fashion-convnet", cpu=course_of(600)),
    # one block in each of ResNet-20's three stages: ResNet-8
    "cifar10": Course(
        "cifar10-resnet18-sgdm", PLAIN, {"model.blocks": [1, 1, 1], "batch": 64, **course_of(400)}, without=("muon",)
    ),
    "shakespeare": Course("shakespeare-gpt-sgdm", cpu=course_of(600)),
    "modular-addition": Course(
        "grokking-add", {"data.by_heart": False}, {"steps": 500, "evaluate_every": 10}, reached="test_accuracy"
    ),
    "multi30k": Course(
        "multi30k-transformer-adamw",
        {**PLAIN, "data.beam": 0},
        {"batch": 1024, "schedule.warmup": 60, **course_of(400)},
    ),
}


# the race

Grids = dict[str, list[Result]]
TARGETS = ("SGDM", "AdamW", "Muon", "SOAP")
"""What these come to with every seed, at their best rates, is what everybody is timed to."""
TIE = 0.02
"""Rates whose ends with the first seed differ by less than this share are run with all seeds: seeds differ by more."""
ROUNDS = 3
Times = dict[str, list[float]]
"""Seconds of the first steps of each optimizer."""
TIMED = 200
"""Steps that are timed; what comes after costs as much as the later half of them, on average."""


class Race:
    """One task, and everybody's runs on it."""

    def __init__(self, course: Course, scale: str, runs: Path, perform: Callable[[list[Config]], None]) -> None:
        self._course, self._scale, self._runs, self._perform = course, scale, runs, perform

    def results(self, entry: Entry, rates: Sequence[float], seeds: Sequence[int]) -> list[Result]:
        """Of each rate with each seed, as far as they have been run."""
        configs = self._wanted(entry, rates, seeds)
        folders = [(config.base.lr, folder_of(self._runs, config)) for config in configs]
        return [{**run.read_result(), "lr": lr, "curve": curve(run.read_metrics())} for lr, run in folders if run.done]

    def run(self, wanted: Mapping[Entry, Sequence[float]], seeds: Sequence[int]) -> None:
        """Make the runs that aren't there, all at once: no core waits for another's optimizer."""
        self._perform([each for entry, rates in wanted.items() for each in self._wanted(entry, rates, seeds)])

    def grids(self, entries: Sequence[Entry], seed: int) -> Grids:
        def ends_at(coming: Mapping[Entry, Sequence[float]]) -> Mapping[Entry, dict[float, float]]:
            self.run(coming, [seed])
            results = {entry: self.results(entry, rates, [seed]) for entry, rates in coming.items()}
            return {e: dict.fromkeys(rates, math.inf) | self._ends(results[e]) for e, rates in coming.items()}

        ends = widened({entry: entry.rates for entry in entries}, ends_at)
        return {entry.name: self.results(entry, list(own), [seed]) for entry, own in ends.items()}

    def _ends(self, results: list[Result]) -> dict[float, float]:
        return {each["lr"]: end(each, self._course) for each in results}

    def chosen(self, grids: Grids, runners: Sequence[Entry], seeds: Sequence[int]) -> dict[Entry, list[float]]:
        """The best rate of each who has one. Where others come close to it with the first seed, all seeds decide, by their
        mean."""
        close = {entry: rates for entry in runners if (rates := self._close(grids[entry.name]))}
        self.run(close, seeds)

        def mean_end(entry: Entry, rate: float) -> float:
            results = self.results(entry, [rate], seeds)
            return mean(end(each, self._course) for each in results) if len(results) == len(seeds) else math.inf

        return {entry: [min(rates, key=partial(mean_end, entry))] for entry, rates in close.items()}

    def _close(self, results: list[Result]) -> list[float]:
        """The best rates, from the best on: those whose ends differ by less than seeds do."""
        ends = self._ends(results)
        finite = sorted((lr for lr in ends if ends[lr] < math.inf), key=lambda lr: ends[lr])
        return [lr for lr in finite if ends[lr] <= (1 + TIE) * ends[finite[0]]]

    def step_seconds(self, best: Mapping[Entry, Sequence[float]], seed: int, data: Path | None) -> Times:
        """Everybody's at their best rates, in turns; kept beside the runs, for as long as the same ones are timed."""
        if not best:
            return {}
        configs = {entry.name: self._configuration(entry, rates[0], seed) for entry, rates in best.items()}
        labels = {name: config.label for name, config in configs.items()}
        which = blake2b(json.dumps(labels).encode(), digest_size=8).hexdigest()
        path = self._runs / self._course.preset / self._scale / f"seconds-{which}.json"
        if path.is_file():
            return dict(json.loads(path.read_text(encoding="utf-8"))["seconds"])
        steps = 2 if self._scale == "smoke" else TIMED
        torch.set_flush_denormal(True)
        task = task_of(next(iter(configs.values())), data)
        with bar(ROUNDS, "timing steps") as done, one_thread():
            begin = lambda: {name: advancing(config, task) for name, config in configs.items()}  # noqa: E731
            found = step_seconds(begin, ROUNDS, steps, turn=25, done=done)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"labels": labels, "seconds": found})
        return found

    def _wanted(self, entry: Entry, rates: Sequence[float], seeds: Sequence[int]) -> list[Config]:
        return [self._configuration(entry, rate, seed) for rate in rates for seed in seeds]

    def _configuration(self, entry: Entry, rate: float, seed: int) -> Config:
        shorter = self._course.cpu if self._scale == "cpu" else {}
        changes = {**self._course.changes, **shorter, **entry.changes(rate)}
        return resolve(self._course.preset, self._scale, entry.method, seed, changes)


def end(result: Result, course: Course) -> float:
    """How a run ended: its last training loss, or the steps that it took to be over; the less the better."""
    by_steps = course.target is not None or course.reached == "test_accuracy"
    found = place(result, course, course.target) if by_steps else last_loss(result)
    return math.inf if found is None else float(found)


class Performed:
    """The runs of a benchmark as it wants them, and whether all came to their end; its results, when all is done."""

    def __init__(self, command: str, page: Path | None, runs: Path, data: Path | None, jobs: int) -> None:
        check_page(page, command)
        self.console, self.failed, self._page, self._command = Console(), False, page, command
        self._how = runs, data, jobs, "auto"

    def __call__(self, wanted: list[Config]) -> None:
        self.failed |= sweep(wanted, *self._how) is False

    def report(self, body: str, *written: Path) -> None:
        say(self.console, f"{body}\nWrote {' and '.join(map(str, written))}")
        if self.failed:
            raise RunError(
                "some runs came to no end (above): the same command goes on with them, and writes the page then"
            )
        if self._page is not None:
            write_page(self._page, self._command, body)


def main(
    names: Sequence[str],
    entries: Sequence[str],
    scale: str,
    seeds: Sequence[int],
    runs: Path,
    data: Path | None,
    jobs: int,
    output: Path,
    figure: Path,
    page: Path | None = None,
    untuned: bool = False,
    steps: int | None = None,
) -> None:
    """`untuned`: LLQR has no rates of its own, and runs at its base's only. `steps`: of each course, in place of its own."""
    perform = Performed(COMMAND, page, runs, data, jobs)
    rows, at_base = list[Row](), list[Row]()
    some = (f" --optimizers '{','.join(entries)}'" if entries else "") + " --untuned" * untuned
    some += f" --steps {steps}" if steps else ""
    command = f"llqr bench race {' '.join(names)} --scale {scale} --seeds {','.join(map(str, seeds))}{some}"
    for name in names:
        course = COURSES[name].of_length(steps)
        race = Race(course, scale, runs, perform)
        runners = [entry for entry in course.runners if not entries or entry.name in entries]
        tuned = [entry for entry in runners if entry.method == "base" or not untuned]
        grids = race.grids(tuned, seeds[0])
        best = race.chosen(grids, tuned, seeds)
        wrapped = at_rates_of_bases(runners, best)
        race.run(wrapped, seeds)
        finals = {entry.name: race.results(entry, rates, seeds) for entry, rates in best.items()}
        times = race.step_seconds({**wrapped, **best}, seeds[0], data)
        rows += summary(name, course, grids, finals, len(seeds), times)
        results = {entry: race.results(entry, rates, seeds) for entry, rates in wrapped.items()}
        at_base += untuned_rows(name, course, finals, results, len(seeds), times)
        found = {"scale": scale, "seeds": list(seeds), "rows": rows, "untuned": at_base}
        write_json(output, {**provenance(command, seeds[0]), **found})
    draw(at_base, figure)
    perform.report(body(rows, at_base), output, figure)


def summary(
    task: str, course: Course, grids: Grids, finals: dict[str, list[Result]], seeds: int, times: Times
) -> list[Row]:
    """A row an optimizer: its rate, steps and seconds to each target (medians of the seeds), how it ended, and its memory."""
    targets: dict[str, float] = {THE_END: 0.0}
    if course.reached != "test_accuracy":
        ends = {name: common_end(finals.get(name, [])) for name in TARGETS}
        targets = {name: loss for name, loss in ends.items() if loss is not None}
    rows = []
    for name, tried in grids.items():
        results, seconds = finals.get(name, []), times.get(name)
        losses = [last_loss(each) for each in results]
        reached = {label: _reached(results, course, target, seeds, seconds) for label, target in targets.items()}
        rows.append(
            {
                "task": task,
                "optimizer": name,
                "lr": results[0]["lr"] if results else None,
                "tried": {f"{each['lr']:g}": finite(end(each, course)) for each in tried},
                "diverged": sorted({f"{each['lr']:g}" for each in (*tried, *results) if each["diverged"]}),
                "seeds": seeds,
                "targets": reached,
                "train_loss": _middle(losses),
                "train_losses": losses,
                "score_name": results[0]["score"] if results else None,
                "score": _middle([value(each) for each in results]),
                "step_seconds": seconds and mean(seconds),
                "peak_bytes": _middle([each["peak_bytes"] for each in results]),
                "unmoved": sorted({moved for each in (*tried, *results) for moved in each["unmoved"]}),
            }
        )
    return rows


def at_rates_of_bases(runners: Sequence[Entry], best: Mapping[Entry, Sequence[float]]) -> dict[Entry, Sequence[float]]:
    """LLQR with the best rate of its base, where the base has one."""
    rates = {entry.base: own for entry, own in best.items() if entry.method == "base"}
    return {entry: rates[entry.base] for entry in runners if entry.method != "base" and entry.base in rates}


def untuned_rows(
    task: str,
    course: Course,
    finals: Mapping[str, list[Result]],
    wrapped: Mapping[Entry, list[Result]],
    seeds: int,
    times: Times,
) -> list[Row]:
    """A row a base: with each seed, its steps, and those after which LLQR at its rate was at the base's last training loss.

    A ratio is the median of the seeds'; one that LLQR doesn't get there with is infinite, which is None. Seeds that the base
    doesn't get there with, or that one of the two wasn't run with, don't count.
    """
    rows = []
    for entry, results in wrapped.items():
        base = entry.name.removeprefix("LLQR on ")
        others = {each["seed"]: each for each in results}
        pairs = [(each, others[each["seed"]]) for each in finals[base] if each["seed"] in others]
        targets = [last_loss(own) for own, _ in pairs]
        whole = [None if own["diverged"] else float(own["steps"]) for own, _ in pairs]
        ends = [place(own, course, 0.0) for own, _ in pairs] if course.reached == "test_accuracy" else whole
        there = [place(other, course, target) for (_, other), target in zip(pairs, targets, strict=True)]
        alone = _side([own for own, _ in pairs], ends, times[base])
        around = _side([other for _, other in pairs], there, times[entry.name])
        own = {"task": task, "base": base, "lr": finals[base][0]["lr"], "seeds": seeds}
        row: Row = {**own, "alone": alone, "llqr": around}
        for what in ("steps", "seconds"):
            ratios = [
                math.inf if there is None else there / own
                for own, there in zip(alone[what], around[what], strict=True)
                if own is not None
            ]
            row[f"{what}_ratio"] = finite(median(ratios)) if ratios else None
            row[f"{what}_ratios"] = [finite(each) for each in ratios]
        rows.append(row)
    return rows


def _side(results: list[Result], steps: Sequence[float | None], times: list[float]) -> Row:
    """Of the base or of LLQR, a number a seed: its steps, their time, and its last training loss."""
    losses = [last_loss(each) for each in results]
    return {
        "steps": list(steps),
        "seconds": [None if each is None else seconds_to(times, each) for each in steps],
        "train_loss": _middle(losses),
        "train_losses": losses,
        "curve": results[0]["curve"] if results else None,
    }


def common_end(results: Sequence[Result]) -> float | None:
    """The training loss that was come to with every seed; None where one diverged."""
    ends = [last_loss(each) for each in results]
    return max(each for each in ends if each is not None) if ends and None not in ends else None


def _reached(results: list[Result], course: Course, target: float, seeds: int, times: list[float] | None) -> Row:
    """How many seeds got there, the target, and the median of the steps if all did, with the time of so many steps."""
    places = [found for each in results if (found := place(each, course, target)) is not None]
    steps = median(places) if len(places) == seeds else None
    return {
        "loss": target if course.reached == "train_loss" else None,
        "reached": len(places),
        "steps": steps,
        "seconds": None if steps is None or times is None else seconds_to(times, steps),
    }


def place(result: Result, course: Course, target: float | None) -> float | None:
    """The step at which a run was there for the first time; None if it diverged in the end, or there is no target."""
    if result["diverged"] or (target is None and course.reached != "test_accuracy"):
        return None
    return result.get("steps_to_target") if course.reached == "test_accuracy" else reached_at(result, target or 0.0)


def _middle(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return median(known) if known and len(known) == len(values) else None


def advancing(config: Config, task: Task) -> Callable[[int], float]:
    """A run from its start: what makes the step of a number, and gives its seconds."""
    run = Run(config, task, torch.device("cpu"))

    def step(number: int) -> float:
        before = run.seconds
        run.advance(task.train[number])
        return run.seconds - before

    return step


def seconds_to(times: Sequence[float], steps: float) -> float:
    """The time of so many steps from the start."""
    known = min(round(steps), len(times))
    return sum(times[:known]) + (steps - known) * fmean(times[len(times) // 2 :])
