"""kizami.json: what was made from what, with which settings, and the SHA-256 of every file beside it."""

import hashlib
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.strict_json import dump_json, read_json_object
from kizami.quantize.plan import Plan, canonical
from kizami.quantize.settings import Method, Policy

MANIFEST = "kizami.json"
REPORT = "kizami-report.jsonl"
CARD = "README.md"
CONFIG = "config.json"
SCHEMA = "kizami.manifest/1"
MAX_MANIFEST_BYTES = 16 << 20  # 163 shards and a few hundred side files take 100 kB


def build_manifest(
    plan: Plan, shards: list[dict[str, Any]], files: dict[str, str], has_negative_scales: bool
) -> dict[str, Any]:
    """`shards`: file, bytes, sha256, in order; `files`: every other file's SHA-256 by name. No times, no paths."""
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "kizami_version": version("kizami"),
        "plan_hash": plan.hash,
        "scheme": plan.policy.scheme,
        "policy": asdict(plan.policy),
        "method": plan.method.name,
        "scale_sign": plan.method.scale_sign,
        "clip_allowance": plan.method.clip_allowance,
        "has_negative_scales": has_negative_scales,
        "family": plan.family,
        "dialect": plan.dialect,
        "counts": plan.counts,
        "output": {
            "bytes": plan.output.bytes,
            "file_bytes": plan.output.file_bytes,
            "tensors": plan.output.tensors,
            "bits_per_weight": plan.bits_per_weight,
        },
        "source": plan.source,
        "warnings": list(plan.warnings),
        "shards": shards,
        "files": dict(sorted(files.items())),
    }
    return manifest | {"self_sha256": self_hash(manifest)}


def self_hash(manifest: dict[str, Any]) -> str:
    """Of everything but the hash itself: a flipped bit in the manifest is found like any other."""
    body = {key: value for key, value in manifest.items() if key != "self_sha256"}
    return hashlib.sha256(canonical(body).encode()).hexdigest()


def read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of a finished output. Raises KizamiError if there is none or a bit of it has changed."""
    path = out / MANIFEST
    if not path.is_file():
        raise KizamiError(
            "not found",
            code="no_manifest",
            file=MANIFEST,
            hint=f"{out.name} is not a folder that kizami convert finished",
        )
    manifest = read_json_object(path, MANIFEST, limit=MAX_MANIFEST_BYTES)
    if manifest.get("schema") != SCHEMA:
        raise KizamiError(f"schema {manifest.get('schema')!r}; expected {SCHEMA!r}", code="bad_manifest", file=MANIFEST)
    if manifest.get("self_sha256") != self_hash(manifest) or path.read_bytes() != dump_json(manifest):
        raise KizamiError(
            "its bytes are not those that kizami wrote (self_sha256 does not match)",
            code="bad_manifest",
            file=MANIFEST,
            hint="the file was edited or damaged: convert again, or restore it",
        )
    return manifest


def policy_of(manifest: dict[str, Any]) -> Policy:
    """The policy that a manifest records. KizamiError where it is none (another version's, or a forged one)."""
    fields = dict(manifest["policy"])
    try:
        return Policy(**fields | {"targets": tuple(fields["targets"]), "ignore": tuple(fields["ignore"])})
    except (KeyError, TypeError):
        raise KizamiError("its policy is not one of this version", code="bad_manifest", file=MANIFEST) from None


def method_of(manifest: dict[str, Any]) -> Method:
    return Method(manifest["method"], manifest["scale_sign"], manifest["clip_allowance"])
