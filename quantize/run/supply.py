"""Disk space within a limit: source files from the Hub ahead of the cores, and outputs until they are on the Hub.

Shards are served in the plan's order. Before a shard begins, room for its source files, and for itself where outputs
leave the disk, is taken; so of the shards that have their room each can be finished, and one that waits is waited for
by nobody. A source file that a later shard needs stays as long as there is room for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition, Event, Thread

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.hub.mirror import Mirror
from kizami.formats.index import INDEX_NAME
from kizami.formats.reader import TensorReader
from kizami.formats.side_files import find_side_files
from kizami.quantize.manifest import CARD, CONFIG
from kizami.quantize.plan import Shard
from kizami.quantize.threads import Stopped

FETCHERS = 4  # downloads at once; each of them is of one file
BLOCK = 4096  # of a file system: what a file takes is rounded up
NOTES = 3 * BLOCK  # beside each file: huggingface_hub's record and lock of the download, and our line of its contents
ROOM = 1 << 16  # folders, journal, locks
LOOK = 0.2  # seconds; a signal sets `stop` and wakes nobody


def on_disk(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def source_files(shard: Shard, mirror: Mirror | None) -> frozenset[str]:
    """The weight files that must come for it: none of a source that is on the disk."""
    names = (info.file for step in shard.steps for info in step.sources if info.file)
    return frozenset(names if mirror is not None else ())


@dataclass(slots=True)
class _File:
    """users: shards that have their room and are not finished. later: shards that come to it."""

    nbytes: int
    users: int = 0
    later: int = 0
    here: bool = False
    asked: bool = False


@dataclass(slots=True)
class Supply:
    """limit: bytes on the disk at most, side files and headers included. mirror: None for a source that is on the disk
    and stays there. outputs: whether finished shards count until `gone` says that they are; `kept`: bytes of those that
    an earlier run finished, by number. A context manager; `todo` are served in their order. on_short: somebody waits
    for room."""

    mirror: Mirror | None
    checkpoint: Checkpoint
    todo: Sequence[Shard]
    reader: TensorReader
    stop: Event
    limit: int
    outputs: bool = False
    kept: Mapping[int, int] = field(default_factory=dict)
    on_short: Callable[[], None] = lambda: None
    short: bool = False
    _files: dict[str, _File] = field(default_factory=dict)
    _room: dict[int, int] = field(default_factory=dict)
    _taken: int = 0
    _change: Condition = field(default_factory=Condition)
    _wanted: "SimpleQueue[str | None]" = field(default_factory=SimpleQueue)
    _error: BaseException | None = None

    def __post_init__(self) -> None:
        headers = self.checkpoint.headers
        for shard in self.todo:
            for name in source_files(shard, self.mirror):
                self._files.setdefault(name, _File(on_disk(headers[name].file_size))).later += 1
        check_limit(self.limit, self.todo, self.checkpoint, self.mirror, outputs=self.outputs)
        self._room = {number: on_disk(nbytes) for number, nbytes in self.kept.items()}
        fixed = fixed_bytes(self.checkpoint, self.mirror, outputs=self.outputs)
        self._taken = fixed + sum(self._room.values())

    def __enter__(self) -> "Supply":
        if self.mirror is not None:
            self._keep_what_is_there(self.mirror)
        for work in (self._give_room, *[self._fetch] * FETCHERS):
            Thread(target=self._guarded, args=(work,), name="kizami-fetch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._change:  # daemons: who waits for a server that does not answer is not waited for
            self.stop.set()
            self._change.notify_all()
        for _ in range(FETCHERS):
            self._wanted.put(None)

    def _keep_what_is_there(self, mirror: Mirror) -> None:
        """Of an earlier run that was killed; each file is hashed before it is used."""
        needs = (needed_bytes(shard, self.checkpoint, mirror, outputs=self.outputs) for shard in self.todo)
        room = self.limit - max(needs, default=0)
        for name in self.checkpoint.headers:
            file = self._files.get(name)
            if not mirror.holds(name):
                continue
            if file is None or self._taken + file.nbytes > room:
                mirror.drop(name)
            else:
                file.asked = True
                self._taken += file.nbytes
                self._wanted.put(name)

    @contextmanager
    def lend(self, shard: Shard) -> Iterator[None]:
        """The shard's source files, whole. Raises as `has`."""
        with self._change:
            while not self._has(shard):
                self._change.wait(LOOK)
        yield
        self.take_back(shard)

    def has(self, shard: Shard) -> bool:
        """Whether the shard's source files are here, whole; they stay until `take_back`. Raises Stopped, or what a
        download ended with."""
        with self._change:
            return self._has(shard)

    def _has(self, shard: Shard) -> bool:
        self._raise()
        names = source_files(shard, self.mirror)
        return shard.number in self._room and all(self._files[name].here for name in names)

    def take_back(self, shard: Shard) -> None:
        """Who was lent them needs them no more."""
        names = source_files(shard, self.mirror)
        with self._change:
            for name in names:
                self._files[name].users -= 1
                if not self._files[name].users and not self._files[name].later:
                    self._drop(name)
            self._change.notify_all()

    def gone(self, number: int) -> None:
        """The output of that shard is no longer on the disk."""
        with self._change:
            self._taken -= self._room.pop(number)
            self._change.notify_all()

    def fail(self, error: BaseException) -> None:
        """Whoever waits for a file or for room gets `error`."""
        with self._change:
            self._error = self._error or error
            self._change.notify_all()

    @property
    def _ended(self) -> bool:
        return self._error is not None or self.stop.is_set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self.stop.is_set():
            raise Stopped

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as e:
            self.fail(e)

    def _give_room(self) -> None:
        """To one shard after the other."""
        for shard in self.todo:
            names = sorted(source_files(shard, self.mirror))
            out = on_disk(shard.file_nbytes) if self.outputs else 0
            with self._change:
                while not (self._ended or self._fits(names, out)):
                    self.short = True
                    self.on_short()
                    self._change.wait(LOOK)
                self.short = False
                self._raise()
                for name in names:
                    file = self._files[name]
                    file.users, file.later = file.users + 1, file.later - 1
                    if not (file.here or file.asked):
                        file.asked = True
                        self._taken += file.nbytes
                        self._wanted.put(name)
                self._room[shard.number] = out
                self._taken += out
                self._change.notify_all()

    def _fits(self, names: Sequence[str], out: int) -> bool:
        """Whether there is room, after idle files have gone that only a later shard needs."""
        need = out + sum(self._files[name].nbytes for name in names if not self._is_held(name))
        idle = [name for name, file in self._files.items() if file.here and not file.users and name not in names]
        while self._taken + need > self.limit and idle:
            self._drop(idle.pop())
        return self._taken + need <= self.limit

    def _is_held(self, name: str) -> bool:
        return self._files[name].here or self._files[name].asked

    def _drop(self, name: str) -> None:
        assert self.mirror is not None
        self.reader.forget(name)
        self.mirror.drop(name)
        file = self._files[name]
        file.here = file.asked = False
        self._taken -= file.nbytes

    def _fetch(self) -> None:
        while (name := self._wanted.get()) is not None and not self._ended:
            assert self.mirror is not None
            self.mirror.fetch(name)
            with self._change:
                self._files[name].here = True
                self._change.notify_all()


