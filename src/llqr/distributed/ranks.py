"""Ranks: the processes that find U together, and the few things that they tell each other.

Everything that goes between ranks goes through here: numbers, tensors from an owner to all, and sums over all ranks. Each is,
or is preceded by, a *pulse*: a few numbers that are summed up, and one that says how a rank is. A rank that raises inside
`together()` says so in the others' next pulse, and all of them raise, where they would have waited forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.errors import NonFiniteError, RankError

LIMIT = 2**26
"""Bytes of a bucket, unless one tensor alone is larger."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype and device, and a copy of their numbers in one piece."""

    tensors: list[Tensor]
    flat: Tensor

    def parts(self) -> list[Tensor]:
        """What the bucket now has for each tensor."""
        pieces = torch.split(self.flat, [tensor.numel() for tensor in self.tensors])
        return [piece.view(tensor.shape) for tensor, piece in zip(self.tensors, pieces, strict=True)]


def buckets(tensors: Sequence[Tensor]) -> Iterator[Bucket]:
    """The tensors in buckets, in an order that depends on their dtypes and sizes alone."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        held: list[Tensor] = []
        size = 0
        for tensor in kind:
            length = tensor.numel() * tensor.element_size()
            if held and size + length > LIMIT:
                yield _bucket(held)
                held, size = [], 0
            held.append(tensor)
            size += length
        yield _bucket(held)


def _bucket(tensors: list[Tensor]) -> Bucket:
    return Bucket(tensors, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))


Sent = TypeVar("Sent")
WELL, NOT_FINITE, FAILED = 0.0, 1.0, 2.0**20
"""How a rank is; the sum over the ranks tells the gravest."""
WIDTH = 7
"""Numbers that a pulse can carry."""
UNDER_WAY = 8
"""Buckets that are sent at a time, which bounds the memory that they take."""


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

        def broadcast(flat: Tensor, owner: int) -> Any:
            return dist.broadcast(flat, dist.get_global_rank(self.group, owner), self.group, async_op=True)

        for owner, bucket in self._sent(held, broadcast):
            if owner != self.rank:
                for tensor, part in zip(bucket.tensors, bucket.parts(), strict=True):
                    tensor.copy_(part)

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over the ranks, on all of them."""
        sums: dict[int, Tensor] = {}
        for _, bucket in self._sent(
            {0: tensors}, lambda flat, _: dist.all_reduce(flat, dist.ReduceOp.SUM, self.group, async_op=True)
        ):
            sums |= {id(tensor): part for tensor, part in zip(bucket.tensors, bucket.parts(), strict=True)}
        return [sums.get(id(tensor), tensor) for tensor in tensors]  # empty ones aren't sent

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

    def _sent(
        self, held: Mapping[int, Sequence[Tensor]], begin: Callable[[Tensor, int], Any]
    ) -> Iterator[tuple[int, Bucket]]:
        """Owners and their buckets, when they have arrived; a few are under way at a time."""
        self.check()
        under_way: deque[tuple[int, Bucket, Any]] = deque()

        def arrived() -> tuple[int, Bucket]:
            owner, bucket, work = under_way.popleft()
            self.send(work.wait)
            return owner, bucket

        for owner in sorted(held):
            for bucket in buckets(held[owner]):
                under_way.append((owner, bucket, self.send(partial(begin, bucket.flat, owner))))
                if len(under_way) == UNDER_WAY:
                    yield arrived()
        while under_way:
            yield arrived()

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
            raise self._settled(
                RankError(
                    f"rank {self.rank} lost the others: one has died, or didn't come within the process group's timeout "
                    f"(init_process_group(timeout=...)). Start again from the last checkpoint. torch says: {error}"
                )
            ) from error
