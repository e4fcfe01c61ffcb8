"""A repository as a folder in which weights are holes: headers are read from the Hub, shards come and go again.

The folder is laid out as the Hub's cache is, so that it opens as any checkpoint does. A shard that is not there is a
file of the right size with its header and a hole, which takes no disk space; its time tells it from one that is whole,
so that reading it is an error and never zeros. What comes is held against the Hub's own hash of it.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock

from kizami.formats.checkpoint import CONFIG_NAME, Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error
from kizami.formats.fingerprint import sample_file, sample_pages
from kizami.formats.header import MAX_HEADER_BYTES, Header
from kizami.formats.hub.client import Patience, as_refusal, hub, patiently
from kizami.formats.hub.ranges import read_range
from kizami.formats.hub.repository import RemoteFile, Repository
from kizami.formats.index import INDEX_NAME, SINGLE_NAME, load_index, natural_key
from kizami.formats.run_log import append_line

# Times of our own files, whole seconds, which every file system keeps. Fixed, so that a resumed run finds the source
# that it began with.
ABSENT_NS, FETCHED_NS = 86_400 * 10**9, 2 * 86_400 * 10**9
FIRST_BYTES = 1 << 18  # of a shard; headers of GLM-5.2's take 100 kB
AT_ONCE = 8  # requests
TRIES = 3  # of a file whose bytes are not those that the Hub states
CONTENTS = "contents.jsonl"
PINNED = "hub.json"  # the commit that it is of, and what tells that the folder is ours
MANIFEST_NAME = "kizami.json"  # of an output of kizami's, of which `check` asks it
STREAM_BYTES = 16 << 20
DOWNLOAD = "download"


@dataclass(frozen=True, slots=True)
class Mirror:
    """`repository` in `folder`, which is ours."""

    repository: Repository
    folder: Path
    patience: Patience
    lock: Lock = field(default_factory=Lock, compare=False)

    @property
    def root(self) -> Path:
        name = self.repository.name.replace("/", "--")
        return self.folder / f"models--{name}" / "snapshots" / self.repository.commit

    def open(self) -> Checkpoint:
        """The checkpoint, from config, index and headers alone. KizamiError as `as_refusal` and Checkpoint.open."""
        shutil.rmtree(self.folder / DOWNLOAD, ignore_errors=True)  # halves of files, of a run that was killed
        self.root.mkdir(parents=True, exist_ok=True)
        for file in self.repository.files.values():
            if not (self.root / file.name).exists():
                self._lay(file, b"")
        for name in (CONFIG_NAME, INDEX_NAME, MANIFEST_NAME):
            if name in self.repository.files:
                self.fetch(name)
        weights = [name for name in self._weights() if name in self.repository.files]
        self._at_once(self._lay_header, weights)
        checkpoint = Checkpoint.open(self.root)
        headers = {name: _as_fetched(header) for name, header in checkpoint.headers.items()}
        return replace(checkpoint, headers=headers, remote=True)

    def _weights(self) -> Iterable[str]:
        if INDEX_NAME not in self.repository.files:
            return (SINGLE_NAME,)
        weight_map = load_index(self.root / INDEX_NAME).weight_map
        for tensor, name in weight_map.items():
            if name not in self.repository.files:
                said = f"is not in {self.repository.name}, but {INDEX_NAME} places tensors in it"
                raise KizamiError(said, code="missing_file", file=name, tensor=tensor)
        return set(weight_map.values())

    def _lay_header(self, name: str) -> None:
        path, file = self.root / name, self.repository.files[name]
        if path.stat().st_mtime_ns == FETCHED_NS:
            return
        data = self._first(file, min(FIRST_BYTES, file.size))
        length = 8 + int.from_bytes(data[:8], "little")
        if len(data) < length <= min(file.size, MAX_HEADER_BYTES + 8):
            data = self._first(file, length)
        self._lay(file, data[:length])

    def _first(self, file: RemoteFile, count: int) -> bytes:
        with as_refusal(self.repository.name):
            return patiently(lambda: read_range(self.repository, file.name, 0, count), self.patience)

    def _at_once(self, work: Callable[[str], object], names: Iterable[str]) -> None:
        """The first failure, or a signal, ends the others' waiting, too; from then on nothing comes into the folder,
        which may be removed: others may be waiting for their server still."""
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            for future in as_completed([pool.submit(work, name) for name in names]):
                future.result()
        except BaseException:
            with self.lock:
                self.patience.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """KizamiError "interrupted" after the end of `_at_once`."""
        with self.lock:
            if self.patience.stop.is_set():
                raise KizamiError("is not fetched any more", code="interrupted", file=str(self.folder))
            yield

    def _lay(self, file: RemoteFile, data: bytes) -> None:
        """A hole that begins with `data`."""
        path = self.root / file.name
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(temporary, "wb") as stream:
                    stream.write(data)
                    stream.truncate(file.size)
                os.utime(temporary, ns=(ABSENT_NS, ABSENT_NS))
                os.replace(temporary, path)
        except OSError as e:
            raise io_error("cannot write", e, str(path)) from e

    # ------------------------------------------------------------------------------------------------------ whole files

    def holds(self, name: str) -> bool:
        """Whether it is there, whole."""
        return (self.root / name).stat().st_mtime_ns == FETCHED_NS

    def fetch(self, name: str) -> None:
        """Makes it whole: from the user's cache, which is only read, or from the Hub. KizamiError as `as_refusal`,
        "hub_corrupt", "io_error", "disk_full"."""
        file, path = self.repository.files[name], self.root / name
        try:
            if self.holds(name) and file.is_at(path):  # of an earlier run, which may have been killed at any point
                self._note(file, path)
                return
            self._note(file, self._arrived(file, path))
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                hint = "make room and run the same command again; --scratch-limit bounds what is downloaded ahead"
                raise KizamiError(
                    f"the disk is full: {e.strerror}", code="disk_full", file=str(self.folder), hint=hint
                ) from e
            raise io_error("cannot write", e, str(path)) from e

    def fetch_all(self, names: Iterable[str]) -> None:
        """The same for several, some at once."""
        self._at_once(self.fetch, names)

    def _arrived(self, file: RemoteFile, path: Path) -> Path:
        place = self.folder / DOWNLOAD
        for tried in range(TRIES):
            try:
                with as_refusal(self.repository.name):
                    load = partial(self._download, file, place, again=tried > 0)
                    got = patiently(load, self.patience)
            except OSError as e:
                if e.errno is not None:
                    raise
                continue  # huggingface_hub found another size than was said; its words have the address in them
            if file.is_at(got):
                header = self._header_of(path)
                os.utime(got, ns=(FETCHED_NS, FETCHED_NS))
                os.replace(got, path)
                self._check_header(file, header)
                return path
            got.unlink()
        raise _corrupt(file)

    def _header_of(self, path: Path) -> bytes:
        """Length and header of what lies there; b"" for a hole without."""
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                return b""
            stream.seek(0)
            return stream.read(8 + length)

    def _check_header(self, file: RemoteFile, header: bytes) -> None:
        """The plan was made from a part of the file, which nothing proved: the whole has the Hub's hash."""
        if header and file.name.endswith(".safetensors") and self._header_of(self.root / file.name) != header:
            raise KizamiError(
                "has another header than was read before",
                code="hub_corrupt",
                file=file.name,
                hint="run the same command again: it is read anew",
            )

    def _download(self, file: RemoteFile, place: Path, *, again: bool) -> Path:
        with self._writing():
            place.mkdir(exist_ok=True)  # not its parents
        return Path(
            hub().hf_hub_download(
                self.repository.name, file.name, revision=self.repository.commit, local_dir=place, force_download=again
            )
        )

    def drop(self, name: str) -> None:
        """A hole again. Its header stays."""
        self._lay(self.repository.files[name], self._header_of(self.root / name))

    def remove(self) -> None:
        remove_scratch(self.folder)

    # --------------------------------------------------------------------------------------------------------- contents

    def _note(self, file: RemoteFile, path: Path) -> None:
        """What `sample_contents` would find in it: kept, because it will not be there in the end."""
        if not file.name.endswith(".safetensors") or file.name in self.contents():
            return
        line = json.dumps({"file": file.name, "is": file.sha256 or file.git, "sample": sample_file(path, file.name)})
        target = self.folder / CONTENTS
        with self.lock:
            target.touch()
            half = not target.read_bytes().endswith(b"\n") and target.stat().st_size > 0  # a kill, or a full disk
            append_line(target, f"{chr(10) * half}{line}\n".encode())

    def all_contents(self, checkpoint: Checkpoint) -> dict[str, str]:
        """As `sample_contents`. Files that no shard needed, or that an earlier run fetched whose notes are lost, are
        read from the Hub, to the end: only the whole has a hash. KizamiError "hub_corrupt", and as `as_refusal`."""
        found = self.contents()
        for name, header in checkpoint.headers.items():
            if name not in found:
                found[name] = self._sample_stream(self.repository.files[name], header)
        return {name: found[name] for name in checkpoint.headers}

    def _sample_stream(self, file: RemoteFile, header: Header) -> str:
        """Nothing of it comes to the disk."""

        def read(at: int, size: int) -> bytes:
            with as_refusal(self.repository.name):
                return patiently(lambda: read_range(self.repository, file.name, at, size), self.patience)

        for _ in range(TRIES):
            sampled: dict[int, bytes] = {}

            def sample(at: int, size: int, sampled: dict[int, bytes] = sampled) -> bytes:
                sampled[at] = read(at, size)
                return sampled[at]

            found = sample_pages(header.data_begin, file.size, sample)
            digest, same = file.hasher(file.size), True
            for begin in range(0, file.size, STREAM_BYTES):
                part = read(begin, min(STREAM_BYTES, file.size - begin))
                digest.update(part)
                for at, page in sampled.items():
                    shared = slice(max(at, begin), min(at + len(page), begin + len(part)))
                    if shared.start < shared.stop:
                        ours, theirs = (slice(shared.start - x, shared.stop - x) for x in (begin, at))
                        same = same and part[ours] == page[theirs]
            if same and digest.hexdigest() == (file.sha256 or file.git):
                return found
        raise _corrupt(file)

    def contents(self) -> dict[str, str]:
        """The same, of the weights that have been fetched so far."""
        found: dict[str, str] = {}
        try:
            text = (self.folder / CONTENTS).read_text(encoding="utf-8")
        except FileNotFoundError:
            return found
        for line in text[: text.rfind("\n") + 1].splitlines():
            try:
                one = json.loads(line)
                name, known, sample = one["file"], one["is"], one["sample"]
            except (ValueError, LookupError, TypeError):  # half a line
                continue
            file = self.repository.files.get(name)
            if file is not None and known == (file.sha256 or file.git):
                found[name] = str(sample)
        return {name: found[name] for name in sorted(found, key=natural_key)}


def _corrupt(file: RemoteFile) -> KizamiError:
    return KizamiError(
        f"came {TRIES} times with another hash than the Hub states",
        code="hub_corrupt",
        file=file.name,
        hint="try again later; a proxy or a mirror may be at fault",
    )


def remove_scratch(folder: Path) -> None:
    """What tells whose it is goes last, and then the lock: a kill in between leaves a folder of ours."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (PINNED, "lock"):
            path.unlink()
    (folder / PINNED).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _as_fetched(header: Header) -> Header:
    return replace(header, mtime_ns=FETCHED_NS, inode=None)
