"""A fuzz of the curvature engine: one drawn network a seed, whose gradient and products are exact or refused.

    python tests/fuzz_networks.py --seeds 0-9999 [--json counts.json]

Every seed draws a network, a batch, a loss, a divergence, and whether the batch is cut. `QuadraticModel` is held against the
truth of `fuzz_truth` to 1e-9 (1e-4 in float32), and has to leave everything as it was. An error of the library's own counts as
a refusal where the draw has a reason for it. What is wrong, or raises anything else, is printed with its seed, and makes
the exit code 1.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fuzz_blocks import Draw, written_out
from fuzz_cases import Case, made, streams
from fuzz_truth import Truth, flat
from llqr import QuadraticModel
from llqr.errors import LLQRError
from llqr_lab.results import provenance, write_json

TOLERANCE = 1e-9
"""Of the product's length; and a thousandth of it of the longest that it could be."""
SINGLE = 1e-4
"""The same, where float32 is in it."""
REFUSALS: dict[str, tuple[set[str], str]] = {
    "refused: draws random numbers in chunks": ({"random"}, "draws random numbers"),
    "refused: batch statistics in chunks": ({"norm"}, "statistics of the batch|more than 1 value per channel"),
    "refused: examples see each other in chunks": ({"batch"}, "other examples of the batch|can't take a part of the batch"),
    "refused: a sum in place of a mean": ({"sum"}, "adds the examples up"),
    "refused: a formula by hand hides (Newton)": ({"hiding"}, "formula written by hand hides"),
    "torch can't: no second derivative of the model (Newton)": (
        {"once", "hiding", "once loss"}, "model or its loss can't be differentiated twice"),
    "torch can't: no products with J": ({"once", "hiding"}, "products with its Jacobian"),
    "torch can't: no second derivative of the loss": ({"once loss"}, "the loss .*can't be differentiated twice"),
}  # fmt: skip
"""What an error may say, and the marks of a draw that are a reason for it."""
UNTRAINABLE = "torch can't: its own backward pass raises the same"


# --- one seed ---


class Wrong(Exception):  # noqa: N818
    """A number that isn't the truth, or something that wasn't left as it was."""


def directions(case: Case, seed: int) -> list[Tensor]:
    """General ones; zero, or along the last parameters alone, before or after."""
    d, generator = Draw(-1 - seed), torch.Generator().manual_seed(seed)
    sizes = [p.numel() for name, p in case.model.named_parameters() if name in case.names]
    general, special = (torch.randn(sum(sizes), dtype=torch.float64, generator=generator) for _ in range(2))
    special[: -sizes[-1]] = 0
    if d.chance(0.3):
        special.zero_()
    return d.one([general], [special, general], [general, special, general])


def answered(case: Case, along: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[float]]:
    """The library's gradient, products and v·Hv."""
    q = QuadraticModel.build(case.model, case.inputs, case.targets, case.loss, case.divergence, **case.options)
    assert list(q.gradient) == case.names, (list(q.gradient), case.names)
    shapes = {name: g.shape for name, g in q.gradient.items()}
    products, bends = [], []
    for v in along:
        parts = v.split([shape.numel() for shape in shapes.values()])
        named = {
            name: part.reshape(shapes[name]).to(q.gradient[name].dtype)
            for name, part in zip(shapes, parts, strict=True)
        }
        products.append(flat(list(q.curvature(named).values())).double())
        bends.append(q.curvature_along(named))
    return flat(list(q.gradient.values())).double(), products, bends


def effective(case: Case) -> nn.Module:
    """The model in the mode that it is asked to be run in."""
    training = case.options.get("training")
    return case.model if training is None else case.model.train(training)


def compare(case: Case, along: Sequence[Tensor], answer: tuple[Tensor, list[Tensor], list[float]], seed: int) -> None:
    """Raise where the answer isn't the truth."""
    streams(seed)
    truth = Truth(effective(case), case.names, case.run, case.plain)
    base = truth.output.detach()
    gradient, products, bends = answer
    rounds = "float32" in case.marks
    rows = float(truth.rows.norm()) if len(truth.rows) else 1.0
    given = case.options.get("gradient")
    close(
        "the gradient", gradient, truth.gradient if given is None else flat(list(given.values())), rows * 1e-3, rounds
    )
    damping = case.options["damping"]
    diagonal = flat(
        [
            torch.full(p.shape, damping[name] if isinstance(damping, dict) else damping, dtype=torch.float64)
            for name, p in case.model.named_parameters()
            if name in case.names
        ]
    )
    for v, product, bend in zip(along, products, bends, strict=True):
        expected = diagonal * v
        for weight, psi in case.terms:
            part = truth.steep(v) if psi is None else truth.curved(lambda x, psi=psi: psi(x, base), v)
            expected = expected + weight * part
        longest = float(truth.gradient.norm() + rows**2) * float(v.norm())
        close("a product", product, expected, longest * 1e-3, rounds)
        close("v·Hv", torch.tensor(bend, dtype=torch.float64), v @ expected, longest * 1e-3 * float(v.norm()), rounds)


