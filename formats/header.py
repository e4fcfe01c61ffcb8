"""safetensors headers: reading them with distrust, and encoding them.

The format is huggingface/safetensors' (README.md "Format", safetensors/src/tensor.rs): 8 bytes of little-endian header
length, a JSON object, then the tensors' data without holes.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from json.encoder import encode_basestring
from math import prod
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.files import has_control, open_regular, read_exactly
from kizami.formats.strict_json import parse_json_object
from kizami.formats.tensors import DTYPE_BITS, TensorInfo, TensorSpec, one_shape

# safetensors' own reader refuses more (tensor.rs, MAX_HEADER_SIZE). GLM-5.2's 118,629 tensors take 15 MB in all.
MAX_HEADER_BYTES = 100_000_000
# Real names have up to 80 bytes; a longer one would only serve to fill logs and reports.
MAX_NAME_BYTES = 1024
# NumPy 1 stops at 32 dimensions; real weights have at most 5.
MAX_DIMS = 32
# Sizes and offsets are signed 64-bit numbers in every loader.
MAX_BITS = 2**63
_KEYS = {"dtype", "shape", "data_offsets"}
_DOWNLOAD = "download the file again"


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says about itself. `sha256` is that of the first `data_begin` bytes (length and header). inode:
    None for a file on the Hub, which is fetched when it is needed and known by its hash then."""

    file: str
    file_size: int
    mtime_ns: int
    inode: int | None
    data_begin: int
    tensors: tuple[TensorInfo, ...]  # by offset
    sha256: str


def name_problem(name: str) -> str | None:
    """Why `name` cannot be a tensor's name, or None if it can."""
    if name.isascii() and name.isprintable() and 0 < len(name) <= MAX_NAME_BYTES:
        return None  # as nearly all are, and the rest takes three times as long
    if not name:
        return "an empty tensor name"
    if has_control(name):
        return "a tensor name with a control character"
    if len(name) > MAX_NAME_BYTES or (not name.isascii() and len(name.encode("utf-8")) > MAX_NAME_BYTES):
        return f"a tensor name of more than {MAX_NAME_BYTES} bytes"
    return None


def read_header(path: Path, file: str) -> Header:
    """The header of the safetensors file at `path`, called `file` in errors and in the result.

    Every number is checked before it sizes an allocation, and the tensors must tile the data exactly: no hole, no
    overlap, no byte left over. KizamiError: "bad_header", "bad_json", "unknown_dtype"; "wrong_size" with the actual and
    the expected size of the file; "not_a_file", "missing_file", "io_error".
    """
    fd = open_regular(path, file)
    try:
        status = os.fstat(fd)
        raw = _read_raw(fd, status.st_size, file)
    finally:
        os.close(fd)
    entries = parse_json_object(raw[8:], file, what="header", parse_int=_parse_int if b"-0" in raw else None)
    _check_metadata(entries.pop("__metadata__", None), file)
    data_begin = len(raw)
    tensors = sorted(
        (_tensor(name, entry, file, data_begin) for name, entry in entries.items()),
        key=lambda info: (info.begin, info.end, info.name),
    )
    _check_tiling(tensors, file, data_begin, status.st_size)
    digest = hashlib.sha256(raw).hexdigest()
    return Header(file, status.st_size, status.st_mtime_ns, status.st_ino, data_begin, tuple(tensors), digest)


def _read_raw(fd: int, file_size: int, file: str) -> bytes:
    if file_size < 8:
        raise KizamiError(
            f"file of {file_size} bytes, expected at least 8 for the header's length",
            code="wrong_size",
            file=file,
            hint=_DOWNLOAD,
        )
    prefix = read_exactly(fd, 0, 8, file)
    length = int.from_bytes(prefix, "little")
    if prefix == b"version ":  # spec/v1 of git-lfs: "version https://git-lfs.github.com/spec/v1"
        raise KizamiError(
            f"is a Git LFS pointer of {file_size} bytes, expected a safetensors file",
            code="bad_header",
            file=file,
            hint="fetch the weights with `git lfs pull` or `hf download`",
        )
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise KizamiError(
            f"header length {length}, expected 2 to {MAX_HEADER_BYTES} bytes", code="bad_header", file=file
        )
    if 8 + length > file_size:
        raise KizamiError(
            f"file of {file_size} bytes, expected at least {8 + length}: its header alone has {length}",
            code="wrong_size",
            file=file,
            hint=_DOWNLOAD,
        )
    first = read_exactly(fd, 8, 1, file)
    if first != b"{":
        raise KizamiError(f"header starts with {first!r}, expected '{{'", code="bad_header", file=file)
    return read_exactly(fd, 0, 8 + length, file)


def _parse_int(text: str) -> int:
    if text == "-0":
        raise ValueError("the number -0 is no size")  # to safetensors' parser (serde_json) it is a float
    return int(text)


