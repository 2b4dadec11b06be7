"""`llqr scaling`: what LLQR, nothing set, costs networks of a million to seven billion parameters, on one device to thousands.

Nothing is trained. A network is built without numbers (torch's meta device), and the library's own code is run on it: which
weights are linear maps, what is kept of each, how it is inverted, and which rank owns it. Torch counts the operations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from llqr.curvature.collector import Collector
from llqr.curvature.linear_maps import COLUMNS, ROWS, Block, Stack
from llqr.curvature.statistics import Sums, merged
from llqr.curvature.uses import find_uses
from llqr.distributed.processes import cost, deal
from llqr.structures.stacks import assign
from llqr.wrapper import LONGEST
from llqr_lab.figures.style import BLUE, GREEN, ORANGE, drawing
from llqr_lab.models.convolutional import ResNet50
from llqr_lab.models.transformers import GPT, attend
from llqr_lab.results import markdown_table

COMMAND = "llqr scaling --page"
aten = torch.ops.aten


def _cubed(factor: float) -> Callable[..., int]:
    return lambda shape, *_, **__: round(factor * prod(shape) * shape[-1])


OPERATIONS: dict[Any, Any] = {
    aten.baddbmm_: lambda _, left, right, **__: 2 * prod(left) * right[-1],
    aten.linalg_solve_triangular: lambda factor, right, *_, **__: prod(right) * factor[-1],
    aten._linalg_eigh: _cubed(9),
    aten.linalg_cholesky_ex: _cubed(1 / 3),
    aten.cholesky_inverse: _cubed(2 / 3),
}
"""What torch's counter leaves out: a product in place, and factorisations, by the counts of textbooks."""


def operations(job: Callable[[], Any]) -> tuple[Any, int]:
    """What a job returns; additions and multiplications in its matrix products and factorisations."""
    with FlopCounterMode(display=False, custom_mapping=OPERATIONS) as counter:
        return job(), counter.get_total_flops()


class WithoutNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Who asks a tensor without numbers for one is told that no check has failed, and that no data are zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return False if args[0].dtype == torch.bool else 2**62
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class CountedBlock:
    block: Block
    """Its tensors have shapes and no numbers."""
    members: tuple[torch.Size, ...]
    """Its weight's, and its bias's."""
    apply: int
    """Operations of U m, and of its product with m."""
    invert: int

    @property
    def curvature(self) -> int:
        return _bytes(self.block.moments.values())

    @property
    def inputs(self) -> int:
        return _bytes([self.block.moments[ROWS if self.block.map.inputs_on_rows else COLUMNS]])

    @property
    def u(self) -> int:
        return _bytes(self.block.inverse.values())


@dataclass(frozen=True)
class Census:
    """What a network and a batch ask for: operations and shapes."""

    parameters: list[torch.Size]
    training: int
    """Forward and backward."""
    statistics: int
    second_run: int
    """Forward, and backward to the outputs of the maps: of a refit where FSDP2 has sharded the parameters."""
    blocks: list[CountedBlock]


def census(model: nn.Module, inputs: Tensor) -> Census:
    parameters = dict(model.named_parameters())
    with WithoutNumbers():  # type: ignore[no-untyped-call]
        output, forward = operations(lambda: model(inputs))
        uses = find_uses([output], {id(p): name for name, p in parameters.items()}).uses
        ends, ones = [GradientEdge(use.node, 0) for use in uses], torch.ones_like(output)
        pulled, signals = operations(lambda: torch.autograd.grad(output, ends, ones, retain_graph=True))
        _, backward = operations(lambda: output.backward(ones))
        collector = Collector()
        collector.know(parameters, assign("kfac", parameters))

        def collect() -> None:
            for use, gradient in zip(uses, pulled, strict=True):
                collector.add(use.map, use.sides(gradient))

        with torch.no_grad():
            _, statistics = operations(collect)
            blocks = [_counted(sums, parameters) for sums in merged(collector.sums.values()).values()]
    shapes = [p.shape for p in parameters.values()]
    return Census(shapes, forward + backward, statistics, forward + signals, blocks)