def close(what: str, found: Tensor, truth: Tensor, scale: float, rounds: bool) -> None:
    gap, size = float((found - truth).norm()), float(truth.norm())
    if not gap <= (SINGLE if rounds else TOLERANCE) * (size + scale):
        raise Wrong(f"{what} is off by {gap:.3g} of {size:.3g} ({gap / (size or 1):.2g})")


class Held:
    """What a case holds, to see whether it is left as it was."""

    def __init__(self, case: Case) -> None:
        self.case = case
        for parameter in case.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.before = [self._copied(value) for value in self._values()]

    def _values(self) -> list[Any]:
        model = self.case.model
        own = [value for module in model.modules() for value in vars(module).values()]
        return [
            *model.state_dict().values(), *(p.grad for p in model.parameters()), *self.case.given(), self.case.targets,
            torch.get_rng_state(), random.getstate(), str(np.random.get_state()),
            [(module.training, len(module._forward_hooks)) for module in model.modules()],
            [p.requires_grad for p in model.parameters()],
            *(g.get_state() for g in own if isinstance(g, torch.Generator)),
            *(g.getstate() for g in own if isinstance(g, random.Random)),
            *(str(g.bit_generator.state) for g in own if isinstance(g, np.random.Generator)),
        ]  # fmt: skip

    @staticmethod
    def _copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    def check(self) -> None:
        after = self._values()
        for place, (a, b) in enumerate(zip(self.before, after, strict=True)):
            if not (torch.equal(a, b) if isinstance(a, Tensor) else a == b):
                raise Wrong(f"value {place} of {len(after)} wasn't left as it was")


def fails_in_torch(seed: int, error: Exception) -> bool:
    """Whether torch's own backward pass raises the same, of the network as it is or without checkpoints."""
    for context in (nullcontext(), written_out()):
        case = made(seed)
        effective(case)
        streams(seed)
        try:
            with context:
                case.loss(case.run(), case.targets).backward()
        except Exception as own:
            if str(own)[:60] in str(error):
                return True
    return False


def judged(seed: int) -> str:
    """What became of a seed: a kind to be counted; or an exception, for what is wrong or raw."""
    case = made(seed)
    if not case.names:
        return "nothing to step"
    along = directions(case, seed)
    streams(seed)
    held = Held(case.convert(torch.float32) if case.single else case)
    try:
        answer = answered(case, along)
    except Exception as error:
        held.check()
        if fails_in_torch(seed, error):
            return UNTRAINABLE
        if not isinstance(error, LLQRError):
            raise
        return refusal(case, error)
    held.check()
    compare(made(seed), along, answer, seed)
    return f"exact: {type(case.divergence).__name__}, {'in chunks' if 'chunk_size' in case.options else 'whole'}"


def refusal(case: Case, error: LLQRError) -> str:
    for kind, (marks, said) in REFUSALS.items():
        if re.search(said, str(error)):
            if not marks & case.marks or ("chunks" in kind and "chunk_size" not in case.options):
                raise Wrong(f"refused without a reason: {error}") from error
            return kind
    raise Wrong(f"refused without a reason: {error}") from error


# --- many seeds ---


def seeds_of(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seeds_of, default=range(1000), help="from-to, both included; or one")
    parser.add_argument("--json", type=Path, help="where the counts go")
    given = parser.parse_args(arguments)
    counts, failures, begun = Counter[str](), [], time.monotonic()
    for done, seed in enumerate(given.seeds, start=1):
        kind = outcome(seed)
        if kind.startswith(("WRONG", "RAW")):
            failures.append(seed)
        counts[kind] += 1
        if done % 500 == 0:
            seconds = time.monotonic() - begun
            print(f"{done} of {len(given.seeds)} networks, {len(failures)} failed, {seconds:.0f} s", flush=True)
    for bad in ("WRONG", "RAW EXCEPTION"):
        counts.setdefault(bad, 0)
    for kind, count in sorted(counts.items()):
        print(f"{count:7d}  {kind}")
    print(f"{len(given.seeds):7d}  networks in {time.monotonic() - begun:.0f} s, torch {torch.__version__}")
    if given.json is not None:
        told = provenance(" ".join(["python", *sys.argv]), given.seeds[0])
        write_json(given.json, {**told, "failed": failures, "counts": dict(sorted(counts.items()))})
    return 1 if failures else 0


def outcome(seed: int) -> str:
    """The kind of a seed; failures are printed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return judged(seed)
    except Exception as error:
        kind = "WRONG" if isinstance(error, Wrong) else "RAW EXCEPTION"
        print(f"\nseed {seed}: {kind}: {type(error).__name__}: {error}\n{made(seed)}\n", flush=True)
        return kind


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
