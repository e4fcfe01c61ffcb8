"""Coverage-guided fuzzing of the readers of untrusted bytes, with what must hold for every input.

    python -m venv .venv-fuzz && . .venv-fuzz/bin/activate && pip install -e . atheris     (CPython 3.11 to 3.13)
    cd tests/fuzz && FOUND=$(mktemp -d) && mkdir $FOUND/header $FOUND/index
    python fuzz_readers.py header -dict=json.dict $FOUND/header corpus/header
    python fuzz_readers.py index -dict=json.dict $FOUND/index corpus/index
    python fuzz_readers.py json -dict=json.dict $FOUND/index corpus/index

What follows the target's name goes to libFuzzer, which writes new inputs to the first folder; -max_total_time=600 stops
after ten minutes. test_fuzz.py runs the corpus in every test run, without atheris. This adds to the corpus what
reaches lines that nothing there reaches:

    python fuzz_readers.py header --keep $FOUND/header corpus/header

A header target's input is a file if it begins with anything but a brace; else it is the JSON of a header, and the
length before it and as many bytes of data as it claims are put around it: no fuzzer finds these numbers by luck.
"""

# ruff: noqa: PT017 — an assertion is the verdict on an input, not a test of the error

import hashlib
import json
import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import safetensors

from kizami.formats.errors import KizamiError
from kizami.formats.header import Header, read_header
from kizami.formats.index import encode_index, load_index
from kizami.formats.strict_json import MAX_DEPTH, dump_json, parse_json_object

MAX_DATA = 1 << 16

# Where kizami refuses what the safetensors package reads, on purpose: what its refusal says, and why.
STRICTER = {
    r"has the key .* twice": "the package takes the last one, other readers the first: a checker could be deceived",
    r"control character": "in a log or a terminal a name must be what it looks like",
    r"an empty tensor name": "no module has it",
    r"a tensor name of more than": "fills logs",
    r"a list of at most 32 integers": "NumPy 1 cannot have more dimensions",
    r"2\^63": "sizes are signed in every loader but this one",
    r"header entry .* expected an object with dtype": "unknown keys: a later format, or something hidden",
    r"-0 is no size": "in a key that only the package skips",
    r"nested too deeply": "unknown keys nest, too",
}


def check_header(data: bytes) -> Header | None:
    """The header if it is accepted; then the package, too, reads these tensors from these places."""
    file = _as_file(data)
    path = _scratch()
    path.write_bytes(file)
    try:
        theirs: dict[str, Any] | None = dict(safetensors.deserialize(file))
    except Exception as error:  # whatever it raises is its refusal
        theirs, said = None, str(error)
    try:
        header = read_header(path, "x.safetensors")
    except KizamiError as error:
        assert "\n" not in str(error)
        assert theirs is None or any(re.search(words, error.message) for words in STRICTER), error
        return None
    assert theirs is not None, f"only kizami reads it: {said}"
    ours = {t.name: (t.dtype, list(t.shape), file[t.begin : t.end]) for t in header.tensors}
    assert ours == {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in theirs.items()}
    return header


def _as_file(data: bytes) -> bytes:
    if not data.startswith(b"{"):
        return data
    claimed = 0
    with suppress(ValueError, RecursionError, TypeError, AttributeError, KeyError, IndexError):
        entries = json.loads(data)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        claimed = max((end for end in ends if type(end) is int and 0 < end <= MAX_DATA), default=0)
    return len(data).to_bytes(8, "little") + data + bytes(i * 7 % 251 for i in range(claimed))


def check_index(data: bytes) -> dict[str, str] | None:
    """The map if it is accepted; then no name leads out of the folder, and the index written from it reads equal."""
    path = _scratch()
    path.write_bytes(data)
    try:
        index = load_index(path)
    except KizamiError as error:
        assert "\n" not in str(error)
        return None
    assert index.weight_map
    for tensor, file in index.weight_map.items():
        assert tensor.isprintable() or not re.search(r"[\x00-\x1f\x7f-\x9f]", tensor)
        assert os.path.basename(file) == file
        assert file not in (".", "..")
        assert file.endswith(".safetensors")
    path.write_bytes(encode_index(index.weight_map, 0))
    assert load_index(path).weight_map == index.weight_map
    return index.weight_map


def check_json(data: bytes) -> dict[str, Any] | None:
    """The object if it is accepted; then it is Python's reading of the text, and comes back from a file of ours."""
    try:
        value = parse_json_object(data, "x.json", what="file")
    except KizamiError as error:
        assert "\n" not in str(error)
        return None
    assert _same(value, json.loads(data))
    assert _same(value, parse_json_object(dump_json(value), "x.json", what="file"))
    assert _depth(value) <= MAX_DEPTH
    return value


def _same(a: Any, b: Any) -> bool:
    """Equal, in types and in the order of keys as well; NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_same, a.values(), b.values()))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(_depth, children), default=0)


@cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="kizami-fuzz-")) / "input"


TARGETS: dict[str, Callable[[bytes], object]] = {"header": check_header, "index": check_index, "json": check_json}


def reached(target: Callable[[bytes], object], data: bytes) -> set[tuple[str, int]]:
    """Lines of kizami's that the input runs through."""
    lines: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if "kizami" not in frame.f_globals.get("__name__", ""):
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return lines


def keep(target: Callable[[bytes], object], found: Path, corpus: Path) -> None:
    seen: set[tuple[str, int]] = set().union(*(reached(target, path.read_bytes()) for path in corpus.iterdir()))
    for path in sorted(found.iterdir(), key=lambda path: path.stat().st_size):  # the smallest that does it
        data = path.read_bytes()
        if new := reached(target, data) - seen:
            seen |= new
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]
    if sys.argv[1] == "--keep":
        keep(target, Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        fuzz(target)


def fuzz(target: Callable[[bytes], object]) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import atheris
    import hostile_json

    for module in ("strict_json", "header", "index", "files", "errors"):
        loaded = sys.modules[f"kizami.formats.{module}"]
        for value in vars(loaded).values():
            if isinstance(value, FunctionType) and value.__module__ == loaded.__name__:
                atheris.instrument_func(value)  # in place: its importers have it, too

    def one_input(data: bytes) -> None:
        target(data)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        """Half of the time with an eye for JSON: blind bytes seldom get past the parser."""
        rng = random.Random(seed)
        with suppress(ValueError, RecursionError):
            if rng.random() < 0.5:
                changed = hostile_json.dumps(hostile_json.change(json.loads(data), rng))
                return changed.encode("utf-8", "surrogatepass")[:max_size]
        return bytes(atheris.Mutate(data, max_size))

    atheris.Setup(sys.argv, one_input, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
