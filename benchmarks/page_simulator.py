"""Continuous batching over a paged KV cache, with a ledger that knows for every read whether the bytes are right.

Requests arrive, share prefixes, are prefilled here or elsewhere (their KV then lands page by page, steps later), grow
by a token a step, are preempted and computed again, left by their client, or finish. All writes of one step land at its
end, those of a transfer when they arrive; a page with writes under way is freed only when they have landed (the fence
that sglang #24527 and vllm #45357 lacked). Whole pages are shared through a prefix cache that owns its pages, as
SGLang's does; it gives them up, oldest use first, when there is no free page.

The ledger. A token's KV depends on all tokens before it, so a 64-bit number for (prefix, position) stands for its
bytes: two requests have the same number where they have the same prefix, and nowhere else. A read is right if each cell
has the number that its reader expects. A request that read wrong bytes computes wrong KV from then on: what it writes
is marked, and whoever is handed that by the prefix cache reads wrong bytes, too. Beside it every page has a lease, a
number never used twice, new whenever the page is acquired or released. None of this is seen by the checks
(page_guards.py); faults are put in by page_injections.py, and page_faults.py counts.
"""

from collections import OrderedDict, deque
from typing import Protocol

import numpy as np
import numpy.typing as npt
from page_traffic import Held, Ints, Load, Request, Tally, Writes

WRONG = 0x5A5A_5A5A  # xor'ed into the KV of a request that read wrong bytes


