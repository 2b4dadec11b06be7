"""Ranks: the processes that find U together, and the few things that they tell each other.

Everything that goes between ranks goes through here: numbers, tensors from an owner to all, and sums over all ranks. Each is,
or is preceded by, a *pulse*: a few numbers that are summed up, and one that says how a rank is. A rank that raises inside
`together()` says so in the others' next pulse, and all of them raise, where they would have waited forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.errors import NonFiniteError, RankError

LIMIT = 2**26
"""Bytes of a bucket, unless one tensor alone is larger."""


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors by dtype and device, as many at a time as `LIMIT` allows; empty ones are left out."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            held = kinds.setdefault((tensor.dtype, tensor.device), [])
            if held and sum(t.nbytes for t in held) + tensor.nbytes > LIMIT:
                yield list(held)
                held.clear()
            held.append(tensor)
    yield from kinds.values()


Sent = TypeVar("Sent")
WELL, NOT_FINITE, FAILED = 0.0, 1.0, 2.0**20
"""How a rank is; the sum over the ranks tells the gravest."""
WIDTH = 7
"""Numbers that a pulse can carry."""


class Ranks:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._guarded = False
        self._known: BaseException | None = None

    # --- numbers ---

    def sums(self, *values: float) -> list[float]:
        return self._pulse(values)

    def agree(self, what: str, value: object) -> None:
        """Raise on all ranks unless all have the same value, by its repr."""
        if not self.same(value):
            raise self._settled(RankError(f"the ranks don't have the same {what}; rank {self.rank} has {value!r:.500}"))

    def same(self, value: object) -> bool:
        """Whether all ranks have the same value, by its repr."""
        self.check()
        digest = int.from_bytes(sha256(repr(value).encode()).digest()[:6], "big")  # exact in a double
        least, most = self._reduced([digest, -digest], dist.ReduceOp.MIN)
        return least == -most

    def gather(self, value: Sent) -> list[Sent]:
        """What every rank has, in their order: small things that can be pickled."""
        self.check()
        values: list[Sent] = [value] * self.size
        self.send(lambda: dist.all_gather_object(values, value, self.group))
        return values

    def decide(self, what: str, ask: Callable[[], bool]) -> bool:
        """What every rank answers; raises on all of them where answers differ, or one has none."""
        with self.together():
            answer = ask()
            (yes,) = self.sums(answer)
            if yes not in (0, self.size):
                raise self._settled(RankError(f"the ranks don't have the same {what}; rank {self.rank} has {answer!r}"))
        return answer

    def _reduced(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.send(lambda: dist.all_reduce(numbers, op, self.group))
        return list(map(float, numbers.tolist()))

    # --- tensors ---

    def share(self, held: Mapping[int, Sequence[Tensor]]) -> None:
        """From owners to all: the tensors under a rank are overwritten by what they are on that rank."""
        self.check()
        for owner in sorted(held):
            source = dist.get_global_rank(self.group, owner)
            for tensor, part in self._sent(held[owner], partial(dist.broadcast, src=source, group=self.group)):
                if owner != self.rank:
                    tensor.copy_(part)

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over the ranks, on all of them."""
        self.check()
        sent = self._sent(tensors, partial(dist.all_reduce, op=dist.ReduceOp.SUM, group=self.group))
        sums = {id(tensor): part for tensor, part in sent}
        return [sums.get(id(tensor), tensor) for tensor in tensors]  # empty ones aren't sent

    def _sent(self, tensors: Sequence[Tensor], send: Callable[[Tensor], Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor, with what has become of a copy of it; a bucket of them is sent in one piece."""
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            self.send(partial(send, flat))
            for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                yield tensor, part.view(tensor.shape)

    def check(self) -> None:
        """Hear how the others are, before a message that a rank which has failed won't take part in."""
        if self._guarded:
            self._pulse()

    def swap(self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]]) -> None:
        """From each to each: `outgoing[i]` goes to rank i, and what comes from rank i is written to `incoming[i]`.

        All the tensors are of one dtype, and on one device.
        """
        self.check()
        sent, got = ([sum(t.numel() for t in tensors) for tensors in side] for side in (outgoing, incoming))
        like = next((t for side in (outgoing, incoming) for tensors in side for t in tensors), None)
        empty = torch.empty(0, device=self.device) if like is None else like.new_empty(0)
        flat = torch.cat([empty, *(t.detach().reshape(-1) for tensors in outgoing for t in tensors)])
        received = empty.new_empty(sum(got))
        self.send(lambda: dist.all_to_all_single(received, flat, got, sent, self.group))
        targets = [tensor for tensors in incoming for tensor in tensors]
        for tensor, part in zip(targets, torch.split(received, [t.numel() for t in targets]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    # --- failing together ---

    @contextmanager
    def together(self) -> Iterator[None]:
        """What one rank raises in here, all ranks raise: the error itself there, a `RankError` that tells of it elsewhere.

        A `NonFiniteError` stays one everywhere, so that all ranks reject a fit.
        """
        outer, self._guarded = self._guarded, True
        try:
            yield
            self._pulse()
        except Exception as error:
            if error is not self._known:
                self._pulse(error=error)
            raise
        finally:
            self._guarded = outer
            if not outer:
                self._known = None  # it holds the frames that it came through

    def _pulse(self, values: Sequence[float] = (), error: Exception | None = None) -> list[float]:
        """The sums of a few numbers; always a message of the same length, so that a rank that fails needn't know which it is.

        Its first number says how the ranks are.
        """
        state = WELL if error is None else NOT_FINITE if isinstance(error, NonFiniteError) else FAILED
        message = [state, *values, *[0.0] * (WIDTH - len(values))]
        health, *totals = self._reduced(message, dist.ReduceOp.SUM)
        if health == WELL or not self._guarded:
            return totals[: len(values)]
        gravest = FAILED if health >= FAILED else NOT_FINITE
        own = f"{type(error).__name__}: {error}" if state == gravest else None
        words: list[str | None] = [None] * self.size
        self.send(lambda: dist.all_gather_object(words, own, self.group))
        if error is not None and state == gravest:
            self._settled(error)
            raise error
        rank, word = next((rank, word) for rank, word in enumerate(words) if word is not None)
        kind = NonFiniteError if gravest == NOT_FINITE else RankError
        raise self._settled(kind(f"on rank {rank}: {word}")) from error

    def _settled(self, error: Exception) -> Exception:
        """All ranks know of it: `together` has nothing to say."""
        self._known = error
        return error

    def send(self, call: Callable[[], Sent]) -> Sent:
        """A call to torch.distributed; its errors say what they mean."""
        try:
            return call()
        except RuntimeError as error:
            lost = f"rank {self.rank} lost the others: one has died, or didn't come within init_process_group's timeout"
            raise self._settled(RankError(f"{lost}. Start again from the last checkpoint ({error})")) from error
