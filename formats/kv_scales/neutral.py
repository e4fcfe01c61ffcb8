"""KV scales in a file of kizami's own: what `kizami kv-scales` writes and `kizami convert --kv-scales` reads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from kizami.formats.errors import KizamiError, printable
from kizami.formats.strict_json import dump_json, read_json_object
from kizami.formats.writer import write_file_durably

SCHEMA = "kizami.kv-scales/1"
SUFFIX = ".safetensors"  # a FILE without it is JSON
MAX_BYTES = 8 << 20  # 100 layers of 128 heads, K and V, take 700 kB
MAX_LAYERS = 10_000
MAX_HEADS = 4096
MAX_FINDINGS = 64
DTYPE = "float8_e4m3fn"

Source = Literal["certificate", "calibrated", "carried over", "not calibrated"]
Granularity = Literal["tensor", "attn_head"]
AttentionKind = Literal["mla", "dsa", "gqa"]

# float32 has a normal number for the scale, and a finite one for the largest code times it
_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max) / 448


@dataclass(frozen=True, slots=True)
class LayerScales:
    """k and v: multipliers of the stored codes, one or one per KV head, each a float32 number. `source`: who vouches
    for them. A certificate is of 1.0; a layer that is "not calibrated" has 1.0, too, an engine's default, and nobody
    knows whether it clips."""

    layer: int
    k: tuple[float, ...]
    v: tuple[float, ...]
    source: Source
    findings: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[float, ...]:
        return (*self.k, *self.v)


@dataclass(frozen=True, slots=True)
class KvScales:
    """model_type: of the text config where there is one, which is what engines compare. kv_heads: 0 for a latent.
    config_sha256, statistics_sha256: of the source and of STATS; None where nothing says it. layers: 0 to
    num_hidden_layers - 1, in order; MTP layers have none (no engine's file has a place for them)."""

    model_type: str
    architecture: str
    attention: AttentionKind
    kv_heads: int
    granularity: Granularity
    config_sha256: str | None
    statistics_sha256: str | None
    layers: tuple[LayerScales, ...]

    @property
    def trivial(self) -> bool:
        """Whether every scale is 1.0, which engines use without any, and nothing says that it is right: no layer has
        a certificate or was measured."""
        return all(layer.source == "not calibrated" for layer in self.layers)

    @property
    def uncalibrated(self) -> tuple[int, ...]:
        """Layers whose 1.0 rests on nothing."""
        return tuple(layer.layer for layer in self.layers if layer.source == "not calibrated")

    @staticmethod
    def read(path: Path) -> "KvScales":
        """KizamiError "bad_kv_scales" for anything but what `write` writes; "bad_json", "not_a_file", "missing_file",
        "io_error"."""
        return _decode(read_json_object(path, path.name, limit=MAX_BYTES), path.name)

    @staticmethod
    def parse(body: Mapping[str, Any], file: str) -> "KvScales":
        """As `read`, of an object that `file` holds: a manifest keeps one."""
        return _decode(body, file)

    def write(self, path: Path) -> None:
        """Whole or not at all. KizamiError "io_error"."""
        write_file_durably(path, self.encode())

    def encode(self) -> bytes:
        """The file's bytes. AssertionError for numbers that no engine could use: a bug of ours."""
        body = self.document()
        assert _decode(body, "kv-scales").layers == self.layers
        return dump_json(body)

    def document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "dtype": DTYPE,
            "model_type": self.model_type,
            "architecture": self.architecture,
            "attention": self.attention,
            "kv_heads": self.kv_heads,
            "granularity": self.granularity,
            "config_sha256": self.config_sha256,
            "statistics_sha256": self.statistics_sha256,
            "layers": [
                {
                    "layer": layer.layer,
                    "k": list(layer.k),
                    "v": list(layer.v),
                    "source": layer.source,
                    "findings": list(layer.findings),
                }
                for layer in self.layers
            ],
        }


