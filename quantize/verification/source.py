"""A finished output held against the checkpoint that it was made from: the proof.

The plan is made anew from the source's headers, and every file must be what follows from it: the manifest, the headers,
the index, the config and the side files byte for byte; the tensors as tensors.py says; the rows of the report in
every figure but sqnr_top_db, which needs all weights of a tensor at once.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from threading import Event
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import file_sha256, resolve_inside
from kizami.formats.fingerprint import sample_contents
from kizami.formats.header import encode_header
from kizami.formats.index import INDEX_NAME, encode_index
from kizami.formats.reader import TensorReader
from kizami.formats.run_log import canonical
from kizami.formats.side_files import find_side_files
from kizami.formats.statistics import Statistics
from kizami.formats.strict_json import dump_json
from kizami.formats.writer import PT_METADATA
from kizami.quantize.calibrated.statistics import find_fallbacks
from kizami.quantize.card import hub_origin
from kizami.quantize.given import chosen_instead
from kizami.quantize.kv_scales.merge import asked_of
from kizami.quantize.manifest import CARD, CONFIG, MANIFEST, REPORT, build_manifest, method_of, policy_of
from kizami.quantize.plan import Plan, Shard, Step
from kizami.quantize.planner import build_plan
from kizami.quantize.report import ROW_CRC32, Row
from kizami.quantize.settings import CALIBRATED
from kizami.quantize.shard import report_row
from kizami.quantize.threads import thread_map
from kizami.quantize.verification.calibrated import UNKNOWN, Witness, check_statistics_are_those
from kizami.quantize.verification.damage import tensor_crc32s
from kizami.quantize.verification.files import Problem
from kizami.quantize.verification.tensors import Fault, check_step

# Sums of up to 1e8 float64 terms in two orders differ by less; the figures are ratios and roots of such sums.
FIGURE_TOLERANCE = 1e-8
NOT_RECOMPUTED = ("sqnr_top_db", ROW_CRC32)  # read_report holds the second against the row's bytes


@dataclass(slots=True)
class Comparison:
    """tensors: how many were compared; held: how many of them to statistics."""

    problems: list[Problem] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    tensors: int = 0
    held: int = 0


def check_against(
    out: Checkpoint,
    source: Checkpoint,
    manifest: dict[str, Any],
    rows: Sequence[Row],
    sample: int | None,
    workers: int,
    on_progress: Callable[[int, int], None],
    statistics: Statistics | None = None,
) -> Comparison:
    """sample: only every n-th tensor is compared, so that about `sample` of them are. statistics: of the run."""
    found = Comparison()
    try:
        kv = asked_of(manifest)
        plan = build_plan(source, policy_of(manifest), method_of(manifest), manifest.get("calibration"), kv)
        if statistics is not None:
            found.problems += check_statistics_are_those(statistics, manifest)
            find_fallbacks(plan, statistics)  # raises where they do not fit
    except KizamiError as e:
        found.problems.append(Problem(e.code, e.message, e.file, e.tensor))
        return found
    contents = sample_contents(source)
    found.problems += [*_other_commit(source, manifest)] or [*_other_source(plan, contents, manifest)]
    if found.problems:
        return found
    found.problems += [
        *_tensors(plan, out),
        *_rows(plan, rows),
        *_manifest(plan, source, contents, manifest),
        *_headers(plan, out),
        *_made_files(plan, out),
        *_side_files(source, manifest),
    ]
    if manifest.get("origin") is not None and hub_origin(source.root) is None:
        found.notes = (f"{MANIFEST} names a source on the Hub; SRC is not in the Hub's cache, so this was not checked",)
    if plan.method.name in CALIBRATED and statistics is None:
        found.notes += ("what only the calibration statistics can tell was not checked (--stats STATS does)",)
    if not found.problems:
        _compare(plan, out, source, Witness(statistics), rows, sample, workers, on_progress, found)
    return found


def _other_commit(source: Checkpoint, manifest: dict[str, Any]) -> Iterator[Problem]:
    made_of, now = manifest.get("origin"), hub_origin(source.root)
    if isinstance(made_of, dict) and now is not None and now != (made_of["repo"], made_of["revision"]):
        recorded = f"{made_of['repo']}@{made_of['revision']}"
        yield Problem("other_source", f"was made of {recorded}, and the source here is {'@'.join(now)}", MANIFEST)


def _other_source(plan: Plan, contents: dict[str, str], manifest: dict[str, Any]) -> Iterator[Problem]:
    different = "the source is not the one that was converted"
    recorded = manifest["source"]
    if plan.source != recorded:
        files = [name for name in plan.source["files"] if plan.source["files"][name] != recorded["files"].get(name)]
        what = f"files {', '.join(files[:3])}" if files else "its config.json or its set of files"
        yield Problem("other_source", f"{different}: {what} differ from what {MANIFEST} records")
    elif contents != manifest["source_contents"]:
        names = [name for name, digest in contents.items() if digest != manifest["source_contents"].get(name)]
        yield Problem("other_source", f"{different}: {len(names)} files hold other weights", next(iter(names), None))
    elif plan.hash != manifest["plan_hash"]:
        yield Problem("other_plan", f"plan hash {plan.hash}; {MANIFEST} says {manifest['plan_hash']}")


def _tensors(plan: Plan, out: Checkpoint) -> Iterator[Problem]:
    """Every source module is there with the planned names, dtypes and shapes, and nothing else is."""
    expected = {spec.name: spec for shard in plan.shards for spec in shard.tensors}
    for name in sorted(expected.keys() | out.tensors.keys()):
        info = out.tensors.get(name)
        if info is None or expected.get(name) != info.spec:
            yield Problem("not_as_planned", f"found {info and info.spec}, planned {expected.get(name)}", tensor=name)


def _rows(plan: Plan, rows: Sequence[Row]) -> Iterator[Problem]:
    planned = [[spec.name for spec in step.outputs] for _, step in _in_order(plan)]
    if [sorted(row["crc32"]) for row in rows] != [sorted(names) for names in planned]:
        yield Problem("report_row", f"the {len(rows)} rows are not those of the plan, in its order", REPORT)


def _in_order(plan: Plan) -> Iterator[tuple[Shard, Step]]:
    return ((shard, step) for shard in plan.shards for step in shard.steps)


def _manifest(plan: Plan, source: Checkpoint, contents: dict[str, str], manifest: dict[str, Any]) -> Iterator[Problem]:
    """Whatever follows from the plan. Hashes are held against the files elsewhere; any version may have written it."""
    sha256 = {shard["file"]: shard["sha256"] for shard in manifest["shards"]}
    shards = [{"file": s.file, "bytes": s.file_nbytes, "sha256": sha256.get(s.file)} for s in plan.shards]
    recorded = manifest.get("origin")
    origin = hub_origin(source.root) or (tuple(recorded.values()) if isinstance(recorded, dict) else None)
    files, negative = manifest["files"], manifest["has_negative_scales"]
    expected = build_manifest(plan, shards, files, negative, contents, origin)
    expected |= {key: manifest.get(key) for key in ("kizami_version", "self_sha256")}
    for key in sorted(expected.keys() | manifest.keys()):
        if canonical(manifest.get(key)) != canonical(expected.get(key)):
            yield Problem("other_manifest", f"{key} is not what follows from the source and the policy", MANIFEST)


def _headers(plan: Plan, out: Checkpoint) -> Iterator[Problem]:
    for shard in plan.shards:
        header = out.headers.get(shard.file)
        if header is None:
            yield Problem("not_as_planned", "is planned, but no tensor is in it", shard.file)
        elif header.sha256 != hashlib.sha256(encode_header(shard.tensors, PT_METADATA)).hexdigest():
            yield Problem("other_header", "its header is not the one that kizami writes for these tensors", shard.file)


def _made_files(plan: Plan, out: Checkpoint) -> Iterator[Problem]:
    weight_map = {spec.name: shard.file for shard in plan.shards for spec in shard.tensors}
    made = {INDEX_NAME: encode_index(weight_map, plan.output.bytes), CONFIG: dump_json(plan.config)}
    for name, data in made.items():
        if (out.root / name).read_bytes() != data:
            yield Problem("other_file", "is not what follows from the source and the policy, byte for byte", name)


def _side_files(source: Checkpoint, manifest: dict[str, Any]) -> Iterator[Problem]:
    """Tokenizer, chat template, code...: the source's, byte for byte, none too many and none too few."""
    made, ours = manifest["files"], {INDEX_NAME, CONFIG, REPORT, CARD}
    copied = find_side_files(source).copied
    for name in sorted({*copied, *made, *ours}):
        if name not in made:
            who = "kizami writes it" if name in ours else "the source has it"
            yield Problem("other_side_file", f"{who}, {MANIFEST} has not", name)
        elif name in ours:
            continue
        elif name not in copied:
            yield Problem("other_side_file", "the source has no such file to copy", name)
        elif file_sha256(resolve_inside(source.root, name), name) != made[name]:
            yield Problem("other_side_file", "is not the source's file of this name", name)


