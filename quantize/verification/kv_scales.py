"""The KV scales of an output: usable numbers, those that the manifest records, and a scheme if and only if there are
tensors. No source is needed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import find_family
from kizami.formats.foreign import quantization_configs
from kizami.formats.kv_scales.effects import refusal
from kizami.formats.kv_scales.neutral import KvScales
from kizami.formats.kv_scales.tensors import KV_CACHE_SCHEME, find_prefix, kv_cache_scheme
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorInfo
from kizami.quantize.kv_scales.carried import FLOATS, floats, is_kv_scale, is_scale_of_layers
from kizami.quantize.kv_scales.merge import check_scales, scale_reason, tensors_of
from kizami.quantize.kv_scales.scale_file import is_tensor_file, read_kv_scales
from kizami.quantize.kv_scales.statement import statement
from kizami.quantize.manifest import CONFIG, MANIFEST, REPORT, kv_scales_of, read_manifest
from kizami.quantize.report import Row
from kizami.quantize.verification.files import Problem

MAX_SCALE_BYTES = 1 << 16  # one per head at most, in F64
VALUES_SHOWN = 4


def check_kv_scales(
    checkpoint: Checkpoint, manifest: Mapping[str, Any], rows: Sequence[Row] = (), held: KvScales | None = None
) -> tuple[list[Problem], list[str]]:
    """Problems and notes. rows: of the report. held: those of --kv-scales, which the manifest must have as well."""
    recorded = kv_scales_of(manifest)
    found = {name: info for name, info in checkpoint.tensors.items() if is_kv_scale(name)}
    problems, values = _read(checkpoint, found)
    if recorded is not None:
        problems += _recorded(checkpoint, found, values, recorded, manifest["kv_scales"])
        problems += _record(checkpoint, recorded, manifest["kv_scales"], rows)
    elif (made := next((row for row in rows if row.get("action") == "kv_scale"), None)) is not None:
        message = f"the run wrote this KV scale, and {MANIFEST} records none"
        problems.append(Problem("other_manifest", message, REPORT, made.get("name")))
    notes = list(_scheme(checkpoint, found, problems, recorded))
    if held is not None and (recorded is None or recorded != held):
        problems.append(Problem("other_kv_scales", _difference(recorded, held), MANIFEST))
    elif held is not None:
        notes.append(f"KV scales are those of FILE: {statement(held, bool(found))}")
    return problems, notes


def read_held(file: Path, out: Path) -> KvScales:
    """The scales in `file`, for `check_kv_scales`. Where it has numbers and no more, the rest is as OUT records it."""
    if not is_tensor_file(file):
        return KvScales.read(file)
    held, recorded = read_kv_scales(file, Checkpoint.open(out)), kv_scales_of(read_manifest(out))
    if held.config_sha256 is not None or recorded is None or len(recorded.layers) != len(held.layers):
        return held
    layers = zip(recorded.layers, held.layers, strict=True)
    return replace(
        held,
        config_sha256=recorded.config_sha256,
        statistics_sha256=recorded.statistics_sha256,
        layers=tuple(replace(ours, k=theirs.k, v=theirs.v) for ours, theirs in layers),
    )


def check_foreign_kv_scales(checkpoint: Checkpoint) -> tuple[list[Problem], list[str]]:
    """Of a checkpoint that kizami did not write: without a manifest."""
    return check_kv_scales(checkpoint, {})


def _read(
    checkpoint: Checkpoint, found: Mapping[str, TensorInfo]
) -> tuple[list[Problem], dict[str, NDArray[np.float64]]]:
    """Values by name, and what is wrong with them. Engines that meet 0 or -1 use 1.0 without a word (SGLang 0.5.23
    layers/quantization/kv_cache.py); NaN ruins every token."""
    problems, values = [], {}
    with TensorReader(checkpoint) as reader:
        for name, info in found.items():
            fault = None
            if info.nbytes > MAX_SCALE_BYTES or info.dtype not in FLOATS or not info.nbytes:
                fault = f"is {info.dtype} {list(info.shape)}, expected a float scale, or one per head"
            else:
                values[name] = numbers = floats(info, reader.read(info))
                bad = np.flatnonzero(~(np.isfinite(numbers) & (numbers > 0)))
                if len(bad):
                    fault = f"element {int(bad[0])} is {numbers[bad[0]]:g}, expected a finite number above 0"
            if fault is not None:
                problems.append(Problem("bad_kv_scale", fault, info.file, name))
    return problems, values


def _recorded(
    checkpoint: Checkpoint,
    found: Mapping[str, TensorInfo],
    values: Mapping[str, NDArray[np.float64]],
    scales: KvScales,
    record: Mapping[str, Any],
) -> Iterator[Problem]:
    """The tensors are those that follow from the record, to the bit."""
    prefix, layers = find_prefix(checkpoint.tensors), len(scales.layers)
    found = {name: info for name, info in found.items() if is_scale_of_layers(name, prefix, layers)}
    wanted = tensors_of(checkpoint.tensors, scales) if scales.attention == "gqa" or record["forced"] is not None else {}
    if record["tensors"] != len(wanted):
        yield Problem("other_manifest", f"kv_scales.tensors is {record['tensors']}, expected {len(wanted)}", MANIFEST)
    for name in sorted(wanted.keys() | found.keys()):
        info, array = found.get(name), wanted.get(name)
        if info is None:
            yield Problem("missing_kv_scale", f"{MANIFEST} records this KV scale, and it is not there", CONFIG, name)
        elif array is None:
            yield Problem("stray_kv_scale", f"is a KV scale that {MANIFEST} does not record", info.file, name)
        elif (info.dtype, info.shape) != ("F32", array.shape):
            shown = f"is {info.dtype} {list(info.shape)}, expected F32 {list(array.shape)}"
            yield Problem("other_kv_scale", shown, info.file, name)
        elif not np.array_equal(values[name], array.ravel().astype(np.float64)):
            is_, said = values[name].tolist()[:VALUES_SHOWN], array.ravel().tolist()[:VALUES_SHOWN]
            yield Problem("other_kv_scale", f"is {is_}; {MANIFEST} records {said}", info.file, name)


def _record(
    checkpoint: Checkpoint, scales: KvScales, record: Mapping[str, Any], rows: Sequence[Row]
) -> Iterator[Problem]:
    """What the manifest says of the scales, held against the scales, the config and the report."""
    family, _ = find_family(checkpoint.config, checkpoint.tensors)
    try:
        check_scales(checkpoint, family, replace(scales, config_sha256=None))  # the hash is the source's
    except KizamiError as e:
        yield Problem("other_manifest", e.message, MANIFEST)
    for key, expected in (
        ("statement", statement(scales, bool(record["tensors"]))),
        ("forced", refusal(scales)),
    ):
        if record[key] != expected:
            said, wanted = printable(str(record[key]), 80), printable(str(expected), 80)
            yield Problem("other_manifest", f"kv_scales.{key} is {said}, expected {wanted}", MANIFEST)
    for row in rows:
        layer = row.get("layer")
        if row.get("action") != "kv_scale" or type(layer) is not int or not 0 <= layer < len(scales.layers):
            continue
        source = scales.layers[layer].source
        if row.get("reason") != scale_reason(scales.layers[layer]):
            shown = printable(str(row.get("reason")), 60)
            text = f"layer {layer} is {source} in {MANIFEST}, and {REPORT} says: {shown}"
            yield Problem("other_manifest", text, REPORT, row.get("name"))


def _scheme(
    checkpoint: Checkpoint, found: Mapping[str, TensorInfo], problems: list[Problem], recorded: KvScales | None
) -> Iterator[str]:
    """A scheme without tensors turns a cache to FP8 at 1.0 without a word; tensors without a scheme are not read. What
    a source had wrong and kizami copied is a note."""
    schemes = [
        (where, config["kv_cache_scheme"])
        for where, config in quantization_configs(checkpoint.config)
        if config.get("kv_cache_scheme") is not None
    ]
    if schemes and not found:
        message = f"{schemes[0][0]}.kv_cache_scheme is there, and no KV scale is: engines would use 1.0 without a word"
        problems.append(Problem("kv_scheme_without_scales", message, CONFIG))
    if not schemes and found:
        name = next(iter(found))
        message = f"{len(found)} KV scales are there, and no kv_cache_scheme: engines leave them unread"
        if recorded is not None:
            problems.append(Problem("kv_scales_without_scheme", message, CONFIG, name))
        else:
            yield f"{message} (as in the source)"
    for where, scheme in schemes:
        wanted = KV_CACHE_SCHEME if recorded is None else kv_cache_scheme(recorded)
        odd = [key for key in wanted if not isinstance(scheme, dict) or not _same(scheme.get(key), wanted[key])]
        odd = [key for key in odd if recorded is not None or key != "strategy"]
        odd += sorted(scheme.keys() - wanted.keys()) if recorded is not None and isinstance(scheme, dict) else []
        if odd:
            said = printable(repr(scheme.get(odd[0]) if isinstance(scheme, dict) else scheme), 40)
            expected = repr(wanted[odd[0]]) if odd[0] in wanted else "none"
            message = f"{where}.kv_cache_scheme: {printable(odd[0], 40)} is {said}, expected {expected}"
            if recorded is not None:
                problems.append(Problem("kv_scheme", message, CONFIG))
                continue
            yield f"{message}: engines refuse it or leave it aside (as in the source)"
        strategy = scheme.get("strategy") if isinstance(scheme, dict) else None
        by_head = [name for name, info in found.items() if info.nbytes and max(info.shape, default=1) > 1]
        if strategy not in ("tensor", "attn_head") or (by_head and strategy == "tensor"):
            shown = printable(repr(strategy), 40)
            message = f"{where}.kv_cache_scheme has strategy {shown}, and the scales are one per "
            message += "head" if by_head else "tensor"
            problems.append(Problem("kv_scheme", message, CONFIG, next(iter(by_head or found), None)))


def _same(found: object, expected: object) -> bool:
    """1 is not True to whoever reads JSON with types."""
    return type(found) is type(expected) and found == expected


def _difference(recorded: KvScales | None, held: KvScales) -> str:
    if recorded is None:
        return "was converted without --kv-scales"
    pairs = zip(recorded.layers, held.layers, strict=False)
    if differing := next(((a, b) for a, b in pairs if a.k + a.v != b.k + b.v), None):
        ours, theirs = (f"k {list(x.k[:VALUES_SHOWN])}, v {list(x.v[:VALUES_SHOWN])}" for x in differing)
        return f"records of layer {differing[0].layer} {ours}; FILE has {theirs}"
    for key in (
        "model_type",
        "architecture",
        "attention",
        "kv_heads",
        "granularity",
        "config_sha256",
        "statistics_sha256",
    ):
        ours, theirs = getattr(recorded, key), getattr(held, key)
        if ours != theirs:
            return f"records KV scales of {key} {printable(str(ours), 80)}; FILE has {printable(str(theirs), 80)}"
    if len(recorded.layers) != len(held.layers):
        return f"records KV scales of {len(recorded.layers)} layers, FILE has {len(held.layers)}"
    one, other = next((a, b) for a, b in zip(recorded.layers, held.layers, strict=True) if a != b)
    said = [", ".join((x.source, *x.findings)) for x in (one, other)]
    return f"records of layer {one.layer} {printable(said[0], 200)}; FILE has {printable(said[1], 200)}"