def _check_metadata(value: Any, file: str) -> None:
    """Nothing in it is used, so nothing of it is kept: it may be as large as a header may be."""
    if value is None:  # missing; or null, which some writers emit (huggingface/safetensors issue 549)
        return
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise KizamiError("__metadata__ is not an object of strings", code="bad_header", file=file)


def _are_sizes(values: list[Any]) -> bool:
    for value in values:  # noqa: SIM110 — a generator takes twice as long, and this is asked of every tensor
        if type(value) is not int or not 0 <= value < MAX_BITS:
            return False
    return True


def _tensor(name: str, entry: Any, file: str, data_begin: int) -> TensorInfo:
    def bad(message: str, code: str = "bad_header") -> KizamiError:
        return KizamiError(message, code=code, file=file, tensor=name)

    problem = name_problem(name)
    if problem:
        raise bad(problem)
    if type(entry) is not dict or entry.keys() != _KEYS:
        found = sorted(entry) if type(entry) is dict else type(entry).__name__
        raise bad(f"header entry {found}, expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        raise bad(f"dtype {dtype!r}, expected one of {', '.join(DTYPE_BITS)}", "unknown_dtype")
    if type(shape) is not list or len(shape) > MAX_DIMS or not _are_sizes(shape):
        raise bad(f"shape {_short(shape)}, expected a list of at most {MAX_DIMS} integers from 0 to 2^63-1")
    if type(offsets) is not list or len(offsets) != 2 or not _are_sizes(offsets):
        raise bad(f"data_offsets {_short(offsets)}, expected two integers from 0 to 2^63-1")
    total = bits * prod(shape)
    if total >= MAX_BITS:
        raise bad(f"shape {_short(shape)} of {dtype} has more than 2^63-1 bits")
    if total % 8:
        raise bad(f"shape {_short(shape)} of {dtype} has {total} bits, expected a multiple of 8")
    begin, end = offsets
    if end - begin != total // 8:
        raise bad(f"data_offsets {offsets} span {end - begin} bytes, expected {total // 8} for {dtype} {_short(shape)}")
    # One string per dtype and one tuple per shape instead of one per tensor: 118,629 tensors.
    return TensorInfo(name, _DTYPE[dtype], one_shape(tuple(shape)), file, data_begin + begin, data_begin + end)


_DTYPE = {dtype: dtype for dtype in DTYPE_BITS}


def _short(value: Any) -> str:
    return repr(value)[:200] if type(value) is list and len(value) <= MAX_DIMS else type(value).__name__


def _check_tiling(tensors: Sequence[TensorInfo], file: str, data_begin: int, file_size: int) -> None:
    if tensors and tensors[0].begin != data_begin:
        raise KizamiError(
            f"the first tensor begins at data byte {tensors[0].begin - data_begin}, expected 0",
            code="bad_header",
            file=file,
            tensor=tensors[0].name,
        )
    for before, after in pairwise(tensors):
        if before.end != after.begin:
            what = "overlaps" if after.begin < before.end else "leaves a hole after"
            raise KizamiError(
                f"begins at data byte {after.begin - data_begin} and {what} {before.name}, "
                f"which ends at {before.end - data_begin}",
                code="bad_header",
                file=file,
                tensor=after.name,
            )
    expected = tensors[-1].end if tensors else data_begin
    if file_size != expected:
        raise KizamiError(
            f"file of {file_size} bytes, expected {expected} by its header",
            code="wrong_size",
            file=file,
            hint=_DOWNLOAD if file_size < expected else None,
        )


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def encode_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """The first bytes of a file that holds `specs` in this order without holes: length, JSON, spaces up to 8 bytes.

    `metadata` None writes no `__metadata__`. The data then begins at a multiple of 8, as safetensors' own writer does.
    """
    # Written by hand, as `_compact` would: json.dumps takes three times as long, and a plan needs the headers of all
    # files for their sizes.
    entries = [] if metadata is None else [f'"__metadata__":{_compact(dict(metadata))}']
    names = set() if metadata is None else {"__metadata__"}
    begin = 0
    for spec in specs:
        problem = "a second tensor of this name" if spec.name in names else name_problem(spec.name)
        if problem is not None:
            raise KizamiError(
                f"cannot be written: {problem}", code="bad_name", tensor=spec.name, hint="rename it in the source"
            )
        names.add(spec.name)
        end = begin + spec.nbytes
        shape = ",".join(map(str, spec.shape))
        entries.append(
            f'{encode_basestring(spec.name)}:{{"dtype":"{spec.dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise KizamiError(
            f"the header of one output file would have {len(text)} bytes; readers stop at {MAX_HEADER_BYTES}",
            code="header_too_large",
            hint="use a smaller --max-shard-size",
        )
    return len(text).to_bytes(8, "little") + text
