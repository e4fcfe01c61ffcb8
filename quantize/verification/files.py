"""The files of an output: each is the one that the manifest names, and there is no other."""

from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.files import all_files, file_sha256, resolve_inside
from kizami.formats.run_log import FOLDER
from kizami.formats.side_files import MAX_SIDE_FILE_BYTES
from kizami.quantize.manifest import CARD, MANIFEST
from kizami.quantize.threads import thread_map

# What git and `hf download` keep beside a checkpoint; no reader of one looks there.
HUB_FILES, HUB_FOLDERS = (".gitattributes", ".gitignore", ".git"), (".git/", ".cache/")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it must be."""

    code: str
    message: str
    file: str | None = None
    tensor: str | None = None


def check_files(out: Path, manifest: dict[str, Any], workers: int) -> tuple[list[Problem], list[str]]:
    """Every file the manifest names is there with its SHA-256, and no other. A publisher may edit the model card."""
    expected: dict[str, str] = {shard["file"]: shard["sha256"] for shard in manifest["shards"]} | manifest["files"]
    sizes: dict[str, int] = {shard["file"]: shard["bytes"] for shard in manifest["shards"]}
    found = set(all_files(out))
    problems, notes = [], []
    for name in sorted(found - expected.keys() - {MANIFEST}):
        if name in HUB_FILES or name.startswith(HUB_FOLDERS):
            continue
        hint = " (left by a run that was killed at its very end; safe to remove)" if name.startswith(FOLDER) else ""
        problems.append(Problem("stranger", f"is not named in {MANIFEST}{hint}", name))
    for name in sorted(expected.keys() - found):
        problems.append(Problem("missing_file", f"is named in {MANIFEST}, but is not there", name))
    names = sorted(expected.keys() & found)

    def change(name: str, stop: Event) -> str | None:
        return _change(out, name, expected[name], sizes.get(name), stop)

    for name, changed in zip(names, thread_map(workers, change, names), strict=True):
        if changed and name == CARD and _is_file_inside(out, name):
            notes.append(f"{CARD} was edited after the conversion")
        elif changed:
            problems.append(Problem("changed_file", changed, name))
    return problems, notes


def _is_file_inside(out: Path, name: str) -> bool:
    """A card may be edited; it may not lead to another place, which would be published in its stead."""
    try:
        resolve_inside(out, name)
    except KizamiError:
        return False
    return True


def _change(out: Path, name: str, sha256: str, nbytes: int | None, stop: Event) -> str | None:
    """What tells that a file is not the one of the manifest. Its size goes first: a hole of terabytes is not worth
    hashing. nbytes: None for files whose size the manifest does not have."""
    try:
        path = resolve_inside(out, name)
        size = path.stat().st_size
        if nbytes is None and size > MAX_SIDE_FILE_BYTES:
            return f"{size} bytes, expected at most {MAX_SIDE_FILE_BYTES}"
        if nbytes is not None and size != nbytes:
            return f"{size} bytes; {MANIFEST} says {nbytes}"
        digest = file_sha256(path, name, stop.is_set)
    except KizamiError as e:
        return f"cannot be hashed: it {e.message}" if e.code == "outside_folder" else f"cannot be hashed: {e.message}"
    except OSError as e:
        return f"cannot be hashed: {e.strerror}"
    return None if digest == sha256 else f"SHA-256 is {digest}; {MANIFEST} says {sha256}"
