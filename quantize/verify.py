"""Proof from the finished bytes. Trusts nothing from the run: structure, hashes, and, with the source, every bit.

Checks without source: every file is the one the manifest names; index, headers, config, report and manifest agree;
every module is in exactly one form; scales are usable. With source: the plan is made anew from the source's headers
and must be the one recorded; every tensor is decoded by the oracle and held against the bytes (verify_tensors.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import file_sha256
from kizami.formats.int4_layout import WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, packed_specs
from kizami.formats.quant_config import resolver
from kizami.formats.reader import TensorReader
from kizami.quantize.executor import available_cores, thread_map
from kizami.quantize.journal import FOLDER
from kizami.quantize.manifest import MANIFEST, method_of, policy_of, read_manifest
from kizami.quantize.plan import Step
from kizami.quantize.planner import build_plan
from kizami.quantize.report import Row, over_threshold, read_report, worst_tensors
from kizami.quantize.verify_tensors import check_step, scale_faults


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it must be."""

    code: str
    message: str
    file: str | None = None
    tensor: str | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked (counts by kind) and what was found."""

    problems: tuple[Problem, ...]
    checked: dict[str, int] = field(default_factory=dict)
    files: int = 0
    tensors: int = 0
    max_rel_error: float | None = None
    worst: str | None = None

    @property
    def ok(self) -> bool:
        return not self.problems


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
        problems = [*_check_files(out, manifest, workers)]
        if problems:  # what follows reads the files; on changed bytes it would only say the same in other words
            return Verification(tuple(problems), files=_file_count(manifest))
        rows = read_report(out)
        checkpoint = Checkpoint.open(out)
    except KizamiError as e:
        if e.code in ("not_found", "no_manifest"):
            raise
        return Verification((_problem(e),))
    packed = [
        info.name.removesuffix("." + WEIGHT_PACKED) for info in checkpoint.tensors.values() if _is_packed(info.name)
    ]
    problems += [*_check_structure(checkpoint, manifest, rows, packed)]
    checked = {"structure": len(checkpoint.tensors)}
    if not problems:
        problems += _check_scales(checkpoint, manifest, packed, workers)
        checked["scales"] = len(packed)
    if not problems and against is not None:
        source = _Source(checkpoint, against, manifest, {row["name"]: row for row in rows})
        problems += source.check(sample, workers, on_progress)
        checked["tensors against the source"] = source.seen
    if max_rel_error is not None:
        problems += [_too_large(row, max_rel_error) for row in over_threshold(rows, max_rel_error)]
    worst = worst_tensors(rows, 1)
    return Verification(
        problems=tuple(problems),
        checked=checked,
        files=_file_count(manifest),
        tensors=len(checkpoint.tensors),
        max_rel_error=worst[0]["rel_error"] if worst else None,
        worst=worst[0]["name"] if worst else None,
    )


def _problem(e: KizamiError) -> Problem:
    return Problem(e.code, e.message, e.file, e.tensor)


def _is_packed(name: str) -> bool:
    return name.endswith("." + WEIGHT_PACKED)


def _file_count(manifest: dict[str, Any]) -> int:
    return len(manifest["shards"]) + len(manifest["files"]) + 1


def _check_files(out: Path, manifest: dict[str, Any], workers: int) -> Iterator[Problem]:
    """Every file the manifest names is there with its SHA-256, and no other."""
    expected: dict[str, str] = {shard["file"]: shard["sha256"] for shard in manifest["shards"]} | manifest["files"]
    found = {p.relative_to(out).as_posix(): p for p in out.rglob("*") if p.is_symlink() or not p.is_dir()}
    for name in sorted(found.keys() - expected.keys() - {MANIFEST}):
        hint = " (left by a run that was killed at its very end; safe to remove)" if name.startswith(FOLDER) else ""
        yield Problem("stranger", f"is not named in {MANIFEST}{hint}", name)
    for name in sorted(expected.keys() - found.keys()):
        yield Problem("missing_file", f"is named in {MANIFEST}, but is not there", name)
    names = sorted(expected.keys() & found.keys())
    for name, digest in zip(names, thread_map(workers, lambda n: file_sha256(found[n], n), names), strict=True):
        if digest != expected[name]:
            yield Problem("changed_file", f"SHA-256 is {digest}; {MANIFEST} says {expected[name]}", name)


def _check_structure(
    checkpoint: Checkpoint, manifest: dict[str, Any], rows: Sequence[Row], packed: Sequence[str]
) -> Iterator[Problem]:
    """Config rules = tensors, every module in exactly one form, one report row per module, exact totals."""
    tensors = checkpoint.tensors
    group_size = manifest["policy"]["group_size"]
    quantization_config = checkpoint.config.get("quantization_config") or checkpoint.config.get("text_config", {}).get(
        "quantization_config", {}
    )
    rules = resolver(quantization_config)
    with TensorReader(checkpoint) as reader:
        for module in packed:
            yield from _check_packed_module(checkpoint, reader, module, group_size)
            if rules(module) != "int4":
                yield Problem("config_rules", "is packed, but the config's rules do not say so", "config.json", module)
    for name, info in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and len(info.shape) == 2:
            form = "fp8" if info.dtype == "F8_E4M3" else "none"
            if (said := rules(module)) != form:
                yield Problem(
                    "config_rules", f"is {info.dtype}, but the config's rules say {said}", "config.json", module
                )
    written = {row["name"] for row in rows}
    for module in packed:
        if module not in written:
            yield Problem("report_row", "is packed, but has no row in the report", tensor=module)
    total = sum(info.nbytes for info in tensors.values())
    if total != manifest["output"]["bytes"] or len(tensors) != manifest["output"]["tensors"]:
        yield Problem("totals", f"{len(tensors)} tensors, {total} bytes; the manifest says {manifest['output']}")


def _check_packed_module(
    checkpoint: Checkpoint, reader: TensorReader, module: str, group_size: int
) -> Iterator[Problem]:
    """weight_packed, weight_shape and weight_scale fit each other, in one file, without a float copy beside them."""
    parts = [checkpoint.tensors.get(f"{module}.{suffix}") for suffix in (WEIGHT_PACKED, WEIGHT_SHAPE, WEIGHT_SCALE)]
    packed, shape, scale = parts
    if packed is None or shape is None or scale is None:
        yield Problem(
            "incomplete_module", "has weight_packed, but not all of weight_shape and weight_scale", tensor=module
        )
        return
    if f"{module}.weight" in checkpoint.tensors:
        yield Problem("two_forms", "is there packed and as a float weight", packed.file, module)
    if len({packed.file, shape.file, scale.file}) != 1:
        yield Problem("split_module", "its three tensors lie in different files", packed.file, module)
    rows, cols = (int(size) for size in reader.read(shape).view("<i4")) if shape.nbytes == 8 else (0, 0)
    if [part.spec for part in (packed, shape, scale)] != list(packed_specs(module, rows, cols, group_size)):
        yield Problem(
            "bad_shape", f"weight_shape says [{rows}, {cols}], which its tensors do not have", packed.file, module
        )


def _check_scales(
    checkpoint: Checkpoint, manifest: dict[str, Any], packed: Sequence[str], workers: int
) -> list[Problem]:
    """Scales are finite and not zero; negative ones only where the method may write them, and as the manifest says."""
    may = manifest["method"] == "signed" or (manifest["method"] == "search" and manifest["scale_sign"] == "signed")
    problems = []
    negative = False
    with TensorReader(checkpoint) as reader:
        found = thread_map(
            workers, lambda m: scale_faults(reader.read(checkpoint.tensors[f"{m}.{WEIGHT_SCALE}"])), packed
        )
        for module, (fault, has_negative) in zip(packed, found, strict=True):
            file = checkpoint.tensors[f"{module}.{WEIGHT_SCALE}"].file
            negative |= has_negative
            if fault:
                problems.append(Problem("bad_scale", fault, file, f"{module}.{WEIGHT_SCALE}"))
            elif has_negative and not may:
                problems.append(Problem("bad_scale", "a negative scale, which the method never writes", file, module))
    if negative != manifest["has_negative_scales"]:
        problems.append(Problem("manifest", f"has_negative_scales is {manifest['has_negative_scales']}", MANIFEST))
    return problems


class _Source:
    """The finished output held against the checkpoint it was made from."""

    def __init__(self, out: Checkpoint, source: Checkpoint, manifest: dict[str, Any], rows: dict[str, Row]) -> None:
        self.out, self.source, self.manifest, self.rows = out, source, manifest, rows
        self.seen = 0

    def check(self, sample: int | None, workers: int, on_progress: Callable[[int, int], None]) -> list[Problem]:
        try:
            plan = build_plan(self.source, policy_of(self.manifest), method_of(self.manifest))
        except KizamiError as e:
            return [_problem(e)]
        if plan.source != self.manifest["source"]:
            return [Problem("other_source", self._difference(plan.source))]
        if plan.hash != self.manifest["plan_hash"]:
            return [Problem("other_plan", f"plan hash {plan.hash}; the manifest says {self.manifest['plan_hash']}")]
        steps = [step for step in plan.steps if step.outputs]
        problems = [*self._missing(steps)]
        if problems:
            return problems
        chosen = steps[:: max(1, len(steps) // sample)] if sample else steps
        with TensorReader(self.out) as out, TensorReader(self.source) as source:

            def check(step: Step) -> list[tuple[str, str]]:
                return check_step(step, source, out, self.out.tensors, plan.policy, plan.method, self.rows[step.module])

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
            if step.module not in self.rows:
                yield Problem("report_row", "has no row in the report", tensor=step.module)

    def _difference(self, found: dict[str, Any]) -> str:
        recorded = self.manifest["source"]
        files = [name for name in found["files"] if found["files"][name] != recorded["files"].get(name)]
        what = f"files {', '.join(files[:3])}" if files else "its config.json or its set of files"
        return f"the source is not the one that was converted: {what} differ from what {MANIFEST} records"


def _too_large(row: Row, limit: float) -> Problem:
    return Problem(
        "max_rel_error", f"relative error {row['rel_error']:.4f} is above {limit:g}", row["shard"], row["name"]
    )
