"""kizami.json: what was made from what, with which settings, and the SHA-256 of every file beside it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from kizami.formats.errors import KizamiError
from kizami.formats.files import resolve_inside
from kizami.formats.int4_layout import FORMATS
from kizami.formats.kv_scales.neutral import KvScales
from kizami.formats.places import OUTPUT_MANIFEST
from kizami.formats.run_log import FOLDER, JOURNAL, canonical
from kizami.formats.strict_json import dump_json, read_json_object
from kizami.quantize.plan import KvMerge, Plan
from kizami.quantize.settings import (
    CALIBRATED,
    GIVEN,
    GROUP_SIZES,
    Form,
    Method,
    MethodName,
    Mtp,
    Policy,
    Rest,
    ScaleSign,
)

MANIFEST = OUTPUT_MANIFEST
REPORT = "kizami-report.jsonl"
CARD = "README.md"
CONFIG = "config.json"
SCHEMA = "kizami.manifest/1"
MAX_MANIFEST_BYTES = 16 << 20  # 163 shards and a few hundred side files take 100 kB
MAX_MANIFEST_MARKS = 1_000_000  # brackets, colons and commas; they have 8,000


def build_manifest(
    plan: Plan,
    shards: list[dict[str, Any]],
    files: dict[str, str],
    has_negative_scales: bool,
    source_contents: dict[str, str],
    origin: tuple[str, str] | None,
) -> dict[str, Any]:
    """No times, no paths.

    shards: file, bytes, sha256, in order; files: SHA-256 of every other file; source_contents: SHA-256 of sampled
    pages of each source file; origin: Hub id and commit of a source in the Hub cache.
    """
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "kizami_version": version("kizami"),
        "plan_hash": plan.hash,
        "scheme": plan.policy.scheme,
        "policy": asdict(plan.policy),
        "method": plan.method.name,
        "scale_sign": plan.method.scale_sign,
        "clip_allowance": plan.method.clip_allowance,
        **({} if plan.method.stats is None else {"calibration": plan.calibration}),
        **({} if plan.kv_scales is None else {"kv_scales": asdict(plan.kv_scales)}),
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
        "origin": None if origin is None else {"repo": origin[0], "revision": origin[1]},
        "source": plan.source,
        "source_contents": source_contents,
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
    """The manifest of a finished output. KizamiError "unfinished", "no_manifest"; "bad_manifest" if a bit of it has
    changed."""
    path = out / MANIFEST
    if not path.is_file():
        if (out / FOLDER / JOURNAL).is_file():
            raise KizamiError(
                "holds an unfinished conversion",
                code="unfinished",
                file=out.name,
                hint="run the same kizami convert again: it goes on where it stopped",
            )
        raise KizamiError(
            "not found",
            code="no_manifest",
            file=MANIFEST,
            hint=f"{out.name} is not a folder that kizami convert finished",
        )
    path = resolve_inside(out, MANIFEST)
    manifest = read_json_object(path, MANIFEST, limit=MAX_MANIFEST_BYTES, marks=MAX_MANIFEST_MARKS)
    if manifest.get("schema") != SCHEMA:
        raise KizamiError(f"schema {manifest.get('schema')!r}; expected {SCHEMA!r}", code="bad_manifest", file=MANIFEST)
    _check_form(manifest)
    try:
        json.dumps(manifest, allow_nan=False)
    except ValueError:
        raise KizamiError("has a number that is not finite", code="bad_manifest", file=MANIFEST) from None
    if manifest.get("self_sha256") != self_hash(manifest) or path.read_bytes() != dump_json(manifest):
        raise KizamiError(
            "its bytes are not those that kizami wrote (self_sha256 does not match)",
            code="bad_manifest",
            file=MANIFEST,
            hint="the file was edited or damaged: convert again, or restore it",
        )
    return manifest


_FORM: dict[str, type | tuple[type, ...]] = {
    "kizami_version": str, "plan_hash": str, "scheme": str, "family": str, "dialect": str, "policy": dict,
    "method": str, "scale_sign": str, "clip_allowance": (int, float, type(None)), "has_negative_scales": bool,
    "counts": dict, "output": dict, "source": dict, "source_contents": dict, "warnings": list, "shards": list,
    "files": dict, "self_sha256": str,
}  # fmt: skip


def _check_form(manifest: dict[str, Any]) -> None:
    """Whoever wrote it: what is read anywhere has the types that are expected."""
    wrong = next((key for key, kind in _FORM.items() if not isinstance(manifest.get(key, ...), kind)), None)
    if wrong is None and not _parts_fit(manifest):
        wrong = "a part of policy, counts, output, source, warnings, kv_scales, shards or files"
    if wrong is not None:
        raise KizamiError(
            f"{wrong} is missing or of another type than kizami writes", code="bad_manifest", file=MANIFEST
        )


def _parts_fit(manifest: dict[str, Any]) -> bool:
    policy, output, source = manifest["policy"], manifest["output"], manifest["source"]
    shards = [shard if isinstance(shard, dict) else {} for shard in manifest["shards"]]
    strings = [*manifest["files"].values(), *manifest["warnings"]]
    strings += [shard.get(key) for shard in shards for key in ("file", "sha256")]
    counts = [shard.get("bytes") for shard in shards]
    counts += [*manifest["counts"].values(), *(output.get(key) for key in ("bytes", "file_bytes", "tensors"))]
    return (
        all(isinstance(value, str) for value in strings)
        and all(type(value) is int and 0 <= value < 2**63 for value in [*counts, policy.get("max_shard_bytes")])
        and type(policy.get("group_size")) is int
        and policy["group_size"] in GROUP_SIZES
        and isinstance(output.get("bits_per_weight"), int | float)
        and abs(output["bits_per_weight"]) < 1e9
        and isinstance(source.get("files"), dict)
        and _is_origin(manifest.get("origin"))
        and _is_calibration(manifest)
        and _is_kv_scales(manifest.get("kv_scales"))
    )


def _is_origin(value: Any) -> bool:
    words = value.values() if isinstance(value, dict) and value.keys() == {"repo", "revision"} else [value]
    return value is None or all(isinstance(word, str) for word in words)


def _is_calibration(manifest: dict[str, Any]) -> bool:
    """Those methods have it and no other, with what is read of it here and in the card."""
    facts = manifest.get("calibration")
    if manifest["method"] not in (*CALIBRATED, *GIVEN):
        return "calibration" not in manifest
    return isinstance(facts, dict) and _is_facts(facts)


def _is_kv_scales(value: Any) -> bool:
    """Absent, or as `KvMerge` has it, with scales that kizami would read from a file."""
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() != {field.name for field in fields(KvMerge)}:
        return False
    words = isinstance(value["statement"], str) and isinstance(value["forced"], str | None)
    if not (words and type(value["tensors"]) is int and isinstance(value["document"], dict)):
        return False
    try:
        KvScales.parse(value["document"], MANIFEST)
    except KizamiError:
        return False
    return True


def kv_scales_of(manifest: Mapping[str, Any]) -> KvScales | None:
    """The scales that a manifest records; None without any."""
    recorded = manifest.get("kv_scales")
    return None if recorded is None else KvScales.parse(recorded["document"], MANIFEST)


def _is_facts(facts: dict[str, Any]) -> bool:
    """As `calibrated.facts_of` gives them."""
    counts, names, versions = facts.get("tokens"), facts.get("data"), facts.get("libraries", {})
    return (
        facts.keys() <= {"sha256", "tokens_sha256", "tokens", "data", "libraries"}
        and all(isinstance(facts.get(key), str) for key in ("sha256", "tokens_sha256"))
        and type(counts) is int
        and 0 <= counts < 2**63
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and isinstance(versions, dict)
        and all(isinstance(word, str) for pair in versions.items() for word in pair)
    )


def output_identity(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What tells an output from every other: its plan, and its weights' bytes. Two sources of equal headers, a model
    and its fine-tune, have one plan."""
    shards = canonical([shard["sha256"] for shard in manifest["shards"]])
    return {"plan_hash": manifest["plan_hash"], "shards_sha256": hashlib.sha256(shards.encode()).hexdigest()}


