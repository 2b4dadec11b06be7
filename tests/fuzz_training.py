"""Drawn trainings, one a seed: saved and loaded, killed and resumed, on ranks with DDP and with FSDP2.

    python tests/fuzz_training.py save --seeds 0-499
    python tests/fuzz_training.py kills --seeds 0-499
    python tests/fuzz_training.py ddp --seeds 0-199
    python tests/fuzz_training.py fsdp --seeds 0-99

Each is held against the same training without a stop, in one process. With `--out FILE` finished seeds are kept, one JSON line
each, and not run again. The exit code tells whether all were equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

Line = dict[str, Any]
"""Of one seed: `seed`, `result` (equal, different or error), `wrong`, `drawn`, and `count`, of refits or signals."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["save", "kills", "ddp", "fsdp"])
    parser.add_argument("--seeds", default="0-9", help="the first and the last, as 0-499")
    parser.add_argument("--out", type=Path, help="where finished seeds are kept")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    torch.set_num_threads(1)
    failed = fuzz(options.kind, range(int(first), int(last or first) + 1), options.out)
    sys.exit(1 if failed else 0)


def fuzz(kind: str, seeds: range, out: Path | None = None) -> list[Line]:
    """Run the seeds that aren't known yet; print how it goes, the ones that fail, and a table. Returns those."""
    known = _read(out)
    lines = [known[seed] for seed in seeds if seed in known]
    begun = told = time.monotonic()
    for line in lines_of(kind, [seed for seed in seeds if seed not in known]):
        lines.append(line)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if line["result"] != "equal":
            _show(line)
        if time.monotonic() - told > 20:
            told = time.monotonic()
            print(f"{kind}: {len(lines)} of {len(seeds)}, {told - begun:.0f} s", flush=True)
    failed = [line for line in lines if line["result"] != "equal"]
    if failed:
        print(f"failed: seeds {' '.join(str(line['seed']) for line in failed)}")
    counts = Counter(line["result"] for line in lines)
    what = "signals" if kind == "kills" else "refits"
    print(f"{'kind':8}{'runs':>8}{'equal':>8}{'different':>11}{'error':>8}{what:>9}{'seconds':>9}")
    numbers = f"{len(lines):8}{counts['equal']:8}{counts['different']:11}{counts['error']:8}"
    print(f"{kind:8}{numbers}{sum(line['count'] for line in lines):9}{time.monotonic() - begun:9.0f}", flush=True)
    return failed


def lines_of(kind: str, seeds: list[int]) -> Iterator[Line]:
    """What became of each seed."""
    if kind == "save":
        from fuzz_saving import save

        yield from (tried(save, seed) for seed in seeds)
    elif kind == "kills":
        from fuzz_kills import kill

        with TemporaryDirectory() as folder:
            os.environ["HF_HUB_OFFLINE"] = "1"
            yield from (tried(kill, seed, Path(folder)) for seed in seeds)
    else:
        from fuzz_ranks import drawn_for, on_ranks

        yield from on_ranks(kind, [drawn_for(kind, seed) for seed in seeds])


def tried(run: Callable[..., tuple[list[str], str, int]], seed: int, *more: Any) -> Line:
    try:
        wrong, drawn, count = run(seed, *more)
    except Exception:
        return {"seed": seed, "result": "error", "wrong": [traceback.format_exc()], "drawn": "", "count": 0}
    result = "different" if wrong else "equal"
    return {"seed": seed, "result": result, "wrong": wrong, "drawn": drawn, "count": count}


def _show(line: Line) -> None:
    print(f"seed {line['seed']} {line['result']}: {'; '.join(line['wrong'][:4])}\n  {line['drawn']}", flush=True)


def _read(out: Path | None) -> dict[int, Line]:
    if out is None or not out.exists():
        return {}
    whole, end, _ = out.read_text(encoding="utf-8").rpartition("\n")
    out.write_text(whole + end, encoding="utf-8")  # without a line that was begun
    return {line["seed"]: line for line in map(json.loads, whole.splitlines())}


if __name__ == "__main__":
    main()
