"""JSON from untrusted files: bounded, no duplicate keys, an object at the top."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error, open_regular

# The deepest real file is a config with a quantization_config inside a text_config: 6 levels.
MAX_DEPTH = 64
# Parsed JSON takes up to 100 bytes of memory per bracket, colon or comma, whatever the size of the text. A tensor in a
# safetensors header has 12 of them; Kimi-K2 in one file would have 139,644 tensors, 1.7 million in all.
MAX_MARKS = 4_000_000

_BEYOND_ASCII = re.compile("[\x7f-\U0010ffff]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _DuplicateKeyError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DuplicateKeyError(twice)
    return result


def _keys(value: Any) -> int:
    """How many keys its objects have, all levels together. Of a text without other colons and without a key twice,
    there are as many colons."""
    count = 0
    waiting = [value]
    while waiting:
        level = [node for node in waiting if type(node) is dict]
        count += sum(map(len, level))
        inner = [child for node in level for child in node.values() if type(child) is dict or type(child) is list]
        lists = [node for node in waiting if type(node) is list]
        waiting = inner + [c for node in lists for c in node if type(c) is dict or type(c) is list]
    return count


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


def parse_json_object(
    data: bytes, file: str, *, what: str, marks: int = MAX_MARKS, parse_int: Callable[[str], int] | None = None
) -> dict[str, Any]:
    """The object in `data`; `what` names the thing in errors ("header", "config"). `parse_int` as json.loads has it.

    KizamiError "bad_json": not UTF-8, not JSON, not an object, a key twice in one object (parsers disagree on which
    value counts, so that a checker and a loader could see different files), deeper than MAX_DEPTH, more than `marks`
    brackets, colons and commas, or a string with half a surrogate pair (cannot be written back as UTF-8). The literals
    NaN and Infinity are read, as Python's json does: published configs have them.
    """

    def bad(found: str) -> KizamiError:
        return KizamiError(f"the {what} {found}", code="bad_json", file=file)

    found = sum(map(data.count, (b"[", b"{", b":", b",")))
    if found > marks:
        raise bad(f"has {found} brackets, colons and commas, expected at most {marks}")
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_int=parse_int)
        if _keys(value) != data.count(b":"):  # a colon in a string, or a key that is there twice: the slow way tells
            value = json.loads(text, object_pairs_hook=_object, parse_int=parse_int)
    except UnicodeDecodeError as e:
        raise bad(f"is not UTF-8: byte 0x{data[e.start]:02x} at {e.start}") from None
    except _DuplicateKeyError as e:
        raise bad(f"has the key {str(e)[:300]!r} twice in one object, expected once") from None
    except RecursionError:
        raise bad(f"is nested too deeply, expected at most {MAX_DEPTH} levels") from None
    except ValueError as e:  # JSONDecodeError, or an integer of more than 4300 digits
        raise bad(f"is not valid JSON: {e}") from None
    if type(value) is not dict:
        raise bad(f"is a JSON {type(value).__name__}, expected an object")
    if _too_deep(value):
        raise bad(f"is nested too deeply, expected at most {MAX_DEPTH} levels")
    if _SURROGATE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise bad("has a string with half a surrogate pair, expected valid Unicode") from None
    return value


def read_json_object(path: Path, file: str, *, limit: int, marks: int = MAX_MARKS) -> dict[str, Any]:
    """The object in the regular file at `path` (`file` in errors), refused unread if larger than `limit` bytes."""
    fd = open_regular(path, file)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise KizamiError(f"{size} bytes, expected at most {limit}", code="bad_json", file=file)
        with open(fd, "rb", closefd=False) as stream:
            data = stream.read(limit + 1)
    except OSError as e:
        raise io_error("cannot read", e, file) from e
    finally:
        os.close(fd)
    if len(data) != size:
        raise KizamiError(f"read {len(data)} bytes, expected {size}", code="source_changed", file=file)
    return parse_json_object(data, file, what="file", marks=marks)


def dump_json(obj: object) -> bytes:
    """`obj` as UTF-8 JSON: indent 2, key order kept, a newline at the end (the style of transformers' config.json).
    What a terminal would not show as it is, such as a change of direction, is escaped."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    return _BEYOND_ASCII.sub(lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text).encode("utf-8")