def policy_of(manifest: dict[str, Any]) -> Policy:
    """The policy that a manifest records. KizamiError where it is none (another version's, or a forged one)."""
    fields = dict(manifest["policy"])
    try:
        lists = {key: tuple(fields[key]) for key in ("targets", "ignore")}
        roles = tuple((role, form) for role, form in fields["roles"])
        policy = Policy(**fields | lists | {"roles": roles})
    except (KeyError, TypeError, ValueError):
        policy = None
    if policy is None or not _is_policy(policy):
        raise KizamiError("its policy is not one of this version", code="bad_manifest", file=MANIFEST) from None
    return policy


def _is_policy(policy: Policy) -> bool:
    words = (*policy.targets, *policy.ignore, *(role for role, _ in policy.roles))
    return (
        all(isinstance(word, str) for word in words)
        and policy.to in ("int4", "fp8", "bf16")
        and policy.format in FORMATS
        and policy.rest in get_args(Rest)
        and policy.mtp in get_args(Mtp)
        and all(form in get_args(Form) for _, form in policy.roles)
        and isinstance(policy.allow_requantize, bool)
    )


def method_of(manifest: dict[str, Any]) -> Method:
    name, sign = manifest["method"], manifest["scale_sign"]
    if name not in get_args(MethodName) or sign not in get_args(ScaleSign):
        raise KizamiError(f"method {name!r} with {sign!r} scales is unknown", code="bad_manifest", file=MANIFEST)
    return Method(name, sign, manifest["clip_allowance"], manifest.get("calibration", {}).get("sha256"))