class Guard(Protocol):
    """What a mode does at each point. Pages are ids, tags int32; the guard sees nothing of the ledger."""

    def acquire(self, pages: list[int]) -> list[int]: ...

    def release(self, pages: list[int], tags: list[int]) -> list[bool]:
        """False: refused, the page is not the caller's."""

    def hit(self, page: int, tag: int) -> bool:
        """False: the prefix cache's page is not the one it kept."""

    def landed(self, writes: Writes, cells: Ints, known: bool) -> None:
        """known: somebody still counts on these writes, and so can note that they landed."""

    def flags(self, world: "World", batch: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """bool [rows]: requests of the batch to abort."""


class World:
    """The pool, the scheduler and the ledger. Rows are those of the device's tables, which kernels and checks read."""

    def __init__(self, load: Load, guard: Guard, seed: int) -> None:
        self.load, self.guard = load, guard
        self.rng = np.random.default_rng(seed)
        self.now = 0
        self.tally = Tally()
        self.cells: Ints = np.zeros((load.pages, load.page), np.int64)
        self.lease: Ints = np.arange(load.pages, dtype=np.int64)
        self._leases = load.pages
        self.origin: Ints = np.zeros((load.pages, load.page), np.int64)  # the lease that each cell was written under
        self.soiled = np.zeros(load.pages, np.bool_)  # pages that somebody wrote to whose they are not
        self.refs = [0] * load.pages
        self.under_way = [0] * load.pages  # writes that the scheduler knows of
        self.deferred: dict[int, Held] = {}  # freed once nothing is under way
        self.free = deque(range(1, load.pages))
        self.cache: OrderedDict[int, Held] = OrderedDict()
        self.gone: deque[Held] = deque(maxlen=64)  # what holders had, for stale tables
        shape = (load.rows, load.width)
        self.table = np.zeros(shape, np.int32)
        self.tags = np.zeros(shape, np.int32)
        self.leases = np.zeros(shape, np.int64)
        self.expected: Ints = np.zeros((load.rows, load.width * load.page), np.int64)
        self.owner = np.zeros(load.rows, np.int64)
        self.length = np.zeros(load.rows, np.int64)  # tokens that the next step reads
        self.prompt = np.zeros(load.rows, np.int64)
        self.target = np.zeros(load.rows, np.int64)
        self.count = np.zeros(load.rows, np.int64)  # pages
        self.running = np.zeros(load.rows, np.bool_)
        self.wrong = np.zeros(load.rows, np.bool_)
        self.request: list[Request | None] = [None] * load.rows
        self.arriving = np.zeros(load.rows, np.int64)  # tokens of a transfer that have not landed
        self.queue: deque[Request] = deque()
        self.due: dict[int, list[tuple[int, Writes]]] = {}
        self.families: Ints = self._numbers(load.families * load.prompt[1]).reshape(load.families, -1)
        self._number = 0
        self._place = np.arange(load.width * load.page)

    # ---- one step

    def step(self) -> None:
        """Land, schedule, check, read, write."""
        self.begin()
        self.check()
        self.finish()

    def begin(self) -> None:
        """What lands, who leaves, who comes, who grows: the batch is built."""
        self.now += 1
        for row, writes in self.due.pop(self.now, ()):
            self.land(writes, known=row >= 0)
            if row >= 0 and self.request[row] is not None and self.owner[row] == writes.owner[0]:
                self.arriving[row] -= len(writes.page)
                if self.arriving[row] == 0 and not self.running[row]:
                    self.running[row] = True
                    self.length[row] = int(self.prompt[row])
                    self._publish(row, int(self.prompt[row]))
        for row in np.flatnonzero(self.rng.random(self.load.rows) < self.load.left).tolist():
            if self.request[row] is not None:
                self.tally.events["left"] += 1
                self.drop(row)
        self._arrive()
        self._grow()

    def check(self) -> None:
        """The mode's check of the batch; exactly the requests that it names are aborted."""
        flags = self.guard.flags(self, self.running)
        for row in np.flatnonzero(flags).tolist():
            number = int(self.owner[row])
            if not self.touched(row):
                self.tally.false.append(number)
            self.tally.aborted.setdefault(number, self.now)
            self.drop(row)

    def finish(self) -> None:
        """Reads of all rows that run, then their writes; who has all its tokens goes."""
        batch = np.flatnonzero(self.running)
        self.tally.events["reads"] += len(batch)
        for row in batch[self.wrong_reads(batch)].tolist():
            self.wrong[row] = True
            self.tally.victims.setdefault(int(self.owner[row]), self.now)
        fresh = batch[self.length[batch] < self.prompt[batch]]
        for row in fresh.tolist():
            start, end = int(self.length[row]), int(self.prompt[row])
            self.land(self.writes(row, start, end, counted=False))
            self.length[row] = end
            self._publish(row, end)
        going = batch[~np.isin(batch, fresh)]
        if len(going):
            at = self.length[going]
            self.land(self._one_each(going, at))
            self.length[going] += 1
        for row in going[self.length[going] >= self.target[going]].tolist():
            self.tally.events["finished"] += 1
            self._publish(row, int(self.length[row]))
            self.drop(row)

    # ---- the ledger

    def wrong_reads(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """bool [len(rows)]: would a read of these rows now see a byte that is not theirs?"""
        seen = self.cells[self.table[rows]].reshape(len(rows), self.load.width * self.load.page)
        differ = (seen != self.expected[rows]) & (self._place < self.length[rows, None])
        bad: npt.NDArray[np.bool_] = differ.any(1)
        return bad

    def touched(self, row: int) -> bool:
        """Is anything of this row not as it should be: wrong bytes, a page that is not its any more, a page of its that
        somebody else writes to, or one not written since it is its (even if the bytes are right by chance)?"""
        pages, leases = self.table[row, : self.count[row]], self.leases[row, : self.count[row]]
        moved = (self.lease[pages] != leases) | self.soiled[pages]
        unwritten = (self.origin[pages] != leases[:, None]).reshape(-1)[: self.length[row]]
        return bool(moved.any()) or bool(unwritten.any()) or bool(self.wrong_reads(np.array([row]))[0])

    # ---- pages

    def acquire(self, n: int) -> list[Held] | None:
        """n pages from the head of the free list, evicting from the prefix cache; None if there are not so many."""
        while len(self.free) < n:
            key = next((k for k, (page, _, _) in self.cache.items() if self.refs[page] == 1), None)
            if key is None:
                return None
            self.tally.events["evicted"] += 1
            self.let_go([self.cache.pop(key)])
        pages = [self.free.popleft() for _ in range(n)]
        if not n:
            return []
        held: list[Held] = []
        for page, tag in zip(pages, self.guard.acquire(pages), strict=True):
            self.refs[page] = 1
            self.renew(page)
            held.append((page, tag, int(self.lease[page])))  # a page freed twice may be here twice
        return held

    def let_go(self, pages: list[Held], *, fence: bool = True) -> None:
        """One holder less; the last one frees a page, after the writes under way."""
        last: list[Held] = []
        for held in pages:
            page = held[0]
            if self.refs[page] > 1:
                self.refs[page] -= 1
            elif fence and self.under_way[page]:
                self.deferred[page] = held
            else:
                last.append(held)
        self.release(last)

    def release(self, pages: list[Held]) -> None:
        """Back to the free list, but for those that the guard refuses."""
        if not pages:
            return
        answers = self.guard.release([page for page, _, _ in pages], [tag for _, tag, _ in pages])
        for (page, _, _), good in zip(pages, answers, strict=True):
            if good:
                self.refs[page] = 0
                self.renew(page)
                self.free.append(page)
            else:
                self.tally.refused.append("release")

    def renew(self, page: int) -> None:
        self._leases += 1
        self.lease[page] = self._leases
        self.soiled[page] = False

    # ---- writes

    def writes(self, row: int, start: int, end: int, *, counted: bool) -> Writes:
        """The tokens start..end of a row, into its pages."""
        at = np.arange(start, end)
        pages, tags = self.table[row, at // self.load.page], self.tags[row, at // self.load.page]
        values = self.expected[row, start:end] ^ (WRONG if self.wrong[row] else 0)
        slot = at % self.load.page
        return Writes(
            pages.astype(np.int64), slot, values, tags.astype(np.int64), np.full(end - start, self.owner[row]),
            self.leases[row, at // self.load.page], counted,
        )  # fmt: skip

    def land(self, writes: Writes, *, known: bool = True) -> None:
        """The bytes are in the pages now, whoever has these."""
        self.cells[writes.page, writes.slot] = writes.value
        self.origin[writes.page, writes.slot] = writes.lease
        self.soiled[writes.page[self.lease[writes.page] != writes.lease]] = True
        self.guard.landed(writes, self.cells, known)
        if not writes.counted:
            return
        for page in writes.page.tolist():
            self.under_way[page] -= 1
        for page in set(writes.page.tolist()) & self.deferred.keys():
            if not self.under_way[page]:
                self.release([self.deferred.pop(page)])

    def send(self, row: int, writes: Writes, later: int) -> None:
        """Let them land `later` steps from now; row -1: nobody waits for them."""
        if writes.counted:
            for page in writes.page.tolist():
                self.under_way[page] += 1
        self.due.setdefault(self.now + later, []).append((row, writes))

    def _one_each(self, rows: Ints, at: Ints) -> Writes:
        column, slot = at // self.load.page, at % self.load.page
        values = self.expected[rows, at] ^ np.where(self.wrong[rows], WRONG, 0)
        return Writes(
            self.table[rows, column].astype(np.int64), slot, values, self.tags[rows, column].astype(np.int64),
            self.owner[rows], self.leases[rows, column], counted=False,
        )  # fmt: skip

    # ---- requests

    def _numbers(self, n: int) -> Ints:
        return self.rng.integers(1, 2**62, n)

    def _arrive(self) -> None:
        for _ in range(self.rng.poisson(self.load.arrivals)):
            if len(self.queue) < 2 * self.load.rows:
                prompt, output = (int(self.rng.integers(*limits)) for limits in (self.load.prompt, self.load.output))
                expected = self._numbers(prompt + output)
                if self.rng.random() < 0.9:
                    shared = int(self.rng.integers(prompt + 1))
                    expected[:shared] = self.families[self.rng.integers(self.load.families), :shared]
                self._number += 1
                self.queue.append(Request(self._number, expected, prompt))
        for row in (r for r, request in enumerate(self.request) if request is None):
            if not self.queue or not self._admit(row, self.queue[0]):
                break
            self.queue.popleft()

    def _admit(self, row: int, request: Request) -> bool:
        hits = self._hits(request)
        for held in hits:
            self.refs[held[0]] += 1
        own = self.acquire(-(-request.prompt // self.load.page) - len(hits))
        if own is None:
            self.let_go(hits)
            return False
        self.request[row], self.owner[row], request.held = request, request.number, []
        self.expected[row, : len(request.expected)], self.prompt[row] = request.expected, request.prompt
        self.target[row], self.count[row], self.wrong[row] = len(request.expected), 0, False
        self.hold(row, hits + own)
        self.length[row] = start = len(hits) * self.load.page
        self.tally.events["admitted"] += 1
        self.tally.events["pages shared"] += len(hits)
        self.running[row] = self.rng.random() >= self.load.remote
        if not self.running[row]:
            self.arriving[row] = request.prompt - start
            for first in range(start, request.prompt, self.load.page):
                last = min(first + self.load.page, request.prompt)
                later = int(self.rng.integers(*self.load.transfer))
                self.send(row, self.writes(row, first, last, counted=True), later)
        return True

    def hold(self, row: int, pages: list[Held]) -> None:
        """Pages more for a row, in the scheduler's list and the device's table."""
        request = self.request[row]
        assert request is not None, row
        for page in pages:
            at = int(self.count[row])
            self.table[row, at], self.tags[row, at], self.leases[row, at] = page
            self.count[row] += 1
            request.held.append(page)

    def _hits(self, request: Request) -> list[Held]:
        """Whole pages of its prompt that the prefix cache has; one token at least is left to compute."""
        found: list[Held] = []
        size = self.load.page
        for end in range(size, request.prompt, size):
            key = int(request.expected[end - 1])
            if key not in self.cache:
                break
            if not self.guard.hit(*self.cache[key][:2]):
                self.tally.refused.append("hit")
                del self.cache[key]
                break
            self.cache.move_to_end(key)
            found.append(self.cache[key])
        return found

    def _publish(self, row: int, tokens: int) -> None:
        """Its whole pages go to the prefix cache under what its tokens are, right KV or not."""
        request = self.request[row]
        assert request is not None, row
        for i in range(min(tokens // self.load.page, len(request.held))):
            key = int(self.expected[row, (i + 1) * self.load.page - 1])
            if key not in self.cache:
                self.cache[key] = request.held[i]
                self.refs[request.held[i][0]] += 1

    def _grow(self) -> None:
        """A page for each row whose next token begins one; the youngest gives way if there is none."""
        needy = self.running & (self.length // self.load.page >= self.count) & (self.length < self.target)
        rows = np.flatnonzero(needy).tolist()
        if len(rows) > 1 and (more := self.acquire(len(rows))) is not None:
            for row, page in zip(rows, more, strict=True):
                self.hold(row, [page])
            return
        for row in rows:
            while self.running[row]:
                more = self.acquire(1)
                if more is not None:
                    self.hold(row, more)
                    break
                self.preempt(int(np.argmax(np.where(self.running, self.owner, -1))))

    def preempt(self, row: int) -> None:
        """Its pages go; it waits at the head of the queue and computes its tokens so far again, as a prompt."""
        request = self.request[row]
        assert request is not None, row
        request.prompt = max(request.prompt, int(self.length[row]))
        self.tally.events["preempted"] += 1
        self.drop(row)
        self.queue.appendleft(request)

    def drop(self, row: int, *, fence: bool = True) -> None:
        """The row is empty; its request's pages have a holder less."""
        request = self.request[row]
        assert request is not None, row
        self.request[row] = None
        self.running[row] = False
        self.length[row] = self.count[row] = self.owner[row] = self.arriving[row] = 0
        self.gone.extend(request.held)
        self.let_go(request.held, fence=fence)
        request.held = []
