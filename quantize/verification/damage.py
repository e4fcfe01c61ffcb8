"""A file whose SHA-256 is not the recorded one: which of its tensors, entries or rows have changed.

The SHA-256 of the whole file finds damage; what is here only says where it is. Nothing that it reads can be trusted.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from zlib_ng import zlib_ng

from kizami.formats.errors import KizamiError
from kizami.formats.files import open_regular, read_exactly, resolve_inside
from kizami.formats.header import read_header
from kizami.formats.index import INDEX_NAME, encode_index
from kizami.formats.tensors import TensorInfo
from kizami.quantize.manifest import REPORT
from kizami.quantize.report import damaged_lines, whole_rows
from kizami.quantize.verification.files import Problem

CHUNK_BYTES = 8 << 20


def locate_damage(out: Path, changed: Iterable[str], shards: Sequence[str]) -> Iterator[Problem]:
    """One problem per tensor, index entry or report row that differs, in the `changed` files of the output at `out`.

    shards: all that the manifest names. Nothing is said of files that hold no tensors, nor where the report, which
    knows the CRC-32 of every tensor, cannot tell.
    """
    changed = list(changed)
    crc32: dict[str, dict[str, str]] = {file: {} for file in changed if file in shards}
    for row in whole_rows(out) if crc32 else ():
        crc32.get(row["shard"], {}).update(row["crc32"])
    for file in changed:
        if file in crc32:
            yield from _in_shard(out, file, crc32[file])
        elif file == INDEX_NAME:
            yield from _in_index(out, shards)
        elif file == REPORT:
            for number, name in damaged_lines(out):
                yield Problem("changed_row", f"line {number} is not as it was written", file, name)


def _in_shard(out: Path, file: str, expected: Mapping[str, str]) -> Iterator[Problem]:
    try:
        path = resolve_inside(out, file)
        header = read_header(path, file)
    except KizamiError as e:
        if e.code in ("bad_header", "bad_json", "unknown_dtype"):  # the hashing has told what else there may be
            yield Problem(e.code, f"its header is damaged: {e.message}", file, e.tensor)
        return
    changed = list(_changed_tensors(path, {info.name: info for info in header.tensors}, expected))
    for name, message in changed:
        yield Problem("changed_tensor", message, file, name)
    if expected and not changed:  # CRC-32 sees every change of up to 32 neighbouring bits
        yield Problem("changed_header", "its header has changed, its tensors' bytes have not", file)


def _changed_tensors(
    path: Path, found: Mapping[str, TensorInfo], expected: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(name, what is wrong with it)."""
    for name in sorted(expected.keys() - found.keys()):
        yield name, "its header has no such tensor any more"
    for name, value in tensor_crc32s(path, found.values()):
        if name not in expected:
            yield name, f"{REPORT} knows no such tensor"
        elif (now := f"{value:08x}") != expected[name]:
            yield name, f"its bytes have CRC-32 {now}; {REPORT} says {expected[name]}"


def tensor_crc32s(path: Path, tensors: Iterable[TensorInfo]) -> Iterator[tuple[str, int]]:
    """Name and CRC-32 of each of `tensors`, which lie in the file at `path`."""
    fd = open_regular(path, path.name)
    try:
        for info in tensors:
            value = 0
            for begin in range(info.begin, info.end, CHUNK_BYTES):
                value = zlib_ng.crc32(read_exactly(fd, begin, min(CHUNK_BYTES, info.end - begin), info.file), value)
            yield info.name, value
    finally:
        os.close(fd)


def _in_index(out: Path, shards: Sequence[str]) -> Iterator[Problem]:
    """The shards' headers say what the index was; the first line that differs is the damaged one."""
    try:
        tensors = [info for file in shards for info in read_header(resolve_inside(out, file), file).tensors]
        written = resolve_inside(out, INDEX_NAME).read_bytes()
    except KizamiError:
        return  # the damage of that file is told in its place
    index = encode_index({info.name: info.file for info in tensors}, sum(info.nbytes for info in tensors))
    pairs = zip_longest(index.split(b"\n"), written.split(b"\n"))
    number, line = next(((i, line) for i, (line, now) in enumerate(pairs, 1) if line != now), (0, None))
    if line is not None:
        yield Problem("changed_entry", f"line {number} was {line.decode()!r}", INDEX_NAME, _tensor_of(line))


def _tensor_of(line: bytes) -> str | None:
    """The tensor whose entry in the index this line is."""
    try:
        entry = json.loads(b"{%s}" % line.strip().rstrip(b","))
    except ValueError:
        return None
    (name,) = entry or [None]
    return name if name != "total_size" else None
