"""KV scales in a checkpoint: names by model class, and the `kv_cache_scheme` that makes engines look for them."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError, printable
from kizami.formats.header import encode_header
from kizami.formats.kv_scales.effects import NOT_REMAPPED
from kizami.formats.kv_scales.neutral import KvScales
from kizami.formats.tensors import TensorSpec
from kizami.formats.writer import PT_METADATA

# SGLang takes exactly these values (is_supported_scheme); compressed-tensors and vLLM take them, too.
KV_CACHE_SCHEME: dict[str, Any] = {
    "type": "float",
    "num_bits": 8,
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
LAYERS = "model.layers."
RECORD = "kizami.kv-scales"  # of the metadata: the scales as kizami's JSON has them
# Where transformers' classes have the layers of their language model.
LANGUAGE_MODELS = (LAYERS, "language_model.model.layers.", "model.language_model.layers.", "language_model.layers.")


def kv_cache_scheme(scales: KvScales) -> dict[str, Any]:
    """To be written only beside the tensors: with a scheme alone engines take 1.0 without a word."""
    return KV_CACHE_SCHEME | {"strategy": scales.granularity}


def scale_tensors(scales: KvScales, prefix: str = LAYERS) -> dict[str, NDArray[np.float32]]:
    """Name -> F32 [1], or [KV heads, 1, 1] per head, the shapes that llm-compressor writes. `prefix`: what stands
    before a layer's number in the names of the checkpoint (`find_prefix`).

    Every layer gets both, 1.0 where it is not calibrated: an absent one would be 1.0 without anybody having said so.
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    for layer in scales.layers:
        for name, values in zip(_names(scales), (layer.k, layer.v), strict=True):
            array = np.array(values, np.float32)
            per_head = scales.granularity == "attn_head"
            tensors[f"{prefix}{layer.layer}.{name}"] = array.reshape(-1, 1, 1) if per_head else array
    return tensors


def encode_tensors(scales: KvScales, prefix: str = LAYERS) -> bytes:
    """A safetensors file of the tensors alone, in its metadata the scheme, and who vouches for them: to be added to a
    checkpoint's folder and index, with `kv_cache_scheme` in its quantization_config."""
    tensors = scale_tensors(scales, prefix)
    specs = [TensorSpec(name, "F32", array.shape) for name, array in tensors.items()]
    scheme = json.dumps(kv_cache_scheme(scales))
    header = encode_header(specs, {**PT_METADATA, "kv_cache_scheme": scheme, RECORD: json.dumps(scales.document())})
    return header + b"".join(array.astype("<f4").tobytes() for array in tensors.values())


def _names(scales: KvScales) -> tuple[str, str]:
    """The names that loaders of the class take (SGLang 0.5.23, vLLM 0.33.0).

    DeepSeek's loader in SGLang and vLLM's under modelopt know `k_proj.k_scale` only. SGLang's generic loaders put
    `.attn` before `.k_scale`; those without remapping need the parameter's own name, which vLLM leaves as it is.
    """
    if scales.attention != "gqa":
        return "self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"
    if scales.model_type in NOT_REMAPPED:
        return "self_attn.attn.k_scale", "self_attn.attn.v_scale"
    return "self_attn.k_scale", "self_attn.v_scale"


def find_prefix(names: Iterable[str]) -> str:
    """`model.layers.`, `language_model.model.layers.`: what stands before the number of a layer of the language model.

    KizamiError "kv_scales_unplaced" where several towers have layers with attention, and not just one a known name.
    """
    found = {prefix for name in names if (prefix := _prefix(name)) is not None}
    known = found & set(LANGUAGE_MODELS)
    towers = known or found
    if len(towers) <= 1:
        return next(iter(towers), LAYERS)
    raise KizamiError(
        f"attention lies under {', '.join(printable(prefix, 60) for prefix in sorted(towers)[:4])}: "
        "which of them is the language model is not known",
        code="kv_scales_unplaced",
        hint="kizami knows " + ", ".join(LANGUAGE_MODELS),
    )


def _prefix(name: str) -> str | None:
    head, marked, _ = name.partition(".self_attn.")
    front, layers, number = head.rpartition("layers.")
    is_text = marked and layers and number.isdigit() and "vision" not in front and "visual" not in front
    return front + layers if is_text else None
