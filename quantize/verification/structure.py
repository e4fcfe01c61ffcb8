"""What an output's files hold, held against each other: no source is needed, and no arithmetic on weights."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.foreign import quantization_configs
from kizami.formats.int4_layout import Format, is_int4_weight, layout_names, layout_specs, shape_of
from kizami.formats.method_rules import method_resolver
from kizami.formats.quant_config import Form
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorInfo
from kizami.quantize import reference_layouts
from kizami.quantize.manifest import MANIFEST, REPORT
from kizami.quantize.report import Row
from kizami.quantize.settings import GIVEN, SEARCHED, Policy
from kizami.quantize.threads import thread_map
from kizami.quantize.verification.files import Problem
from kizami.quantize.verification.tensors import scale_faults


@dataclass(frozen=True, slots=True)
class Int4Module:
    """A packed linear as it lies in the files: its tensors in the order of layout_specs, None where one is missing."""

    name: str
    parts: tuple[TensorInfo | None, ...]

    @property
    def present(self) -> list[TensorInfo]:
        return [part for part in self.parts if part is not None]


def packed_modules(checkpoint: Checkpoint, format: Format) -> list[Int4Module]:
    """Every module with a tensor that only an INT4 weight of this layout has."""
    tensors = checkpoint.tensors
    found = [name.rpartition(".")[0] for name, info in tensors.items() if is_int4_weight(format, info)]
    return [Int4Module(name, tuple(map(tensors.get, layout_names(format, name)))) for name in found]


def rules_of(config: Mapping[str, Any]) -> Callable[[str], Form]:
    """What the quantization config that an engine finds first says of a module; "none" without one."""
    stated = quantization_configs(config)
    return method_resolver(stated[0][1]) if stated else lambda module: "none"


def check_structure(
    checkpoint: Checkpoint, policy: Policy, packed: Sequence[Int4Module], rules: Callable[[str], Form]
) -> Iterator[Problem]:
    """Config rules = tensors, and every module in exactly one form."""
    tensors = checkpoint.tensors
    with TensorReader(checkpoint) as reader:
        for module in packed:
            yield from _check_packed_module(checkpoint, reader, module, policy)
            if rules(module.name) != "int4":
                yield Problem(
                    "config_rules", "is packed, but the config's rules do not say so", "config.json", module.name
                )
    ours = {part.name for module in packed for part in module.present}
    for name, info in tensors.items():
        module_name = name.removesuffix(".weight")
        if name.endswith(".weight") and len(info.shape) == 2 and name not in ours:
            form = "fp8" if info.dtype == "F8_E4M3" else "none"
            if (said := rules(module_name)) != form:
                yield Problem(
                    "config_rules", f"is {info.dtype}, but the config's rules say {said}", "config.json", module_name
                )


def check_totals(checkpoint: Checkpoint, manifest: dict[str, Any], rows: Sequence[Row]) -> Iterator[Problem]:
    """Every tensor in one report row, exact totals."""
    tensors = checkpoint.tensors
    written = Counter(name for row in rows for name in row["crc32"])
    for name in sorted(tensors.keys() | written.keys()):
        if name not in tensors:
            yield Problem("report_row", "has a row in the report, but is not there", REPORT, name)
        elif written[name] != 1:
            yield Problem("report_row", f"is in {written[name]} rows of the report, expected 1", REPORT, name)
    for row in rows:
        if not row["crc32"] and row["action"] != "drop":
            yield Problem("report_row", f"action {row['action']}, but nothing of it is there", REPORT, row["name"])
    total = sum(info.nbytes for info in tensors.values())
    if total != manifest["output"]["bytes"] or len(tensors) != manifest["output"]["tensors"]:
        yield Problem("totals", f"{len(tensors)} tensors, {total} bytes; the manifest says {manifest['output']}")


def _check_packed_module(
    checkpoint: Checkpoint, reader: TensorReader, module: Int4Module, policy: Policy
) -> Iterator[Problem]:
    """Its tensors fit each other, in one file, without a float copy beside them."""
    names = layout_names(policy.format, module.name)
    missing = [name for name, part in zip(names, module.parts, strict=True) if part is None]
    if missing:
        words = ", ".join(name.rpartition(".")[2] for name in missing)
        yield Problem("incomplete_module", f"is INT4, but has no {words}", module.present[0].file, module.name)
        return
    parts = module.present
    if policy.format != "w4afp8" and f"{module.name}.weight" in checkpoint.tensors:
        yield Problem("two_forms", "is there packed and as a float weight", parts[0].file, module.name)
    if len({part.file for part in parts}) != 1:
        yield Problem("split_module", "its tensors lie in different files", parts[0].file, module.name)
    rows, cols = shape_of(policy.format, next(part for part in parts if is_int4_weight(policy.format, part)))
    problem = None
    if policy.format == "pack-quantized":
        stored = reader.read(parts[1]).view("<i4").tolist() if parts[1].nbytes == 8 else []
        problem = None if stored == [rows, cols] else f"weight_shape says {stored}, its tensors have [{rows}, {cols}]"
    try:
        specs = list(layout_specs(policy.format, module.name, rows, cols, policy.group_size))
    except KizamiError as e:
        specs, problem = [], e.message
    if problem is None and [part.spec for part in parts] != specs:
        problem = f"its tensors are not those of a [{rows}, {cols}] weight in groups of {policy.group_size}"
    if problem is not None:
        yield Problem("bad_shape", problem, parts[0].file, module.name)
    elif policy.format in ("gptq", "gptq_v2", "awq"):
        beside = [reader.read(part).view("<i4").reshape(part.shape) for part in parts[1:-1]]
        if (fault := reference_layouts.fault_beside(policy.format, beside, policy.group_size)) is not None:
            yield Problem("bad_layout", fault, parts[0].file, module.name)


def check_scales(
    checkpoint: Checkpoint, manifest: dict[str, Any], packed: Sequence[Int4Module], workers: int
) -> list[Problem]:
    """Scales are finite and not zero; negative ones only where the method may write them, and as the manifest says."""
    searched = manifest["method"] in (*SEARCHED, *GIVEN)  # of GIVEN, search packs what the engine does not see
    may = manifest["method"] == "signed" or (searched and manifest["scale_sign"] == "signed")
    may = may or bool(manifest["counts"].get("repack"))  # the source's own
    problems, negative = scale_problems(checkpoint, packed, workers, may_be_negative=may)
    if negative != manifest["has_negative_scales"]:
        problems.append(Problem("manifest", f"has_negative_scales is {manifest['has_negative_scales']}", MANIFEST))
    return problems


def scale_problems(
    checkpoint: Checkpoint, packed: Sequence[Int4Module], workers: int, *, may_be_negative: bool
) -> tuple[list[Problem], bool]:
    """(what is wrong, whether a scale is negative)."""
    problems, any_negative = [], False
    scales = [next(part for part in module.present if "scale" in part.name.rpartition(".")[2]) for module in packed]
    with TensorReader(checkpoint) as reader:
        found = thread_map(workers, lambda info, _: scale_faults(reader.read(info), info.dtype), scales)
        for info, (fault, negative) in zip(scales, found, strict=True):
            any_negative |= negative
            if fault:
                problems.append(Problem("bad_scale", fault, info.file, info.name))
            elif negative and not may_be_negative:
                problems.append(
                    Problem("bad_scale", "a negative scale, which the method never writes", info.file, info.name)
                )
    return problems, any_negative