def _counted(sums: Sums, parameters: Mapping[str, Tensor]) -> CountedBlock:
    block = Block(sums.map, sums.structure)
    block.take(sums.moments())
    _, invert = operations(block.invert)
    m = torch.empty(block.map.joined, device="meta")
    _, apply = operations(lambda: Stack([block]).apply(m))
    members = tuple(parameters[name].shape for name in block.map.members)
    return CountedBlock(block, members, apply + 2 * m.numel(), invert)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


ITEM, PLACES = 4, 8
"""Bytes of a parameter, and of the number of places at which a map was looked at."""


@dataclass(frozen=True)
class Cost:
    """Of the device that has most of each."""

    training: int
    apply: int
    """Operations of U m, in every step."""
    refit: int
    held: int
    """Bytes, as the next three: the curvature, U, and a copy of the parameters, from which a step goes."""
    in_refit: int
    """Beside that in a refit: its own sums, the joined ones, the inputs' means, the new average, the new U; under FSDP2 its own
    sums, these in messages, the joined ones, and all parameters, whole."""
    step_bytes: int = 0
    refit_bytes: int = 0

    @property
    def share(self) -> float:
        """Operations of LLQR per step, when refits are as rare as they get, over those of training."""
        return (self.apply + self.refit / LONGEST) / self.training


def count(found: Census, devices: int = 1, sharded: bool = False, times: int = 1) -> Cost:
    """On so many devices, by DDP or sharded by FSDP2, each with `times` the batch of the census.

    More than once is for batches in which every map acts at as many places as a refit looks at, or more.
    """
    blocks, owned = found.blocks, _owned(found.blocks, devices, sharded)

    def most(what: Callable[[CountedBlock], int]) -> int:
        return max(sum(map(what, own)) for own in owned)

    parts = devices if sharded else 1
    copied = sum(_shards(b.members, parts) for b in blocks)
    curvature, u = sum(b.curvature for b in blocks), sum(b.u for b in blocks)
    new = curvature + u + sum(b.inputs for b in blocks)
    training, refit = times * found.training, found.statistics + most(lambda b: b.invert)
    if devices == 1 and not sharded:
        return Cost(training, sum(b.apply for b in blocks), refit, curvature + u + copied, curvature + new)
    summed = curvature + PLACES * len(blocks)
    if not sharded:
        apply, held = sum(b.apply for b in blocks), curvature + u + copied
        return Cost(training, apply, refit, held, 2 * curvature + new, 0, summed + u)
    whole = ITEM * sum(shape.numel() for shape in found.parameters)
    words = ITEM * sum(len(b.members) + 1 for b in blocks)
    return Cost(
        training,
        most(lambda b: b.apply),
        refit + times * found.second_run,
        most(lambda b: b.curvature + b.u) + copied,
        3 * curvature + whole,
        # momenta and steps to the owners, new steps back; what owners say about each parameter and block
        3 * copied + words + most(lambda b: 3 * _shards(b.members, 1) + devices * ITEM * (len(b.members) + 1)),
        summed + whole,
    )


def _owned(blocks: Sequence[CountedBlock], devices: int, sharded: bool) -> list[list[CountedBlock]]:
    names = [b.block.map.weight if sharded else b.block.map.key for b in blocks]
    work = dict.fromkeys(names, 0)
    for name, b in zip(names, blocks, strict=True):
        work[name] += cost(b.block.moments)
    owners = deal(work, devices)
    found: dict[int, list[CountedBlock]] = {}
    for name, b in zip(names, blocks, strict=True):
        found.setdefault(owners[name], []).append(b)
    return list(found.values())


