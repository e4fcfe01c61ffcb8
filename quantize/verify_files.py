"""The files of an output: each is the one that the manifest names, and there is no other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.files import all_files, file_sha256
from kizami.quantize.executor import thread_map
from kizami.quantize.journal import FOLDER
from kizami.quantize.manifest import CARD, MANIFEST

# What git and `hf download` keep beside a checkpoint; no reader of one looks there.
HUB_FILES = frozenset({".gitattributes", ".gitignore", ".git", ".cache"})


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
    found = {name: out / name for name in all_files(out)}
    problems, notes = [], []
    for name in sorted(found.keys() - expected.keys() - {MANIFEST}):
        if name.split("/")[0] in HUB_FILES:
            continue
        hint = " (left by a run that was killed at its very end; safe to remove)" if name.startswith(FOLDER) else ""
        problems.append(Problem("stranger", f"is not named in {MANIFEST}{hint}", name))
    for name in sorted(expected.keys() - found.keys()):
        problems.append(Problem("missing_file", f"is named in {MANIFEST}, but is not there", name))
    names = sorted(expected.keys() & found.keys())
    for name, digest in zip(names, thread_map(workers, lambda n: _sha256(found[n], n), names), strict=True):
        if digest == expected[name]:
            continue
        if name == CARD:
            notes.append(f"{CARD} was edited after the conversion")
        else:
            problems.append(Problem("changed_file", f"SHA-256 is {digest}; {MANIFEST} says {expected[name]}", name))
    return problems, notes


def _sha256(path: Path, name: str) -> str:
    try:
        return file_sha256(path, name)
    except KizamiError as e:
        return f"unknown ({e.message})"