def needed_bytes(shard: Shard, checkpoint: Checkpoint, mirror: Mirror | None, *, outputs: bool) -> int:
    """While it is made: its source files, and itself where outputs lie within the limit."""
    files = sum(on_disk(checkpoint.headers[name].file_size) for name in source_files(shard, mirror))
    return files + on_disk(shard.file_nbytes) * outputs


def fixed_bytes(checkpoint: Checkpoint, mirror: Mirror | None, *, outputs: bool) -> int:
    """What is on the disk from the first to the last: headers, and the files beside the weights; these twice where the
    output lies within the limit, too."""
    if mirror is None:
        return 0
    names = {*find_side_files(checkpoint).copied, CARD, CONFIG, INDEX_NAME}
    sizes = [on_disk(file.size) for name, file in mirror.repository.files.items() if name in names]
    headers = sum(on_disk(header.data_begin) for header in checkpoint.headers.values())
    return headers + sum(sizes) * (1 + outputs) + NOTES * len(mirror.repository.files) + ROOM


def check_limit(
    limit: int, shards: Sequence[Shard], checkpoint: Checkpoint, mirror: Mirror | None, *, outputs: bool
) -> int:
    """The bytes that one shard needs, of the largest. KizamiError "scratch_limit" where there are not as many."""
    most = max((needed_bytes(shard, checkpoint, mirror, outputs=outputs) for shard in shards), default=0)
    most += fixed_bytes(checkpoint, mirror, outputs=outputs)
    if most > limit:
        raise KizamiError(
            f"--scratch-limit is {limit:,} bytes; one shard with its source files needs {most:,}",
            code="scratch_limit",
            hint="a smaller --max-shard-size needs less, or raise the limit; twice as much keeps the cores busy",
        )
    return most
