"""Proof from the finished bytes. Trusts nothing from the run: structure, hashes, and, with the source, every bit.

Checks without source: every file is the one the manifest names; index, headers, config, report and manifest agree;
every module is in exactly one form; scales are usable. With source: verification/source.py.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.index import INDEX_NAME
from kizami.formats.kv_scales.neutral import KvScales
from kizami.formats.statistics import Statistics
from kizami.quantize.manifest import CONFIG, MANIFEST, REPORT, policy_of, read_manifest
from kizami.quantize.report import Row, over_threshold, read_report, worst_tensors
from kizami.quantize.threads import available_cores
from kizami.quantize.verification.calibrated import require_statistics_of
from kizami.quantize.verification.config import check_config
from kizami.quantize.verification.damage import locate_damage
from kizami.quantize.verification.files import Problem, check_files
from kizami.quantize.verification.foreign import NOTE as FOREIGN_NOTE
from kizami.quantize.verification.foreign import Foreign
from kizami.quantize.verification.kv_scales import check_foreign_kv_scales, check_kv_scales
from kizami.quantize.verification.source import check_against
from kizami.quantize.verification.structure import check_scales, check_structure, check_totals, packed_modules, rules_of


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked (counts by kind), what was found, and what could not be checked after these problems.

    notes: what may be so, but should be known. max_rel_error and worst are the figures that the run recorded; with
    `against` they have been recomputed.
    """

    problems: tuple[Problem, ...]
    checked: dict[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: int = 0
    tensors: int = 0
    max_rel_error: float | None = None
    worst: str | None = None

    @property
    def ok(self) -> bool:
        return not self.problems


STRUCTURE, SCALES, SOURCE = "structure", "scales", "tensors against the source"
STATISTICS = "modules against their statistics"


def verify(
    out: Path,
    *,
    against: Checkpoint | None = None,
    statistics: Statistics | None = None,
    kv_scales: KvScales | None = None,
    sample: int | None = None,
    max_rel_error: float | None = None,
    workers: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> Verification:
    """Checks a finished output.

    sample: with `against`, recompute only every n-th tensor, so that about `sample` of them are seen.
    statistics: with `against`, those that a calibrated method used. kv_scales: those that the output must have.
    Raises KizamiError only where nothing can be checked at all (no folder, no manifest, an unfinished run), or where
    the statistics are those of something else.
    """
    if not out.is_dir():
        raise KizamiError("is not a folder", code="not_found", file=str(out), hint="give the OUT of kizami convert")
    workers = workers or available_cores()
    try:
        manifest = read_manifest(out)
    except KizamiError as e:
        if e.code == "unfinished":
            raise
        if e.code == "no_manifest" and any(os.path.lexists(out / name) for name in (MANIFEST, REPORT)):
            raise  # kizami's, and without its manifest
        if e.code == "no_manifest":
            return _verify_foreign(out, e, against, workers)
        return Verification((_problem(e),), skipped=(STRUCTURE, SCALES, *([SOURCE] if against else [])))
    if statistics is not None:
        require_statistics_of(manifest, statistics)
    problems, notes = check_files(out, manifest, workers)
    changed = [problem.file for problem in problems if problem.code == "changed_file" and problem.file]
    problems += locate_damage(out, changed, [shard["file"] for shard in manifest["shards"]])
    rows: list[Row] = []
    try:
        rows = read_report(out)
        contents = _check_contents(
            out, manifest, rows, problems, against, statistics, kv_scales, sample, workers, on_progress
        )
    except KizamiError as e:  # a file that differs need not be readable
        contents = Verification((_problem(e),), skipped=(STRUCTURE, SCALES, *([SOURCE] if against else [])))
    if max_rel_error is not None:
        problems += [_too_large(row, max_rel_error) for row in over_threshold(rows, max_rel_error)]
    worst = worst_tensors(rows, 1)
    return replace(
        contents,
        problems=(*problems, *(p for p in contents.problems if p not in problems)),
        notes=(*notes, *contents.notes),
        files=_file_count(manifest),
        max_rel_error=worst[0]["rel_error"] if worst else None,
        worst=worst[0]["name"] if worst else None,
    )


def _verify_foreign(out: Path, no_manifest: KizamiError, against: Checkpoint | None, workers: int) -> Verification:
    """Raises `no_manifest` for what is no INT4 checkpoint at all."""
    try:
        foreign = Foreign.open(out)
    except KizamiError as e:
        if e.code == "missing_file" and e.file != CONFIG:  # a folder of something else
            raise no_manifest from None
        return Verification((_problem(e),), skipped=(STRUCTURE, SCALES), notes=(FOREIGN_NOTE,))
    if foreign is None:
        raise no_manifest
    if against is not None:
        raise KizamiError(
            f"has no {MANIFEST}: what was made of which tensor is not known, so nothing can be compared with --against",
            code="no_manifest",
            file=out.name,
            hint="leave --against out: structure and scales are checked",
        )
    packed, tensors = foreign.dialect.packed, foreign.checkpoint.tensors
    kv_problems, kv_notes = check_foreign_kv_scales(foreign.checkpoint)
    problems = (*foreign.problems(workers), *kv_problems)
    notes = (FOREIGN_NOTE, *kv_notes)
    return Verification(problems, {STRUCTURE: len(tensors), SCALES: len(packed)}, notes=notes, tensors=len(tensors))


def _check_contents(
    out: Path,
    manifest: dict[str, Any],
    rows: Sequence[Row],
    file_problems: Sequence[Problem],
    against: Checkpoint | None,
    statistics: Statistics | None,
    kv_scales: KvScales | None,
    sample: int | None,
    workers: int,
    on_progress: Callable[[int, int], None],
) -> Verification:
    """What the files hold. Where one of them differs, only a source can still tell which tensor it is."""
    differing = {problem.file for problem in file_problems if problem.code != "stranger"}
    needed = {INDEX_NAME, CONFIG, REPORT, *(shard["file"] for shard in manifest["shards"])}
    if differing & needed and against is None:
        return Verification((), skipped=(STRUCTURE, SCALES))
    checkpoint = Checkpoint.open(out)
    policy = policy_of(manifest)
    packed = packed_modules(checkpoint, policy.format)
    rules = rules_of(checkpoint.config)
    problems = [*check_structure(checkpoint, policy, packed, rules), *check_totals(checkpoint, manifest, rows)]
    problems += [] if problems else check_config(checkpoint, policy)
    kv_problems, kv_notes = check_kv_scales(checkpoint, manifest, rows, kv_scales)
    other_scales = [problem for problem in kv_problems if problem.code == "other_kv_scales"]  # FILE's: OUT may be right
    problems += [problem for problem in kv_problems if problem not in other_scales]
    checked = {STRUCTURE: len(checkpoint.tensors)}
    if problems:
        skipped = (SCALES, *([SOURCE] if against else []))
        return Verification((*problems, *other_scales), checked, skipped, tensors=len(checkpoint.tensors))
    problems += [*other_scales, *check_scales(checkpoint, manifest, packed, workers)]
    checked[SCALES] = len(packed)
    notes = tuple(kv_notes)
    if against is not None:
        found = check_against(checkpoint, against, manifest, rows, sample, workers, on_progress, statistics)
        problems += found.problems
        notes += found.notes
        checked[SOURCE] = found.tensors
        checked |= {STATISTICS: found.held} if statistics is not None else {}
    return Verification(tuple(problems), checked, notes=notes, tensors=len(checkpoint.tensors))


def _problem(e: KizamiError) -> Problem:
    return Problem(e.code, e.message, e.file, e.tensor)


def _file_count(manifest: dict[str, Any]) -> int:
    return len(manifest["shards"]) + len(manifest["files"]) + 1


def _too_large(row: Row, limit: float) -> Problem:
    return Problem(
        "max_rel_error", f"relative error {row['rel_error']:.4f} is above {limit:g}", row["shard"], row["name"]
    )
