"""`llqr bench unseen`: does LLQR, with nothing set, ever do harm? Tasks that nothing was chosen by, rates that aren't the best.

SGDM and AdamW, alone and with LLQR around them, run at a third, one and three times the rate that is best for the base alone
with the first seed and a cosine schedule, at cosine and constant schedules.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from llqr import LLQR
from llqr_lab.bench.measure import one_thread, rounded, widened
from llqr_lab.data.batches import mixed, own_randomness
from llqr_lab.data.picture_sets import cifar, fashion
from llqr_lab.data.sequences import shakespeare
from llqr_lab.errors import RunError
from llqr_lab.experiments.config import Base
from llqr_lab.experiments.optimizers import base_of
from llqr_lab.models.transformers import ViT
from llqr_lab.results import bar, check_page, markdown_table, provenance, say, write_json, write_page

Batch = tuple[tuple[Tensor, ...], Tensor]
Draw = Callable[[int], Batch]


@dataclass(frozen=True)
class Unseen:
    network: Callable[[], nn.Module]
    load: Callable[[Path | None, int], Draw]
    """From the data folder and a seed to the batches."""
    loss: Callable[[Tensor, Tensor], Tensor]
    sgdm: tuple[float, ...] = (0.03, 0.1, 0.3)
    adamw: tuple[float, ...] = (1e-3, 3e-3, 1e-2)

    def start(self, seed: int) -> nn.Module:
        with own_randomness("weights", seed):
            return self.network()

    def without_inputs(self, draw: Draw) -> float:
        """The least loss of an output that is the same for all examples: what is learned without looking at the inputs."""
        batches = [draw(step) for step in range(20)]
        with torch.no_grad():
            like = self.start(0)(*batches[0][0])
        output = torch.zeros_like(like[:1], requires_grad=True)
        solver = torch.optim.LBFGS([output], max_iter=100, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            solver.zero_grad()
            value = torch.stack([self.loss(output.expand_as(like), targets) for _, targets in batches]).mean()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        solver.step(loss)  # type: ignore[no-untyped-call]
        return float(loss().detach())


def _rows(inputs: Tensor, targets: Tensor, size: int, seed: int) -> Draw:
    """Random rows of what is at hand."""

    def draw(step: int) -> Batch:
        generator = torch.Generator().manual_seed(mixed("rows", seed, step))
        rows = torch.randint(len(inputs), (size,), generator=generator)
        return (inputs[rows],), targets[rows]

    return draw


def _made(batch: Callable[[], Batch], seed: int) -> Draw:
    """Made up anew for every step."""

    def draw(step: int) -> Batch:
        with own_randomness("batch", seed, step):
            return batch()

    return draw


def every_place(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with the classes along the last dimension, over all places before it."""
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


# a deep autoencoder


