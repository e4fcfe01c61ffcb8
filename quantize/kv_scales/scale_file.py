"""`--kv-scales FILE`: kizami's own JSON, or a safetensors file of scales under a checkpoint's names, as other tools and
`kizami kv-scales --format checkpoint` write it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.families import Family, find_family
from kizami.formats.files import open_regular, read_exactly
from kizami.formats.header import Header, read_header
from kizami.formats.kv_scales.neutral import MAX_BYTES, SUFFIX, KvScales, LayerScales, Source
from kizami.formats.kv_scales.tensors import RECORD, find_prefix
from kizami.formats.serving.model import ServedModel, compared_type, read_model
from kizami.formats.strict_json import parse_json_object
from kizami.formats.tensors import TensorInfo
from kizami.quantize.kv_scales.carried import Carried, is_scale_of_attention, layer_scales, spread

LEAST, MOST = 1e-6, 1e3  # 448 times these: below any cache's plateau, above any activation that BF16 models have


def read_kv_scales(path: Path, checkpoint: Checkpoint) -> KvScales:
    """The scales in `path`. Of tensors, `checkpoint` says which model they are of: its own or one of the same class.

    KizamiError: as `KvScales.read`, of JSON. Of tensors "kv_scales_mismatch" for a layer too many or too few,
    "bad_kv_scales" for a tensor that is none, "bad_kv_scale" for 0, NaN, infinity or below 0; those of `read_header`.
    """
    if not is_tensor_file(path):
        return KvScales.read(path)
    header = read_header(path, path.name)
    if header.file_size > MAX_BYTES:
        expected = f"at most {MAX_BYTES}: KV scales and nothing else"
        raise KizamiError(f"has {header.file_size} bytes, expected {expected}", code="bad_kv_scales", file=path.name)
    raw = _bytes(path, header)
    found = _of_tensors(header, raw, checkpoint)
    recorded = _record(header, raw)
    if recorded is None:
        return found
    if (recorded.granularity, _values(recorded)) != (found.granularity, _values(found)):
        raise KizamiError(
            "the tensors are not those that its metadata records",
            code="bad_kv_scales",
            file=path.name,
            hint="kizami kv-scales writes both; change neither",
        )
    return recorded


def _of_tensors(header: Header, raw: bytes, checkpoint: Checkpoint) -> KvScales:
    family, _ = find_family(checkpoint.config, checkpoint.tensors)
    model = read_model(checkpoint.config, family)
    carried = _carried(header, raw, family, model)
    by_head = any(len(layer.k + layer.v) > 2 for layer in carried)
    heads = model.kv_heads if by_head else 1
    return KvScales(
        model_type=compared_type(family),
        architecture=model.architecture,
        attention=model.attention.value,
        kv_heads=model.kv_heads,
        granularity="attn_head" if by_head else "tensor",
        config_sha256=None,
        statistics_sha256=None,
        layers=tuple(_layer(number, layer, heads) for number, layer in enumerate(carried)),
    )


def _record(header: Header, raw: bytes) -> KvScales | None:
    """What `--format checkpoint` wrote beside the tensors: it knows more than numbers."""
    metadata: Mapping[str, Any] = json.loads(raw[8 : header.data_begin]).get("__metadata__") or {}
    text = metadata.get(RECORD)
    if text is None:
        return None
    return KvScales.parse(parse_json_object(text.encode(), header.file, what=f"metadata {RECORD}"), header.file)


def _values(scales: KvScales) -> list[tuple[float, ...]]:
    return [layer.values for layer in scales.layers]


def is_tensor_file(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def _bytes(path: Path, header: Header) -> bytes:
    fd = open_regular(path, header.file)
    try:
        return read_exactly(fd, 0, header.file_size, header.file)
    finally:
        os.close(fd)


def _carried(header: Header, raw: bytes, family: Family, model: ServedModel) -> list[Carried]:
    names: dict[int, dict[str, TensorInfo]] = {}
    prefix = find_prefix(info.name for info in header.tensors)
    for info in header.tensors:
        _, _, rest = info.name.partition(".self_attn.")
        layer = family.place(info.name).layer
        if not is_scale_of_attention(rest) or layer is None:
            raise _bad_tensor(info, "is not the KV scale of a layer", "bad_kv_scales")
        if info.name != f"{prefix}{layer}.self_attn.{rest}":
            raise _bad_tensor(info, f"expected {prefix}{layer}.self_attn.{rest}: one model's scales", "bad_kv_scales")
        if layer >= model.layers:
            raise _bad_tensor(info, f"is of layer {layer}; the model has {model.layers}, from 0", "kv_scales_mismatch")
        names.setdefault(layer, {})[rest] = info

    def read(info: TensorInfo) -> NDArray[np.uint8]:
        return np.frombuffer(raw, np.uint8, info.nbytes, info.begin)

    found = []
    for layer in range(model.layers):
        carried = layer_scales(names.get(layer, {}), model.kv_heads, read)
        if carried is None:
            raise KizamiError(
                f"has no k_scale and v_scale of layer {layer} ({len(names)} of {model.layers} layers are there)",
                code="kv_scales_mismatch",
                file=header.file,
                hint="an absent scale would be 1.0 without anybody having said so",
            )
        found.append(carried)
    return found


def _bad_tensor(info: TensorInfo, message: str, code: str) -> KizamiError:
    hint = "a file of KV scales has layers.N.self_attn.k_scale and v_scale of every layer, and nothing else"
    return KizamiError(message, code=code, file=info.file, tensor=info.name, hint=hint)


def _layer(number: int, carried: Carried, heads: int) -> LayerScales:
    source: Source = "not calibrated" if carried.is_unity else "carried over"
    odd = [value for value in (*carried.k, *carried.v) if not LEAST <= value <= MOST]
    findings = (f"a scale of {odd[0]:g}: is it a scale, not its reciprocal or a largest value?",) if odd else ()
    return LayerScales(number, spread(carried.k, heads), spread(carried.v, heads), source, findings)
