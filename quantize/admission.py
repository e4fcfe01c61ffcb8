"""Who may be in memory: pieces that are computed or wait to be written, by their number and, where the user has set a
limit, by their bytes.

No run can wait for ever. (1) Whoever holds a place or bytes never waits for more of either: `in_order` then hands out
what it has, and that needs nothing but its own result. (2) A computation waits neither for a place nor for bytes. So
what is held is given back in the end. (3) Who holds nothing waits in a queue, first come, first served, and nobody
passes it: small pieces cannot starve a large one. (4) No piece takes more than the limit, which is seen to before the
run (quantize/max_memory.py): when everything has been given back, the first of the queue gets in.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Semaphore
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True, slots=True, order=True)
class Need:
    """Bytes of a piece at most: `work` until it is computed, `result` until it is written."""

    work: int
    result: int

    @property
    def total(self) -> int:
        return self.work + self.result


class Share:
    """What one piece holds of a limit. Safe to call from threads, and more than once."""

    def __init__(self, need: Need, give: Callable[[int], None]) -> None:
        self._work, self._result, self._give = need.work, need.result, give

    def computed(self) -> None:
        work, self._work = self._work, 0
        self._give(work)

    def close(self) -> None:
        self.computed()
        result, self._result = self._result, 0
        self._give(result)


class Limit(Protocol[T_contra]):
    def take(self, item: T_contra, *, wait: bool) -> Share | None:
        """None where it does not fit now, unless `wait`."""


class Unlimited:
    """Places alone bound the memory."""

    def take(self, item: object, *, wait: bool) -> Share | None:
        return Share(Need(0, 0), lambda nbytes: None)


UNLIMITED = Unlimited()


@dataclass(slots=True)
class ByteLimit(Generic[T]):
    """limit: bytes of all pieces in flight at most. need: of a piece. on_left: told what the pieces leave of the limit,
    whenever that changes: unused memory that is kept for later pieces may take no more."""

    limit: int
    need: Callable[[T], Need]
    on_left: Callable[[int], None] = lambda left: None
    _taken: int = field(default=0, init=False)
    _queue: deque[object] = field(default_factory=deque, init=False)
    _change: Condition = field(default_factory=Condition, init=False)

    def take(self, item: T, *, wait: bool) -> Share | None:
        need, me = self.need(item), object()
        assert need.total <= self.limit, (need, self.limit)
        with self._change:
            if not wait and (self._queue or self._taken + need.total > self.limit):
                return None
            self._queue.append(me)
            while self._queue[0] is not me or self._taken + need.total > self.limit:
                self._change.wait()
            self._queue.popleft()
            self._add(need.total)
        return Share(need, self._give)

    def _give(self, nbytes: int) -> None:
        if nbytes:
            with self._change:
                self._add(-nbytes)

    def _add(self, nbytes: int) -> None:
        self._taken += nbytes
        self.on_left(self.limit - self._taken)
        self._change.notify_all()


def enter(item: T, slots: Semaphore, limit: Limit[T], *, wait: bool) -> Share | None:
    """One of the `slots` and a share of the limit; neither, and None, where one is not free and nobody is to wait."""
    if not slots.acquire(blocking=wait):
        return None
    share = limit.take(item, wait=wait)
    if share is None:
        slots.release()
    return share