def _compare(
    plan: Plan,
    out: Checkpoint,
    source: Checkpoint,
    witness: Witness,
    rows: Sequence[Row],
    sample: int | None,
    workers: int,
    on_progress: Callable[[int, int], None],
    found: Comparison,
) -> None:
    steps = [(shard, step, row) for (shard, step), row in zip(_in_order(plan), rows, strict=True)]
    chosen = steps[:: max(1, len(steps) // sample)] if sample else steps
    with TensorReader(out) as ours, TensorReader(source) as theirs:

        def check(item: tuple[Shard, Step, Row], _: Event) -> list[Fault]:
            shard, step, row = item
            claim, fault = witness.claim(plan, step, row)
            if fault is not None:
                return [("report_row", fault)]
            method = plan.method if claim is None else replace(plan.method, name=claim.chosen.method)
            h = None if claim is None else claim.h
            faults, sums = check_step(step, theirs, ours, out.tensors, plan.policy, method, h)
            if faults:
                return faults
            crc32 = dict(tensor_crc32s(out.path(shard.file), [out.tensors[spec.name] for spec in step.outputs]))
            made = chosen_instead(plan.method, step) if claim is None else claim.chosen
            expected = report_row(plan, shard, step, sums, crc32, made)
            if claim is not None and h is None:
                expected |= {key: row[key] for key in UNKNOWN if key in expected}
            return list(_row_faults(row, expected))

        checked = zip(chosen, thread_map(workers, check, chosen), strict=True)
        for done, ((shard, step, _), faults) in enumerate(checked, 1):
            found.tensors += bool(step.sources)  # KV scales are held to the manifest's record
            found.held += witness.holds(plan, step)
            on_progress(done, len(chosen))
            found.problems += [Problem(code, message, shard.file, step.module) for code, message in faults]


def _row_faults(row: Row, expected: Mapping[str, Any]) -> Iterator[Fault]:
    """One fault a row: its figures depend on each other."""
    wrong = [f"{key} is {row.get(key)}, recomputed {expected.get(key)}" for key in _wrong_keys(row, expected)]
    if any(text.startswith("weight_energy") for text in wrong):
        yield (
            "report_row",
            f"its weights are not those that were converted, or the report is changed: {'; '.join(wrong)}",
        )
    elif wrong:
        yield "report_row", f"the report's {'; '.join(wrong)}"


def _wrong_keys(row: Row, expected: Mapping[str, Any]) -> Iterator[str]:
    yield from sorted(row.keys() - {ROW_CRC32} ^ expected.keys())
    for key in sorted((row.keys() & expected.keys()) - {*NOT_RECOMPUTED}):
        said, is_ = row.get(key), expected.get(key)
        same = canonical(said) == canonical(is_)
        if isinstance(said, float) and isinstance(is_, float):
            same = isclose(said, is_, rel_tol=FIGURE_TOLERANCE)
        if key == "sqnr_db" and said is not None and is_ is not None:
            same = isclose(said, is_, abs_tol=2e-6)  # written with 6 digits after the point
        if not same:
            yield key
