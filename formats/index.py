"""`model.safetensors.index.json`: which file holds which tensor."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kizami.formats.errors import KizamiError
from kizami.formats.files import has_control
from kizami.formats.header import name_problem
from kizami.formats.strict_json import dump_json, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# GLM-5.2's 118,629 entries take 13 MB; this is ten times as much.
MAX_INDEX_BYTES = 128 << 20
# The most of any published checkpoint is 163.
MAX_FILES = 10_000
# NAME_MAX of Linux's file systems.
MAX_FILE_NAME_BYTES = 255

_DIGITS = re.compile("[0-9]+")


@dataclass(frozen=True, slots=True)
class Index:
    """`weight_map` is tensor -> file; `total_size` is what the index claims, often wrongly: never rely on it."""

    weight_map: dict[str, str]
    total_size: int | None


def natural_key(file: str) -> tuple[str, str]:
    """Sort key with numbers by value: `model-2-of-61` before `model-10-of-61` (Kimi-K2 does not pad)."""
    return _DIGITS.sub(lambda match: f"{len(match[0].lstrip('0')):03}{match[0].lstrip('0')}", file), file


def file_name_problem(file: str) -> str | None:
    """Why `file` cannot be the name of a shard beside the index, or None if it can."""
    if not file:
        return "an empty file name"
    if has_control(file):
        return "a control character in the file name"
    if "/" in file or "\\" in file or file.startswith(".."):
        return "a path, where only a file beside the index may stand"
    if not file.endswith(".safetensors"):
        return "not the name of a .safetensors file"
    if len(file.encode("utf-8")) > MAX_FILE_NAME_BYTES:
        return f"a file name of more than {MAX_FILE_NAME_BYTES} bytes"
    return None


def load_index(path: Path) -> Index:
    """The index at `path`. Tensor and file names are checked; no file that it names is touched.

    KizamiError: "bad_index" naming the tensor whose entry is wrong; "bad_json", "missing_file", "io_error".
    """
    file = INDEX_NAME  # in a Hub cache the path ends in a hash
    content = read_json_object(path, file, limit=MAX_INDEX_BYTES)
    weight_map = content.get("weight_map")
    if type(weight_map) is not dict or not weight_map:
        found = "missing" if weight_map is None else "empty" if weight_map == {} else type(weight_map).__name__
        raise KizamiError(f"weight_map is {found}, expected an object of tensor -> file", code="bad_index", file=file)
    files: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if type(shard) is not str:
            problem: str | None = "not a string"
        else:
            problem = None if shard in files else file_name_problem(shard)
        problem = problem or name_problem(tensor)
        if problem:
            raise KizamiError(f"names {str(shard)[:300]!r}: {problem}", code="bad_index", file=file, tensor=tensor)
        weight_map[tensor] = files.setdefault(shard, shard)
    if len(files) > MAX_FILES:
        raise KizamiError(f"names {len(files)} files, expected at most {MAX_FILES}", code="bad_index", file=file)
    metadata = content.get("metadata")
    total = metadata.get("total_size") if type(metadata) is dict else None
    return Index(weight_map, total if type(total) is int else None)


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """An index as transformers writes it: sorted by tensor name, `total_size` = bytes of all tensors."""
    return dump_json({"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))})
