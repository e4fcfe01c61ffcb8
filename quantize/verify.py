"""Proof from the finished bytes. Trusts nothing from the run: structure, hashes, and, with the source, every bit.

Checks without source: every file is the one the manifest names; index, headers, config, report and manifest agree;
every module is in exactly one form; scales are usable. With source: the plan is made anew from the source's headers
and must be the one recorded; config and side files are those that follow from it; every tensor is decoded by the oracle
and held against the bytes (verify_tensors.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import file_sha256, resolve_inside
from kizami.formats.fingerprint import sample_contents
from kizami.formats.index import INDEX_NAME
from kizami.formats.reader import TensorReader
from kizami.formats.side_files import find_side_files
from kizami.quantize.executor import available_cores, thread_map
from kizami.quantize.manifest import CARD, CONFIG, MANIFEST, REPORT, method_of, policy_of, read_manifest
from kizami.quantize.plan import Step, canonical
from kizami.quantize.planner import build_plan
from kizami.quantize.report import Row, over_threshold, read_report, worst_tensors
from kizami.quantize.verify_damage import locate_damage
from kizami.quantize.verify_files import Problem, check_files
from kizami.quantize.verify_structure import check_scales, check_structure, packed_modules
from kizami.quantize.verify_tensors import check_step


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked (counts by kind), what was found, and what could not be checked because files differ.

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


def verify(
    out: Path,
    *,
    against: Checkpoint | None = None,
    sample: int | None = None,
    max_rel_error: float | None = None,
    workers: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> Verification:
    """Checks a finished output.

    sample: with `against`, recompute only every n-th tensor, so that about `sample` of them are seen.
    Raises KizamiError only where nothing can be checked at all (no folder, no manifest).
    """
    if not out.is_dir():
        raise KizamiError("is not a folder", code="not_found", file=str(out), hint="give the OUT of kizami convert")
    workers = workers or available_cores()
    try:
        manifest = read_manifest(out)
    except KizamiError as e:
        if e.code == "no_manifest":
            raise
        return Verification((_problem(e),), skipped=(STRUCTURE, SCALES, *([SOURCE] if against else [])))
    problems, notes = check_files(out, manifest, workers)
    changed = [problem.file for problem in problems if problem.code == "changed_file" and problem.file]
    problems += locate_damage(out, changed, [shard["file"] for shard in manifest["shards"]])
    try:
        contents = _check_contents(out, manifest, problems, against, sample, workers, on_progress)
    except KizamiError as e:  # a file that differs need not be readable
        contents = Verification((_problem(e),), skipped=(STRUCTURE, SCALES, *([SOURCE] if against else [])))
    rows = _rows_or_none(out)
    if max_rel_error is not None and rows is not None:
        problems += [_too_large(row, max_rel_error) for row in over_threshold(rows, max_rel_error)]
    worst = worst_tensors(rows or [], 1)
    return replace(
        contents,
        problems=(*problems, *(p for p in contents.problems if p not in problems)),
        notes=tuple(notes),
        files=_file_count(manifest),
        max_rel_error=worst[0]["rel_error"] if worst else None,
        worst=worst[0]["name"] if worst else None,
    )


def _check_contents(
    out: Path,
    manifest: dict[str, Any],
    file_problems: Sequence[Problem],
    against: Checkpoint | None,
    sample: int | None,
    workers: int,
    on_progress: Callable[[int, int], None],
) -> Verification:
    """What the files hold. Where one of them differs, only a source can still tell which tensor it is."""
    differing = {problem.file for problem in file_problems if problem.code != "stranger"}
    needed = {INDEX_NAME, CONFIG, REPORT, *(shard["file"] for shard in manifest["shards"])}
    if differing & needed and against is None:
        return Verification((), skipped=(STRUCTURE, SCALES))
    rows = read_report(out)
    checkpoint = Checkpoint.open(out)
    packed = packed_modules(checkpoint)
    problems = [*check_structure(checkpoint, manifest, rows, packed)]
    checked = {STRUCTURE: len(checkpoint.tensors)}
    if problems:
        skipped = (SCALES, *([SOURCE] if against else []))
        return Verification(tuple(problems), checked, skipped, tensors=len(checkpoint.tensors))
    problems += check_scales(checkpoint, manifest, packed, workers)
    checked[SCALES] = len(packed)
    if against is not None:
        source = _Source(checkpoint, against, manifest, {name: row for row in rows for name in row["crc32"]})
        problems += source.check(sample, workers, on_progress)
        checked[SOURCE] = source.seen
    return Verification(tuple(problems), checked, tensors=len(checkpoint.tensors))


def _rows_or_none(out: Path) -> list[Row] | None:
    """None where the report cannot be read; `_check_contents` or the hashes have said so."""
    try:
        return read_report(out)
    except KizamiError:
        return None


def _problem(e: KizamiError) -> Problem:
    return Problem(e.code, e.message, e.file, e.tensor)


def _file_count(manifest: dict[str, Any]) -> int:
    return len(manifest["shards"]) + len(manifest["files"]) + 1


class _Source:
    """The finished output held against the checkpoint it was made from."""

    def __init__(self, out: Checkpoint, source: Checkpoint, manifest: dict[str, Any], rows: dict[str, Row]) -> None:
        self.out, self.source, self.manifest = out, source, manifest
        self.rows = rows  # by the name of each tensor that a row is about
        self.seen = 0

    def check(self, sample: int | None, workers: int, on_progress: Callable[[int, int], None]) -> list[Problem]:
        try:
            plan = build_plan(self.source, policy_of(self.manifest), method_of(self.manifest))
        except KizamiError as e:
            return [_problem(e)]
        if plan.source != self.manifest["source"]:
            return [Problem("other_source", self._difference(plan.source))]
        contents = sample_contents(self.source)
        if contents != self.manifest["source_contents"]:
            files = [name for name, digest in contents.items() if digest != self.manifest["source_contents"].get(name)]
            return [
                Problem(
                    "other_source",
                    f"the source is not the one that was converted: {len(files)} files hold other weights",
                    files[0] if files else None,
                )
            ]
        if plan.hash != self.manifest["plan_hash"]:
            return [Problem("other_plan", f"plan hash {plan.hash}; the manifest says {self.manifest['plan_hash']}")]
        steps = [step for step in plan.steps if step.outputs]
        problems = [*self._missing(steps)]
        if canonical(self.out.config) != canonical(plan.config):
            problems.append(Problem("other_config", "is not the config that the source and the policy give", CONFIG))
        problems += self._side_files()
        if problems:
            return problems
        chosen = steps[:: max(1, len(steps) // sample)] if sample else steps
        with TensorReader(self.out) as out, TensorReader(self.source) as source:

            def check(step: Step) -> list[tuple[str, str]]:
                row = self.rows[step.outputs[0].name]
                return check_step(step, source, out, self.out.tensors, plan.policy, plan.method, row)

            for step, faults in zip(chosen, thread_map(workers, check, chosen), strict=True):
                self.seen += 1
                on_progress(self.seen, len(chosen))
                file = self.out.tensors[step.outputs[0].name].file
                problems += [Problem(code, message, file, step.module) for code, message in faults]
        return problems

    def _missing(self, steps: Sequence[Step]) -> Iterator[Problem]:
        """Every source module is there with the planned names, dtypes and shapes, and nothing else is."""
        expected = {spec.name: spec for step in steps for spec in step.outputs}
        for name in sorted(expected.keys() | self.out.tensors.keys()):
            info = self.out.tensors.get(name)
            if info is None or expected.get(name) != info.spec:
                yield Problem(
                    "not_as_planned", f"found {info and info.spec}, planned {expected.get(name)}", tensor=name
                )
        for step in steps:
            if step.outputs[0].name not in self.rows:
                yield Problem("report_row", "has no row in the report", tensor=step.module)

    def _side_files(self) -> Iterator[Problem]:
        """Tokenizer, chat template, code...: the source's, byte for byte, none too many and none too few."""
        made = self.manifest["files"]
        copied = find_side_files(self.source).copied
        for name in sorted({*copied, *made} - {INDEX_NAME, CONFIG, REPORT, CARD}):
            if name not in made:
                yield Problem("other_side_file", "the source has it, the output has not", name)
            elif name not in copied:
                yield Problem("other_side_file", "the source has no such file to copy", name)
            elif file_sha256(resolve_inside(self.source.root, name), name) != made[name]:
                yield Problem("other_side_file", "is not the source's file of this name", name)

    def _difference(self, found: dict[str, Any]) -> str:
        recorded = self.manifest["source"]
        files = [name for name in found["files"] if found["files"][name] != recorded["files"].get(name)]
        what = f"files {', '.join(files[:3])}" if files else "its config.json or its set of files"
        return f"the source is not the one that was converted: {what} differ from what {MANIFEST} records"


def _too_large(row: Row, limit: float) -> Problem:
    return Problem(
        "max_rel_error", f"relative error {row['rel_error']:.4f} is above {limit:g}", row["shard"], row["name"]
    )