def float32_scale(value: object) -> float | None:
    """`value` as engines will hold it, or None: not a number, NaN, infinite, zero, negative, or so small or large that
    float32 has no normal number for it, or none for the cache's values."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an int of 400 digits
        return None
    if not math.isfinite(number) or not _TINY <= number <= _HUGE:
        return None
    return float(np.float32(number))


_KEYS = frozenset({
    "schema", "dtype", "model_type", "architecture", "attention", "kv_heads", "granularity", "config_sha256",
    "statistics_sha256", "layers",
})  # fmt: skip
_LAYER_KEYS = frozenset({"layer", "k", "v", "source", "findings"})


def _decode(body: Mapping[str, Any], file: str) -> KvScales:
    if body.get("schema") != SCHEMA:
        raise _bad("schema", body.get("schema"), SCHEMA, file, hint="`kizami kv-scales SRC -o FILE` writes it")
    _check_keys(body, _KEYS, "the file", file)
    if body["dtype"] != DTYPE:
        raise _bad("dtype", body["dtype"], DTYPE, file)
    for key in ("model_type", "architecture"):
        if not isinstance(body[key], str) or not body[key] or len(body[key]) > 200:
            raise _bad(key, body[key], "a word", file)
    for key, words in (("attention", get_args(AttentionKind)), ("granularity", get_args(Granularity))):
        if body[key] not in words:
            raise _bad(key, body[key], " or ".join(words), file)
    is_gqa = body["attention"] == "gqa"
    heads = body["kv_heads"]
    if type(heads) is not int or not (1 <= heads <= MAX_HEADS if is_gqa else heads == 0):
        raise _bad("kv_heads", heads, f"a whole number from 1 to {MAX_HEADS}" if is_gqa else "0, for a latent", file)
    if not is_gqa and body["granularity"] != "tensor":
        raise _bad("granularity", body["granularity"], "tensor, for a latent", file)
    for key in ("config_sha256", "statistics_sha256"):
        if body[key] is not None and not _is_sha256(body[key]):
            raise _bad(key, body[key], "a SHA-256 of 64 hexadecimal digits", file)
    layers = body["layers"]
    if not isinstance(layers, list) or not 1 <= len(layers) <= MAX_LAYERS:
        raise _bad("layers", layers, f"a list of 1 to {MAX_LAYERS} layers", file)
    count = heads if body["granularity"] == "attn_head" else 1
    decoded = tuple(_decode_layer(at, layer, count, is_gqa, file) for at, layer in enumerate(layers))
    return KvScales(
        body["model_type"],
        body["architecture"],
        body["attention"],
        heads,
        body["granularity"],
        body["config_sha256"],
        body["statistics_sha256"],
        decoded,
    )


def _decode_layer(at: int, layer: Any, count: int, is_gqa: bool, file: str) -> LayerScales:
    where = f"layers[{at}]"
    if not isinstance(layer, dict):
        raise _bad(where, layer, "an object", file)
    _check_keys(layer, _LAYER_KEYS, where, file)
    if type(layer["layer"]) is not int or layer["layer"] != at:
        raise _bad(f"{where}.layer", layer["layer"], f"{at}: every layer once, in order", file)
    if layer["source"] not in get_args(Source):
        raise _bad(f"{where}.source", layer["source"], ", ".join(get_args(Source)), file)
    k, v = (_scales(layer[key], f"{where}.{key}", count, file) for key in ("k", "v"))
    if not is_gqa and k != v and layer["source"] != "carried over":  # what others wrote is only ever forced
        raise _bad(f"{where}.v", list(v), f"{list(k)}: K and V of a latent are one row", file)
    if layer["source"] in ("not calibrated", "certificate") and set(k + v) != {1.0}:
        kind = "has a certificate, which is of 1.0" if layer["source"] == "certificate" else "is not calibrated"
        raise _bad(f"{where}.k, v", [*k, *v], f"1.0, for a layer that {kind}", file)
    findings = layer["findings"]
    if not isinstance(findings, list) or len(findings) > MAX_FINDINGS or not all(map(_is_line, findings)):
        raise _bad(f"{where}.findings", findings, f"a list of at most {MAX_FINDINGS} lines", file)
    return LayerScales(at, k, v, layer["source"], tuple(findings))


def _scales(found: Any, where: str, count: int, file: str) -> tuple[float, ...]:
    if not isinstance(found, list) or len(found) != count:
        raise _bad(where, found, f"a list of {count} scale{'' if count == 1 else 's'}", file)
    scales = []
    for value in found:
        if (scale := float32_scale(value)) is None:
            raise _bad(where, value, "a positive, finite number that float32 holds", file)
        scales.append(scale)
    return tuple(scales)


def _is_line(text: object) -> bool:
    return isinstance(text, str) and len(text) <= 1000


def _is_sha256(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _check_keys(found: Mapping[str, Any], expected: frozenset[str], where: str, file: str) -> None:
    if found.keys() != expected:
        missing, unknown = sorted(expected - found.keys()), sorted(found.keys() - expected)
        words = [f"lacks {_listed(missing)}"] if missing else []
        words += [f"has {_listed(unknown)}, which kizami does not write"] if unknown else []
        raise KizamiError(f"{where} {' and '.join(words)}", code="bad_kv_scales", file=file)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(printable(name, 40) for name in names[:5]) + (", ..." if len(names) > 5 else "")


def _bad(where: str, found: object, expected: str, file: str, hint: str | None = None) -> KizamiError:
    shown = printable(repr(found) if not isinstance(found, str) else found, 80)
    return KizamiError(f"{where} is {shown}, expected {expected}", code="bad_kv_scales", file=file, hint=hint)
