"""What an output's files hold, held against each other: no source is needed, and no arithmetic on weights."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.foreign import quantization_configs
from kizami.formats.int4_layout import WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, packed_specs
from kizami.formats.quant_config import resolver
from kizami.formats.reader import TensorReader
from kizami.quantize.executor import thread_map
from kizami.quantize.manifest import MANIFEST, REPORT
from kizami.quantize.report import Row
from kizami.quantize.verify_files import Problem
from kizami.quantize.verify_tensors import scale_faults


def packed_modules(checkpoint: Checkpoint) -> list[str]:
    return [name.removesuffix("." + WEIGHT_PACKED) for name in checkpoint.tensors if name.endswith("." + WEIGHT_PACKED)]


def check_structure(
    checkpoint: Checkpoint, manifest: dict[str, Any], rows: Sequence[Row], packed: Sequence[str]
) -> Iterator[Problem]:
    """Config rules = tensors, every module in exactly one form, every tensor in one report row, exact totals."""
    tensors = checkpoint.tensors
    group_size = manifest["policy"]["group_size"]
    stated = [quant for _, quant in quantization_configs(checkpoint.config)]
    rules = resolver(stated[0] if stated else {})
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
    written = Counter(name for row in rows for name in row["crc32"])
    for name in sorted(tensors.keys() | written.keys()):
        if name not in tensors:
            yield Problem("report_row", "has a row in the report, but is not there", REPORT, name)
        elif written[name] != 1:
            yield Problem("report_row", f"is in {written[name]} rows of the report, expected 1", REPORT, name)
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


def check_scales(
    checkpoint: Checkpoint, manifest: dict[str, Any], packed: Sequence[str], workers: int
) -> list[Problem]:
    """Scales are finite and not zero; negative ones only where the method may write them, and as the manifest says."""
    may = manifest["method"] == "signed" or (manifest["method"] == "search" and manifest["scale_sign"] == "signed")
    problems = []
    negative = False
    with TensorReader(checkpoint) as reader:
        found = thread_map(
            workers, lambda m, _: scale_faults(reader.read(checkpoint.tensors[f"{m}.{WEIGHT_SCALE}"])), packed
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
