"""KV scales that a source brings, as numbers: an engine takes 0 and -1 for 1.0 without a word, and NaN ruins every
token (SGLang 0.5.23 layers/quantization/kv_cache.py)."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError
from kizami.formats.kv_scales.neutral import float32_scale
from kizami.formats.tensors import TensorInfo
from kizami.quantize.unpack import as_float32

# Whatever attention module an engine or a tool puts before it: attn, attn_mqa, k_proj, ...; Quark's are output_scale
K_NAMES = re.compile(r"(.*\.)?k_scale|(.*\.)?k_proj\.output_scale")
V_NAMES = re.compile(r"(.*\.)?v_scale|(.*\.)?v_proj\.output_scale")
BOTH_NAMES = re.compile(r"(.*\.)?kv_scale")
FLOATS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}


def is_kv_scale(name: str) -> bool:
    return any(form.fullmatch(name) for form in (K_NAMES, V_NAMES, BOTH_NAMES))


def floats(info: TensorInfo, raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The numbers of a tensor of FLOATS, from its bytes."""
    values: NDArray[Any] = raw.view(FLOATS[info.dtype])
    return (as_float32(values) if info.dtype == "BF16" else values).astype(np.float64)


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