def autoencoder() -> nn.Module:
    sides = (784, 256, 64, 16, 64, 256, 784)
    layers = [part for before, after in pairwise(sides) for part in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@cache
def _fashion(folder: Path | None) -> Tensor:
    images = fashion(folder).train
    return images.take(torch.arange(len(images.labels))).flatten(1).float() / 255


# a vision transformer


@cache
def _cifar(folder: Path | None) -> tuple[Tensor, Tensor]:
    pictures = cifar("cifar10", folder)
    labels = pictures.train.labels
    return pictures.normalisation(pictures.train.take(torch.arange(len(labels))).float() / 255), labels


# an LSTM


class CharacterLSTM(nn.Module):
    def __init__(self, words: int = 65, width: int = 128) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(words, width // 2), nn.LSTM(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(hidden)  # type: ignore[no-any-return]


# a regression: four smooth functions of eight numbers, with noise


def _functions(seed: int) -> Draw:
    with own_randomness("functions", 0):
        inputs, first, second = torch.randn(4096, 8), torch.randn(8, 16), torch.randn(16, 4) / 4
        targets = torch.sin(inputs @ first / 2) @ second
        return _rows(inputs, targets + 0.05 * torch.randn_like(targets), 128, seed)


# a U-Net that tells discs and squares from a noisy background


class UNet(nn.Module):
    def __init__(self, classes: int = 3, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(1, width), self._block(width, 2 * width)])
        self.middle = self._block(2 * width, 4 * width)
        rise = (nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2))
        self.rise = nn.ModuleList(rise)
        self.up = nn.ModuleList([self._block(4 * width, 2 * width), self._block(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            kept.append(block(x))
            x = functional.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat((rise(x), kept.pop()), 1))
        return self.head(x)  # type: ignore[no-any-return]


def shapes(size: int = 16, side: int = 32) -> Batch:
    """A disc and a square in each picture, and which of them every pixel shows."""
    places = torch.arange(side, dtype=torch.float32)
    centres, reach = 4 + (side - 8) * torch.rand(size, 2, 2), 2 + 4 * torch.rand(size, 2)
    down, across = ((places - centres[:, :, axis, None]).abs() for axis in (0, 1))
    disc = down[:, 0, :, None] ** 2 + across[:, 0, None] ** 2 < reach[:, 0, None, None] ** 2
    square = torch.maximum(down[:, 1, :, None], across[:, 1, None].expand(-1, side, -1)) < reach[:, 1, None, None]
    classes = torch.where(square, 2, disc.long())
    pictures = (classes > 0).float() + 0.5 * torch.randn(size, side, side)
    return (pictures[:, None],), classes


# a GNN that tells how far each node is from a marked one


class GraphNet(nn.Module):
    """Messages along a dense adjacency matrix: h ← h + relu(W h + V (A h))."""

    def __init__(self, width: int = 64, layers: int = 3, classes: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, width), nn.Linear(width, classes)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.others = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.embed(features)
        for own, others in zip(self.own, self.others, strict=True):
            hidden = hidden + functional.relu(own(hidden) + others(adjacency @ hidden))
        return self.head(hidden)  # type: ignore[no-any-return]


def graphs(size: int = 32, nodes: int = 24, farthest: int = 5) -> Batch:
    """Random graphs with one marked node; the classes are the steps to it: 0 … 4, and more. Three layers don't see that far."""
    drawn = torch.triu((torch.rand(size, nodes, nodes) < 2 / nodes).float(), 1)
    adjacency = drawn + drawn.mT
    marked = functional.one_hot(torch.randint(nodes, (size,)), nodes).float()
    seen, steps = marked > 0, torch.full((size, nodes), farthest)
    steps[seen] = 0
    for number in range(1, farthest):
        reached = (torch.einsum("bij,bj->bi", adjacency, seen.float()) > 0) & ~seen
        steps[reached], seen = number, seen | reached
    normed = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
    return (torch.stack((marked, adjacency.sum(-1) / 4), -1), normed), steps


UNSEEN: dict[str, Unseen] = {
    "autoencoder": Unseen(
        autoencoder,
        lambda folder, seed: _rows(_fashion(folder), _fashion(folder), 256, seed),
        functional.binary_cross_entropy_with_logits,
        sgdm=(0.3, 1.0, 3.0),
    ),
    "vit": Unseen(
        partial(ViT, width=64, heads=4, layers=3),
        lambda folder, seed: _rows(*_cifar(folder), 64, seed),
        functional.cross_entropy,
    ),
    "lstm": Unseen(
        CharacterLSTM,
        lambda folder, seed: shakespeare(folder).training(32, 64, seed).__getitem__,
        every_place,
        sgdm=(0.3, 1.0, 3.0),
    ),
    "regression": Unseen(
        lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)),
        lambda folder, seed: _functions(seed),
        functional.mse_loss,
    ),
    "unet": Unseen(UNet, lambda folder, seed: _made(shapes, seed), functional.cross_entropy),
    "gnn": Unseen(GraphNet, lambda folder, seed: _made(graphs, seed), every_place),
}


COMMAND = "llqr bench unseen --page"
BASES = ("SGDM", "AdamW")
SCHEDULES = ("cosine", "constant")
FACTORS = (1 / 3, 1.0, 3.0)
"""Times the base's best rate."""
HARM = 1.02
"""The ratio of last losses above which LLQR is said to do harm."""
Row = dict[str, Any]
Place = tuple[str, str]


class Trial(NamedTuple):
    task: str
    base: str
    llqr: bool
    schedule: str
    rate: float
    seed: int
    steps: int


def main(
    tasks: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    data: Path | None,
    jobs: int,
    output: Path,
    page: Path | None = None,
) -> None:
    check_page(page, COMMAND)
    for task in tasks:
        UNSEEN[task].load(data, 0)  # so that data that isn't there is told before the first run
    bench = Comparison(data, jobs, steps)
    rows = bench.rows(bench.best_rates(tasks, seeds[0]), seeds)
    command = f"llqr bench unseen {' '.join(tasks)} --seeds {','.join(map(str, seeds))} --steps {steps}"
    write_json(output, {**provenance(command, seeds[0]), "steps": steps, "seeds": list(seeds), "rows": rows})
    say(Console(), f"{body(rows)}\nWrote {output}")
    if page is not None:
        write_page(page, COMMAND, body(rows))