def _shards(shapes: Iterable[torch.Size], parts: int) -> int:
    """Bytes of the first of so many parts of each: rows are divided."""
    return ITEM * sum(-(-shape[0] // parts) * prod(shape[1:]) for shape in shapes)


# networks, and what the page shows of them


class LlamaLayer(nn.Module):
    """Attention and a gated MLP. Positions turn queries and keys: that takes no parameter and no product, and is left out."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads, linear = heads, partial(nn.Linear, bias=False)
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_attention(x)
        x = x + self.out(attend(self.query(y), self.key(y), self.value(y), self.heads, causal=True))
        y = self.norm_mlp(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


def llama(words: int = 32_000, width: int = 4096, inner: int = 11_008, heads: int = 32, layers: int = 32) -> nn.Module:
    """The shapes of LLaMA, Touvron et al. 2023; by default of the one with seven billion parameters."""
    blocks = [LlamaLayer(width, inner, heads) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.RMSNorm(width), nn.Linear(width, words, bias=False))


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    example: tuple[int, ...]
    """Tokens in a row, or the sides of a picture."""
    batch: int
    """Examples of a training step, on all devices."""
    counted: int = 1
    """Of which so many are looked at together; a sequence of 512 tokens is as many places as a refit looks at."""
    places: tuple[tuple[int, bool], ...] = ()
    """Numbers of devices in the table, and whether sharded."""


NETWORKS = {
    "GPT": Network(lambda: GPT(65, 256, 128, 4, 5), (256,), 64, 64, ((1, False),)),
    "ResNet-50": Network(ResNet50, (3, 224, 224), 256, 32, ((8, False),)),
    "GPT-2": Network(lambda: GPT(50_257, 1024, 768, 12, 12), (1024,), 512, 1, ((8, False),)),
    "GPT-2 XL": Network(lambda: GPT(50_257, 1024, 1600, 25, 48), (1024,), 512, 1, ((64, False), (64, True))),
    "LLaMA": Network(llama, (2048,), 2048, 1, ((64, False), (64, True), (1024, True))),
}


@cache
def counted(name: str) -> Census:
    network = NETWORKS[name]
    with torch.device("meta"):
        model, inputs = network.build(), torch.empty(network.counted, *network.example)
    return census(model, inputs.long() if len(network.example) == 1 else inputs)


def at(name: str, devices: int, sharded: bool) -> Cost:
    """Of a network, its batch divided among the devices."""
    network = NETWORKS[name]
    return count(counted(name), devices, sharded, network.batch // devices // network.counted)


def table() -> str:
    """What is written into the page; bytes with two digits."""
    header = ["network", "parameters", "batch", "devices", "`U m`", "refit", "average"]
    rows = [[*header, "held", "in a refit", "sent: step", "refit"]]
    for name, network in NETWORKS.items():
        size = sum(shape.numel() for shape in counted(name).parameters)
        batch = f"{network.batch}" + (f"×{network.example[0]}" if len(network.example) == 1 else "")
        for devices, sharded in network.places:
            found = at(name, devices, sharded)
            way = "" if devices == 1 else " FSDP2" if sharded else " DDP"
            shares = [f"{100 * x / found.training:.2g}%" for x in (found.apply, found.refit)]
            sizes = []
            for x in (found.held, found.in_refit, found.step_bytes, found.refit_bytes):
                unit, letter = (1e9, "G") if x >= 1e9 else (1e6, "M")
                sizes.append(f"{float(f'{x / unit:.2g}'):g} {letter}B" if x else "–")
            row = [name, f"{size / 1e6:,.0f} M", batch]
            rows.append([*row, f"{devices}{way}", *shares, f"{100 * found.share:.2g}%", *sizes])
    return markdown_table(rows)


LINES = {"GPT-2": (GREEN, False), "GPT-2 XL": (ORANGE, True), "LLaMA": (BLUE, True)}


def draw(path: Path) -> None:
    """The share of operations, and memory, by the number of devices."""
    with drawing(path, 10, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        for name, (colour, sharded) in LINES.items():
            for way in (False, True) if sharded else (False,):
                devices = [2**k for k in range(way, 12) if 2**k <= NETWORKS[name].batch]
                found = [at(name, each, way) for each in devices]
                how: dict[str, Any] = {"color": colour, "linestyle": "-" if way else "--"}
                label = f"{name}, {'FSDP2' if way else 'DDP'}"
                left.plot(devices, [100 * each.share for each in found], label=label, **how)
                right.plot(devices, [each.held / 1e9 for each in found], **how)
                if way or not sharded:
                    peak = [(each.held + each.in_refit) / 1e9 for each in found]
                    right.plot(devices, peak, color=colour, linestyle=":")
        left.set_ylabel("operations of LLQR per step,\n% of training's")
        right.set_ylabel("memory of LLQR per device, GB\n(dotted: in a refit)")
        for axes in (left, right):
            axes.set_xscale("log", base=4)
            axes.set(yscale="log", xlabel="devices that share the batch")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
        left.legend()
