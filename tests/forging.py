"""Changes to an output that leave all of its hashes right: what a forger would do."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.header import encode_header
from kizami.formats.index import INDEX_NAME, encode_index
from kizami.formats.strict_json import dump_json
from kizami.quantize.manifest import self_hash
from kizami.quantize.report import ROW_CRC32, encode_row

MANIFEST, REPORT = "kizami.json", "kizami-report.jsonl"


def forge_manifest(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((out / MANIFEST).read_bytes())
    change(manifest)
    (out / MANIFEST).write_bytes(sealed(manifest))


def sealed(manifest: dict[str, Any]) -> bytes:
    return dump_json(manifest | {"self_sha256": self_hash(manifest)})


def record(manifest: dict[str, Any], name: str, data: bytes) -> None:
    """What kizami.json says of the file `name`."""
    digest = hashlib.sha256(data).hexdigest()
    for shard in manifest["shards"]:
        if shard["file"] == name:
            shard |= {"sha256": digest, "bytes": len(data)}
    if name in manifest["files"]:
        manifest["files"][name] = digest


def forge(out: Path, file: str, change: Callable[[bytearray], object]) -> None:
    """Changes the bytes of a file."""
    data = bytearray((out / file).read_bytes())
    change(data)
    (out / file).write_bytes(data)
    forge_manifest(out, lambda manifest: record(manifest, file, bytes(data)))


def row_line(row: dict[str, Any]) -> bytes:
    return encode_row({key: value for key, value in row.items() if key != ROW_CRC32})


def forge_rows(out: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Changes the rows of the report, each with its own checksum."""

    def rewrite(data: bytearray) -> None:
        rows = [json.loads(line) for line in bytes(data).splitlines()]
        change(rows)
        data[:] = b"".join(map(row_line, rows))

    forge(out, REPORT, rewrite)


def agreed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of an output with everything in them that is a checksum made right, as far as they can be read."""
    result = dict(files)
    if REPORT in result:
        result[REPORT] = b"".join(map(_checked_line, result[REPORT].splitlines(keepends=True)))
    manifest = json.loads(result[MANIFEST])
    for name, data in result.items():
        record(manifest, name, data)
    return result | {MANIFEST: sealed(manifest)}


def _checked_line(line: bytes) -> bytes:
    try:
        return row_line(json.loads(line))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return line


def forge_tensors(out: Path, drop: Collection[str]) -> None:
    """Takes tensors out of the weight files as if the run had never written them: headers, index, report, totals and
    all hashes agree."""
    checkpoint = Checkpoint.open(out)
    for file in {checkpoint.tensors[name].file for name in drop}:
        header = checkpoint.headers[file]
        kept = [info for info in header.tensors if info.name not in drop]
        raw = (out / file).read_bytes()
        shard = encode_header([info.spec for info in kept], {"format": "pt"})
        shard += b"".join(raw[info.begin : info.end] for info in kept)
        forge(out, file, lambda data, shard=shard: data.__setitem__(slice(None), shard))
    left = {name: info for name, info in checkpoint.tensors.items() if name not in drop}
    index = encode_index({n: i.file for n, i in left.items()}, sum(i.nbytes for i in left.values()))
    forge(out, INDEX_NAME, lambda data: data.__setitem__(slice(None), index))

    def forget(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["crc32"] = {name: crc for name, crc in row["crc32"].items() if name not in drop}

    def recount(manifest: dict[str, Any]) -> None:
        manifest["output"] |= {"bytes": sum(i.nbytes for i in left.values()), "tensors": len(left)}

    forge_rows(out, forget)
    forge_manifest(out, recount)