class Comparison:
    """Runs, each of which is made once."""

    def __init__(self, data: Path | None, jobs: int, steps: int) -> None:
        self.data, self.jobs, self.steps = data, jobs, steps
        self.known: dict[Trial, Row] = {}

    def best_rates(self, tasks: Iterable[str], seed: int) -> dict[Place, float]:
        """Of each task and base, by its last loss at a cosine schedule."""

        def ends_at(coming: Mapping[Place, Sequence[float]]) -> Mapping[Place, dict[float, float]]:
            found: dict[Place, dict[float, float]] = {key: {} for key in coming}
            runs = {Trial(*key, False, "cosine", rate, seed, self.steps): key for key in coming for rate in coming[key]}
            for run, result in self.results(list(runs)).items():
                found[runs[run]][run.rate] = math.inf if result["last"] is None else result["last"]
            return found

        grids = {(task, base): getattr(UNSEEN[task], base.lower()) for task in tasks for base in BASES}
        ends = widened(grids, ends_at)
        for (task, base), found in ends.items():
            if min(found.values()) == math.inf:
                raise RunError(f"{base} diverged on {task} at every rate that was tried: {sorted(found)}")
        return {key: min(found, key=lambda rate: found[rate]) for key, found in ends.items()}

    def rows(self, rates: dict[Place, float], seeds: Sequence[int]) -> list[Row]:
        """One for each task, base, schedule and rate: the last losses of both, and their ratio."""
        places = [
            (task, base, schedule, factor, rounded(factor * rate))
            for (task, base), rate in rates.items()
            for schedule in SCHEDULES
            for factor in FACTORS
        ]

        def trials(place: tuple[str, str, str, float, float], llqr: bool) -> list[Trial]:
            task, base, schedule, _, rate = place
            return [Trial(task, base, llqr, schedule, rate, seed, self.steps) for seed in seeds]

        found = self.results([run for place in places for llqr in (False, True) for run in trials(place, llqr)])
        without_inputs = {
            task: UNSEEN[task].without_inputs(UNSEEN[task].load(self.data, seeds[0])) for task, _ in rates
        }
        rows = []
        for place in places:
            row: Row = dict(zip(("task", "base", "schedule", "factor", "rate"), place, strict=True))
            row["without_inputs"] = without_inputs[row["task"]]
            seconds = {}
            for side, llqr in (("alone", False), ("llqr", True)):
                results = [found[run] for run in trials(place, llqr)]
                ends = [each["last"] for each in results]
                row[side] = None if None in ends else fmean(ends)
                seconds[side] = fmean(each["seconds"] for each in results)
            row["trains"] = row["alone"] is not None and row["alone"] * HARM < row["without_inputs"]
            both = row["alone"] is not None and row["llqr"] is not None
            row["ratio"] = row["llqr"] / row["alone"] if both else None
            row["harm"] = row["trains"] and (row["ratio"] is None or row["ratio"] > HARM)
            rows.append({**row, "seconds": seconds})
        return rows

    def results(self, wanted: Sequence[Trial]) -> dict[Trial, Row]:
        missing = [run for run in dict.fromkeys(wanted) if run not in self.known]
        make = partial(train, data=self.data)
        with bar(len(missing), "training") as done, ExitStack() as stack:
            made: Iterable[Row] = map(make, missing)
            if self.jobs > 1 and len(missing) > 1:
                pool = ProcessPoolExecutor(self.jobs, mp_context=get_context("spawn"))
                made = stack.enter_context(pool).map(make, missing)
            for run, result in zip(missing, made, strict=True):
                self.known[run] = result
                done()
        return {run: self.known[run] for run in wanted}


@one_thread()
def train(run: Trial, data: Path | None) -> Row:
    """The loss at the start, its mean over the last tenth of the steps (None if it diverged)."""
    torch.set_flush_denormal(True)
    task = UNSEEN[run.task]
    model, draw = task.start(run.seed), task.load(data, run.seed)
    base = base_of(Base(run.base.lower(), lr=run.rate), model)  # type: ignore[arg-type]
    optimizer = LLQR(base, model) if run.llqr else base
    torch.manual_seed(run.seed)
    losses: list[float] = []
    seconds = 0.0
    for step in range(run.steps):
        if run.schedule == "cosine":
            for group in optimizer.param_groups:
                group["lr"] = run.rate * 0.5 * (1 + math.cos(math.pi * step / run.steps))
        inputs, targets = draw(step)
        begun = time.process_time()
        optimizer.zero_grad()
        loss = task.loss(model(*inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds += time.process_time() - begun
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
    tenth = max(1, run.steps // 10)
    whole = len(losses) == run.steps and math.isfinite(losses[-1])
    return {"first": losses[0], "last": fmean(losses[-tenth:]) if whole else None, "seconds": seconds}


def body(rows: Sequence[Row]) -> str:
    """The table: a line for each task, base and schedule, and of each rate the ratio and both last losses."""
    header = ["task", "base", "best rate", "schedule", "a third of it", "it", "three times"]
    lines = []
    for key in dict.fromkeys((row["task"], row["base"], row["schedule"]) for row in rows):
        own = [row for row in rows if (row["task"], row["base"], row["schedule"]) == key]
        rate = next(row["rate"] for row in own if row["factor"] == 1.0)
        lines.append([key[0], key[1], f"{rate:g}", key[2], *map(cell, own)])
    trained = [row for row in rows if row["trains"]]
    harmed = [row for row in trained if row["harm"]]
    said = (
        f"LLQR's last training loss over its base's (the base's → LLQR's). The base trains in {len(trained)} of {len(rows)} "
        f"settings: it ends more than {100 * (HARM - 1):g}% below the best output that is the same for all examples. In "
        f"{len(harmed)} of these LLQR's loss is more than {HARM:g} of it (bold)."
    )
    return f"{markdown_table([header, *lines])}\n{said}\n"


def cell(row: Row) -> str:
    ends = " → ".join("diverged" if row[side] is None else f"{row[side]:.4g}" for side in ("alone", "llqr"))
    if not row["trains"]:
        return f"the base doesn't train ({ends})"
    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.3f}"
    return f"**{ratio}** ({ends})" if row["harm"] else f"{ratio} ({ends})"
