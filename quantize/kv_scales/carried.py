"""KV scales that a source or a file of tensors brings, as numbers: an engine takes 0 and -1 for 1.0 without a word, and
NaN ruins every token (SGLang 0.5.23 layers/quantization/kv_cache.py)."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError, printable
from kizami.formats.kv_scales.neutral import float32_scale
from kizami.formats.tensors import TensorInfo
from kizami.quantize.unpack import as_float32

# Behind `self_attn.`: with the module that an engine or a tool puts before it, if any: attn, attn_mqa, k_proj, ...;
# Quark's are output_scale. An indexer's keys have a cache, and a scale, of their own.
K_NAMES = re.compile(r"(?:(?!indexer\.|v_proj\.)\w+\.)?k_scale|k_proj\.output_scale")
V_NAMES = re.compile(r"(?:(?!indexer\.|k_proj\.)\w+\.)?v_scale|v_proj\.output_scale")
BOTH_NAMES = re.compile(r"(?:(?!indexer\.)\w+\.)?kv_scale")
Read = Callable[[TensorInfo], NDArray[np.uint8]]
VALUES_SHOWN = 4
FLOATS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Carried:
    """Scales that the source brings, one or one per KV head."""

    k: tuple[float, ...]
    v: tuple[float, ...]

    @property
    def is_unity(self) -> bool:
        return set(self.k + self.v) == {1.0}


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is the scale of a layer's KV cache; `mlp.adapter.k_scale` is none."""
    _, marked, rest = name.partition(".self_attn.")
    return bool(marked) and is_scale_of_attention(rest)


def is_scale_of_attention(rest: str) -> bool:
    """rest: what follows `self_attn.`"""
    return any(form.fullmatch(rest) for form in (K_NAMES, V_NAMES, BOTH_NAMES))


def is_scale_of_layers(name: str, prefix: str, layers: int) -> bool:
    """Whether it is that of one of the first `layers` layers under `prefix`: not of a tower beside them, and not of the
    next-token layers behind them, which no file of scales has."""
    head, _, _ = name.partition(".self_attn.")
    number = head.removeprefix(prefix)
    return is_kv_scale(name) and head == prefix + number and number.isdecimal() and int(number) < layers


def floats(info: TensorInfo, raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The numbers of a tensor of FLOATS, from its bytes."""
    values: NDArray[Any] = raw.view(FLOATS[info.dtype])
    return (as_float32(values) if info.dtype == "BF16" else values).astype(np.float64)


def layer_scales(names: Mapping[str, TensorInfo], heads: int, read: Read) -> Carried | None:
    """Of one layer, by what follows `self_attn.`. heads: KV heads, 0 for a latent. None without any.

    KizamiError "bad_kv_scale" for two names that differ, another number of scales, and as `scale_values`.
    """

    def find(*forms: re.Pattern[str]) -> tuple[float, ...] | None:
        those = {rest: info for rest, info in sorted(names.items()) if any(form.fullmatch(rest) for form in forms)}
        found = {info.name: _counted(info, heads, read) for info in those.values()}
        if len(set(found.values())) > 1:
            (first, one), (name, other) = list(found.items())[:2]
            info = next(info for info in names.values() if info.name == name)
            raise bad_scale(info, f"is {_listed(other)}, and {printable(first, 200)} is {_listed(one)}")
        return next(iter(found.values()), None)

    k, v = find(K_NAMES, BOTH_NAMES), find(V_NAMES)  # engines load kv_scale as k_scale
    if k is None or v is None:
        k = v = k or v  # one of the two: engines use it for both
    return None if k is None or v is None else Carried(k, v)


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values[:VALUES_SHOWN])


def _counted(info: TensorInfo, heads: int, read: Read) -> tuple[float, ...]:
    counts = {1, heads} if heads else {1}
    if info.dtype not in FLOATS or prod(info.shape) not in counts:
        expected = " or ".join(str(count) for count in sorted(counts))
        raise bad_scale(info, f"is {info.dtype} {list(info.shape)}, expected {expected} floats")
    return scale_values(info, read(info))


def spread(values: tuple[float, ...], heads: int) -> tuple[float, ...]:
    """One of several: the largest, which clips nowhere; several of one: the same for each head."""
    if len(values) == heads:
        return values
    return (max(values),) * heads


def scale_values(info: TensorInfo, raw: NDArray[np.uint8]) -> tuple[float, ...]:
    """As engines will hold them. KizamiError "bad_kv_scale" for 0, NaN, infinity, below 0, or what is no float."""
    if info.dtype not in FLOATS:
        raise bad_scale(info, f"is {info.dtype} {list(info.shape)}, expected floats")
    scales = []
    for value in floats(info, raw).tolist():
        if (scale := float32_scale(value)) is None:
            raise bad_scale(info, f"has a KV scale of {value:g}, expected a positive, finite number")
        scales.append(scale)
    return tuple(scales)


def bad_scale(info: TensorInfo, message: str) -> KizamiError:
    return KizamiError(
        message,
        code="bad_kv_scale",
        file=info.file,
        tensor=info.name,
        hint="engines would take it as it is, or 1.0 without a word; remove the tensor and measure with --stats",
    )
