"""How each parameter is stepped, in words: along U m, or by the base and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import Tensor

from llqr.linear_maps import SPARSE_DATA
from llqr.statistics import Block
from llqr.structures import EigenKronecker, Kronecker
from llqr.structures.base import LONG_SIDE
from llqr.structures.stacks import NAMES

IN_WORDS = {
    "Embedding": "an embedding",
    "EmbeddingBag": "an embedding",
    "NativeLayerNorm": "a layer norm",
    "NativeGroupNorm": "a group norm",
    "NativeBatchNorm": "a batch norm",
    "CudnnBatchNorm": "a batch norm",
    "MiopenBatchNorm": "a batch norm",
    "FusedRmsNorm": "an RMS norm",
    "WeightNormInterface": "a weight norm",
    "PreluKernel": "a PReLU",
    "Add": "an addition",
    "Sub": "a subtraction",
    "Mul": "a product number by number",
    "Div": "a division",
    "Pow": "a power",
    **dict.fromkeys(("Addmm", "Mm", "Bmm", "Baddbmm", "Linear"), "a matrix product, not as one matrix or bias"),
    "Cat": "a concatenation",
    "Stack": "a concatenation",
    "Index": "a choice by index",
    "IndexSelect": "a choice by index",
    SPARSE_DATA: "a product with data that are mostly zeros",
}
"""What autograd's nodes are called here; the others go by their own names."""


def assignments(
    parameters: Mapping[str, Tensor], blocks: Iterable[Block], others: Mapping[str, str], otherwise: Mapping[str, str]
) -> dict[str, str]:
    """By parameter. `others`: the nodes beside linear maps that use them; `otherwise`: why the rest has no block."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        for name in block.map.members:
            found.setdefault(name, []).append(block)
    told = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            told[name] = "frozen"
        elif name in found:
            told[name] = _along(found[name], name)
        elif name in others:
            kind = re.sub(r"Backward\d*$", "", others[name])
            told[name] = f"by the base: used by {IN_WORDS.get(kind, kind)}"
        else:
            told[name] = otherwise[name]
    return told


def _along(blocks: list[Block], name: str) -> str:
    map_, structure = blocks[0].map, blocks[0].structure
    if name == map_.bias:
        return f"along U m, with {map_.weight}"
    counts: Counter[str] = Counter()
    for block in blocks:
        g, r, c = block.map.joined
        counts[f"{r} × {c}"] += g
    sizes = ", ".join(size if count == 1 else f"{count} of {size}" for size, count in counts.items())
    notes = dict.fromkeys(note for block in blocks for note in _unusual(block))
    named = next((short for short, make in NAMES.items() if make() == structure), repr(structure))
    return "; ".join([f"along U m, {named} of {sizes}", *notes])


def _unusual(block: Block) -> Iterable[str]:
    """The sides that aren't inverted as whole matrices."""
    if not isinstance(block.structure, (Kronecker, EigenKronecker)):
        return
    _, *sides = block.map.joined
    if not block.structure.joins_bias(block.map.kernel):
        sides = [sides[0], sides[1] // block.map.kernel, block.map.kernel]
    for side in sides:
        if side > block.structure.max_dim:
            yield f"the side of {side:,} by its diagonal"
        elif side > LONG_SIDE and isinstance(block.structure, Kronecker):
            yield f"the side of {side:,} by its leading eigenvectors"
