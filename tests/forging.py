"""Changes to an output that leave all of its hashes right: what a forger would do."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kizami.formats.strict_json import dump_json
from kizami.quantize.manifest import self_hash
from kizami.quantize.report import ROW_CRC32, encode_row


def forge_manifest(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((out / "kizami.json").read_bytes())
    change(manifest)
    manifest["self_sha256"] = self_hash(manifest)
    (out / "kizami.json").write_bytes(dump_json(manifest))


def forge(out: Path, file: str, change: Callable[[bytearray], object]) -> None:
    """Changes the bytes of a file."""
    data = bytearray((out / file).read_bytes())
    change(data)
    (out / file).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()

    def record(manifest: dict[str, Any]) -> None:
        for shard in manifest["shards"]:
            if shard["file"] == file:
                shard |= {"sha256": digest, "bytes": len(data)}
        if file in manifest["files"]:
            manifest["files"][file] = digest

    forge_manifest(out, record)


def forge_rows(out: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Changes the rows of the report, each with its own checksum."""

    def rewrite(data: bytearray) -> None:
        rows = [json.loads(line) for line in bytes(data).splitlines()]
        for row in rows:
            del row[ROW_CRC32]
        change(rows)
        data[:] = b"".join(encode_row(row) for row in rows)

    forge(out, "kizami-report.jsonl", rewrite)
