"""What an optimizer tells of itself: what its refits came to, and how each parameter is stepped, along U m or by the base."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from llqr.checks import check_amount, check_count
from llqr.curvature.linear_maps import Block
from llqr.curvature.statistics import UNLIKE_USES
from llqr.curvature.uses import SPARSE_DATA
from llqr.errors import LLQRError
from llqr.structures import EigenKronecker, Kronecker
from llqr.structures.base import LONG_SIDE
from llqr.structures.stacks import NAMES


@dataclass
class Stats:
    """Counts since the first step; they are saved and loaded with the optimizer."""

    refits: int = 0
    """Refits whose U was taken."""
    rejected: int = 0
    """Refits whose U wasn't, because something wasn't finite. The U from before stayed."""
    nonfinite: int = 0
    """Blocks, or parameters where there is no U yet, whose step the base took as it would have alone, because something wasn't
    finite; summed over the steps."""
    objective_before: float | None = None
    """J of the last fit at its start, and"""
    objective_after: float | None = None
    """at its end."""
    seconds: float = 0.0
    """Time spent in refits."""
    memory: int = 0
    """Bytes of U."""

    @classmethod
    def of(cls, saved: Any) -> Stats:
        """From a state, which may be of another version; an error where it has something else than numbers."""
        if not isinstance(saved, Mapping):
            raise LLQRError("the state's 'stats' aren't a mapping of numbers")
        found = {f.name: saved[f.name] for f in fields(cls) if f.name in saved}
        for name, value in found.items():
            what = f"{name!r} in the state's 'stats'"
            if not name.startswith("objective"):
                (check_amount if name == "seconds" else check_count)(what, value)
            elif value is not None and not isinstance(value, float):  # of a fit that failed it may be anything
                raise LLQRError(f"{what} isn't a number or None")
        return cls(**found)

    def in_words(self) -> str:
        left = f", {self.nonfinite} steps of blocks left to the base" if self.nonfinite else ""
        refits = f"{self.refits} refits ({self.seconds:.1f} s), {self.rejected} rejected"
        return f"{refits}{left}, {self.memory / 2**20:.1f} MiB of curvature and U"

    def as_logs(self, prefix: str = "llqr/") -> dict[str, float]:
        """What a logger takes: numbers by name, without those that there aren't yet."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items() if value is not None}


IN_WORDS = {
    **dict.fromkeys(("Embedding", "EmbeddingBag"), "an embedding"),
    "NativeLayerNorm": "a layer norm",
    "NativeGroupNorm": "a group norm",
    **dict.fromkeys(("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"), "a batch norm"),
    "FusedRmsNorm": "an RMS norm",
    "WeightNormInterface": "a weight norm",
    "PreluKernel": "a PReLU",
    "Add": "an addition",
    "Sub": "a subtraction",
    "Mul": "a product number by number",
    "Div": "a division",
    "Pow": "a power",
    **dict.fromkeys(("Addmm", "Mm", "Bmm", "Baddbmm", "Linear"), "a matrix product, not as one matrix or bias"),
    **dict.fromkeys(("Cat", "Stack"), "a concatenation"),
    **dict.fromkeys(("Index", "IndexSelect"), "a choice by index"),
    SPARSE_DATA: "a product with data that are mostly zeros",
    UNLIKE_USES: "several products, as matrices that don't go together",
}
"""What autograd's nodes are called here; the others go by their own names."""


def assignments(
    parameters: Mapping[str, Tensor], blocks: Iterable[Block], others: Mapping[str, str], otherwise: str
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
            told[name] = otherwise
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
    for side in block.map.joined[1:]:
        if side > block.structure.max_dim:
            yield f"the side of {side:,} by its diagonal"
        elif side > LONG_SIDE and isinstance(block.structure, Kronecker):
            yield f"the side of {side:,} by its leading eigenvectors"
